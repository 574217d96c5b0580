"""``--vram_budget``: a cap on the process, and what is left below it spent on not computing twice.

PyTorch's allocator stops at the cap as it stops at a card's end. Under Windows and WSL a card has no end: the driver takes
system memory for what does not fit, and a step takes fifty times as long without a word.
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
from kohya_ext.units import AUTO, format_size, index_of, read_budget

VRAM_BUDGET = Option[int | str | None](
    "vram_budget",
    None,
    read_budget,
    "limit the process to this much GPU memory, unlike --vram, which names a GPU (14GB is 14e9 bytes, 13GiB is 13 * 2**30; "
    "a 16 GB GPU has 17.2e9; auto takes the free memory less 5 percent): checkpoint every block, then stop checkpointing as "
    "many blocks as the measured peak leaves room for",
    metavar="SIZE|auto",
    activates=True,
)


@dataclass
class _Budget(TrainingCallback):
    device: Any
    spender: Any = None
    """A :class:`kohya_ext.gpu.budget_controller.BudgetController`, whose module imports torch; None where only a cap is set."""

    def before_batch(self, accelerator: Any) -> None:
        if self.spender is not None:
            self.spender.before_batch(accelerator)

    def after_batch(self, accelerator: Any) -> None:
        if self.spender is not None:
            self.spender.after_batch(accelerator)

    def on_end(self) -> None:
        """Take the cap off."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.set_per_process_memory_fraction(1.0, index_of(self.device))


def _start(args: Namespace, accelerator: Any, settings: Settings) -> _Budget:
    budget = settings[VRAM_BUDGET]
    assert budget is not None, "wanted without a value"
    limit = _cap(budget, accelerator.device)
    reason = _reason_not_to_spend(args, accelerator, settings)
    if limit is None or reason is not None:
        if reason is not None:
            note(f"memory budget: nothing below it is spent: {reason}")
        return _Budget(accelerator.device)
    from kohya_ext.gpu.budget_controller import BudgetController
    from kohya_ext.gpu.memory_meter import GPUMemoryMeter, HostMemoryMeter

    on_card = accelerator.device.type == "cuda"
    spender = BudgetController(
        round(limit * USABLE_FRACTION), GPUMemoryMeter(accelerator.device) if on_card else HostMemoryMeter()
    )
    if settings["selective_torch_compile"]:
        _wait_with_compiling(spender, accelerator.device.type, settings["compile_backend"])
    if not args.gradient_checkpointing:
        args.gradient_checkpointing = True
        note("memory budget: gradient checkpointing is on for the first steps, and for the blocks that have no room after them")
    return _Budget(accelerator.device, spender)


def _cap(budget: int | str, device: Any) -> int | None:
    """Cap the process; return the bytes that its tensors may take, None where that is not known."""
    import torch

    if device.type != "cuda":
        if budget == AUTO:
            warn("--vram_budget auto: no CUDA card is used here, so there is no free memory to go by and nothing to cap")
            return None
        note(
            f"--vram_budget {format_size(float(budget))}: no CUDA card is used here, so nothing is capped; "
            "the tensors of the training steps are kept below it as measured"
        )
        return int(budget)
    card = index_of(device)
    free, total = torch.cuda.mem_get_info(card)
    wanted = tensor_limit(budget, free, total)
    if wanted <= 0:
        stop(
            f"--vram_budget: {format_size(free)} of the card's {format_size(total)} are free, and CUDA's context alone takes "
            f"about {format_size(CONTEXT_BYTES)}: give more, or end what else uses the card"
        )
    if budget != AUTO and wanted > free:
        warn(
            f"--vram_budget {format_size(float(budget))} is more than the {format_size(free)} that are free on this card: "
            "--vram_budget auto takes what is there"
        )
    limit = min(round(wanted), int(total))
    torch.cuda.set_per_process_memory_fraction(limit / total, card)
    note(f"memory budget: {format_size(limit)} for tensors on a card of {format_size(total)}, {format_size(free)} of them free")
    return limit


def _reason_not_to_spend(args: Namespace, accelerator: Any, settings: Settings) -> str | None:
    reason = reason_unused(program().command.name, args, settings)
    if reason is not None:
        return reason
    if str(accelerator.distributed_type).rpartition(".")[2] in ("DEEPSPEED", "FSDP"):
        return "the model is sharded"
    return None


def _wait_with_compiling(spender: Any, device: str, backend: str) -> None:
    """Let the first steps run eager, where blocks can be weighed; they are compiled once it is known what they may keep."""
    from kohya_ext.compiling.blocks import RUN
    from kohya_ext.compiling.budget import set_budget
    from kohya_ext.compiling.support import find_obstacle

    if RUN.disabled_because or find_obstacle(device, backend):
        return  # they stay eager, and are freed one by one

    def compile_at(share: float) -> None:
        RUN.paused = False
        try:
            set_budget(share)
        except Exception as error:  # torch's internals differ between versions; training goes on with what it has
            warn(f"this torch takes no activation memory budget: {type(error).__name__}: {error}")
            return
        note(f"compiled blocks keep {share:.0%} of their activations")

    RUN.paused = True
    spender.compile_at = compile_at


def _take(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def enable_gradient_checkpointing(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        budget = current(_Budget)
        if budget is not None and budget.spender is not None:
            budget.spender.take(self)
        return result

    return enable_gradient_checkpointing


def _facts() -> Mapping[str, object]:
    budget = current(_Budget)
    return budget.spender.facts() if budget is not None and budget.spender is not None else {}


PATCH = Patch(
    name="vram_budget",
    summary="--vram_budget: cap the process, and free blocks from checkpointing as far as the measured peak allows",
    targets=enable_checkpointing_targets(_take),
    options=(VRAM_BUDGET,),
    exactness="exact",
    held_to="the trained file with every block checkpointed; compiled blocks as selective_torch_compile",
    idea="https://pytorch.org/blog/activation-checkpointing-techniques/",
    wanted=lambda settings: settings[VRAM_BUDGET] is not None,
    facts=_facts,
    stage=Stage.OBSERVE,
    on_start=_start,
)
