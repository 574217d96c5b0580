"""Copy the swapped blocks of a LoRA's frozen model in one direction, from the host to the GPU.

With --blocks_to_swap upstream copies each block that leaves the GPU to newly allocated memory of the host, then the next one to
the GPU, and waits for both. Frozen weights are the same on the host. So they are copied once, and stay: half of the bytes are
copied, from page-locked memory, in the order of events on the GPU that the host does not wait for. The GPU's memory is
upstream's to the byte. The host keeps a copy of each block that is ever swapped, also while it is on the GPU; if it has too
little memory for that, upstream's way is used.

A GPU is tested first, in a process of its own (`kohya_ext.speed.self_test`). Trained blocks are copied in both directions, and
so are blocks that only sampling swaps.
"""

from __future__ import annotations

import weakref
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

from kohya_ext.config.settings import Option, Settings, boolean
from kohya_ext.console import note
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current
from kohya_ext.patching.types import Accelerator
from kohya_ext.sdscripts.fingerprints import KnownBodies, known_bodies
from kohya_ext.speed import proof
from kohya_ext.units import gigabytes

if TYPE_CHECKING:
    from kohya_ext.patching.page_lock import PageLock
    from kohya_ext.patching.swapped_blocks import OneWaySwap

ONE_WAY_BLOCK_SWAP = Option(
    "one_way_block_swap",
    None,
    boolean,
    "with --blocks_to_swap, copy frozen blocks from host to GPU only, from page-locked memory; on by default if a test on this "
    "GPU shows that it works, and if the host has the memory",
)


@dataclass
class _Swaps(TrainingCallback):
    """The models of a run whose blocks are swapped."""

    accelerator: Accelerator
    swaps: Any = field(default_factory=weakref.WeakKeyDictionary)
    """Upstream's offloader -> OneWaySwap; None if it copies in both directions."""
    lock: PageLock | None = None
    kept: int = 0
    """Bytes of the host's copies."""
    is_announced: bool = False

    def prepare(self, offloader: Any, blocks: Sequence[Any]) -> None:
        """Keep the blocks that upstream has placed on GPU and host."""
        if offloader not in self.swaps:
            self.swaps[offloader] = self._begin(offloader, blocks)
        if (swap := self.swaps[offloader]) is not None:
            for block, on_host in _swapped(offloader, blocks):
                swap.keep(block, on_host)

    def _begin(self, offloader: Any, blocks: Sequence[Any]) -> OneWaySwap | None:
        import torch

        from kohya_ext.patching.page_lock import PageLock, free_memory
        from kohya_ext.patching.swapped_blocks import OneWaySwap, obstacle, size

        free = free_memory(self.accelerator.num_processes)
        more = size(block for block, on_host in _swapped(offloader, blocks) if not on_host)
        if (problem := obstacle(blocks)) is None and more > free:
            problem = f"copies in host memory need {gigabytes(more)} GB more, and {gigabytes(max(free, 0))} GB are free"
        if problem is not None:
            note(f"--blocks_to_swap copies blocks in both directions: {problem}")
            return None
        if self.lock is None:
            self.lock = PageLock.of_this_machine(self.accelerator.num_processes)
        self.kept += size(block for block, _ in _swapped(offloader, blocks))
        return OneWaySwap(offloader.device, torch.cuda.Stream(offloader.device), offloader.thread_pool, self.lock)

    def before_batch(self, accelerator: Accelerator) -> None:
        if self.lock is not None and not self.is_announced:
            self.is_announced = True
            note(
                f"swapped blocks are copied to the GPU only: {gigabytes(self.kept)} GB stay in host memory, "
                f"{gigabytes(self.lock.locked)} GB of them page-locked"
            )

    def of(self, offloader: Any) -> OneWaySwap | None:
        """Return the swap of an offloader; None if it copies in both directions."""
        swap: OneWaySwap | None = self.swaps.get(offloader)
        return swap

    def on_end(self) -> None:
        for swap in self.swaps.values():
            if swap is not None:
                swap.drain()


def _swapped(offloader: Any, blocks: Sequence[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield (block, whether it is on the host before forward) for the blocks that training swaps.

    The first ones leave in forward, and the last ones replace them. Backward moves both back.
    """
    first_on_host = len(blocks) - offloader.blocks_to_swap
    for index, block in enumerate(blocks):
        if index < offloader.blocks_to_swap or index >= first_on_host:
            yield block, index >= first_on_host


def _swap_of(offloader: Any) -> OneWaySwap | None:
    swaps = current(_Swaps)
    return None if swaps is None else swaps.of(offloader)


def _prepare(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def prepare_block_devices_before_forward(self: Any, blocks: Any) -> None:
        swaps = current(_Swaps)
        if swaps is None or not self.blocks_to_swap:
            original(self, blocks)
            return
        if (swap := swaps.of(self)) is not None:
            swap.drain()  # a pass that ended with an error leaves copies
        original(self, blocks)
        swaps.prepare(self, blocks)

    return prepare_block_devices_before_forward


def _submit(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def _submit_move_blocks(self: Any, blocks: Any, block_idx_to_cpu: int, block_idx_to_cuda: int) -> None:
        if (swap := _swap_of(self)) is None:
            original(self, blocks, block_idx_to_cpu, block_idx_to_cuda)
            return
        self.futures[block_idx_to_cuda] = swap.submit(blocks[block_idx_to_cpu], blocks[block_idx_to_cuda])

    return _submit_move_blocks


def _wait(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def _wait_blocks_move(self: Any, block_idx: int) -> None:
        if (swap := _swap_of(self)) is None:
            original(self, block_idx)
            return
        if (arrival := self.futures.pop(block_idx, None)) is not None:
            swap.wait(arrival)

    return _wait_blocks_move


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Swaps | None:
    if not getattr(args, "blocks_to_swap", None) or not _is_possible(accelerator.device):
        return None
    if settings[ONE_WAY_BLOCK_SWAP] is None:
        if settings["speed"] == "off":
            return None
        device, name = accelerator.device, ONE_WAY_BLOCK_SWAP.name
        problem = proof.problems(proof.machine(device), [name], proof.starter(device.index or 0), note)[name]
        if problem is not None:
            note(
                f"--blocks_to_swap copies blocks in both directions: {problem}; "
                "to test it again: python -m kohya_ext tune --self_test"
            )
            return None
    return _Swaps(accelerator)


def _is_possible(device: Any) -> bool:
    return bool(device.type == "cuda")


def _facts() -> Mapping[str, object]:
    swaps = current(_Swaps)
    locked = 0 if swaps is None or swaps.lock is None else swaps.lock.locked
    return {} if swaps is None else {"kept_bytes": swaps.kept, "page_locked_bytes": locked}


_MODULE = "library.custom_offloading_utils"
_SUBMIT, _WAIT = "Offloader._submit_move_blocks", "Offloader._wait_blocks_move"

#: What this patch does in another way. If one of them is edited, all of upstream's are used.
_BODIES = {
    _SUBMIT: {"7de4f13f4fc0": "since 2024-12"},
    _WAIT: {"6c4b0b686324": "since 2024-12"},
    "Offloader.swap_weight_devices": {"ac412eb0a0e5": "since 2024-12"},
    "swap_weight_devices_cuda": {"e6b1d8821fde": "2024-12 to 2025-07", "0e4129e2e768": "since 2025-08"},
}


def _known(name: str) -> KnownBodies:
    return known_bodies(_BODIES[name], helpers={other: body for other, body in _BODIES.items() if other != name})


PATCH = Patch(
    name="one_way_block_swap",
    summary="with --blocks_to_swap, copy frozen blocks in one direction, from page-locked memory, without waiting",
    targets=(
        Target(_MODULE, "ModelOffloader.prepare_block_devices_before_forward", _prepare, takes("self", "blocks"), body="runs"),
        Target(_MODULE, _SUBMIT, _submit, body=_known(_SUBMIT)),
        Target(_MODULE, _WAIT, _wait, body=_known(_WAIT)),
    ),
    options=(ONE_WAY_BLOCK_SWAP,),
    exactness="exact",
    held_to="training without it, bit for bit",
    idea="https://github.com/kohya-ss/musubi-tuner/pull/972",
    wanted=lambda settings: settings[ONE_WAY_BLOCK_SWAP] is not False,
    facts=_facts,
    stage=Stage.COMPUTE,
    on_start=_start,
)
