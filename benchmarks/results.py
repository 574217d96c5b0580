"""What is written of a measurement, and what must be in it: the JSON in results/."""

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
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.ratios import pooled, quartiles, ratio
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
    """One way of doing the same work."""

    name: str
    meaning: str
    """In words, for a table's row."""
    arguments: list[str] = field(default_factory=list)
    """What tells it from the others, on the command line."""
    status: Status = "measured"
    reason: str = ""
    """Why it failed or was left out."""
    rounds: list[list[float]] = field(default_factory=list)
    """Seconds of each sample, by round; warm-up is not among them."""
    warm_up: dict[str, Any] = field(default_factory=dict)
    """Seconds of preparing and of the first steps, which compile; what is not in ``rounds``."""
    memory: dict[str, int] = field(default_factory=dict)
    """Peaks in bytes over the measured rounds: ``allocated``, ``reserved`` (CUDA), ``host_resident`` (the process)."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else was counted: graphs, breaks, patches that were applied."""
    files: list[str] = field(default_factory=list)


@dataclass
class Comparison:
    """Variants measured in the same rounds; the first is what the others are compared with."""

    title: str
    unit: str
    """What a sample is: seconds a step, seconds a start."""
    configuration: dict[str, Any]
    variants: list[Variant]
    flops: int | None = None
    """Of one step without recomputing anything; a multiply-add is two."""
    is_against_first: bool = True
    """False for rows that do different work, side by side."""

    def is_whole(self, rounds: int) -> bool:
        """Return whether every variant that could be measured has had all its rounds."""
        return all(len(variant.rounds) == rounds for variant in self.variants if variant.status == "measured")

    def summary(self) -> dict[str, Any]:
        """Medians, quartiles and ratios to the first variant."""
        rows: dict[str, Any] = {}
        baseline = self.variants[0]
        for variant in self.variants:
            samples = pooled(variant.rounds)
            if not samples:
                continue
            row: dict[str, Any] = {"median": median(samples), "quartiles": quartiles(samples), "samples": len(samples)}
            if self.is_against_first and variant is not baseline and baseline.rounds:
                row["ratio"] = asdict(ratio(baseline.rounds, variant.rounds))
            rows[variant.name] = row
        return rows


@dataclass
class Result:
    """One file in results/."""

    suite: str
    command: str
    """What makes it again, without the places of one machine's files."""
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    commits: dict[str, Any]
    reduced: bool
    """Small models and pictures: ratios say little of a card's."""
    note: str = ""
    """What a reader must know: a machine shared with others."""
    comparisons: list[Comparison] = field(default_factory=list)
    complete: bool = False
    """False while it is being measured, and for good when the time was up before all rounds were done."""
    schema: int = SCHEMA

    def write(self, file: Path) -> None:
        """Write it whole, with summaries, so that a run that is cut off loses one round."""
        document = asdict(self)
        for comparison, written in zip(self.comparisons, document["comparisons"], strict=True):
            written["summary"] = comparison.summary()
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(f".{os.getpid()}.tmp")
        beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        beside.replace(file)


def read(file: Path) -> Result:
    """Read a result back. Raises ValueError for a file that is none, or of another schema."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document.get("schema") != SCHEMA:
            raise ValueError(f"schema {document.get('schema')}, not {SCHEMA}")
        comparisons = []
        for row in document["comparisons"]:
            variants = [Variant(**variant) for variant in row["variants"]]
            rest = {one.name: row[one.name] for one in fields(Comparison) if one.name in row and one.name != "variants"}
            comparisons.append(Comparison(variants=variants, **rest))
        return Result(**{**document, "comparisons": comparisons})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is no result of these benchmarks: {error}") from None


def kept(folder: Path = FOLDER) -> list[Path]:
    """Return the results in a folder, which other benchmarks share."""
    return [file for file in sorted(folder.glob("*.json")) if '"suite":' in file.read_text(encoding="utf-8")[:100]]


def begin(suite: str, checkout: Checkout, device: Mapping[str, Any], reduced: bool, note: str = "") -> Result:
    """Return an empty result of this machine, now. ``device`` is what a worker says of the device."""
    command = shlex.join(["python", *without_places(_module_and_arguments())])
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
        versions={"python": platform.python_version(), **_versions()},
        commits={
            **kohya_ext_commit(),
            "sd_scripts": checkout.commit or PINNED.get(checkout.version or ""),
            "sd_scripts_version": checkout.version,
        },
        reduced=reduced,
        note=note,
    )


#: Of checkouts that travel without their history: see bundle.
PINNED = {"0.11.1": "6721028c79ee85a78b3a06dfd8954dae310a1cce", "0.10.1": "48d368fa557731ad0488c07304dfeba8c07910eb"}

#: Written into a bundle, which has no history either.
COMMIT_FILE = "COMMIT"


def kohya_ext_commit() -> dict[str, Any]:
    """Return our own commit, and whether the tree differs from it."""
    written = ROOT / COMMIT_FILE
    if written.is_file():
        commit, _, state = written.read_text(encoding="utf-8").strip().partition(" ")
        return {"kohya_ext": commit, "kohya_ext_changed": state == "changed"}
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


#: Options of ``benchmarks.run`` that say where things lie on one machine, and change nothing that is measured.
PLACES = ("--sd-scripts", "--scratch", "--output")


def without_places(words: Sequence[str]) -> list[str]:
    """Return a command line's words without :data:`PLACES` and their values."""
    kept: list[str] = []
    skip = False
    for word in words:
        if not skip and not word.startswith(tuple(f"{name}=" for name in PLACES)) and word not in PLACES:
            kept.append(word)
        skip = word in PLACES
    return kept


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
