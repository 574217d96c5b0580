"""The order of the training data: what decides the next batches, apart from the random state.

Upstream's datasets shuffle their buckets when they learn of a new epoch. The loader's collate function tells them, so after
the first batch of that epoch was read. It also tells them the step count, which ``--token_warmup_step`` reads. The
script sets both numbers for the collate function: the epoch before it begins, and the step count in its loop, when the next
batches have been loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def state(loader: Any) -> dict[str, Any]:
    """Return the datasets' epoch, step and seeds, the step of the collate function, and the sampler's generator.

    With data-loader workers, this process's datasets stay in epoch 0, step 0. The sampler has a generator only with several
    processes.
    """
    sets = _datasets(loader)
    generator = getattr(loader, "synchronized_generator", None)
    return {
        "counters": [getattr(sets[0], "current_epoch", 0), getattr(sets[0], "current_step", 0)] if sets else [0, 0],
        "next_step": getattr(_next_step(loader), "value", None),
        "seeds": [getattr(dataset, "seed", None) for dataset in sets],
        "generator": generator.get_state() if generator is not None else None,
    }


def restore(loader: Any, saved: Mapping[str, Any]) -> None:
    """Restore a :func:`state`. Shuffles buckets for each epoch up to the saved one, with Python's random numbers."""
    sets, now = _datasets(loader), state(loader)
    if len(saved["seeds"]) == len(sets):
        for dataset, seed in zip(sets, saved["seeds"], strict=True):
            if seed is not None and hasattr(dataset, "set_seed"):
                dataset.set_seed(seed)
    for name, value, old in zip(("set_current_epoch", "set_current_step"), saved["counters"], now["counters"], strict=True):
        if value != old and hasattr(loader.dataset, name):
            getattr(loader.dataset, name)(value)
    if saved["generator"] is not None and now["generator"] is not None:
        loader.synchronized_generator.set_state(saved["generator"])
    set_next_step(loader, saved.get("next_step"))


def batch_sizes(loader: Any) -> list[int]:
    """Return the number of images in a full batch of each dataset; empty if a dataset does not tell it."""
    sizes = [getattr(dataset, "batch_size", None) for dataset in _datasets(loader)]
    return [size for size in sizes if size] if all(sizes) else []


def batches_of_as_many_images(loader: Any, batches: int, sizes: list[int]) -> int:
    """Return the number of batches with as many images as ``batches`` had with other :func:`batch_sizes`."""
    now = batch_sizes(loader)
    return batches * sum(sizes) // sum(now) if sizes and len(now) == len(sizes) else batches


def set_next_step(loader: Any, value: int | None) -> None:
    """Set the step that the collate function passes to the datasets; does nothing for None."""
    if value is not None and (shared := _next_step(loader)) is not None:
        shared.value = value


def steps(loader: Any) -> list[int | None]:
    """Return the step that the datasets have, and the one that they get with the next batch."""
    sets = _datasets(loader)
    return [getattr(sets[0], "current_step", 0) if sets else 0, getattr(_next_step(loader), "value", None)]


def set_steps(loader: Any, saved: list[int | None] | None) -> None:
    """Restore :func:`steps`; does nothing for None."""
    if saved is None:
        return
    if hasattr(loader.dataset, "set_current_step"):
        loader.dataset.set_current_step(saved[0])
    set_next_step(loader, saved[1])


def inexact(loader: Any, workers: int, persistent: bool) -> Iterator[str]:
    """Yield what a resumed run cannot repeat."""
    subsets = [subset for dataset in _datasets(loader) for subset in getattr(dataset, "subsets", ())]
    if workers and any(getattr(subset, "token_warmup_step", 0) for subset in subsets):
        yield (
            "--token_warmup_step with data loader workers: they read the step count at a time that differs between runs; use "
            "--max_data_loader_n_workers 0"
        )
    if persistent and any(getattr(dataset, "train_inpainting", False) for dataset in _datasets(loader)):
        yield "--train_inpainting with --persistent_data_loader_workers: the random state of the masks is lost with the workers"


def _datasets(loader: Any) -> list[Any]:
    return list(getattr(loader.dataset, "datasets", [loader.dataset]))


def _next_step(loader: Any) -> Any:
    """Return the shared integer with the step of the collate function; None for another function."""
    shared = getattr(getattr(loader, "collate_fn", None), "current_step", None)
    return shared if hasattr(shared, "value") else None
