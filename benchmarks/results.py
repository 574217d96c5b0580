"""The JSON files in results/: their fields, reading and writing."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.ratios import pooled, quartiles, ratio
from kohya_ext.estimate import cache
from kohya_ext.sdscripts.checkouts import Checkout

SCHEMA = 1
ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).parent / "results"

PACKAGES = (
    "accelerate", "bitsandbytes", "diffusers", "numpy", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "safetensors", "tensorboard",
    "torch", "transformers", "triton", "wrapt", "xformers",
)  # fmt: skip

Status = Literal["measured", "failed", "left out"]


@dataclass
class Variant:
    """One way to do the same work."""

    name: str
    meaning: str
    """Description for a row of a table."""
    arguments: list[str] = field(default_factory=list)
    """The arguments that differ from the other variants."""
    status: Status = "measured"
    reason: str = ""
    """Why it failed or was left out."""
    rounds: list[list[float]] = field(default_factory=list)
    """Seconds of each sample, by round, without warm-up."""
    warm_up: dict[str, Any] = field(default_factory=dict)
    """Seconds of the preparation and of the first steps, which compile; not in ``rounds``."""
    memory: dict[str, int] = field(default_factory=dict)
    """Peaks in bytes over the measured rounds: ``allocated``, ``reserved`` (CUDA), ``host_resident`` (the process)."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Other counts: graphs, graph breaks, applied patches."""
    files: list[str] = field(default_factory=list)


@dataclass
class Comparison:
    """Variants measured in the same rounds; the first is the baseline."""

    title: str
    unit: str
    """The unit of a sample: seconds a step, seconds a start."""
    configuration: dict[str, Any]
    variants: list[Variant]
    flops: int | None = None
    """FLOPs of one step without recomputation; a multiply-add counts as two."""

    def is_whole(self, rounds: int) -> bool:
        """Return whether every variant that ran has all its rounds."""
        return all(len(variant.rounds) == rounds for variant in self.variants if variant.status == "measured")

    def summary(self) -> dict[str, Any]:
        """Return medians, quartiles and ratios to the first variant."""
        rows: dict[str, Any] = {}
        baseline = self.variants[0]
        for variant in self.variants:
            samples = pooled(variant.rounds)
            if not samples:
                continue
            row: dict[str, Any] = {"median": median(samples), "quartiles": quartiles(samples), "samples": len(samples)}
            if variant is not baseline and baseline.rounds:
                row["ratio"] = asdict(ratio(baseline.rounds, variant.rounds))
            rows[variant.name] = row
        return rows


@dataclass
class Result:
    """One file in results/."""

    suite: str
    command: str
    """The command that repeats it, without the paths of one machine."""
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    commits: dict[str, Any]
    reduced: bool
    """Small models and images; their ratios do not predict those of a GPU."""
    note: str = ""
    """A remark for readers, for example that the machine was shared."""
    comparisons: list[Comparison] = field(default_factory=list)
    complete: bool = False
    """False during the measurement, or if time ran out before all rounds were done."""
    schema: int = SCHEMA

    def write(self, file: Path) -> None:
        """Write the file atomically, with summaries, so that an interrupted run loses one round at most."""
        document = asdict(self)
        for comparison, written in zip(self.comparisons, document["comparisons"], strict=True):
            written["summary"] = comparison.summary()
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        temporary.replace(file)


def read(file: Path) -> Result:
    """Read a result. Raises ValueError for any other file and for another schema."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document.get("schema") != SCHEMA:
            raise ValueError(f"schema {document.get('schema')}, not {SCHEMA}")
        comparisons = []
        for row in document["comparisons"]:
            variants = [Variant(**variant) for variant in row["variants"]]
            rest = {item.name: row[item.name] for item in fields(Comparison) if item.name in row and item.name != "variants"}
            comparisons.append(Comparison(variants=variants, **rest))
        return Result(**{**document, "comparisons": comparisons})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not a result of these benchmarks: {error}") from None


def kept(folder: Path = FOLDER) -> list[Path]:
    """Return the result files in a folder; other JSON files may be there too."""
    return [file for file in sorted(folder.glob("*.json")) if '"suite":' in file.read_text(encoding="utf-8")[:100]]


def begin(suite: str, checkout: Checkout, device: Mapping[str, Any], reduced: bool, note: str = "") -> Result:
    """Return an empty result for this machine. ``device`` is a worker's description of the device."""
    command = shlex.join(["python", *without_paths(_module_and_arguments())])
    packages = {package: version for package in PACKAGES if (version := cache.version(package)) is not None}
    return Result(
        suite=suite,
        command=command,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine={
            "system": platform.platform(terse=True),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
            "load_at_start": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
            **device,
        },
        versions={"python": platform.python_version(), **packages},
        commits={**kohya_ext_commit(), "sd_scripts": checkout.commit, "sd_scripts_version": checkout.version},
        reduced=reduced,
        note=note,
    )


def kohya_ext_commit() -> dict[str, Any]:
    """Return the extension's commit, and whether the working tree differs from it."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"))
    except (OSError, subprocess.CalledProcessError):
        return {"kohya_ext": None, "kohya_ext_changed": None}
    return {"kohya_ext": head, "kohya_ext_changed": changed}


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _module_and_arguments() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["-m", spec.name, *sys.argv[1:]] if spec is not None else [*map(str, sys.argv)]


#: Options of ``benchmarks.run`` that hold paths of one machine and do not change the measurement.
PATHS = ("--sd-scripts", "--scratch", "--output")


def without_paths(words: Sequence[str]) -> list[str]:
    """Return a command line's words without :data:`PATHS` and their values."""
    kept: list[str] = []
    skip = False
    for word in words:
        if not skip and not word.startswith(tuple(f"{name}=" for name in PATHS)) and word not in PATHS:
            kept.append(word)
        skip = word in PATHS
    return kept


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
