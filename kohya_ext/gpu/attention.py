"""The kernel that PyTorch's ``scaled_dot_product_attention`` runs for a family, and why it is not a fused kernel.

PyTorch chooses among flash, memory-efficient, cuDNN and math by GPU, dtype, head dimension and mask. Its own function makes the
choice here, for small tensors with the same properties. The math kernel stores the scores of all pairs of tokens.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kohya_ext.sdscripts import families
from kohya_ext.sdscripts.families import Family

HEADS: Mapping[str, tuple[int, ...]] = {
    "sdxl": (64,),
    "sd15": (40, 80, 160),
    "sd3": (64,),
    "flux": (128,),
    "chroma": (128,),
    "lumina": (96,),
    "anima": (128,),
    "hunyuan-image": (128,),
}
"""Family -> the dimensions of its attention heads. Blocks of SD 1.5 have 8 heads at three widths."""

_SD2_HEADS = (64,)

MATH = "math"

_KERNELS = {"MATH": MATH, "FLASH_ATTENTION": "flash", "EFFICIENT_ATTENTION": "memory-efficient", "CUDNN_ATTENTION": "cuDNN"}
"""Names of ``torch.nn.attention.SDPBackend``."""

_TOKENS = 256

_MODES = {"xformers": "xformers.ops", "flash": "flash_attn", "sageattn": "sageattention"}
"""Value of --attn_mode -> the module that it needs."""

_SDPA = "sdpa"
_TORCH = "torch"
"""PyTorch's attention as a value of --attn_mode."""


@dataclass(frozen=True)
class Shape:
    """The properties of attention that decide on the kernel."""

    head: int
    """The head dimension."""
    masked: bool = False


def shapes(family: Family, args: Namespace, alone: Collection[str] = ()) -> list[Shape]:
    """Return the shapes of a family's attention in training, with the script's arguments.

    ``alone``: families whose texts need no mask in batches of one, besides those of upstream.
    """
    heads = _SD2_HEADS if getattr(args, "v2", False) else HEADS[family.name]
    masked = {
        "lumina": True,
        "flux": getattr(args, "apply_t5_attn_mask", False),
        # Texts are cut to the longest of the batch, so a single one has no padding.
        "hunyuan-image": getattr(args, "train_batch_size", 1) > 1 and not getattr(args, "split_attn", False),
    }
    needs_mask = masked.get(family.name) and not (family.name in alone and getattr(args, "train_batch_size", 1) == 1)
    return [Shape(head, bool(needs_mask)) for head in heads]


def kernel(shape: Shape, dtype: Any, device: Any) -> str:
    """Return the kernel for a shape on a CUDA device: flash, memory-efficient, cuDNN or math."""
    import torch
    from torch.nn.attention import SDPBackend

    q = torch.empty(1, 1, _TOKENS, shape.head, device=device, dtype=dtype, requires_grad=True)
    mask = torch.ones(1, 1, 1, _TOKENS, device=device, dtype=torch.bool) if shape.masked else None
    return _KERNELS.get(SDPBackend(torch._fused_sdp_choice(q, q, q, attn_mask=mask)).name, "another")


def cause_of_math(shape: Shape, dtype: Any, device: Any) -> str:
    """Return why the math kernel is chosen: the property without which another kernel is."""
    import torch

    if dtype is not torch.float16 and kernel(shape, torch.float16, device) != MATH:
        return f"{_name(dtype)}; use --mixed_precision fp16"
    if shape.masked and kernel(Shape(shape.head), dtype, device) != MATH:
        return "the mask"
    if kernel(Shape(64, shape.masked), dtype, device) != MATH:
        return f"the head dimension {shape.head}"
    return "this GPU, or a setting of torch.backends.cuda"


def describe(shapes: Sequence[Shape], dtype: Any, device: Any) -> tuple[str, str]:
    """Return a text with the kernels of shapes, and the cause of the math kernel; no cause if another kernel runs."""
    kernels: dict[str, list[Shape]] = {}
    for shape in shapes:
        kernels.setdefault(kernel(shape, dtype, device), []).append(shape)
    parts = [f"{name} (head dimension {', '.join(str(each.head) for each in group)})" for name, group in kernels.items()]
    mask = ", with a mask" if any(shape.masked for shape in shapes) else ""
    cause = cause_of_math(kernels[MATH][0], dtype, device) if MATH in kernels else ""
    return f"PyTorch's {' and '.join(parts)} in {_name(dtype)}{mask}", cause


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# --- the script's arguments ------------------------------------------------------------------------------------------


def implementation(family: Family, args: Namespace) -> str:
    """Return the implementation that the arguments select: sdpa, a value of --attn_mode, mem_eff_attn, or none."""
    if family.unet:
        chosen = (name for name in ("mem_eff_attn", "xformers", _SDPA) if getattr(args, name, False))
        return next(chosen, "none")
    if hasattr(args, "attn_mode"):
        mode = args.attn_mode or ("xformers" if getattr(args, "xformers", False) else _SDPA)
        return _SDPA if mode == _TORCH else str(mode)
    if getattr(args, "use_sage_attn", False):
        return "sageattn"
    return "flash" if getattr(args, "use_flash_attn", False) else _SDPA


def use_installed(script: str, args: Namespace) -> list[str]:
    """Select PyTorch's attention where the package of the selected one cannot be imported; return a line for each option.

    Without any selection, --attn_mode becomes PyTorch's, as in Anima's LoRA script. Its other scripts fail at their first step.
    """
    family = families.of(script, vars(args))
    if family is None:
        return []
    lines = []
    chosen = implementation(family, args)
    if hasattr(args, "attn_mode") and args.attn_mode is None:
        args.attn_mode = _TORCH if chosen == _SDPA else chosen
    if chosen in _MODES and (problem := _import_problem(_MODES[chosen])):
        lines.append(f"attention: {chosen} cannot be imported ({problem}); using PyTorch's")
        for name in ("xformers", "use_flash_attn", "use_sage_attn"):
            if hasattr(args, name):
                setattr(args, name, False)
        if hasattr(args, "attn_mode"):
            args.attn_mode = _TORCH
        if family.unet:
            args.sdpa = True
    if getattr(args, "diffusers_xformers", False) and (problem := _import_problem(_MODES["xformers"])):
        lines.append(f"--diffusers_xformers is left out: xformers cannot be imported ({problem})")
        args.diffusers_xformers = False
    return lines


def _import_problem(module: str) -> str:
    """Return why a module cannot be imported; empty if it can."""
    try:
        importlib.import_module(module)
    except Exception as problem:  # packages for another version of torch fail in many ways
        return f"{type(problem).__name__}: {problem}".splitlines()[0]
    return ""
