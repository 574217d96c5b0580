"""Head dimensions and masks of a family's full-size model in a dry run, as JSON: ``attention.py CHECKOUT FAMILY``."""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch

from kohya_ext.config.command_line import CommandLine, option_words
from kohya_ext.dry_run import estimation, process, steps
from kohya_ext.dry_run.arguments import Arguments, Workload
from kohya_ext.dry_run.request import Request
from kohya_ext.sdscripts.checkouts import describe
from kohya_ext.sdscripts.families import BY_NAME

checkout, family = describe(Path(sys.argv[1]), "named"), BY_NAME[sys.argv[2]]
attend = torch.nn.functional.scaled_dot_product_attention
seen = set()


def record(query, key, value, attn_mask=None, *args, **kwargs):
    seen.add((query.shape[-1], attn_mask is not None))
    return attend(query, key, value, attn_mask, *args, **kwargs)


def end(code):
    print("JSON", json.dumps(sorted(seen)), sep="", flush=True)
    os._exit(code)


option = family.checkpoints[0].option
words = ["--network_module", family.networks[0], "--network_dim", "4", "--cache_latents", "--mixed_precision", "bf16"]
words += ["--cache_text_encoder_outputs", "--network_train_unet_only", "--sdpa", "--gradient_checkpointing"]
words += ["--resolution", "256", *option_words({} if option is None else dict([option]))]
command = CommandLine(checkout.script(family.lora), words, {})
torch.nn.functional.scaled_dot_product_attention, steps.end = record, end
with tempfile.TemporaryDirectory() as folder:
    arguments = Arguments(command, Workload.of(command), Path(folder))
    estimation._request(checkout, arguments, budgets=False).write(Path(folder))
    os.environ |= estimation._environment(arguments)
    process._run(Request.read(Path(folder)), Path(folder))
