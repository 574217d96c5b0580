"""Cache latents and text encoder outputs without waiting for the host, and open no checked cache file again.

Upstream decodes, resizes and normalizes each image between two batches of the VAE, writes each file there, and after each batch
collects Python's garbage and empties CUDA's cache: most of the time of a first start. Here upstream's own loop only plans the
batches. Threads then prepare images ahead of the VAE and write files behind it, and the memory is only emptied when the shape
of a batch changes, as upstream does with --highvram. The functions that decode, resize, encode and write are upstream's, and
the batches and their order are too, so results are bit-identical, including the VAE's random numbers.

Each file is checked once: as training reads it, or for new text encoder outputs by their arrays. See
:mod:`kohya_ext.caching.checks` and :mod:`kohya_ext.run.file_index`. A file that is damaged, has another shape or has values
that are not finite is created again.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from kohya_ext.caching import sources
from kohya_ext.caching.checks import NOT_FINITE, Check, is_finite, latents_problem, outputs_problem, state_of
from kohya_ext.caching.threads import Writer, default_workers, in_order
from kohya_ext.config.settings import Option, Settings, whole_number
from kohya_ext.console import error, note, progress, should_print, warn
from kohya_ext.patching.attributes import replaced
from kohya_ext.patching.patch import Patch, moved, takes
from kohya_ext.run.atomic_write import remove_abandoned
from kohya_ext.run.file_index import FileIndex

CACHING_WORKERS = Option[int | None](
    "caching_workers",
    None,
    whole_number,
    "threads that prepare images while latents are cached, by default one per CPU core up to 16; 0: cache as upstream does",
    metavar="N",
)

_WRITERS = 4
"""Threads that write files. Most of their time they wait for the disk."""

_PREPARED_BYTES = 2**30
"""Largest size of the images that wait for the VAE."""

_WRITTEN_BYTES = 2**29
"""Largest size of the data that waits for the disk."""

Image = Any  # upstream's ImageInfo


@dataclass(frozen=True)
class _Upstream:
    """The modules that hold what caching looks up at each call; all are one module before v0.11."""

    images: ModuleType
    """``load_images_and_masks_for_caching``."""
    memory: ModuleType
    """``HIGH_VRAM``."""
    strategies: ModuleType
    """The base classes of the strategies."""


def _upstream() -> _Upstream | None:
    """Return upstream's modules; None for a fork that has other ones."""
    names = ("library.caching", "library.accelerator_setup", "library.strategy_base")
    images, memory, strategies = (sys.modules.get(name) or sys.modules.get("library.train_util") for name in names)
    if not hasattr(images, "load_images_and_masks_for_caching") or not hasattr(memory, "HIGH_VRAM") or strategies is None:
        return None
    assert images is not None
    assert memory is not None
    return _Upstream(images, memory, strategies)


def _cache_latents(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def new_cache_latents(self: Any, model: Any, accelerator: Any) -> None:
        images = list(self.image_data.values())
        modules = _upstream()
        strategy = None if modules is None else modules.strategies.LatentsCachingStrategy.get_strategy()
        workers = _count(settings, accelerator)
        # Threads would draw the random numbers of a random crop in another order, and write a file twice in any order.
        if (
            modules is None
            or strategy is None
            or not workers
            or _share_files(images)
            or any(info.image is not None for info in images)
            or any(subset.random_crop for subset in self.subsets)
        ):
            original(self, model, accelerator)
            return
        check = Check(
            FileIndex(),
            strategy.is_disk_cached_latents_expected,
            partial(latents_problem, strategy),
            state_of(strategy, "is_disk_cached_latents_expected"),
            position=1,
            sources=_sources_of_latents(strategy, images),
        )
        with ThreadPoolExecutor(workers, "kohya_ext-images") as pool:
            if _is_checked(strategy):
                # Upstream's reader logs its first old file, and a logged line draws a random number in rich 14.1.
                with replaced(strategy, "_warned_fallback_to_old_npz", True):
                    _check_latents(self, images, strategy, accelerator, check, pool)
            batches = _plan(original, self, model, accelerator, strategy, check)
            if batches:
                _cache_batches(batches, model, accelerator, strategy, check, modules, pool, workers)

    return new_cache_latents


def _sources_of_latents(strategy: Any, images: Sequence[Image]) -> dict[str, str]:
    """Return path of a cache file -> its image as it is now."""
    if not strategy.cache_to_disk:
        return {}
    own = [info for info in images if info.latents_npz is None]
    paths = {info.absolute_path: strategy.get_latents_npz_path(info.absolute_path, info.image_size) for info in own}
    return sources.by_cache(sources.of_images(paths), paths)


def _count(settings: Settings, accelerator: Any) -> int:
    """Return the number of threads that prepare images."""
    workers = settings[CACHING_WORKERS]
    return default_workers(accelerator.num_processes) if workers is None else workers


def _share_files(images: Sequence[Image]) -> bool:
    """Return whether two images have the same path without suffix, and so perhaps the same cache file."""
    return len({os.path.normcase(os.path.splitext(info.absolute_path)[0]) for info in images}) < len(images)


def _is_checked(strategy: Any) -> bool:
    return bool(strategy.cache_to_disk and not strategy.skip_disk_cache_validity_check)


def _check_latents(dataset: Any, images: list[Image], strategy: Any, accelerator: Any, check: Check, pool: Any) -> None:
    """Check the files that this process would check one by one, in threads. Their results are in the index afterwards."""
    for folder in {os.path.dirname(info.absolute_path) for info in images}:
        remove_abandoned(Path(folder))
    images = sorted(images, key=lambda info: info.bucket_reso[0] * info.bucket_reso[1])  # as upstream does
    arguments = []
    for info in images[accelerator.process_index :: accelerator.num_processes]:
        if info.latents_npz is None:
            subset = dataset.image_to_subset[info.image_key]
            path = strategy.get_latents_npz_path(info.absolute_path, info.image_size)
            arguments.append((info.bucket_reso, path, subset.flip_aug, subset.alpha_mask))
    _run_checks(check, strategy, arguments, os.path.splitext(strategy.cache_suffix)[0], pool)


def _run_checks(check: Check, strategy: Any, arguments: Sequence[tuple[Any, ...]], ending: str, pool: Any) -> None:
    """Run checks in threads; report the rejected files, and remove the unusable ones whose stem has this ending.

    Upstream reads an existing file before it adds latents of another size to it. An unreadable file of another name, which
    may not be a cache, is left to upstream, which ends with an error.
    """
    unknown = [args for args in arguments if not check.is_known(*args)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(progress("checking caches"))
        for kind in type(strategy).__mro__:  # upstream logs an error for each unreadable file
            stack.enter_context(replaced(logging.getLogger(kind.__module__), "disabled", True))
        list(pool.map(lambda args: check(*args), unknown))
    if check.rejected:
        note(check.summary())
    for path in check.unusable:
        if os.path.splitext(path)[0].endswith(ending):
            with contextlib.suppress(OSError):  # another run has removed it, or has it open on Windows
                os.remove(path)


@dataclass(frozen=True)
class _Batch:
    images: list[Image]
    arguments: tuple[Any, ...]
    """Those of ``cache_batch_latents`` after the model and the images: flip, alpha mask and random crop."""

    @property
    def shape(self) -> tuple[object, ...]:
        """The number and size of its images."""
        return (len(self.images), tuple(self.images[0].bucket_reso))


def _plan(original: Any, dataset: Any, model: Any, accelerator: Any, strategy: Any, check: Check) -> list[_Batch]:
    """Run upstream's loop without decoding and encoding; return the batches that it would encode."""
    batches: list[_Batch] = []

    def record(model: Any, batch: list[Image], *arguments: Any) -> None:
        batches.append(_Batch(list(batch), arguments))

    module = sys.modules[original.__module__]
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(strategy, "cache_batch_latents", record))
        stack.enter_context(replaced(module, "load_image", lambda *args: None))
        stack.enter_context(replaced(module, "tqdm", lambda items, **options: items))
        if _is_checked(strategy):
            stack.enter_context(replaced(strategy, "is_disk_cached_latents_expected", check))
        original(dataset, model, accelerator)
    return batches


def _cache_batches(
    batches: Sequence[_Batch],
    model: Any,
    accelerator: Any,
    strategy: Any,
    check: Check,
    modules: _Upstream,
    pool: ThreadPoolExecutor,
    workers: int,
) -> None:
    load, save = modules.images.load_images_and_masks_for_caching, strategy.save_latents_to_disk
    # flip, alpha mask and random crop follow the images; loading needs the last two
    jobs = [(info, batch.arguments[1:]) for batch in batches for info in batch.images]
    bytes_per_image = max(12 * info.bucket_reso[0] * info.bucket_reso[1] for info, _ in jobs)
    limit = max(workers, min(2 * workers + len(batches[0].images), _PREPARED_BYTES // bytes_per_image))
    prepared = in_order(partial(_prepare, load), jobs, pool, limit)

    def take(images: Sequence[Image], *arguments: Any) -> Any:
        results: list[Any] = []
        for info in images:
            job, result = next(prepared, (None, None))
            if job is None or job[0] is not info:
                return load(images, *arguments)
            results.append(result)
        return _joined(results)

    paths = {info.latents_npz: (info, batch.arguments) for batch in batches for info in batch.images}
    unusable: list[str] = []

    def save_behind(path: str, latents: Any, *args: Any, **kwargs: Any) -> None:
        writer.submit(_bytes(latents, *args, *kwargs.values()), write, path, latents, args, kwargs)

    def write(path: str, latents: Any, args: Any, kwargs: Any) -> None:
        info, (flip, mask, *_) = paths[path]
        with _naming(info.absolute_path):
            save(path, latents, *args, **kwargs)
            if problem := _record(check, info.bucket_reso, path, flip, mask):
                unusable.append(f"{info.absolute_path} ({problem})")

    gc.collect()  # once instead of after each batch: garbage may hold GPU memory
    shape = None
    with (
        contextlib.closing(prepared),
        Writer(_WRITERS, _WRITTEN_BYTES) as writer,
        replaced(modules.images, "load_images_and_masks_for_caching", take),
        replaced(modules.memory, "HIGH_VRAM", True),
        replaced(strategy, "save_latents_to_disk", save_behind),
        _bar(len(jobs), "caching latents") as advance,
    ):
        for batch in batches:
            if shape is not None and shape != batch.shape:
                _empty_cache(accelerator.device)
            shape = batch.shape
            strategy.cache_batch_latents(model, batch.images, *batch.arguments)
            advance(len(batch.images))
    _empty_cache(accelerator.device)
    if unusable:
        warn(f"cached latents cannot be trained on: {unusable[0]} and {len(unusable) - 1} more; with fp16 try --no_half_vae")


def _prepare(load: Callable[..., Any], job: tuple[Image, tuple[Any, ...]]) -> Any:
    info, arguments = job
    with _naming(info.absolute_path):
        return load([info], *arguments)


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Name the image in an error line when the block fails."""
    try:
        yield
    except Exception as problem:
        error(f"cannot cache {path}: {type(problem).__name__}: {problem}")
        raise


def _joined(results: list[Any]) -> Any:
    """Return the results for single images as one for their batch."""
    import torch

    if len(results) == 1:
        return results[0]
    tensors, *lists = zip(*results, strict=True)
    return (torch.cat(tensors), *([item for part in parts for item in part] for parts in lists))


def _bytes(*values: Any) -> int:
    return sum(value.nbytes for value in values if hasattr(value, "nbytes"))


def _record(check: Check, *args: Any) -> str:
    """Check a file that was just written; return why it cannot be trained on."""
    try:
        problem = check.read(*args)
    except OSError:  # another run replaces it; the next start checks it
        return ""
    if problem == "":
        check.record(*args)
    return problem or ""  # a file that must be created is created at the next start


def _empty_cache(device: Any) -> None:
    """Free the allocator's unused memory, which blocks of another shape could not use."""
    import torch

    empty = getattr(getattr(torch, device.type, None), "empty_cache", None)
    if empty is not None:
        empty()


@contextlib.contextmanager
def _bar(total: int, title: str) -> Iterator[Callable[[int], Any]]:
    """Show a progress bar with images per second and the time left; yield the function that advances it."""
    from tqdm import tqdm

    with tqdm(total=total, desc=title, unit="image", smoothing=0.1, disable=not should_print()) as bar:
        yield bar.update


def _cache_text_encoder_outputs(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def new_cache_text_encoder_outputs(self: Any, models: Any, accelerator: Any) -> None:
        import numpy as np

        images = list(self.image_data.values())
        modules = _upstream()
        strategy = None if modules is None else modules.strategies.TextEncoderOutputsCachingStrategy.get_strategy()
        workers = _count(settings, accelerator)
        if modules is None or strategy is None or not strategy.cache_to_disk or not workers or _share_files(images):
            original(self, models, accelerator)
            return
        paths = {info.absolute_path: strategy.get_outputs_npz_path(info.absolute_path) for info in images}
        index = FileIndex()
        check = Check(
            index,
            strategy.is_disk_cached_outputs_expected,
            partial(outputs_problem, strategy),
            state_of(strategy, "is_disk_cached_outputs_expected"),
            position=0,
            sources=sources.by_cache(sources.of_texts(images, modules.strategies.TokenizeStrategy.get_strategy()), paths),
            outdated=sources.older_than_captions(_captions_of_unknown(self, images, paths, index)),
        )
        if _is_checked(strategy):
            own = images[accelerator.process_index :: accelerator.num_processes]
            with ThreadPoolExecutor(workers, "kohya_ext-images") as pool:
                _run_checks(check, strategy, [(strategy.get_outputs_npz_path(info.absolute_path),) for info in own], "", pool)
        save = np.savez
        unusable: list[str] = []

        def save_behind(file: Any, *args: Any, **arrays: Any) -> None:
            writer.submit(_bytes(*args, *arrays.values()), write, file, args, arrays)

        def write(file: Any, args: Any, arrays: Any) -> None:
            with _naming(file):
                save(file, *args, **arrays)
                # The arrays instead of the file: their own strategy has just written them.
                if all(map(is_finite, map(np.asarray, (*args, *arrays.values())))):
                    check.record(file)
                else:
                    unusable.append(f"{file} ({NOT_FINITE})")

        with (
            Writer(_WRITERS, _WRITTEN_BYTES) as writer,
            replaced(np, "savez", save_behind),
            replaced(sys.modules[original.__module__], "tqdm", _by_image),
        ):
            if _is_checked(strategy):
                with replaced(strategy, "is_disk_cached_outputs_expected", check):
                    original(self, models, accelerator)
            else:
                original(self, models, accelerator)
        if unusable:
            warn(f"cached text encoder outputs cannot be trained on: {unusable[0]} and {len(unusable) - 1} more")

    return new_cache_text_encoder_outputs


def _captions_of_unknown(dataset: Any, images: list[Image], paths: dict[str, str], index: FileIndex) -> dict[str, str]:
    """Return path of a cache file without a record of its source, as upstream writes it -> the file of its caption."""
    captions = {}
    for info in images:
        path = paths[info.absolute_path]
        extension = getattr(dataset.image_to_subset.get(info.image_key), "caption_extension", None)
        if extension and index.exists(path) and not sources.recorded(index.passed(path)):
            captions[path] = os.path.splitext(info.absolute_path)[0] + extension
    return captions


def _by_image(items: Iterable[Any], **options: Any) -> Iterator[Any]:
    """Yield the items, and show the progress of batches by images."""
    items = list(items)
    if not items or not isinstance(items[0], list):
        yield from items
        return
    with _bar(sum(map(len, items)), "caching text encoder outputs") as advance:
        for batch in items:
            yield batch
            advance(len(batch))


PATCH = Patch(
    name="parallel_caching",
    summary="cache latents and text encoder outputs with threads before and after the GPU, and check each cache file once",
    targets=(
        *moved(
            "BaseDataset.new_cache_latents",
            "library.dataset",
            _cache_latents,
            takes("self", "model", "accelerator", exactly=True),
            body="runs",
        ),
        *moved(
            "BaseDataset.new_cache_text_encoder_outputs",
            "library.dataset",
            _cache_text_encoder_outputs,
            takes("self", "models", "accelerator", exactly=True),
            body="runs",
        ),
    ),
    options=(CACHING_WORKERS,),
    exactness="exact",
    held_to="upstream's cache files and cached tensors",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/library/dataset.py",
)
