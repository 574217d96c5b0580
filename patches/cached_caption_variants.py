"""``--cached_caption_variants 8``: shuffle and drop captions although their text encoder outputs are cached.

Upstream refuses --shuffle_caption, --caption_dropout_rate and --caption_tag_dropout_rate with cached outputs, and silently
ignores wildcards, prefixes and suffixes. Here upstream's own ``process_caption`` makes a few variants of each caption, which
are encoded and cached like the captions of images. A step takes one of them. See :mod:`kohya_ext.caching.caption_variants`.

--token_warmup_step depends on the step, so it stays refused.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from types import FrameType
from typing import Any

from kohya_ext.caching import caption_variants
from kohya_ext.caching.cached_datasets import bytes_per_value, current_strategy, datasets_of, encoded, outputs_path
from kohya_ext.caching.caption_variants import ImagesOfBatch, Plan, ProcessedCaption
from kohya_ext.caching.size_limit import memory_copies, outputs_bytes
from kohya_ext.config.settings import Option, Settings, count
from kohya_ext.console import note, stop
from kohya_ext.patching.attributes import replaced
from kohya_ext.patching.patch import Patch, moved, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, program
from kohya_ext.patching.types import Accelerator
from kohya_ext.run.validation import preserved_random_state
from kohya_ext.sdscripts.constraints import CACHED_TEXT, VARIANTS
from kohya_ext.units import format_size

CACHED_CAPTION_VARIANTS = Option[int | None](
    VARIANTS,
    None,
    count,
    "with cached text encoder outputs, shuffle and drop captions: cache this many variants of each, and take one of them at "
    "random in each step",
    metavar="K",
)

_CAPTIONS = "kohya_ext_captions"
"""The attribute of a dataset with its variants. It goes to the data loader's workers with the dataset."""

_MEMORY_SHARE = 0.8
"""Largest share of the available host memory that variants may take."""


class _Run(TrainingCallback):
    """Counts the groups of datasets that the run caches, and gives the epoch to the training data."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.has_cached = args, False
        # Without --seed, LoRA scripts draw one, with which no file would be used again.
        self.seed = int(program().command.values.get("seed") or 0)
        self.files = set[str]()
        """Those of the texts of all groups."""

    def before_batch(self, accelerator: Accelerator) -> None:
        """Name the files that no group reads, once all are cached."""
        if older := caption_variants.older_files(self.files):
            what = f"{len(older)} cached texts of other captions, options or seeds"
            note(f"{what} ({format_size(sum(map(os.path.getsize, older)))}) can be deleted: {older[0]}, ...")
        self.files.clear()

    def batches(self, loader: Any, batches: Callable[[], Iterator[Any]], loop: FrameType | None) -> Iterator[Any]:
        """Share the epoch's number, before workers are started."""
        epoch = getattr(getattr(loader, "collate_fn", None), "current_epoch", None)
        for dataset in datasets_of(loader.dataset):
            if (captions := getattr(dataset, _CAPTIONS, None)) is not None:
                captions.epoch = epoch
        return batches()


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Run:
    return _Run(args)


def _is_cacheable(original: Any, settings: Settings) -> Any:
    """Return upstream's check as if nothing but the step count changed captions. LoRA scripts call it before the run begins."""

    @wraps(original)
    def is_text_encoder_output_cacheable(self: Any, *args: Any, **kwargs: Any) -> bool:
        with replaced(self, "subsets", [_unchanging(subset) for subset in self.subsets]):
            return bool(original(self, *args, **kwargs))

    return is_text_encoder_output_cacheable


def _unchanging(subset: Any) -> Any:
    kept = caption_variants.kept(subset)
    kept.shuffle_caption, kept.caption_tag_dropout_rate = False, 0.0
    return kept


def _cache(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def new_cache_text_encoder_outputs(self: Any, models: Any, accelerator: Any) -> None:
        run, datasets = current(_Run) or _Run(Namespace()), datasets_of(self)
        cache = partial(original, self, models, accelerator)
        plans = [caption_variants.plan(dataset, settings[CACHED_CAPTION_VARIANTS] or 1, run.seed) for dataset in datasets]
        with contextlib.ExitStack() as stack:
            for dataset, plan in zip(datasets, plans, strict=True):
                if plan.variants:
                    stack.enter_context(replaced(dataset, "image_data", plan.images))
            if any(plan.variants for plan in plans):
                _check_space(plans, datasets, cache, accelerator, settings)
            cache()
        for dataset, plan in zip(datasets, plans, strict=True):
            if plan.variants:
                # Scripts cache the training data first. Later groups are for validation.
                setattr(dataset, _CAPTIONS, plan.captions(is_fixed=run.has_cached))
        run.has_cached = True

    return new_cache_text_encoder_outputs


def _check_space(
    plans: Sequence[Plan], datasets: Sequence[Any], cache: Callable[[], None], accelerator: Any, settings: Settings
) -> None:
    """Print the size of the variants. Exits with code 2 if the disk or host memory lacks it."""
    strategy = current_strategy("TextEncoderOutputsCachingStrategy")
    infos = {info.absolute_path: info for plan in plans for info in plan.texts.values()}
    paths = {outputs_path(strategy, info): info for info in infos.values()}
    missing = {path: info for path, info in paths.items() if not (strategy.cache_to_disk and os.path.exists(path))}
    images = sum(len(plan.variants) for plan in plans)
    words = f"--{VARIANTS} {settings[CACHED_CAPTION_VARIANTS]}: {len(infos)} texts for {images} images"
    if strategy.cache_to_disk and (run := current(_Run)) is not None:
        run.files.update(paths)
    if not missing:
        note(f"{words}, all cached before")
        return
    with preserved_random_state():
        outputs = encoded(next(iter(missing.values())), datasets, strategy, cache)
    if not strategy.cache_to_disk:
        _check_memory(words, len(infos) * outputs_bytes(outputs, 4), accelerator)
        return
    size = outputs_bytes(outputs, bytes_per_value(settings))
    note(f"{words} take {format_size(len(infos) * size)} on disk, {format_size(len(missing) * size)} of it to be written")
    if settings["cache_size_limit"] is None:  # else that patch divides them between the disk and memory
        _check_disks([*missing], size)


def _check_memory(words: str, size: int, accelerator: Any) -> None:
    import psutil

    run = current(_Run)
    workers = int(getattr(run.args, "max_data_loader_n_workers", None) or 0) if run is not None else 0
    needed = size * memory_copies(accelerator.num_processes, workers, multiprocessing.get_start_method() == "fork")
    available = psutil.virtual_memory().available
    note(f"{words} take {format_size(needed)} of host memory")
    if needed > _MEMORY_SHARE * available:
        stop(
            f"--{VARIANTS} needs {format_size(needed)} of host memory, of which {format_size(available)} is available; "
            "use fewer variants, or add --cache_text_encoder_outputs_to_disk"
        )


def _check_disks(paths: Sequence[str], size: int) -> None:
    """Exit if a disk lacks the space for some new files of one size."""
    folders = [os.path.dirname(path) or "." for path in paths]
    disks = {folder: os.stat(folder).st_dev for folder in set(folders)}
    for folder, disk in disks.items():
        needed, free = size * sum(disks[each] == disk for each in folders), shutil.disk_usage(folder).free
        if needed > free:
            stop(
                f"--{VARIANTS} needs {format_size(needed)} in {folder}, which has {format_size(free)} free; use fewer "
                "variants, add --cache_format safetensors --cache_dtype bf16 to halve them, or free disk space"
            )


def _getitem(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def getitem(self: Any, index: Any) -> Any:
        captions = getattr(self, _CAPTIONS, None)
        if captions is None:
            return original(self, index)
        with replaced(self, "image_data", ImagesOfBatch(captions, self, index)):
            return original(self, index)

    return getitem


def _process(original: Any, settings: Settings) -> Any:
    """Keep a variant as it is where CLIP is trained, so that it gets the text whose T5 outputs are cached."""

    @wraps(original)
    def process_caption(self: Any, subset: Any, caption: Any) -> Any:
        return str(caption) if isinstance(caption, ProcessedCaption) else original(self, subset, caption)

    return process_caption


def _problems(script: str, args: Any, settings: Settings) -> Iterator[str]:
    if not any(getattr(args, name, None) for name in CACHED_TEXT):
        yield f"--{VARIANTS} needs --cache_text_encoder_outputs; without a cache every step processes its captions"


PATCH = Patch(
    name="cached_caption_variants",
    summary="shuffle and drop captions although their text encoder outputs are cached",
    targets=(
        *moved("BaseDataset.is_text_encoder_output_cacheable", "library.dataset", _is_cacheable, takes("self"), body="runs"),
        *moved(
            "DatasetGroup.new_cache_text_encoder_outputs",
            "library.dataset",
            _cache,
            takes("self", "models", "accelerator", exactly=True),
            body="runs",
        ),
        *moved("BaseDataset.__getitem__", "library.dataset", _getitem, takes("self", "index", exactly=True), body="runs"),
        *moved(
            "BaseDataset.process_caption",
            "library.dataset",
            _process,
            takes("self", "subset", "caption", exactly=True),
            body="runs",
        ),
    ),
    options=(CACHED_CAPTION_VARIANTS,),
    wanted=lambda settings: settings[CACHED_CAPTION_VARIANTS] is not None,
    exactness="close",
    held_to="training with cached outputs of the same texts, bit for bit; without a cache, other texts of the same processing",
    idea="https://github.com/ostris/ai-toolkit",
    stage=Stage.CHOOSE,  # outside of output_preservation, which caches the class captions of its variants
    problems=_problems,
    on_start=_start,
)
