"""Print which attention a run uses and the kernel that PyTorch runs for it; use PyTorch's where a package is missing.

With xformers or flash-attn selected and not installed, upstream fails after it has loaded the model.
"""

from __future__ import annotations

from argparse import Namespace

from kohya_ext.config.settings import Settings
from kohya_ext.console import note, warn
from kohya_ext.gpu.attention import describe, implementation, shapes, use_installed
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage, program
from kohya_ext.patching.types import Accelerator
from kohya_ext.sdscripts import families

_WITHOUT_SCORES = {
    "none": "upstream's own, which stores the scores of all pairs of tokens; --sdpa needs less time and memory",
    "mem_eff_attn": "upstream's own in slices; --sdpa needs less time",
}


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> None:
    script = program().command.name
    for line in use_installed(script, args):
        warn(line)
    family = families.of(script, vars(args))
    if family is None or accelerator.device.type != "cuda":
        return
    chosen = implementation(family, args)
    if chosen != "sdpa":
        note(f"attention: {_WITHOUT_SCORES.get(chosen, chosen)}")
        return
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision, torch.float32)
    alone = ("lumina",) if settings["cuda_graphs"] else ("lumina", "flux")  # see needless_masks
    words, cause = describe(shapes(family, args, alone if settings["fused_operations"] else ()), dtype, accelerator.device)
    if cause:
        warn(f"attention: {words}, which stores the scores of all pairs of tokens. Cause: {cause}")
    else:
        note(f"attention: {words}")


PATCH = Patch(
    name="attention",
    summary="print the attention kernel of a run; use PyTorch's attention where xformers or flash-attn is missing",
    targets=(),
    exactness="exact",
    held_to="the same run without it, where the selected package is installed",
    idea="https://github.com/bmaltais/kohya_ss/issues/3200",
    stage=Stage.OBSERVE,
    on_start=_start,
)
