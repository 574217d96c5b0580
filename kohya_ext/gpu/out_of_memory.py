"""A run that is out of memory: when it happened, what lay where, and what to change next."""

from __future__ import annotations

import sys
import traceback
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kohya_ext.config.command_line import CommandLine, quoted, restart_line
from kohya_ext.errors import UserError
from kohya_ext.estimate import cache
from kohya_ext.estimate import memory_config as choosing
from kohya_ext.estimate.result import Estimate
from kohya_ext.launch.session import peak_memory
from kohya_ext.planning.memory_savings import Attempt, Phase, Step, steps
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.units import GB, gigabytes, index_of, said

#: What errors say that are not of torch's own type for it: the CPU's allocator, cuBLAS's handle, a kernel's launch.
_SAID = ("you tried to allocate", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "CUDA out of memory")

#: Which function of sd-scripts, accelerate or torch is running, the outermost first, says which moment it is.
_MOMENTS: Mapping[str, Phase] = {
    **dict.fromkeys(("new_cache_latents", "cache_latents", "cache_batch_latents"), "caching latents"),
    **dict.fromkeys(
        ("new_cache_text_encoder_outputs", "cache_text_encoder_outputs", "cache_text_encoder_outputs_if_needed"),
        "caching text encoder outputs",
    ),
    **dict.fromkeys(("sample_images", "sample_images_common"), "sampling"),
    **dict.fromkeys(("load_target_model", "prepare", "load_state"), "loading"),
    **dict.fromkeys(("backward", "_engine_run_backward"), "backward"),
    **dict.fromkeys(("step", "clip_grad_norm_"), "optimizer step"),
}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory, the card's or the host's, did not suffice."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SAID)


def moment(error: BaseException, training: bool) -> Phase:
    """Return when an error was raised, told from the functions it came through; ``training``: whether steps had begun."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_name
        if name.startswith("save_") or name == "save":
            return "saving"
        if (found := _MOMENTS.get(name)) is not None:
            return found
    return "forward" if training else "loading"


# --- what lay where --------------------------------------------------------------------------------------------------


def measured(device: Any) -> str:
    """Return in one line what this process holds now."""
    if device.type != "cuda":
        return f"on the host: {said(peak_memory()['host_resident'])} resident at most"
    import torch

    card = index_of(device)
    free, total = torch.cuda.mem_get_info(card)
    reserved = torch.cuda.memory_reserved(card)
    tensors, most = torch.cuda.memory_allocated(card), torch.cuda.max_memory_allocated(card)
    others = max(0, total - free - reserved)
    return (
        f"of the card's {gigabytes(total)} GB, {gigabytes(reserved)} are reserved by this run ({gigabytes(tensors)} by tensors "
        f"now, {gigabytes(most)} at most), {gigabytes(others)} are other programs' and CUDA's own, {gigabytes(free)} are free"
    )


def predicted(checkout: Checkout, args: Namespace, command: CommandLine) -> str:
    """Return in one line what is known of this command line's memory already, or what to type to know it."""
    try:
        choices = choosing.normalized(choosing.from_values(vars(args), command))
    except (UserError, KeyError, ValueError, TypeError):  # a script that is not modelled
        return ""
    known = cache.find(checkout, choices, command.settings.disable_patch)
    if known is None:
        words = ("python", "-m", "kohya_ext", "estimate", str(command.script), *command.with_environment().argv)
        return f"what needs how much: {quoted(words)}"
    found = Estimate(**known)
    largest = sorted(found.parts.items(), key=lambda row: -row[1])
    parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in largest if size >= GB / 100)
    return (
        f"predicted for this command line: {gigabytes(found.on_the_card)} GB on the card, the peak in {found.moment}: {parts} "
        "(not calibrated on CUDA)"
    )


# --- what to change --------------------------------------------------------------------------------------------------


def next_step(args: Namespace, command: CommandLine, phase: Phase, keep_state: bool) -> Step | None:
    """Return the cheapest rung that helps at a moment; with ``keep_state``, one that a state can be gone on from, if any."""
    known = vars(args)
    values = {**known, **{name: value for name, value in asdict(command.settings).items() if value is not None}}
    found = list(steps(Attempt(command.name, values, known.__contains__), phase))
    going_on = [step for step in found if step.rung.resumes] if keep_state else []
    return next(iter(going_on or found), None)


def advice(step: Step, state: Path | None) -> list[str]:
    """Return what to say of a rung: what it does and costs, and the command line that takes it."""
    exact = "The result stays the same, bit for bit" if step.rung.exact else "The result changes a little"
    changes = dict(step.changes)
    if state is not None and step.rung.resumes:
        changes["resume"] = str(state)
        going_on = f"go on from {state.name}"
    else:
        changes["resume"], going_on = None, "begin again"
    return [
        f"the cheapest next step: {step.rung.what} ({quoted(step.words)}). It costs: {step.rung.costs}. {exact}",
        f"to {going_on} with it: {restart_line(changes)}",
    ]
