"""``--cache_size_limit 20GB``: keep in host memory what the limit does not allow to be cached on disk.

Upstream reads each image's latents and text encoder outputs from memory or from a file, so one batch may hold both. Its own
loop runs twice: for the images with a file, and as without ``--cache_latents_to_disk`` for the others. At a first start,
with one image per batch of the VAE, values in memory are those that the files would have. A later start encodes again, with
other random numbers of the VAE. Encoding during training would need the VAE and the text encoders, which the scripts have
moved off the GPU by then.

The sizes are known before anything is written: from the buckets, and from the outputs of one caption.
"""

from __future__ import annotations

import multiprocessing
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from kohya_ext.caching.cached_datasets import (
    bytes_per_value,
    current_strategy,
    datasets_of,
    encoded,
    in_memory,
    only,
    outputs_path,
)
from kohya_ext.caching.size_limit import Cache, Division, caches_of, divide, latents_bytes, memory_copies, outputs_bytes
from kohya_ext.config.settings import Option, Settings
from kohya_ext.console import note, stop, warn
from kohya_ext.patching.patch import Patch, moved, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current
from kohya_ext.patching.types import Accelerator
from kohya_ext.units import format_size, read_size

CACHE_SIZE_LIMIT = Option[int | None](
    "cache_size_limit",
    None,
    read_size,
    "largest size of the caches in the image folders, such as 20GB; others are computed at each start and kept in host memory",
    metavar="SIZE",
)

_MEMORY_SHARE = 0.8
"""Largest share of the available host memory that caches may take."""


@dataclass
class _Run(TrainingCallback):
    workers: int


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Run:
    return _Run(min(getattr(args, "max_data_loader_n_workers", None) or 0, os.cpu_count() or 1))


def _latents(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def new_cache_latents(self: Any, model: Any, accelerator: Any) -> None:
        strategy = current_strategy("LatentsCachingStrategy")
        cache = partial(original, self, model, accelerator)
        if strategy is None or not strategy.cache_to_disk:
            cache()
            return

        def size(dataset: Any, info: Any, width: int) -> int:
            subset = dataset.image_to_subset[info.image_key]
            return latents_bytes(strategy, info.bucket_reso, subset.flip_aug, subset.alpha_mask, width) or 0

        def path(info: Any) -> str:
            return str(info.latents_npz or strategy.get_latents_npz_path(info.absolute_path, info.image_size))

        datasets = datasets_of(self)
        if any(not size(dataset, info, 4) for dataset in datasets for info in dataset.image_data.values()):
            warn(f"--cache_size_limit: the size of latents of {type(strategy).__name__} is not known; all are cached on disk")
            cache()
            return
        caches = [caches_of(_in_order(data), path, partial(size, data), bytes_per_value(settings)) for data in datasets]
        kept = _divide_and_cache(
            "latents", datasets, caches, strategy, accelerator, settings, cache, "--no-cache_latents to encode each batch"
        )
        for info in kept:
            info.latents = info.latents.float()  # as a file holds them
            if info.latents_flipped is not None:
                info.latents_flipped = info.latents_flipped.float()

    return new_cache_latents


def _outputs(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def new_cache_text_encoder_outputs(self: Any, models: Any, accelerator: Any) -> None:
        strategy = current_strategy("TextEncoderOutputsCachingStrategy")
        cache = partial(original, self, models, accelerator)
        datasets = datasets_of(self)
        images = [info for dataset in datasets for info in dataset.image_data.values()]
        missing = [info for info in images if not os.path.exists(outputs_path(strategy, info))] if strategy is not None else []
        if not missing or not strategy.cache_to_disk:
            cache()
            return
        outputs = encoded(missing[0], datasets, strategy, cache)

        def size(info: Any, width: int) -> int:
            return outputs_bytes(outputs, width)

        width, path = bytes_per_value(settings), partial(outputs_path, strategy)
        caches = [caches_of(data.image_data, path, size, width) for data in datasets]
        smaller = "--cache_format safetensors --cache_dtype bf16 to halve them"
        _divide_and_cache("text encoder outputs", datasets, caches, strategy, accelerator, settings, cache, smaller)

    return new_cache_text_encoder_outputs


def _divide_and_cache(
    subject: str,
    datasets: Sequence[Any],
    caches: Sequence[Sequence[Cache]],
    strategy: Any,
    accelerator: Any,
    settings: Settings,
    cache: Callable[[], None],
    alternative: str,
) -> list[Any]:
    """Cache all images, those beyond the limit in memory; return these. Exits with code 2 if they do not fit there."""
    limit = settings[CACHE_SIZE_LIMIT]
    assert limit is not None
    division = divide([each for part in caches for each in part], limit)
    # Another process would count the files that this one writes.
    accelerator.wait_for_everyone()
    if not division.memory:
        cache()
        return []
    _announce(subject, division, limit, accelerator, alternative)
    with only(datasets, [division.disk] * len(datasets)):
        cache()
    with only(datasets, [division.memory] * len(datasets)), in_memory(strategy):
        cache()
        return [info for dataset in datasets for info in dataset.image_data.values()]


def _announce(subject: str, division: Division, limit: int, accelerator: Any, alternative: str) -> None:
    import psutil

    run = current(_Run)
    forks = multiprocessing.get_start_method() == "fork"
    needed = division.memory_bytes * memory_copies(accelerator.num_processes, run.workers if run is not None else 0, forks)
    available = psutil.virtual_memory().available
    images = len(division.memory) + len(division.disk)
    words = (
        f"--cache_size_limit {format_size(limit)}: {subject} of {len(division.memory)} of {images} images do not fit "
        f"({format_size(division.missing)} more on disk)"
    )
    if needed > _MEMORY_SHARE * available:
        stop(
            f"{words} and need {format_size(needed)} of host memory, of which {format_size(available)} is available; "
            f"use --cache_size_limit {-(-(limit + division.missing) // 10**9)}GB, or {alternative}"
        )
    note(f"{words}; they are computed at each start and need {format_size(needed)} of host memory")


def _in_order(dataset: Any) -> dict[str, Any]:
    """Return the images in the order in which upstream encodes them: files for the first ones do not change this order."""
    return dict(sorted(dataset.image_data.items(), key=lambda item: item[1].bucket_reso[0] * item[1].bucket_reso[1]))


PATCH = Patch(
    name="cache_size_limit",
    summary="limit the size of caches on disk, and keep the others in host memory",
    targets=(
        *moved(
            "DatasetGroup.new_cache_latents",
            "library.dataset",
            _latents,
            takes("self", "model", "accelerator", exactly=True),
            body="runs",
        ),
        *moved(
            "DatasetGroup.new_cache_text_encoder_outputs",
            "library.dataset",
            _outputs,
            takes("self", "models", "accelerator", exactly=True),
            body="runs",
        ),
    ),
    options=(CACHE_SIZE_LIMIT,),
    wanted=lambda settings: settings[CACHE_SIZE_LIMIT] is not None,
    exactness="close",
    held_to="training on caches on disk: bit-identical at a first start; later the VAE samples its latents again",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/library/strategy_base.py",
    stage=Stage.COMPUTE,
    on_start=_start,
)
