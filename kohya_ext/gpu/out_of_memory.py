"""The diagnosis of an out-of-memory error: its phase, the memory in use, and the next change."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kohya_ext.config.command_line import CommandLine, quoted, restart_line
from kohya_ext.estimate import predict
from kohya_ext.gpu.peak_memory import of_device as peaks_of_device
from kohya_ext.gpu.peak_memory import peak_memory
from kohya_ext.installed_gpus import first_gpu
from kohya_ext.planning.memory_savings import Attempt, Phase, Step, steps
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.units import GB, format_size, gigabytes, index_of

#: Messages of out-of-memory errors that are a RuntimeError: of the CPU's allocator, the driver (also in a launch, in Triton
#: and with expandable segments), libraries that cannot create their workspace, the allocator under WSL, and C++.
_MESSAGES = (
    *("you tried to allocate", "Cannot allocate memory", "std::bad_alloc", "bad allocation"),
    *("CUDA out of memory", "CUDA error: out of memory", "CUDA driver error: out of memory"),
    "Triton Error [CUDA]: out of memory",
    *("cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "NVML_SUCCESS == r INTERNAL ASSERT"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED"),
    *("CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_NOT_INITIALIZED"),
)

_PAGING_FILE = 1455
"""Windows' error number when the paging file is too small, whatever the language of its message."""

#: Function of sd-scripts, accelerate or torch -> phase; the outermost function in a traceback decides.
_PHASES: Mapping[str, Phase] = {
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
    """Return whether an error, or its cause, is an out-of-memory error, on the GPU or the host."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError) and (error.errno == errno.ENOMEM or getattr(error, "winerror", None) == _PAGING_FILE):
        return True
    text = str(error)
    if f"os error {_PAGING_FILE}" in text or (isinstance(error, RuntimeError) and any(each in text for each in _MESSAGES)):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def phase_of(error: BaseException, training: bool) -> Phase:
    """Return the phase of an error from its traceback; ``training`` is true once steps have begun."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_name
        if name.startswith("save_") or name == "save":
            return "saving"
        if name in _PHASES:
            return _PHASES[name]
    return "forward" if training else "loading"


# --- memory in use ---------------------------------------------------------------------------------------------------


def usage(device: Any) -> str:
    """Return the memory in use by this process, as one line."""
    if device.type != "cuda":
        return f"host memory: peak of {format_size(peak_memory()['host_resident'])} resident"
    import torch

    index = index_of(device)
    free, total = torch.cuda.mem_get_info(index)
    reserved = torch.cuda.memory_reserved(index)
    tensors, peak = torch.cuda.memory_allocated(index), peaks_of_device(index)[0]
    others = max(0, total - free - reserved)
    return (
        f"GPU memory: {gigabytes(total)} GB; this run reserves {gigabytes(reserved)} ({gigabytes(tensors)} in tensors, "
        f"peak {gigabytes(peak)}), other programs and CUDA use {gigabytes(others)}, and {gigabytes(free)} are free"
    )


def prediction(checkout: Checkout, args: Namespace, command: CommandLine) -> str:
    """Return the known estimate of this command line, or the command that makes one, as one line; empty if there is none."""
    if predict.configuration(args, command) is None:
        return ""
    estimate = predict.known(checkout, args, command)
    if estimate is None:
        words = ("python", "-m", "kohya_ext", "estimate", str(command.script), *command.with_environment().argv)
        return f"for an estimate by part, run: {quoted(words)}"
    largest = sorted(estimate.parts.items(), key=lambda row: -row[1])
    parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in largest if size >= GB / 100)
    return (
        f"predicted for this command line: {gigabytes(estimate.total)} GB, with the peak in {estimate.peak_phase}: {parts} "
        "(not compared with a GeForce GPU)"
    )


# --- the next change -------------------------------------------------------------------------------------------------


def next_step(args: Namespace, command: CommandLine, phase: Phase, keep_state: bool) -> Step | None:
    """Return the cheapest change that helps in a phase; with ``keep_state``, one that can resume a saved state, if any."""
    known = vars(args)
    values = {**known, **{name: value for name, value in command.settings.values().items() if value is not None}}
    values["num_processes"] = int(os.environ.get("WORLD_SIZE", "1"))  # also of a run that another launcher has started
    gpu = first_gpu()
    bf16 = gpu is None or gpu.has_bf16
    helpful = list(steps(Attempt(command.name, values, known.__contains__, bf16=bf16), phase))
    resumable = [step for step in helpful if step.saving.resumes] if keep_state else []
    return next(iter(resumable or helpful), None)


def advice(step: Step, state: Path | None) -> list[str]:
    """Return the lines to print for a change: its effect and cost, and the command line with it."""
    exact = "The result is bit-identical" if step.saving.exact else "The result changes slightly"
    changes = dict(step.changes)
    if state is not None and step.saving.resumes:
        changes["resume"] = str(state)
        action = f"resume from {state.name}"
    else:
        changes["resume"], action = None, "start over"
    return [
        f"the cheapest change: {step.saving.what} ({quoted(step.words)}). Cost: {step.saving.costs}. {exact}",
        f"to {action} with it: {restart_line(changes)}",
    ]
