"""Describe the run that wrote a file, from the metadata that sd-scripts stores in it.

Keys: ``ss_*`` of sd-scripts' ``train_network.py``, and ``modelspec.*`` of https://github.com/Stability-AI/ModelSpec.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from kohya_ext.run.step_times import format_duration
from kohya_ext.sdscripts import networks

_LARGEST = 3e10
"""Numbers of metadata are below it; as seconds since 1970 it is the year 2920, which every system's calendar has."""

_TAGS = 8
"""Number of the most frequent tags to show."""

_TAG = 40
"""Number of characters of a tag to show; without commas a whole caption is a tag."""


def describe(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return {topic: text} for the topics that the metadata have."""
    known = {key: value for key, value in metadata.items() if value not in ("", "None")}
    topics = {
        "name": _joined(known.get("modelspec.title") or known.get("ss_output_name"), known.get("ss_training_comment")),
        "architecture": known.get("modelspec.architecture", ""),
        "base model": _base_model(known),
        "network": _network(known),
        "trained": _joined(*_trained(known)),
        "learning rate": _joined(*_learning_rate(known)),
        "images": _joined(*_images(known)),
        "batch size": _joined(*_batch(known)),
        "precision": _joined(_precision(known), "fp8 base model" if _is_true(known, "ss_fp8_base") else None),
        "options": _joined(*_options(known)),
        "tags": _tags(known),
        "sd-scripts": known.get("ss_sd_scripts_commit_hash", "").removeprefix("(unknown)")[:8],
        "author": known.get("modelspec.author", ""),
        "license": known.get("modelspec.license", ""),
    }
    return {topic: text for topic, text in topics.items() if text}


def _joined(*texts: str | None) -> str:
    return ", ".join(filter(None, texts))


def _is_true(known: Mapping[str, str], key: str) -> bool:
    return known.get(key, "").lower() == "true"


def _number(known: Mapping[str, str], key: str) -> float | None:
    """Return a number of metadata, which may come from another person; None for one that no run has."""
    with contextlib.suppress(ValueError):
        number = float(known.get(key, ""))
        return number if abs(number) < _LARGEST else None
    return None


def _json(known: Mapping[str, str], key: str) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(known.get(key, ""))
    return None


def _count(value: object) -> int:
    """Return a number of images or tags; 0 for anything else."""
    return value if isinstance(value, int) and 0 < value < _LARGEST else 0


def _base_model(known: Mapping[str, str]) -> str:
    name, version = known.get("ss_sd_model_name"), known.get("ss_base_model_version")
    return f"{name} ({version})" if name and version else name or version or ""


def _network(known: Mapping[str, str]) -> str:
    rank, alpha = known.get("ss_network_dim"), known.get("ss_network_alpha")
    arguments = _json(known, "ss_network_args")
    pairs = [f"{key}={value}" for key, value in arguments.items()] if isinstance(arguments, dict) else []
    module = known.get("ss_network_module")
    meaning = networks.meaning_of_dim(module, pairs)
    dimension = f"rank {rank}" if meaning is None else f"network_dim {rank} ({meaning})"
    return _joined(module, rank and dimension, alpha and f"alpha {alpha}", *pairs)


def _precision(known: Mapping[str, str]) -> str | None:
    return "float32" if (mixed := known.get("ss_mixed_precision")) == "no" else mixed


def _trained(known: Mapping[str, str]) -> Iterator[str | None]:
    for unit, done, planned in (("steps", "ss_steps", "ss_max_train_steps"), ("epochs", "ss_epoch", "ss_num_epochs")):
        count, total = _number(known, done), _number(known, planned)
        if count is not None:
            yield f"{count:,.0f} of {total:,.0f} {unit}" if total else f"{count:,.0f} {unit}"
    began, ended = _number(known, "ss_training_started_at"), _number(known, "ss_training_finished_at")
    if began and ended:
        yield f"in {format_duration(ended - began)}"
    if ended and ended > 0:
        yield f"until {time.strftime('%Y-%m-%d %H:%M', time.localtime(ended))}"
    elif date := known.get("modelspec.date"):
        yield date


def _learning_rate(known: Mapping[str, str]) -> Iterator[str | None]:
    yield known.get("ss_learning_rate")
    for key, of in (("ss_unet_lr", "U-Net or transformer"), ("ss_text_encoder_lr", "text encoders")):
        if rate := known.get(key):
            yield f"{of} {rate}"
    yield known.get("ss_optimizer")
    yield known.get("ss_lr_scheduler")
    if warmup := _number(known, "ss_lr_warmup_steps"):
        yield f"{warmup:,.0f} warmup steps"


def _images(known: Mapping[str, str]) -> Iterator[str | None]:
    sets = _json(known, "ss_datasets")
    folders = [each.get("dataset_dirs", {}) for each in sets if isinstance(each, dict)] if isinstance(sets, list) else []
    folders = folders or [_json(known, "ss_dataset_dirs") or {}]
    rows = [row for each in folders if isinstance(each, dict) for row in each.values() if isinstance(row, dict)]
    if images := sum(_count(row.get("img_count")) for row in rows):
        yield f"{images:,} images"
    if repeated := _number(known, "ss_num_train_images"):
        yield f"{repeated:,.0f} with repeats"
    if regularization := _number(known, "ss_num_reg_images"):
        yield f"{regularization:,.0f} regularization images"
    sizes = [each.get("resolution") for each in sets if isinstance(each, dict)] if isinstance(sets, list) else []
    texts = ["x".join(map(str, size)) if isinstance(size, list) else str(size) for size in sizes if size]
    yield " and ".join(dict.fromkeys(texts)) or _resolution(known)


def _resolution(known: Mapping[str, str]) -> str:
    """Return ``512x512`` for ``(512, 512)``, as sd-scripts stores it."""
    return "x".join(re.findall(r"\d+", known.get("ss_resolution") or known.get("modelspec.resolution") or ""))


def _batch(known: Mapping[str, str]) -> Iterator[str | None]:
    sets = _json(known, "ss_datasets")
    sizes = [each.get("batch_size_per_device") for each in sets if isinstance(each, dict)] if isinstance(sets, list) else []
    size = " and ".join(dict.fromkeys(str(each) for each in sizes if each)) or known.get("ss_batch_size_per_device")
    if size:
        yield size
    if (accumulated := _number(known, "ss_gradient_accumulation_steps")) and accumulated > 1:
        yield f"gradient accumulation {accumulated:.0f}"


def _options(known: Mapping[str, str]) -> Iterator[str | None]:
    for key in ("noise_offset", "min_snr_gamma", "ip_noise_gamma", "network_dropout", "scale_weight_norms", "clip_skip"):
        if value := known.get(f"ss_{key}"):
            yield f"{key} {value}"
    if (loss := known.get("ss_loss_type")) not in (None, "l2"):
        yield f"loss {loss}"
    if _is_true(known, "ss_gradient_checkpointing"):
        yield "gradient checkpointing"
    if seed := known.get("ss_seed"):
        yield f"seed {seed}"


def _tags(known: Mapping[str, str]) -> str:
    counts: Counter[str] = Counter()
    folders = _json(known, "ss_tag_frequency")
    for folder in folders.values() if isinstance(folders, dict) else ():
        for tag, count in folder.items() if isinstance(folder, dict) else ():
            if number := _count(count):
                counts[tag.strip()] += number
    return ", ".join(f"{tag[:_TAG]} ({count})" for tag, count in counts.most_common(_TAGS))
