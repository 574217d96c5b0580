"""``--auto_data_loader``: choose the data loader's workers from cores, memory, caches and platform, and pin their batches.

Upstream starts eight workers, or one per core, and new ones in each epoch. Each worker draws its own random numbers for flips,
crops, shuffled and dropped captions, and starting workers draws one of the training's. So another number of workers, or
workers that persist, change a run with random data, and this is an option. Without random data, the batches are the same.

With pinned memory, a thread takes a batch from the workers while the GPU computes the step before. Upstream takes it between
two steps, while the GPU is idle, and opens a file descriptor of the worker for each tensor.
"""

from __future__ import annotations

import multiprocessing
from argparse import Namespace
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from kohya_ext.caching.threads import available_cores
from kohya_ext.config.settings import Option, Settings, boolean
from kohya_ext.console import note
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage, TrainingCallback, program
from kohya_ext.patching.types import Accelerator
from kohya_ext.units import GB, format_size

AUTO_DATA_LOADER = Option(
    "auto_data_loader",
    False,
    boolean,
    "choose the number of data loader workers from cores, memory and caches, keep them for all epochs, and pin their batches",
)

_WORKERS = "max_data_loader_n_workers"
_PERSISTENT = "persistent_data_loader_workers"

_CACHED, _DECODING = 2, 8
"""Largest number of workers that read cached latents, and that decode images."""

_FORKED, _STARTED = GB // 4, 2 * GB
"""Assumed memory of a worker's own pages: a forked one shares the packages, another one imports them."""


def choose(cores: int, available: int, cached: bool, forks: bool) -> int:
    """Return the number of workers for ``cores`` cores and ``available`` bytes of memory of this process; at least 1.

    ``cached``: whether latents are cached. One core is left to the training, and half of the memory.
    """
    by_memory = available // 2 // (_FORKED if forks else _STARTED)
    return max(1, min(_CACHED if cached else _DECODING, cores - 1, by_memory))


class _PinnedBatches(TrainingCallback):
    """Lets the loader's own thread take batches from the workers and copy them to pinned memory."""

    def batches(self, loader: Any, batches: Callable[[], Iterator[Any]], loop: FrameType | None) -> Iterator[Any]:
        """Return the batches of a pass, whose iterator reads the attribute when it is created."""
        loader.base_dataloader.pin_memory = True  # accelerate's loader wraps the one that has the workers
        return batches()


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _PinnedBatches | None:
    import psutil

    command = program().command
    if getattr(args, _WORKERS, 0) == 0 or not hasattr(args, _PERSISTENT) or getattr(args, "deepspeed", False):
        return None  # DeepSpeed needs one worker
    cores = available_cores() // accelerator.num_processes
    available = psutil.virtual_memory().available // accelerator.num_processes
    forks = multiprocessing.get_start_method() == "fork"
    cached = bool(getattr(args, "cache_latents", False))
    if command.origin(_WORKERS) == "default":
        setattr(args, _WORKERS, choose(cores, available, cached, forks))
    if command.origin(_PERSISTENT) == "default":
        setattr(args, _PERSISTENT, True)
    workers, persistent = getattr(args, _WORKERS), getattr(args, _PERSISTENT)
    pinned = accelerator.device.type == "cuda" and _can_pin()
    note(
        f"data loader: {workers} {'persistent ' if persistent else ''}worker{'s' * (workers != 1)}"
        f"{', pinned batches' if pinned else ''} ({'cached latents' if cached else 'images are decoded'}, {cores} cores, "
        f"{format_size(available)} of free memory, workers are {'forked' if forks else 'new processes'})"
    )
    return _PinnedBatches() if pinned else None


def _can_pin() -> bool:
    """Return whether the driver gives pinned memory, which WSL limits. Without it the loader's thread would end the run."""
    import torch

    try:
        torch.empty(2**20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return False
    return True


PATCH = Patch(
    name="automatic_data_loader",
    summary="choose the number of data loader workers, keep them for all epochs, and take their batches ahead in pinned memory",
    targets=(),
    options=(AUTO_DATA_LOADER,),
    wanted=lambda settings: settings[AUTO_DATA_LOADER],
    exactness="close",
    held_to="the same batches without random flips, crops and captions; else other random numbers of the same distribution",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/library/args.py",
    stage=Stage.COMPUTE,
    on_start=_start,
)
