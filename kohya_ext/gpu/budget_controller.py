"""Spend a memory budget: start with every block checkpointed, and free as many from it as the measured peak leaves room for.

The first step weighs each block: while it is recomputed in backward, what it keeps and what it computes are measured. The
second one, in which the optimizer's state is there, gives the peak. A block that is freed keeps its activations and is not
recomputed, so the peak rises by no more than they weigh: the blocks with the most work per byte are freed as long as that bound
fits, the next step's peak is measured, and so on until nothing more fits. Every figure is scaled from the batch it was measured
with to the largest batch of the data set, since activations grow with the pixels.

Gradients stay what they are with every block checkpointed, bit for bit: recomputing gives the same numbers.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kohya_ext.console import note, warn
from kohya_ext.estimate.tracker import Allocations
from kohya_ext.gpu.memory_meter import MemoryMeter
from kohya_ext.gpu.out_of_memory import is_out_of_memory
from kohya_ext.patching.checkpointed_blocks import covered_blocks, recomputed
from kohya_ext.patching.training_loop import current_batch, data_sets
from kohya_ext.units import format_size

#: Compiled blocks that may keep less than this share recompute nearly everything: then single blocks are freed, as without.
LEAST_SHARE = 0.1


@dataclass(eq=False)
class Block:
    """One block and what it weighs."""

    module: Any
    kept: int = 0
    """Bytes that it keeps for backward when it is not checkpointed."""
    flops: int = 0
    """What its recomputation costs."""
    turn: int = -1
    """Its place in the order of the forward pass."""

    @property
    def checkpointed(self) -> bool:
        """Whether it is recomputed in backward."""
        return bool(self.module.gradient_checkpointing)

    @checkpointed.setter
    def checkpointed(self, value: bool) -> None:
        self.module.gradient_checkpointing = value


@dataclass
class BudgetController:
    """Spends one process's budget."""

    limit: int
    """Bytes that a step may hold."""
    gauge: MemoryMeter
    compile_at: Callable[[float], None] | None = None
    """Called once with the share of their activations that compiled blocks may keep, where blocks wait to be compiled."""
    blocks: list[Block] = field(default_factory=list)
    steps: int = 0
    settled: bool = False
    peaks: list[int] = field(default_factory=list)
    """Of the steps that were measured, in bytes."""
    rerun: int = 0
    """Blocks that were out of memory in forward and ran again checkpointed."""
    _weighed: int = 0
    """Pixels of the batch with which the blocks were weighed."""
    _pixels: int = 0
    """Pixels of the smallest micro-batch of the step that is measured."""
    _held: int = 0
    """Bytes held before that step."""
    _measuring: bool = False
    _turns: int = 0
    _largest: int = 0
    _share: float = 1.0
    """Of a free block's activations that it keeps: compiled ones may keep less than all."""
    _final: bool = False
    """Whether no more is freed: the next step only says whether it was too much."""

    def take(self, model: Any) -> None:
        """Take over the blocks of a model whose gradient checkpointing was just turned on."""
        for module in covered_blocks(model):
            block = Block(module)
            self.blocks.append(block)
            for layer, name in recomputed(module):
                self._weigh(block, layer, name)
            self._guard(block)

    # --- weighing ----------------------------------------------------------------------------------------------------

    def _weigh(self, block: Block, layer: Any, name: str) -> None:
        original = getattr(layer, name)
        kept = flops = 0

        def weighed(*args: Any, **kwargs: Any) -> Any:
            nonlocal kept, flops
            if torch._C._current_graph_task_id() == -1:  # forward, not a recomputation within backward
                if block.turn < 0:
                    block.turn, self._turns = self._turns, self._turns + 1
                return original(*args, **kwargs)
            scale = Allocations()
            try:
                with scale:
                    return original(*args, **kwargs)
            except BaseException as error:
                # Non-reentrant checkpointing leaves the recomputation by an exception as soon as it has what it needs.
                traceback.clear_frames(error.__traceback__)
                raise
            finally:
                more = max(scale.alive - kept, 0), max(scale.flops - flops, 0)
                kept, flops = kept + more[0], flops + more[1]
                block.kept, block.flops = block.kept + more[0], block.flops + more[1]

        # On the instance, where it hides the class's own until it is taken away.
        setattr(layer, name, weighed)

    def _end_weighing(self) -> None:
        for block in self.blocks:
            for layer, name in recomputed(block.module):
                if name in vars(layer):
                    delattr(layer, name)
        self.blocks.sort(key=lambda block: block.turn)

    # --- around the steps --------------------------------------------------------------------------------------------

    def before_batch(self, accelerator: Any) -> None:
        """Note the size of the micro-batch that begins, and begin to measure with a step's first one."""
        if self.settled or not self.blocks:
            return
        pixels = pixels_of(current_batch(), accelerator)
        if self.steps == 0:
            self._weighed = min(filter(None, (self._weighed, pixels)), default=0)
            return
        if not self._measuring:
            self._largest = self._largest or largest_batch(accelerator)
            self._held, self._pixels, self._measuring = self.gauge.begin(), pixels, True
        self._pixels = min(self._pixels, pixels)

    def after_batch(self, accelerator: Any) -> None:
        """After an optimizer step: end the weighing, or free what the measured peak leaves room for."""
        if self.settled or not accelerator.sync_gradients:
            return
        self.steps += 1
        if self.steps == 1:
            if not any(block.kept for block in self.blocks):
                self._settle("no block was recomputed, so there is nothing to free")
            self._end_weighing()
        elif self._measuring:
            self._measuring = False
            self.peaks.append(self.gauge.end())
            if self.rerun:
                self._settle()
            else:
                self._spend(self.peaks[-1])

    def _spend(self, peak: int) -> None:
        if not (self._weighed and self._pixels and self._largest):
            self._settle("the size of the batches is not known, so every block stays checkpointed")
            return
        room = self.limit - self._held - (peak - self._held) * self._largest / self._pixels
        if self._final:
            if room < 0:
                self._take_back(-room)
            else:
                self._settle()
            return
        costs = {block: self._cost(block) for block in self.blocks if block.checkpointed and block.kept}
        if self.compile_at is not None and costs and room / sum(costs.values()) >= LEAST_SHARE:
            self._share = min(1.0, room / sum(costs.values()))
            self._compile(self._share)
            for block in self.blocks:
                block.checkpointed = False
            self._final = True
            return
        if room < 0 and any(not block.checkpointed for block in self.blocks):
            self._take_back(-room)
            return
        freed = 0
        for block in sorted(costs, key=_work, reverse=True):
            if costs[block] <= room:
                room -= costs[block]
                block.checkpointed = False
                freed += 1
        if not freed or self.compile_at is not None:
            self._settle()

    def _cost(self, block: Block) -> float:
        """Bytes that a block keeps of the largest batch when it is free."""
        return block.kept * self._share * self._largest / self._weighed

    def _take_back(self, missing: float) -> None:
        """Checkpoint free blocks again after a step that held so many bytes more than what was measured before it said."""
        self._final = True
        for block in sorted((block for block in self.blocks if block.kept and not block.checkpointed), key=_work):
            if missing > 0:
                missing -= self._cost(block)
                block.checkpointed = True
        if all(block.checkpointed for block in self.blocks):
            self._settle()

    def _compile(self, share: float) -> None:
        if self.compile_at is not None:
            self.compile_at(share)
            self.compile_at = None

    def _settle(self, reason: str = "") -> None:
        self.settled = True
        self._compile(1.0)  # what is checkpointed keeps nothing anyway
        covered = sum(block.checkpointed for block in self.blocks)
        peak = f", peak {format_size(self.peaks[-1])} of {format_size(self.limit)}" if self.peaks else ""
        if not reason and self.peaks and self.peaks[-1] > self.limit and covered == len(self.blocks):
            reason = "the step needs that much with every block checkpointed"
        why = f" ({reason})" if reason else ""
        note(f"memory budget: {covered} of {len(self.blocks)} blocks are checkpointed{peak}{why}")

    # --- out of memory in forward ------------------------------------------------------------------------------------

    def _guard(self, block: Block) -> None:
        original = block.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if block.checkpointed or not block.module.training or not torch.is_grad_enabled():
                return original(*args, **kwargs)
            random = _random_state()
            try:
                return original(*args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            # Here the error is gone, and with it the frames that held what the block had allocated.
            self._checkpoint_from(block)
            _set_random_state(random)
            return original(*args, **kwargs)

        block.module.forward = forward

    def _checkpoint_from(self, block: Block) -> None:
        self.rerun += 1
        self.gauge.release()
        for later in self.blocks[self.blocks.index(block) :]:
            later.checkpointed = True
        name = type(block.module).__name__
        warn(f"out of memory in a {name} in forward: it runs again checkpointed, as all after it do from now on")

    def facts(self) -> dict[str, Any]:
        """For the report: sizes in bytes."""
        return {
            "limit": self.limit,
            "peaks": self.peaks,
            "blocks": len(self.blocks),
            "checkpointed": sum(block.checkpointed for block in self.blocks),
            "recomputed_flops": sum(block.flops for block in self.blocks if block.checkpointed),
            "recomputed_flops_at_first": sum(block.flops for block in self.blocks),
            "rerun": self.rerun,
            "kept_share_of_free_blocks": self._share,
            "settled": self.settled,
        }


def _work(block: Block) -> tuple[float, int]:
    """Work per byte, and among equals the place: what the last blocks keep is gone before the others' recomputation begins."""
    return block.flops / block.kept, block.turn


def _random_state() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def _set_random_state(state: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(state[0])
    for on_the_card in state[1:]:
        torch.cuda.set_rng_state(on_the_card)


# --- how large batches are -------------------------------------------------------------------------------------------


def pixels_of(batch: dict[str, Any], accelerator: Any) -> int:
    """Return the pixels of a batch of sd-scripts, all pictures together; 0 where that cannot be told.

    Cached latents are smaller by a factor that differs between VAEs; the one that leads to a bucket of the data set is right.
    """
    for name, factors in (("images", (1,)), ("latents", (8, 16, 32))):
        values = batch.get(name)
        if isinstance(values, torch.Tensor) and values.dim() >= 4:
            height, width = values.shape[-2:]
            sizes = {size for dataset in data_sets(accelerator) for size in dataset.bucket_manager.resos}
            factor = next((factor for factor in factors if (width * factor, height * factor) in sizes), 0)
            return int(values.shape[0] * width * height * factor**2)
    return 0


def largest_batch(accelerator: Any) -> int:
    """Return the pixels of the largest batch that the data set has; 0 where that cannot be told."""
    sizes = [
        width * height * min(int(dataset.batch_size), len(bucket))
        for dataset in data_sets(accelerator)
        for (width, height), bucket in zip(dataset.bucket_manager.resos, dataset.bucket_manager.buckets, strict=True)
    ]
    return max(sizes, default=0)
