"""The parts of a model that checkpoint files hold (U-Net, text encoder, VAE), recognized by the names of their tensors.

A part of another size has the same names, so a width tells CLIP-L from CLIP-G. Only the standard library is used.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

TABLE = "tensor_names.json"
"""The names of the tensors of each part: a tree of the words between dots. Equal branches share a key, with commas in it. ``#``
is each index of a list of blocks. Written by tools/make_tensor_names.py."""

_RECOGNIZED = 0.5
"""The share of a part's tensors from which on a file is that part, though incomplete."""

_CLIP = ("text_model.embeddings.token_embedding.weight", 1)
_T5 = ("block.0.layer.0.SelfAttention.q.weight", 1)
_LAYERS = ("layers.0.self_attn.q_proj.weight", 1)
_VAE = ("decoder.conv_in.weight", 1)

_SD_VAE = {4: "the VAE of SD 1.5 or SDXL"}
_DIT_VAE = {16: "the VAE of FLUX or SD3"}


@dataclass(frozen=True)
class Part:
    """One model in a file, as a loader of sd-scripts reads it."""

    name: str
    title: str
    """For messages: ``CLIP-L``."""
    prefixes: tuple[str, ...] = ("",)
    """The loader removes one of them from the names of the tensors."""
    names: str = ""
    """The key in the table; by default the name."""
    width: tuple[str, int] = ("", 0)
    """The tensor and the axis whose length differs between sizes of the part."""
    others: Mapping[int, str] = field(default_factory=dict, hash=False)
    """Width -> the title of another model with the same names."""
    converted: str = ""
    """A tensor of another layout, which the loader converts. Files that have it are not counted."""


@dataclass(frozen=True)
class Contents:
    """How much of a part a file has."""

    part: Part
    required: int
    missing: tuple[str, ...]
    """Names of missing tensors, as in the file."""
    other: str = ""
    """The title of the model that the file has instead: the names are those of the part, but the width is another."""

    @property
    def is_recognized(self) -> bool:
        """Return whether the file is the part, complete or not."""
        return len(self.missing) <= _RECOGNIZED * self.required and not self.other


PARTS = (
    Part("clip-l", "CLIP-L", width=_CLIP, others={1280: "CLIP-G", 1024: "OpenCLIP-H"}),
    Part("clip-g", "CLIP-G", width=_CLIP, others={768: "CLIP-L", 1024: "OpenCLIP-H"}),
    Part(
        "t5",
        "T5-XXL",
        width=(f"encoder.{_T5[0]}", _T5[1]),
        others={512: "T5-small", 768: "T5-base", 1024: "T5-large", 2048: "T5-XL", 1472: "ByT5-small"},
    ),
    Part("byt5", "ByT5-small", ("", "encoder."), width=_T5, others={512: "T5-small", 768: "T5-base", 4096: "T5-XXL"}),
    Part("flux-ae", "FLUX's autoencoder", width=_VAE, others=_SD_VAE),
    Part("lumina-ae", "FLUX's autoencoder", ("", "vae."), "flux-ae", _VAE, _SD_VAE),
    Part(
        "gemma2",
        "Gemma 2 2B",
        ("", "model.", "text_encoders.gemma2_2b.transformer.model."),
        width=_LAYERS,
        others={3584: "Gemma 2 9B", 2560: "Gemma 3 4B"},
    ),
    Part("qwen3", "Qwen3 0.6B", ("", "model."), width=_LAYERS, others={2048: "Qwen3 1.7B", 2560: "Qwen3 4B", 4096: "Qwen3 8B"}),
    Part("qwen-vae", "Qwen-Image's VAE", converted="conv1.bias"),
    Part("qwen-vl", "Qwen2.5-VL 7B"),
    Part("hunyuan-vae", "HunyuanImage's VAE"),
    Part("sd-vae", "the VAE of SD 1.5 or SDXL", ("", "first_stage_model."), "sdxl.first_stage_model", _VAE, _DIT_VAE),
    Part("sd3-vae", "SD3's VAE", ("",), "sd3.first_stage_model", _VAE, _SD_VAE),
    Part("sdxl", "SDXL"),
    Part("sd15", "SD 1.5", converted="cond_stage_model.transformer.embeddings.token_embedding.weight"),
    Part("flux", "FLUX", ("", "model.diffusion_model."), converted="transformer_blocks.0.attn.add_k_proj.bias"),
    Part("chroma", "Chroma", ("", "model.diffusion_model.")),
    Part("sd3", "SD3", ("model.diffusion_model.",), "sd3.model.diffusion_model"),
    Part("lumina", "Lumina", ("", "model.diffusion_model.")),
    Part("anima", "Anima", ("", "net.")),
    Part("hunyuan-image", "HunyuanImage"),
)
_BY_NAME = {part.name: part for part in PARTS}


_Tree = Mapping[str, Any]


def of_name(name: str) -> Part:
    """Return the part with a name. Raises KeyError for an unknown one."""
    return _BY_NAME[name]


def contents(shapes: Mapping[str, tuple[int, ...]], part: Part) -> Contents:
    """Return how much of a part a file with these tensors has, under the prefix that fits best."""
    if part.converted in shapes:
        return Contents(part, 0, ())
    stored = _tree(shapes)
    each = (_contents(shapes, stored, part, prefix) for prefix in part.prefixes)
    return min(each, key=lambda contents: len(contents.missing))


def recognize(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return the title of the part that a file is; None if no part is known whose tensors it has."""
    every = [contents(shapes, part) for part in PARTS]
    similar = [each for each in every if len(each.missing) <= _RECOGNIZED * each.required]
    best = max(similar, key=lambda each: (not each.other, each.required - len(each.missing)), default=None)
    return None if best is None else best.other or best.part.title


def count_blocks(names: Iterable[str], blocks: str, prefixes: Iterable[str]) -> int:
    """Return the number of blocks in a list of a model, under any of the prefixes that its names may have."""
    starts = tuple(f"{prefix}{blocks}." for prefix in prefixes)
    indexes = {name.partition(start)[2].partition(".")[0] for name in names for start in starts if name.startswith(start)}
    return len({index for index in indexes if index.isdecimal()})


def _contents(shapes: Mapping[str, tuple[int, ...]], stored: _Tree, part: Part, prefix: str) -> Contents:
    for word in prefix.split(".")[:-1]:
        stored = stored.get(word) or {}
    required = [*_required(_names_of(part.names or part.name), stored, prefix)]
    missing = tuple(name for name, is_there in required if not is_there)
    tensor, axis = part.width
    shape = shapes.get(prefix + tensor, ())
    other = part.others.get(shape[axis], "") if len(shape) > axis else ""
    return Contents(part, len(required), missing, other)


def _required(wanted: _Tree, stored: _Tree, prefix: str) -> Iterator[tuple[str, bool]]:
    """Yield each required name, with the prefix, and whether the file has it.

    A list of blocks ends at the file's last block.
    """
    for key, branch in wanted.items():
        words: Iterable[str] = key.split(",")
        if key == "#":
            words = map(str, range(1 + max((int(word) for word in stored if word.isdecimal()), default=0)))
        for word in words:
            if branch:
                yield from _required(branch, stored.get(word) or {}, f"{prefix}{word}.")
            else:
                yield prefix + word, word in stored


def _tree(names: Iterable[str]) -> _Tree:
    tree: dict[str, Any] = {}
    for name in names:
        *words, last = name.split(".")
        branch = tree
        for word in words:
            branch = branch.setdefault(word, {})
        branch.setdefault(last, {})
    return tree


@functools.cache
def _table() -> Mapping[str, _Tree]:
    table: Mapping[str, _Tree] = json.loads(resources.files("kohya_ext.sdscripts").joinpath(TABLE).read_text("utf-8"))
    return table


def _names_of(path: str) -> _Tree:
    """Return a part's tree of names, or the branch of another part's."""
    name, *words = path.split(".")
    branch = _table()[name]
    for word in words:
        branch = next(inner for key, inner in branch.items() if word in key.split(","))
    return branch
