"""Swap frozen blocks between host and GPU by copying in one direction.

Frozen weights never change, so a block that leaves the GPU is not copied: its modules get the host's copy again, which stays in
memory, page-locked where the machine allows it. Another block's weights are then copied into the memory of the one that has
left. A stream of its own copies them, after the kernels that read the old ones and before those that read the new ones. The
host waits for neither.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

import torch

from kohya_ext.patching.page_lock import PageLock

#: Bytes between the beginnings of two tensors in a block's memory.
_ALIGNMENT = 256

Module = Any
Block = Any


def weights(block: Block) -> dict[str, Module]:
    """Return the modules of a block whose weight is swapped, by name: all that have one, as in sd-scripts."""
    return {name: part for name, part in block.named_modules() if getattr(part, "weight", None) is not None}


def size(blocks: Iterable[Block]) -> int:
    """Return the bytes of the swapped weights of some blocks."""
    return sum(part.weight.nbytes for block in blocks for part in weights(block).values())


def obstacle(blocks: Iterable[Block]) -> str | None:
    """Return why blocks cannot be swapped in one direction; None if they can."""
    dtypes: dict[str, torch.dtype] = {}
    for block in blocks:
        for name, part in weights(block).items():
            if part.weight.requires_grad:
                return "the blocks are trained"
            if dtypes.setdefault(name, part.weight.dtype) != part.weight.dtype:
                return f"the blocks store {name} in several types"
    return None


def move_back(model: Any) -> None:
    """Move the blocks of --blocks_to_swap to where a forward pass begins, as after a pass without a backward pass."""
    if getattr(model, "blocks_to_swap", None):
        model.prepare_block_swap_before_forward()


@dataclass(frozen=True)
class Arrival:
    """A block's weights on their way to the GPU."""

    copied: Any
    """The event after the copies."""
    slots: Sequence[tuple[Module, torch.Tensor]]
    """(module, its weight on the GPU)."""


@dataclass
class OneWaySwap:
    """The host's copies of a model's blocks, and the copies to the GPU."""

    device: torch.device
    """The GPU."""
    stream: Any
    """Its stream for the copies."""
    executor: Executor
    """Its only thread enqueues the copies, because its caller waits for one from memory that is not page-locked."""
    lock: PageLock
    copies: weakref.WeakKeyDictionary[Module, torch.Tensor] = field(default_factory=weakref.WeakKeyDictionary)
    """Module -> the host's copy of its weight."""

    def keep(self, block: Block, on_host: bool) -> None:
        """Keep a copy of a block on the host. The block uses it if it is there: until it is replaced on the GPU."""
        parts = [*weights(block).values()]
        if any(part not in self.copies for part in parts):
            self._copy(parts)
        if on_host:
            for part in parts:
                part.weight.data = self.copies[part]

    def _copy(self, parts: Sequence[Module]) -> None:
        offsets = [0]
        for part in parts:
            offsets.append(offsets[-1] + -(-part.weight.nbytes // _ALIGNMENT) * _ALIGNMENT)
        memory = torch.empty(offsets[-1], dtype=torch.uint8)
        self.lock.lock(memory)
        for part, begin in zip(parts, offsets, strict=False):
            weight = part.weight.data
            self.copies[part] = memory[begin : begin + weight.nbytes].view(weight.dtype).view(weight.shape).copy_(weight)

    def submit(self, leaving: Block, arriving: Block) -> Future[Arrival]:
        """Begin to replace a block on the GPU by another one, after the kernels that are launched already."""
        launched = torch.cuda.current_stream().record_event()
        others = weights(leaving)
        replaced, single = [], []
        for name, part in weights(arriving).items():
            other = others.get(name)
            if other is None or other.weight.shape != part.weight.shape:
                single.append(part)
                continue
            replaced.append((other, part, other.weight.data))
            if other in self.copies:
                other.weight.data = self.copies[other]
        return self.executor.submit(self._replace, launched, replaced, single)

    def _replace(
        self, launched: Any, replaced: Sequence[tuple[Module, Module, torch.Tensor]], single: Sequence[Module]
    ) -> Arrival:
        for part in single:  # the blocks of Stable Diffusion 3 differ; upstream leaves on the GPU what only one of two has
            if self._is_on_host(part):
                part.weight.data = torch.empty_like(part.weight, device=self.device).copy_(part.weight)
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(launched)
            for leaving, arriving, slot in replaced:
                if leaving not in self.copies:  # only sampling moves it, and it is copied in both directions
                    leaving.weight.data = torch.empty_like(slot, device="cpu").copy_(slot)
                slot.copy_(self.copies.get(arriving, arriving.weight.data), non_blocking=True)
            return Arrival(self.stream.record_event(), [(arriving, slot) for _, arriving, slot in replaced])

    def _is_on_host(self, part: Module) -> bool:
        copy = self.copies.get(part)
        if copy is None:
            return bool(part.weight.device.type == "cpu")
        return bool(part.weight.untyped_storage()._cdata == copy.untyped_storage()._cdata)

    def wait(self, arrival: Future[Arrival]) -> None:
        """Let the kernels that are launched from now on wait for a block, and give its modules their weights on the GPU."""
        arrived = arrival.result()
        torch.cuda.current_stream().wait_event(arrived.copied)
        for part, slot in arrived.slots:
            part.weight.data = slot

    def drain(self) -> None:
        """Wait until nothing is copied any more, so that the memory on the GPU can be freed."""
        self.executor.submit(lambda: None).result()
        self.stream.synchronize()
