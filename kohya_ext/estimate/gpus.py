"""The rates of GPUs by name: from cards.tsv, or measured by `calibrate`. Nothing here imports torch.

Rates of cards.tsv are those of the data sheets: products of 16-bit, 8-bit and fp32 numbers without sparsity and with sums in
fp32, in TFLOP/s, memory and bus in GB/s, the L2 cache in MB. ``checked`` is ``yes`` if a public source was read for the row,
``in part``, ``no``, or ``disputed`` where sources differ; ``source`` names it.
"""

from __future__ import annotations

import csv
import functools
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

from packaging.version import Version

from kohya_ext.errors import UserError
from kohya_ext.units import GIB

TABLE = "cards.tsv"

LINUX, WINDOWS, COLAB = "linux", "windows", "colab"

#: Kind of computer -> seconds of a launch relative to a common one under Linux. That of Windows is an assumption, and Google
#: Colab's, with its slow processors, is fitted (benchmarks/step_seconds.py).
HOSTS = {LINUX: 1.0, WINDOWS: 1.2, COLAB: 2.0}

#: Kinds of matrix products, by the type of their operands: bf16 and fp16 have one rate.
SIXTEEN_BITS, FP32, FP8, INT8 = "16 bits", "fp32", "fp8", "int8"


@dataclass(frozen=True)
class Gpu:
    """A GPU's rates, and its host's."""

    name: str
    rates: Mapping[str, float]
    """Kind of product -> FLOPs or operations per second, for the kinds that it has."""
    bandwidth: float
    """Bytes per second of its memory, read and written."""
    cache: float
    """Bytes of its L2 cache."""
    bus: float
    """Bytes per second between host and GPU, in one direction."""
    memory: int
    """Bytes of its memory, as advertised: GiB."""
    architecture: str
    checked: str
    host: str = LINUX
    """The kind of its computer."""
    launch: float = 1.0
    """Seconds of a launch relative to a common computer under Linux."""
    measured: bool = False
    """Whether `calibrate` measured it."""

    @property
    def is_geforce(self) -> bool:
        """Whether it is a GeForce: RTX and four digits."""
        return re.search(r"\brtx \d{4}\b", self.name.lower()) is not None and "ada" not in self.name.lower()

    @property
    def has_bf16(self) -> bool:
        """Whether it multiplies bf16 in hardware, as Ampere and later ones do."""
        return self.architecture not in ("Turing", "7.5", "7.0")

    @property
    def multiplies_fp8_with_triton(self) -> bool:
        """Whether torch has no fp8 products with a scale for each row on it, so that an fp8 base runs Triton's."""
        return self.host == WINDOWS or (self.architecture in ("Ada", "8.9") and _is_older_than_2_7())

    def reason_without_kernels(self, precision: str | None) -> str | None:
        """Return why a run with this ``--base_precision`` does not multiply in 8 bits on it; None if it does, or without it."""
        if precision == "int8" and (self.architecture == "Turing" or re.match(r"[5-7]\.", self.architecture)):
            return f"The {self.name} has no kernels for an int8 base: a run saves memory, and its seconds are not predicted."
        if precision == "fp8" and FP8 not in self.rates:
            return f"The {self.name} has no fp8 products: --base_precision fp8 ends with an error. Use int8."
        return None


@functools.cache
def _is_older_than_2_7() -> bool:
    """Return whether the installed torch is older than 2.7, the first with these products for compute capability 8.9."""
    try:
        return Version(version("torch")) < Version("2.7")
    except PackageNotFoundError:
        return False


def this_host() -> str:
    """Return the kind of this computer."""
    if sys.platform == "win32":
        return WINDOWS
    return COLAB if "COLAB_RELEASE_TAG" in os.environ else LINUX


def on(host: str, gpu: Gpu) -> Gpu:
    """Return a GPU in another kind of computer."""
    return replace(gpu, host=host, launch=HOSTS[host])


@functools.cache
def cards() -> tuple[Gpu, ...]:
    """Return the GPUs of cards.tsv."""
    text = (files("kohya_ext.estimate") / TABLE).read_text(encoding="utf-8")
    return tuple(_read(row) for row in csv.DictReader(text.splitlines(), delimiter="\t"))


def _read(row: Mapping[str, str]) -> Gpu:
    rates = {
        kind: 1e12 * float(row[column])
        for kind, column in ((SIXTEEN_BITS, "tensor_16_bits"), (FP32, "fp32"), (FP8, "fp8"), (INT8, "int8"))
        if row[column]
    }
    gpu = Gpu(
        name=row["card"],
        rates=rates,
        bandwidth=1e9 * float(row["bandwidth"]),
        cache=1e6 * float(row["l2_mb"]),
        bus=1e9 * float(row["bus"]),
        memory=round(float(row["memory_gb"]) * GIB),
        architecture=row["arch"],
        checked=row["checked"],
    )
    return on(this_host(), gpu)


def find(name: str, memory: int | None = None) -> Gpu | None:
    """Return the GPU of cards.tsv with a name, as the shop or the driver has it; None for an unknown name.

    A size in the name (``RTX 3080 12GB``) or ``memory`` bytes choose between cards of one name, and otherwise the first is
    returned.
    """
    words, size = _words(name)
    alike = [card for card in cards() if _words(card.name)[0] == words]
    size = size or memory
    return min(alike, key=lambda card: abs(card.memory - size) if size else 0, default=None)


def named(name: str) -> Gpu:
    """Return the GPU with a name. Raises UserError with similar names for an unknown one."""
    card = find(name)
    if card is not None:
        return card
    words = _words(name)[0]
    similar = [card.name for card in cards() if words & _words(card.name)[0] - {"rtx"}]
    hint = f"similar: {', '.join(dict.fromkeys(similar))}" if similar else 'give a name such as "RTX 4070"'
    raise UserError(f"no rates are known for a GPU named {name!r}; {hint}")


#: GPUs of common sizes, for a run whose GPU is only known by its size.
_TYPICAL = (
    "RTX 2060 6GB",
    "RTX 4060 8GB",
    "RTX 3080 10GB",
    "RTX 3060 12GB",
    "RTX 4080 16GB",
    "RTX 4090 24GB",
    "RTX 5090 32GB",
    "RTX A6000",
    "H100",
)


def typical(memory: int) -> Gpu:
    """Return a common GPU with about ``memory`` bytes."""
    return min((named(name) for name in _TYPICAL), key=lambda card: abs(card.memory - memory))


#: Words of a driver's name that cards.tsv leaves out or names otherwise.
_DROPPED = {"nvidia", "geforce", "graphics", "card", "gpu", "generation", "workstation", "edition", "server"}
_SAME = {"hbm3": "sxm", "sxm4": "sxm", "sxm5": "sxm", "hbm3e": "sxm"}


@functools.cache
def _words(name: str) -> tuple[frozenset[str], int | None]:
    """Return the words that identify a GPU, and the bytes that its name has; ``RTX4070ti`` has the words of ``RTX 4070 Ti``."""
    text = re.sub(r"(\d)(ti|super)\b", r"\1 \2", re.sub(r"\b(rtx|gtx)(\d)", r"\1 \2", name.lower().replace("-", " ")))
    size = re.search(r"\b(\d+)\s*gi?b\b", text)
    text = re.sub(r"\b\d+\s*gi?b\b", "", text)
    words = {_SAME.get(word, word) for word in text.split()} - _DROPPED
    if "t4" in words:
        words.add("tesla")
    if words & {"h100", "h200", "a100", "b200"} and not words & {"sxm", "pcie"}:
        words.add("sxm")
    if words and not words & {"rtx", "gtx", "tesla", "titan"} and re.fullmatch(r"\d{4}", sorted(words)[0]):
        words.add("rtx")
    return frozenset(words), int(size.group(1)) * GIB if size else None
