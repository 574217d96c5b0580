"""Find the weights of a checkpoint that the modules of a network change.

sd-scripts names the modules of SD 1.x and 2.x as Diffusers does and their checkpoints as the first release does, and those of
OpenCLIP's text encoders as transformers does, where the checkpoint has one weight for query, key and value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from kohya_ext.weights import names
from kohya_ext.weights.tensor_file import TensorFile

_CLIP = "text_model_encoder_layers"

#: Parts of a module's path in OpenCLIP -> in transformers' CLIP.
_OPEN_CLIP = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp_c_fc": "mlp_fc1",
    "mlp_c_proj": "mlp_fc2",
    "attn_out_proj": "self_attn_out_proj",
}

#: Parts of a residual block in Diffusers -> in a checkpoint.
_RESNET = {
    "norm1": "in_layers_0",
    "conv1": "in_layers_2",
    "time_emb_proj": "emb_layers_1",
    "norm2": "out_layers_0",
    "conv2": "out_layers_3",
    "conv_shortcut": "skip_connection",
}

_DOWN_OR_UP = re.compile(r"(down|up)_blocks_(\d)_(attentions|resnets)_(\d)_(.+)")
_SCALER = re.compile(r"(down|up)_blocks_(\d)_(?:down|up)samplers_0_conv")
_MIDDLE = re.compile(r"mid_block_(attentions|resnets)_(\d)_(.+)")
_RESBLOCK = re.compile(r"(?:model_)?transformer_resblocks_(\d+)_(.+)")


@dataclass(frozen=True)
class BaseWeight:
    """A weight of a checkpoint, or a third of the rows of one."""

    name: str
    third: int | None = None
    """0 for query, 1 for key and 2 for value; None for the whole."""

    def read(self, file: TensorFile) -> torch.Tensor:
        """Return the values as a float32 matrix with a row for each output."""
        values = file.tensor(self.name).to(torch.float32)
        if self.third is not None:
            values = values.chunk(3)[self.third]
        return values.reshape(values.shape[0], -1)


def base_weights(tensors: Iterable[str]) -> Mapping[tuple[str, str], BaseWeight]:
    """Return (component, path of a module) -> its weight, with the paths that networks use."""
    return {
        (_component(place), path): weight
        for name, place in names.places(tensors).items()
        if name.endswith("weight")
        for path, weight in _weights(name, place)
    }


def key(place: names.Place) -> tuple[str, str]:
    """Return the key of a network's module in :func:`base_weights`."""
    return _component(place), place.path if place.component.startswith("text encoder") else _first_release(place.path)


def _component(place: names.Place) -> str:
    return place.component if place.component.startswith(("text encoder", "VAE", "EMA")) else names.MAIN


def _weights(name: str, place: names.Place) -> Iterator[tuple[str, BaseWeight]]:
    path = place.path.removesuffix("_weight")
    if not place.component.startswith("text encoder"):
        yield path, BaseWeight(name)
    elif (match := _RESBLOCK.fullmatch(path)) is None:
        yield path.removeprefix("transformer_"), BaseWeight(name)
    elif match[2] == "attn_in_proj":
        for third, part in enumerate("qkv"):
            yield f"{_CLIP}_{match[1]}_self_attn_{part}_proj", BaseWeight(name, third)
    else:
        yield f"{_CLIP}_{match[1]}_{_OPEN_CLIP.get(match[2], match[2])}", BaseWeight(name)


def _first_release(path: str) -> str:
    """Return a path in Diffusers' U-Net as in the checkpoints of Stable Diffusion; any other path as it is."""
    if (match := _DOWN_OR_UP.fullmatch(path)) is not None:
        way, block, kind, number, rest = match[1], int(match[2]), match[3], int(match[4]), match[5]
        index = 3 * block + number + (way == "down")
        return f"{'input' if way == 'down' else 'output'}_blocks_{index}_{_layer(kind, rest)}"
    if (match := _MIDDLE.fullmatch(path)) is not None:
        if match[1] == "attentions":
            return f"middle_block_1_{match[3]}"
        return f"middle_block_{2 * int(match[2])}_{_RESNET.get(match[3], match[3])}"
    if (match := _SCALER.fullmatch(path)) is not None:
        block = int(match[2])
        if match[1] == "down":
            return f"input_blocks_{3 * block + 3}_0_op"
        return f"output_blocks_{3 * block + 2}_{1 if block == 0 else 2}_conv"
    return path


def _layer(kind: str, rest: str) -> str:
    return f"1_{rest}" if kind == "attentions" else f"0_{_RESNET.get(rest, rest)}"
