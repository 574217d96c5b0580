"""The page of a report: one HTML file with its styles, scripts, data and images. Jinja2 is optional.

Names, captions and paths are escaped by the template. The page's Content-Security-Policy allows its own two scripts and no
network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

from kohya_ext import __version__
from kohya_ext.errors import UserError
from kohya_ext.reporting.charts import charts
from kohya_ext.reporting.history import History, number
from kohya_ext.reporting.similarity import ImageModel, references
from kohya_ext.reporting.thumbnails import Thumbnails
from kohya_ext.run.evaluations import Evaluation
from kohya_ext.run.output_files import MULTIPLIER
from kohya_ext.run.step_times import format_duration
from kohya_ext.units import format_size, gigabytes

_FOLDER = Path(__file__).parent

_SAMPLES = 60
"""Largest number of samples in a report; those of steps in between are left out."""

_SAMPLE_EDGE, _IMAGE_EDGE = 320, 112
"""Pixels per side of thumbnails of samples, and of skipped steps' images."""

_SKIPS, _EVENTS, _FILES, _IMAGES = 60, 300, 300, 8
"""Largest numbers of skipped steps, events and files of a run, and of images of a skipped step."""

_BLOCKS = 8
"""Largest number of parts of the model of a profile."""

_SMALLEST_SHARE = 0.0005
"""Parts of the time below this share are left out."""

_SAMPLE_NUMBER = re.compile(r"_(\d{2,})_\d{14}(?:_(-?\d+))?$")
"""The number of the prompt in the name of a sample, before its date, and its seed after it if the prompt has one."""

_MULTIPLIER = re.compile(rf"{MULTIPLIER}(-?[\d.]+(?:e[-+]\d+)?)_(?:e?\d+)_\d{{2,}}_\d{{14}}")
"""The multiplier in the name of a sample of --sample_multipliers."""

_ORIGINS = ("command line", "environment", "config file", "preset")

Row = dict[str, Any]


def html(
    runs: Sequence[History],
    thumbnails: Thumbnails,
    now: float,
    refresh: float | None = None,
    image_model: ImageModel | None = None,
) -> str:
    """Return the report on runs at a time in seconds since 1970; a browser reloads it every ``refresh`` seconds.

    With an ``image_model`` samples are compared with the images of their run. Adds missing images to ``thumbnails``. Raises
    UserError without Jinja2, and for an image model that cannot be loaded.
    """
    try:
        import jinja2
        import markupsafe
    except ImportError as error:
        raise UserError(f"the report needs Jinja2 ({error}); run `pip install jinja2`") from None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {"clock": _clock, "name": lambda file: PurePath(str(file)).name}
    environment.filters["breaks"] = lambda name: markupsafe.escape(name).replace("_", markupsafe.Markup("_<wbr>"))
    scripts = [_text("uplot/uPlot.iife.min.js"), _text("page.js")]
    labels = _labels(runs)
    rows = [_run(label, index, run, now) for index, (label, run) in enumerate(zip(labels, runs, strict=True))]
    _add_images(rows, thumbnails)
    for row in rows:
        row["similarity"] = [] if image_model is None else list(_similarities(row, image_model))
    drawn = {key: chart for key, chart in charts(list(zip(labels, runs, strict=True))).items() if chart.curves}
    text: str = environment.get_template("page.html").render(
        styles=_text("uplot/uPlot.min.css") + styles(),
        scripts=scripts,
        hashes=[base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts],
        licence=_text("uplot/LICENSE"),
        refresh=refresh,
        version=__version__,
        now=now,
        title=" and ".join(labels) if len(labels) < 4 else f"{len(labels)} runs",
        runs=rows,
        differences=list(_differences(runs)) if len(rows) > 1 else [],
        charts=drawn,
        chart_data={key: asdict(chart) for key, chart in drawn.items()},
        grid=_sample_grid(rows),
    )
    return text


def _add_images(rows: Sequence[Row], thumbnails: Thumbnails) -> None:
    """Add thumbnails to samples, evenly over the steps if there are too many, and to images of skipped steps."""
    for row in rows:
        row["samples_in_all"] = len(row["samples"])
        row["samples"] = _evenly(row["samples"], max(_SAMPLES // len(rows), 2))
    samples = [sample for row in rows for sample in row["samples"]]
    images = [image for row in rows for skip in row["skips"] for image in skip["images"]]
    for some, edge in ((samples, _SAMPLE_EDGE), (images, _IMAGE_EDGE)):
        thumbnails.add(dict.fromkeys(Path(image["file"]) for image in some), edge)
        for image in some:
            image["url"] = thumbnails.get(Path(image["file"]), edge)


def _similarities(run: Row, model: ImageModel) -> Iterator[Row]:
    """Yield for each column of samples how similar they are to the images: to all of them, and to the nearest one."""
    images = references(run["folders"])
    columns: dict[str, list[list[float]]] = {}
    for sample in run["samples"]:
        if images and (values := model.similarities(Path(sample["file"]), images)):
            columns.setdefault(sample["words"], []).append(values)
    for words, rows in columns.items():
        mean, nearest = statistics.fmean(map(statistics.fmean, rows)), statistics.fmean(map(max, rows))
        yield {"words": words, "samples": len(rows), "mean": mean, "nearest": nearest}


def styles() -> str:
    """Return the styles that all pages share."""
    return _text("page.css")


def _text(name: str) -> str:
    """Return a file of this package, safe inside an HTML element: neither scripts nor styles contain ``</``."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def _labels(runs: Sequence[History]) -> list[str]:
    """Return the names of runs; runs of the same name have their start time, too."""
    names = [str(run.start.get("name") or run.id) for run in runs]
    labels = [f"{name}, {_clock(run.began)}" if names.count(name) > 1 else name for name, run in zip(names, runs, strict=True)]
    return [f"{label} ({index})" if labels.count(label) > 1 else label for index, label in enumerate(labels, 1)]


def _clock(seconds: float) -> str:
    """Return a local date and time of seconds since 1970; an empty text if it is not one."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, OSError, ValueError, TypeError):
        return ""


# --- run -------------------------------------------------------------------------------------------------------------


def _run(label: str, index: int, run: History, now: float) -> Row:
    summary = run.summary(now)
    files = list(_files(run))[:_FILES]
    return {
        "label": label,
        "index": index,
        "summary": summary,
        "resumes": summary["next_command"] is not None and summary["next_command"] == run.start.get("resume_command"),
        "began": run.began,
        "updated": run.time,
        "tiles": list(_tiles(run, summary)),
        "memory_scale": _memory_scale(summary["memory"]),
        "parts": _time_by_part(run),
        "profile": _profile(run.profile),
        "training": run.training,
        "buckets": _buckets(run.training.get("buckets")),
        "folders": _dicts(run.training.get("folders")),
        "tags": _pairs(run.training.get("tags")),
        "sample_prompts": run.training.get("sample_prompts") or [],
        "samples": [_sample(line) for line in run.samples()],
        "files": files,
        "overfitting": _overfitting(run),
        "bands": _bands(run.evaluations()),
        "best": str(best[0]) if (best := run.best_file()) is not None else "",
        "problems": [problem for file in files for problem in file["problems"]],
        "skips": [_skip(line) for line in run.of_kind("skip")[-_SKIPS:]],
        "events": [_event(line) for line in run.events if line.get("kind") != "sample"][-_EVENTS:],
        "settings": _settings(run),
        "patches": _patches(run),
        "facts": list(_facts(run)),
        "commands": [str(start.get("command")) for start in run.starts if start.get("command")][-1:],
    }


def _tiles(run: History, summary: Row) -> Iterator[Row]:
    step, total, skipped = summary["step"], summary["steps"], summary["skipped"]
    share = min(step / total, 1.0) if total else None
    epochs = f"epoch {summary['epoch']}" + (f" of {summary['epochs']}" if summary["epochs"] else "")
    details = [epochs] if summary["epoch"] is not None else []
    details += [f"{skipped} skipped"] if skipped else []
    yield {"label": "Steps", "value": f"{step:,}", "of": f"of {total:,}" if total else "", "details": details, "share": share}

    left, parts = summary["seconds_left"], summary["parts"]
    details = [f"{format_duration(left)} left"] if left is not None else []
    details += [f"{parts} processes, resumed"] if parts > 1 else []
    yield {"label": "Duration", "value": format_duration(run.elapsed), "of": "", "details": details, "share": None}

    loss = summary["loss"]
    if loss["smoothed"] is not None:
        details = [f"{loss['first']:.4g} at the start"]
        details += [f"means of {loss['smoothing']} steps"] if loss["smoothing"] > 1 else []
        yield {"label": "Loss", "value": f"{loss['smoothed']:.4g}", "of": "", "details": details, "share": None}

    if validations := run.evaluations():
        yield _validation_tile(run, validations)

    seconds = summary["seconds_per_step"]
    if seconds["median"] is not None:
        details = (
            [_against(seconds["median"], seconds["predicted"], f"{seconds['predicted']:.3g} s")] if seconds["predicted"] else []
        )
        yield {
            "label": "Time per step",
            "value": f"{seconds['median']:.3g} s",
            "of": "median",
            "details": details,
            "share": None,
        }

    memory = summary["memory"]
    if memory["peak_reserved"] is not None:
        peak, predicted, gpu = memory["peak_reserved"], memory["predicted_reserved"], memory["gpu"]
        details = [_against(peak, predicted, format_size(predicted))] if predicted else []
        details += [f"GPU: {gigabytes(gpu)} GB"] if gpu else []
        yield {"label": "Peak GPU memory", "value": format_size(peak), "of": "", "details": details, "share": None}
    elif (resident := (run.end or {}).get("memory", {}).get("host_resident")) is not None:
        yield {"label": "Peak host memory", "value": format_size(resident), "of": "", "details": [], "share": None}


def _validation_tile(run: History, validations: Sequence[Evaluation]) -> Row:
    lowest, latest = min(validations, key=lambda each: each.loss), validations[-1]
    details = [f"lowest, at step {lowest.step:,}"]
    details += [f"{latest.loss:.4g} at step {latest.step:,}"] if latest is not lowest else []
    details += [f"standard error {lowest.error:.2g}"] if lowest.error is not None else []
    details += [] if lowest.held_out else ["of training images: measures memorisation only partly"]
    return {"label": "Validation loss", "value": f"{lowest.loss:.4g}", "of": "", "details": details, "share": None}


def _bands(validations: Sequence[Evaluation]) -> list[Row]:
    """Return the losses by timesteps: of the first validation, of that with the lowest loss, and of the last one."""
    if not validations:
        return []
    shown = (validations[0], min(validations, key=lambda each: each.loss), validations[-1])
    return [{"timesteps": name, "losses": [each.bands.get(name) for each in shown]} for name in shown[0].bands]


def _overfitting(run: History) -> str:
    """Return a sentence on when over-fitting began and which file to use; empty if it did not."""
    began, best = run.overfitting(), run.best_file()
    if began is None:
        return ""
    advice = f"best saved file: {best[0].name} of step {best[1].step:,}" if best is not None else "no model of a validated step"
    return f"Since step {began.step:,} the validation loss rises while the training loss falls; {advice}."


def _against(actual: float, predicted: float, text: str) -> str:
    return f"{abs(actual / predicted - 1):.1%} {'below' if actual < predicted else 'above'} the predicted {text}"


def _memory_scale(memory: Row) -> Row | None:
    """Return peak, prediction and GPU as shares of the largest of them."""
    peak, predicted, gpu = memory["peak_reserved"], memory["predicted_reserved"], memory["gpu"]
    largest = max(peak or 0, predicted or 0, gpu or 0)
    if peak is None or not (predicted or gpu):
        return None
    return {
        "peak": peak / largest,
        "predicted": predicted / largest if predicted else None,
        "gpu": gpu / largest if gpu else None,
    }


def _time_by_part(run: History) -> list[Row]:
    """Return the parts of the run's duration that are known: name, text and share."""
    waiting, outside = math.fsum(filter(math.isfinite, run.data)), math.fsum(run.outside)
    steps = math.fsum(filter(math.isfinite, run.seconds))
    parts = {
        "loading": run.loading,
        "steps": max(steps - waiting, 0.0),
        "waiting for data": waiting,
        "saving": run.saving,
        "sampling, validation and other": max(outside - run.saving, 0.0),
    }
    total = sum(parts.values())
    return [
        {"name": name, "text": _duration(value), "share": value / total}
        for name, value in parts.items()
        if value > total * _SMALLEST_SHARE
    ]


def _profile(line: Row | None) -> Row | None:
    """Return the latest profile: its steps, verdict, advice and largest parts of the model."""
    if line is None:
        return None
    blocks = [
        block for block in _dicts(line.get("blocks")) if number(block.get("device"), 0.0) or number(block.get("host"), 0.0)
    ]
    return {
        "steps": f"{line.get('first')} to {line.get('last')}",
        "verdict": str(line.get("verdict", "")),
        "advice": [str(option) for option in line.get("advice") or []],
        "blocks": [
            {
                "name": str(block.get("name")),
                **{side: f"{1e3 * number(block.get(side), 0.0):,.1f}" for side in ("device", "host")},
            }
            for block in blocks[:_BLOCKS]
        ],
        "table": str(line.get("table", "")),
        "trace": str(line.get("trace", "")),
    }


def _duration(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else format_duration(seconds)


# --- data and files --------------------------------------------------------------------------------------------------


def _buckets(buckets: object) -> list[Row]:
    rows = [(size, count) for size, count in _pairs(buckets) if count]
    largest = max((count for _, count in rows), default=1)
    return [{"size": size, "count": count, "share": count / largest} for size, count in rows]


def _pairs(values: object) -> list[tuple[str, int]]:
    """Return (key, count) of a dictionary of counts, the largest first."""
    counts = values.items() if isinstance(values, dict) else ()
    return sorted(((str(key), count) for key, count in counts if isinstance(count, int)), key=lambda row: -row[1])


def _dicts(values: object) -> list[Row]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _sample(line: Mapping[str, Any]) -> Row:
    file = str(line.get("file"))
    name = PurePath(file).stem
    match, final = _SAMPLE_NUMBER.search(name), _MULTIPLIER.search(name)
    prompt, seed = (int(match[1]), match[2]) if match else (0, None)
    multiplier = float(final[1]) if final else None
    words = (
        f"step {line.get('step')}" if multiplier is None else f"multiplier {multiplier:g}" if multiplier else "without the LoRA"
    )
    return {
        "file": file,
        "step": line.get("step"),
        "multiplier": multiplier,
        "words": words,
        "prompt": prompt,
        "seed": seed,
        "url": None,
    }


def _sample_grid(rows: Sequence[Row]) -> Row:
    """Return the grid of samples: a column for each step and final multiplier, and for each prompt a row for each run."""
    samples = [sample for row in rows for sample in row["samples"]]
    columns = sorted(set(map(_column, samples)), key=lambda column: [(value is not None, value) for value in column])
    lines = [
        {
            "number": prompt,
            "text": next((row["sample_prompts"][prompt] for row in rows if prompt < len(row["sample_prompts"])), ""),
            "run": row,
            "cells": [[each for each in own if _column(each) == column] for column in columns],
        }
        for prompt in sorted({sample["prompt"] for sample in samples})
        for row in rows
        if (own := [each for each in row["samples"] if each["prompt"] == prompt])
    ]
    return {"columns": columns, "rows": lines, "has_seeds": all(sample["seed"] for sample in samples)}


def _column(sample: Row) -> tuple[float | None, int | None]:
    """Return (multiplier, step); samples of the same multiplier share a column, those during training have none."""
    return sample["multiplier"], sample["step"] if sample["multiplier"] is None else None


def _evenly(samples: Sequence[Row], most: int) -> list[Row]:
    """Return the samples of evenly spaced columns with the first and the last, about ``most`` of them."""
    columns = list(dict.fromkeys(map(_column, samples)))
    if len(samples) <= most:
        return list(samples)
    others, final = ([column for column in columns if (column[0] is None) is trains] for trains in (True, False))
    count = max(most * len(columns) // len(samples) - len(final), 2)
    kept = {others[index * (len(others) - 1) // (count - 1)] for index in range(count)} if others else set()
    return [sample for sample in samples if _column(sample) in kept.union(final)][:most]


def _files(run: History) -> Iterator[Row]:
    """Yield the written models and states, the newest first, with the result of their check."""
    for name in dict.fromkeys((*run.checks, *reversed(run.saves))):
        line, check = run.saves.get(name, {}), run.checks.get(name, {})
        problems = check.get("problems")
        yield {
            "file": name,
            "step": line.get("step", check.get("step")),
            "size": format_size(line["bytes"]) if isinstance(line.get("bytes"), int) else "",
            "seconds": _duration(line["seconds"]) if isinstance(line.get("seconds"), (int, float)) else "",
            "kind": str(line.get("kind") or "save"),
            "checked": bool(check),
            "summary": str(check.get("summary") or ""),
            "problems": list(map(str, problems)) if isinstance(problems, list) else [],
        }


def _skip(line: Mapping[str, Any]) -> Row:
    images = line.get("images") if isinstance(line.get("images"), list) else []
    files = list(map(str, images or []))
    shown = [{"file": file, "url": None} for file in files[:_IMAGES]]
    return {
        "step": line.get("step"),
        "problem": str(line.get("problem") or ""),
        "images": shown,
        "more": len(files) - len(shown),
    }


def _event(line: Mapping[str, Any]) -> Row:
    details = [PurePath(str(line["file"])).name] if line.get("file") else []
    details += [str(line[key]) for key in ("reason", "phase", "problem", "summary") if line.get(key)]
    details += [format_size(line["bytes"])] if isinstance(line.get("bytes"), int) else []
    details += [_duration(line["seconds"])] if isinstance(line.get("seconds"), (int, float)) else []
    kind = str(line.get("kind"))
    return {"time": line.get("time"), "step": line.get("step"), "kind": kind.replace("_", " "), "details": ", ".join(details)}


# --- settings --------------------------------------------------------------------------------------------------------


def _values(run: History) -> dict[str, tuple[str, str]]:
    """Return {key: (value, origin)}."""
    settings = run.start.get("settings")
    rows = settings.items() if isinstance(settings, dict) else ()
    return {str(key): (_shown(row[0]), str(row[1])) for key, row in rows if isinstance(row, list) and len(row) == 2}


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _settings(run: History) -> list[Row]:
    order = {origin: index for index, origin in enumerate(_ORIGINS)}
    rows = sorted(_values(run).items(), key=lambda row: (order.get(row[1][1], len(order)), row[0]))
    return [{"key": key, "value": value, "origin": origin} for key, (value, origin) in rows]


def _patches(run: History) -> list[Row]:
    patches = run.training.get("patches")
    rows = patches.items() if isinstance(patches, dict) else ()
    known = [(str(name), row) for name, row in rows if isinstance(row, list) and len(row) == 2]
    words = {"waiting": "not used by this script"}
    return [
        {"name": name, "status": str(status), "reason": str(reason) or words.get(str(status), "")}
        for name, (status, reason) in sorted(known, key=lambda row: (row[1][0] != "applied", row[0]))
    ]


def _facts(run: History) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of what the run has used."""
    start, training = run.start, run.training
    gpu = start.get("gpu") or {}
    memory = f", {gigabytes(gpu['memory'])} GB" if isinstance(gpu.get("memory"), int) else ""
    rows = {
        "script": start.get("script"),
        "GPU": f"{gpu['name']}{memory}" if gpu.get("name") else None,
        "processes": start.get("processes"),
        "sd-scripts": start.get("sd_scripts"),
        "kohya_ext": start.get("kohya_ext"),
        "PyTorch": start.get("torch"),
        "images": training.get("images"),
        "images with repeats": training.get("images_with_repeats"),
        "steps": run.total,
        "host": start.get("host"),
    }
    yield from ((name, str(value)) for name, value in rows.items() if value is not None)


def _differences(runs: Sequence[History]) -> Iterator[Row]:
    """Yield the facts and settings that are not the same in all runs: key, and for each run the value and its origin."""
    facts = [{name: (value, "") for name, value in _facts(run)} for run in runs]
    applied = [", ".join(row["name"] for row in _patches(run) if row["status"] == "applied") for run in runs]
    if all(applied):
        common = set.intersection(*(set(each.split(", ")) for each in applied))
        for each, names in zip(facts, applied, strict=True):
            each["other patches applied"] = (", ".join(name for name in names.split(", ") if name not in common) or "none", "")
    for kind, columns in (("fact", facts), ("setting", [_values(run) for run in runs])):
        for key in dict.fromkeys(key for column in columns for key in column):
            values = [column.get(key) for column in columns]
            if len({value and value[0] for value in values}) > 1:
                yield {"key": key, "kind": kind, "values": values}
