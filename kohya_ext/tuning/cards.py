"""Files with the measurements of one GPU to hand on: without names, paths and captions.

A setting is included if it is a number, a switch, or one of the names that sd-scripts and the extension have. Nothing here
imports torch.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from kohya_ext.config import preset_files
from kohya_ext.config.settings import patch_modules
from kohya_ext.estimate import tuned
from kohya_ext.estimate.memory_config import FP8, SD3, MemoryConfig
from kohya_ext.estimate.tuned import OUT_OF_MEMORY, Tuned
from kohya_ext.sdscripts.families import FAMILIES
from kohya_ext.speed import switches
from kohya_ext.units import GB

SCHEMA = 1

#: The value of a setting that is not one of the known names, and the reason of a run that failed otherwise.
OTHER = "other"

_OPTIMIZERS = (
    *("adamw", "adamw8bit", "pagedadamw", "pagedadamw8bit", "pagedadamw32bit", "lion", "lion8bit", "pagedlion8bit"),
    *("sgdnesterov", "sgdnesterov8bit", "adafactor", "prodigy", "prodigyplus", "dadaptation", "dadaptadam", "came"),
    *("adamwschedulefree", "radamschedulefree", "sgdschedulefree", "stableadamw"),
)

#: Settings with names -> all of their values.
_NAMES: Mapping[str, Sequence[str]] = {
    "script": tuple(preset_files.FAMILIES),
    "mixed_precision": ("no", "fp16", "bf16"),
    "network_module": tuple(dict.fromkeys(network for family in FAMILIES for network in family.networks)),
    "optimizer_type": ("", *_OPTIMIZERS),
    "base_precision": ("int8", "fp8"),
    "model_type": ("flux", "chroma"),
    "attn_mode": ("torch", "sdpa", "xformers", "flash", "sageattn", "flex"),
    "offload_optimizer_device": ("cpu", "nvme"),
    "offload_param_device": ("cpu", "nvme"),
    "ema_device": ("cpu", "gpu"),
    "t5xxl": (FP8,),
    "pretrained_model_name_or_path": SD3,
    "speed": ("off", "exact", "auto"),
}

_SIZES = ("resolution", "sample_prompts")
_SIZE = re.compile(r"\d{2,5},\d{2,5}")

#: Names of GPUs and processors: no slashes, and no @ without spaces.
_NAME = re.compile(r"[\w ()@.,+-]{1,100}", re.ASCII)
_VERSION = re.compile(r"[\w.+!-]{1,40}", re.ASCII)
_DAY = re.compile(r"(\d{4}-\d\d-\d\d)?")

_NUMBERS = ("seconds", "spread", "reserved", "on_card")

_RUN = frozenset(field.name for field in fields(Tuned)) - {"config"} | {"settings"}


def document(
    gpu: Mapping[str, Any], machine: Mapping[str, Any], versions: Mapping[str, str], runs: Sequence[Tuned]
) -> dict[str, Any]:
    """Return the content of a file.

    ``gpu`` has name, memory (bytes), capability and driver, and ``machine`` what :func:`this_machine` returns.
    """
    return {
        "schema": SCHEMA,
        "gpu": dict(gpu),
        "machine": dict(machine),
        "versions": dict(versions),
        "runs": [run_of(each) for each in runs],
    }


def this_machine() -> dict[str, Any]:
    """Return system, processor, cores and host memory (bytes) of this machine."""
    import psutil  # accelerate needs it

    memory = int(psutil.virtual_memory().total)
    return {"system": platform.system(), "processor": processor(), "cores": os.cpu_count(), "memory": memory}


def run_of(run: Tuned) -> dict[str, Any]:
    """Return a run without what may be private."""
    row = {name: value for name, value in asdict(run).items() if name != "config"}
    failed = run.failed if run.failed in ("", OUT_OF_MEMORY) else OTHER
    return {**row, "features": list(run.features), "failed": failed, "settings": dict(_settings(run.config))}


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    known = {field.name for field in fields(MemoryConfig)} | {"speed"}
    for name, value in config.items():
        if name == "disabled":
            yield name, [patch for patch in value if patch in _patches()]
        elif name not in known or "learning_rate" in name or name.endswith("_lr"):
            continue
        elif name in _NAMES:
            yield name, value if _is_known(name, value) else OTHER
        elif isinstance(value, (bool, int, float)) or (name in _SIZES and _SIZE.fullmatch(str(value))):
            yield name, value


def _is_known(name: str, value: object) -> bool:
    text = str(value).lower() if name == "optimizer_type" else value
    return text in _NAMES[name]


def _patches() -> set[str]:
    return {"*", *(module.PATCH.name for module in patch_modules())}


def problems(document: Any) -> list[str]:
    """Return the problems of a file; empty if it can be published."""
    try:
        return list(_problems(document))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return [f"not a file of `tune --export`: {type(error).__name__}: {error}"]


def _problems(document: Any) -> Iterator[str]:
    if document["schema"] != SCHEMA:
        yield f"schema {document['schema']}, and this release knows {SCHEMA}"
        return
    yield from _unknown("the file", document, {"schema", "gpu", "machine", "versions", "runs"})
    yield from _unknown("gpu", document["gpu"], {"name", "memory", "capability", "driver"})
    yield from _unknown("machine", document["machine"], {"system", "processor", "cores", "memory"})
    for name in (document["gpu"]["name"], document["machine"]["system"], document["machine"]["processor"]):
        if not _NAME.fullmatch(name) or re.search(r"\S@\S", name):
            yield f"not a name of a GPU, a system or a processor: {name!r}"
    for version in (document["gpu"]["driver"], document["gpu"]["capability"], *document["versions"].values()):
        if version and not _VERSION.fullmatch(version):
            yield f"not a version: {version!r}"
    known = {*tuned.PACKAGES, "python"}
    yield from _unknown("versions", document["versions"], known)
    if not 1 <= document["gpu"]["memory"] / GB <= 1000:
        yield "gpu: memory is not in bytes"
    if not document["runs"]:
        yield "no runs"
    for number, run in enumerate(document["runs"], 1):
        yield from (f"run {number}: {problem}" for problem in _problems_of_run(run, document["gpu"]["memory"]))


def _problems_of_run(run: Mapping[str, Any], memory: int) -> Iterator[str]:
    yield from _unknown("it", run, _RUN)
    if missing := _RUN - run.keys():
        yield f"without {', '.join(sorted(missing))}"
        return
    yield from _problems_of_settings(run["settings"])
    if not _DAY.fullmatch(run["day"]):
        yield f"not a day: {run['day']!r}"
    if run["sd_scripts"] and not _VERSION.fullmatch(run["sd_scripts"]):
        yield f"not a release of sd-scripts: {run['sd_scripts']!r}"
    if not set(run["features"]) <= {switch.name for switch in switches.ALL}:
        yield "unknown features"
    if not all(isinstance(run[name], (int, float)) and run[name] >= 0 for name in _NUMBERS):
        yield "a number is negative or missing"
    elif run["failed"]:
        if run["failed"] not in (OUT_OF_MEMORY, OTHER):
            yield "a reason in own words"
    elif not (1e-4 < run["seconds"] < 1e4 and run["spread"] <= run["seconds"]):
        yield "seconds or spread are out of range"
    elif not (0 < run["reserved"] <= 2 * memory and run["reserved"] <= run["on_card"] <= 2 * memory):
        yield "memory is out of range"
    for name in ("difference", "waiting"):
        if run[name] is not None and not 0 <= run[name] <= 1:
            yield f"{name} is out of range"


def _problems_of_settings(settings: Mapping[str, Any]) -> Iterator[str]:
    if "script" not in settings:
        yield "settings without a script"
    allowed = dict(_settings(settings))
    for name, value in settings.items():
        if name not in allowed or (allowed[name] != value and value != OTHER):
            yield f"the setting {name} is unknown, or has a value of its own: {value!r}"


def _unknown(what: str, values: Mapping[str, Any], known: set[str] | frozenset[str]) -> Iterator[str]:
    if unknown := sorted(values.keys() - known):
        yield f"{what} has unknown keys: {', '.join(unknown)}"


def processor() -> str:
    """Return the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor()
    return re.sub(r"[^\w ()@.,+-]", " ", name, flags=re.ASCII)[:100].strip() or "unknown"
