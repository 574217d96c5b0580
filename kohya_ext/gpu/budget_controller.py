"""Use a memory budget: start with every block checkpointed, and free as many as the measured peak allows.

A freed block keeps its activations and is not recomputed, so the peak rises by at most their size. The controller frees the
blocks with the most FLOPs per byte while that bound fits, measures the next step's peak, and repeats until nothing more fits
(:class:`Phase`). Sizes are scaled from the measured batch to the dataset's largest batch, because activations grow with its
pixels.

Gradients are bit-identical to those with every block checkpointed: recomputing gives the same values.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from kohya_ext.console import note, warn
from kohya_ext.dry_run.tracker import Allocations
from kohya_ext.gpu.batch_sizes import largest_batch, pixels_of
from kohya_ext.gpu.memory_meter import MemoryMeter
from kohya_ext.gpu.out_of_memory import is_out_of_memory
from kohya_ext.patching.checkpointed_blocks import checkpointed_blocks, recomputed_methods
from kohya_ext.patching.training_loop import current_batch
from kohya_ext.patching.types import Accelerator
from kohya_ext.units import format_size

#: Below this share compiled blocks recompute nearly everything; single blocks are freed instead, as without compiling.
LEAST_SHARE = 0.1


class Phase(Enum):
    """The controller's action in the next optimizer step."""

    WEIGHING = "measure the activations and the FLOPs of each block while backward recomputes it"
    FREEING = "measure the peak, which now includes the optimizer's states, and free blocks"
    CHECKING = "measure the peak, and checkpoint blocks again where it is above the limit"
    SETTLED = "nothing"


@dataclass(eq=False)
class Block:
    """A block and its measurements."""

    module: Any
    kept: int = 0
    """Bytes of activations that it keeps for backward when it is not checkpointed."""
    flops: int = 0
    """FLOPs of its recomputation."""
    turn: int = -1
    """Its position in the forward pass."""

    @property
    def checkpointed(self) -> bool:
        """Whether backward recomputes it."""
        return bool(self.module.gradient_checkpointing)

    @checkpointed.setter
    def checkpointed(self, value: bool) -> None:
        self.module.gradient_checkpointing = value


@dataclass
class BudgetController:
    """Checkpoints and frees the blocks of one process."""

    limit: int
    """Bytes that a step may hold."""
    meter: MemoryMeter
    compile_at: Callable[[float], None] | None = None
    """Called once, where blocks wait to be compiled, with the share of their activations that they may keep."""
    blocks: list[Block] = field(default_factory=list)
    phase: Phase = Phase.WEIGHING
    peaks: list[int] = field(default_factory=list)
    """Peaks of the measured steps, in bytes."""
    rerun: int = 0
    """Number of blocks that ran out of memory in forward and ran again checkpointed."""
    _measured: int = 0
    """Pixels of the batch with which the blocks were measured."""
    _pixels: int = 0
    """Pixels of the smallest micro-batch of the measured step."""
    _held: int | None = None
    """Bytes held before that step; None while no step is measured."""
    _turns: int = 0
    _largest: int = 0
    _share: float = 1.0
    """Share of its activations that a free block keeps; below 1 for compiled blocks."""

    def take(self, model: Any) -> None:
        """Control the blocks of a model whose gradient checkpointing was just enabled."""
        for module in checkpointed_blocks(model):
            block = Block(module)
            self.blocks.append(block)
            for layer, name in recomputed_methods(module):
                self._measure(block, layer, name)
            self._guard(block)

    # --- measuring blocks --------------------------------------------------------------------------------------------

    def _measure(self, block: Block, layer: Any, name: str) -> None:
        original = getattr(layer, name)
        kept = flops = 0

        def measured(*args: Any, **kwargs: Any) -> Any:
            nonlocal kept, flops
            if torch._C._current_graph_task_id() == -1:  # forward, not a recomputation in backward
                if block.turn < 0:
                    block.turn, self._turns = self._turns, self._turns + 1
                return original(*args, **kwargs)
            scale = Allocations()
            try:
                with scale:
                    return original(*args, **kwargs)
            except BaseException as error:
                # Non-reentrant checkpointing stops the recomputation with an exception once it has every tensor.
                traceback.clear_frames(error.__traceback__)
                raise
            finally:
                more = max(scale.alive - kept, 0), max(scale.flops - flops, 0)
                kept, flops = kept + more[0], flops + more[1]
                block.kept, block.flops = block.kept + more[0], block.flops + more[1]

        # Set on the instance, where it hides the class's method until _end_measuring deletes it.
        setattr(layer, name, measured)

    def _end_measuring(self) -> None:
        for block in self.blocks:
            for layer, name in recomputed_methods(block.module):
                if name in vars(layer):
                    delattr(layer, name)
        self.blocks.sort(key=lambda block: block.turn)

    # --- around the steps --------------------------------------------------------------------------------------------

    def before_batch(self, accelerator: Accelerator) -> None:
        """Record the size of the micro-batch, and start to measure at the first one of a step."""
        if self.phase is Phase.SETTLED or not self.blocks:
            return
        pixels = pixels_of(current_batch(), accelerator)
        if self.phase is Phase.WEIGHING:
            self._measured = min(filter(None, (self._measured, pixels)), default=0)
            return
        if self._held is None:
            self._largest = self._largest or largest_batch(accelerator)
            self._held, self._pixels = self.meter.begin(), pixels
        self._pixels = min(self._pixels, pixels)

    def after_batch(self, accelerator: Accelerator) -> None:
        """After an optimizer step: stop measuring blocks, or act on the measured peak."""
        if self.phase is Phase.SETTLED or not accelerator.sync_gradients:
            return
        if self.phase is Phase.WEIGHING:
            self.phase = Phase.FREEING
            if not any(block.kept for block in self.blocks):
                self._settle("no block was recomputed, so there is nothing to free")
            self._end_measuring()
        elif self._held is not None:
            held, self._held = self._held, None
            self.peaks.append(self.meter.end())
            if self.rerun:
                self._settle()
            elif not (self._measured and self._pixels and self._largest):
                self._settle("the batch size is not known, so every block stays checkpointed")
            else:
                room = self.limit - held - (self.peaks[-1] - held) * self._largest / self._pixels
                if self.phase is Phase.FREEING:
                    self._free(room)
                elif room < 0:
                    self._take_back(-room)
                else:
                    self._settle()

    def _free(self, room: float) -> None:
        """Free the blocks that fit into ``room`` bytes; compile all of them where that saves enough."""
        costs = {block: self._cost(block) for block in self.blocks if block.checkpointed and block.kept}
        if self.compile_at is not None and costs and room / sum(costs.values()) >= LEAST_SHARE:
            self._share = min(1.0, room / sum(costs.values()))
            self._compile(self._share)
            for block in self.blocks:
                block.checkpointed = False
            self.phase = Phase.CHECKING
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
        """Return the bytes that a free block keeps of the largest batch."""
        return block.kept * self._share * self._largest / self._measured

    def _take_back(self, missing: float) -> None:
        """Checkpoint free blocks again until ``missing`` bytes are saved, the cheapest to recompute first."""
        self.phase = Phase.CHECKING
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
        self.phase = Phase.SETTLED
        self._compile(1.0)  # a checkpointed block keeps nothing anyway
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
            # The error and its frames, which held the block's tensors, are freed by now.
            self._checkpoint_from(block)
            _set_random_state(random)
            return original(*args, **kwargs)

        block.module.forward = forward

    def _checkpoint_from(self, block: Block) -> None:
        self.rerun += 1
        self.meter.release()
        for later in self.blocks[self.blocks.index(block) :]:
            later.checkpointed = True
        name = type(block.module).__name__
        warn(f"out of memory in forward of a {name}; it runs again checkpointed, and all blocks after it stay checkpointed")

    def facts(self) -> dict[str, Any]:
        """Return the sizes for the report, in bytes."""
        return {
            "limit": self.limit,
            "peaks": self.peaks,
            "blocks": len(self.blocks),
            "checkpointed": sum(block.checkpointed for block in self.blocks),
            "recomputed_flops": sum(block.flops for block in self.blocks if block.checkpointed),
            "recomputed_flops_at_first": sum(block.flops for block in self.blocks),
            "rerun": self.rerun,
            "kept_share_of_free_blocks": self._share,
            "settled": self.phase is Phase.SETTLED,
        }


def _work(block: Block) -> tuple[float, int]:
    """Return FLOPs per byte, then the position: the last blocks' activations are freed before the others are recomputed."""
    return block.flops / block.kept, block.turn


def _random_state() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def _set_random_state(state: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(state[0])
    for on_gpu in state[1:]:
        torch.cuda.set_rng_state(on_gpu)
