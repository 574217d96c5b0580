"""Head dimensions and masks of full-size models in a training step, as JSON: ``attention.py CHECKOUT FAMILY...``."""

import json
import sys
from pathlib import Path

import torch

from kohya_ext.config.command_line import CommandLine, option_words
from kohya_ext.estimate import measurement
from kohya_ext.sdscripts.checkouts import describe
from kohya_ext.sdscripts.families import BY_NAME

checkout = describe(Path(sys.argv[1]), "named")
attend = torch.nn.functional.scaled_dot_product_attention
seen = set()


def record(query, key, value, attn_mask=None, *args, **kwargs):
    seen.add((query.shape[-1], attn_mask is not None))
    return attend(query, key, value, attn_mask, *args, **kwargs)


torch.nn.functional.scaled_dot_product_attention = record
heads = {}
for name in sys.argv[2:]:
    family = BY_NAME[name]
    option = family.checkpoints[0].option
    words = ["--network_module", family.networks[0], "--network_dim", "4", "--cache_latents", "--mixed_precision", "bf16"]
    words += ["--network_train_unet_only", "--sdpa", "--gradient_checkpointing"]
    words += ["--resolution", "256", *option_words({} if option is None else dict([option]))]
    seen.clear()
    measurement.measure(checkout, CommandLine(checkout.script(family.lora), words, {}))
    heads[name] = sorted(seen)
print("JSON", json.dumps(heads), sep="")
