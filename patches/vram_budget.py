"""Cap the GPU memory of the process (``--vram_budget``), and use free memory below the cap to recompute fewer blocks.

PyTorch's allocator treats the cap as the end of GPU memory. On Windows and WSL the driver silently spills to system memory,
and a step takes fifty times as long.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Option, Settings
from kohya_ext.console import note, stop, warn
from kohya_ext.estimate.result import CONTEXT_BYTES
from kohya_ext.gpu.cap import USABLE_FRACTION, reason_unused, tensor_limit
from kohya_ext.patching.checkpointed_blocks import enable_checkpointing_targets
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, program
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import ranks
from kohya_ext.units import AUTO, format_size, index_of, read_budget

VRAM_BUDGET = Option[int | str | None](
    "vram_budget",
    None,
    read_budget,
    "limit the process to this much GPU memory, unlike --vram, which names a GPU (14GB is 14e9 bytes, 13GiB is 13 * 2**30; "
    "a 16 GB GPU has 17.2e9; auto takes the free memory less 5 percent): checkpoint every block, then stop checkpointing as "
    "many blocks as the measured peak allows",
    metavar="SIZE|auto",
    activates=True,
)


@dataclass
class _Budget(TrainingCallback):
    device: Any
    controller: Any = None
    """A :class:`kohya_ext.gpu.budget_controller.BudgetController`, whose module imports torch; None where only a cap is set."""

    def before_batch(self, accelerator: Accelerator) -> None:
        if self.controller is not None:
            self.controller.before_batch(accelerator)

    def after_batch(self, accelerator: Accelerator) -> None:
        if self.controller is not None:
            self.controller.after_batch(accelerator)

    def on_end(self) -> None:
        """Remove the cap."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.set_per_process_memory_fraction(1.0, index_of(self.device))


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Budget:
    budget = settings[VRAM_BUDGET]
    assert budget is not None, "wanted without a value"
    limit = _cap(budget, accelerator.device)
    reason = _reason_to_only_cap(args, accelerator, settings)
    if limit is None or reason is not None:
        if reason is not None:
            note(f"memory budget: all blocks stay as configured, since {reason}")
        return _Budget(accelerator.device)
    from kohya_ext.gpu.budget_controller import BudgetController
    from kohya_ext.gpu.memory_meter import GPUMemoryMeter, HostMemoryMeter

    on_gpu = accelerator.device.type == "cuda"
    meter = GPUMemoryMeter(accelerator.device) if on_gpu else HostMemoryMeter()
    controller = BudgetController(round(limit * USABLE_FRACTION), meter)
    if settings["selective_torch_compile"]:
        _delay_compiling(controller, accelerator.device.type)
    if not args.gradient_checkpointing:
        args.gradient_checkpointing = True
        note("memory budget: gradient checkpointing covers all blocks in the first steps, then as few as the budget allows")
    return _Budget(accelerator.device, controller)


def _cap(budget: int | str, device: Any) -> int | None:
    """Cap the process; return the bytes allowed for tensors, or None if unknown."""
    import torch

    if device.type != "cuda":
        if budget == AUTO:
            warn("--vram_budget auto is ignored: it needs a CUDA GPU")
            return None
        note(
            f"--vram_budget {format_size(float(budget))}: no CUDA GPU is used, so memory is not capped; "
            "blocks are checkpointed to keep the measured tensors below the budget"
        )
        return int(budget)
    index = index_of(device)
    free, total = torch.cuda.mem_get_info(index)
    wanted = tensor_limit(budget, free, total)
    if wanted <= 0:
        stop(
            f"--vram_budget leaves no memory for tensors: {format_size(free)} of the GPU's {format_size(total)} are free, and "
            f"the CUDA context needs about {format_size(CONTEXT_BYTES)}; raise the budget or end other programs on the GPU"
        )
    if budget != AUTO and wanted > free:
        warn(
            f"--vram_budget {format_size(float(budget))} exceeds the {format_size(free)} free on this GPU; "
            "--vram_budget auto uses the free memory"
        )
    limit = min(round(wanted), int(total))
    torch.cuda.set_per_process_memory_fraction(limit / total, index)
    note(f"memory budget: {format_size(limit)} for tensors on a GPU of {format_size(total)} with {format_size(free)} free")
    return limit


def _reason_to_only_cap(args: Namespace, accelerator: Accelerator, settings: Settings) -> str | None:
    reason = reason_unused(program().command.name, args, settings)
    if reason is not None:
        return reason
    if ranks.is_sharded(accelerator):
        return "the model is sharded"
    return None


def _delay_compiling(controller: Any, device: str) -> None:
    """Run the first steps eager, to measure the blocks, and compile them once their activation budget is known."""
    from kohya_ext.compiling.blocks import RUN
    from kohya_ext.compiling.budget import set_budget
    from kohya_ext.compiling.support import find_obstacle

    if RUN.disabled_because or find_obstacle(device, RUN.backend):
        return  # blocks stay eager and are freed one by one

    def compile_at(share: float) -> None:
        RUN.paused = False
        try:
            set_budget(share)
        except Exception as error:  # torch's internals differ between versions; training continues without a budget
            warn(f"this version of torch rejects an activation memory budget: {type(error).__name__}: {error}")
            return
        note(f"compiled blocks keep {share:.0%} of their activations")

    RUN.paused = True
    controller.compile_at = compile_at


def _add_model(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def enable_gradient_checkpointing(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        budget = current(_Budget)
        if budget is not None and budget.controller is not None:
            budget.controller.take(self)
        return result

    return enable_gradient_checkpointing


def _facts() -> Mapping[str, object]:
    budget = current(_Budget)
    return budget.controller.facts() if budget is not None and budget.controller is not None else {}


PATCH = Patch(
    name="vram_budget",
    summary="cap GPU memory (--vram_budget) and checkpoint only as many blocks as the measured peak requires",
    targets=enable_checkpointing_targets(_add_model),
    options=(VRAM_BUDGET,),
    exactness="exact",
    held_to="the trained weights with every block checkpointed; compiled blocks as in selective_torch_compile",
    idea="https://pytorch.org/blog/activation-checkpointing-techniques/",
    wanted=lambda settings: settings[VRAM_BUDGET] is not None,
    facts=_facts,
    stage=Stage.OBSERVE,
    on_start=_start,
)
