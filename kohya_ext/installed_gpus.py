"""The NVIDIA GPUs of this machine, from nvidia-smi, and the one that CUDA uses first. Importing torch would take seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from typing import NamedTuple

#: The lowest compute capability with bf16 products and bf16 attention: Ampere.
BF16 = 8.0

_FIELDS = ("uuid", "name", "memory.total", "compute_cap")


class InstalledGpu(NamedTuple):
    """A GPU, or a MIG device of one."""

    name: str
    """As the driver has it: ``NVIDIA GeForce RTX 3060``."""
    memory: int
    """Bytes."""
    capability: float | None = None
    """Compute capability; None if the driver is too old to tell."""
    uuid: str = ""

    @property
    def has_bf16(self) -> bool:
        """Whether it multiplies bf16 in hardware; True if that is not known."""
        return self.capability is None or self.capability >= BF16


def first_gpu() -> InstalledGpu | None:
    """Return the GPU that CUDA uses first; None without one.

    nvidia-smi lists GPUs by their slots, CUDA the fastest first. If they differ, or for a MIG device, CUDA is asked.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    order = os.environ.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    return None if visible in ("", "-1") else _first_gpu(visible, order, os.environ.get("PATH", ""))


def visible_gpus() -> int:
    """Return the number of visible NVIDIA GPUs of this machine, from nvidia-smi; 0 without it."""
    installed = (_output(["nvidia-smi", "--list-gpus"]) or "").count("GPU ")
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return installed
    return min(installed, len([device for device in chosen.split(",") if device.strip() not in ("", "-1")]))


def driver_version() -> str:
    """Return the version of the NVIDIA driver; empty if nvidia-smi does not tell."""
    lines = (_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or "").split()
    return lines[0] if lines else ""


@cache
def _first_gpu(visible: str, order: str, path: str) -> InstalledGpu | None:
    """Return the same for CUDA_VISIBLE_DEVICES' first entry, CUDA_DEVICE_ORDER and PATH, which decide it."""
    gpus = _installed()
    if visible.isdecimal():
        alike = len({gpu[:2] for gpu in gpus}) == 1
        if alike or order == "PCI_BUS_ID":
            return gpus[int(visible)] if int(visible) < len(gpus) else None
    elif named := [gpu for gpu in gpus if gpu.uuid.lower().startswith(visible.lower())]:
        return named[0]
    first = _asked_of_cuda() if gpus else None
    if first is None:
        return gpus[int(visible)] if visible.isdecimal() and int(visible) < len(gpus) else None
    # nvidia-smi's size is the advertised one, CUDA's without what the driver reserves. A MIG device is a part of its GPU.
    return next((gpu for gpu in gpus if gpu.uuid == first.uuid and first.memory > 0.9 * gpu.memory), first)


def _installed() -> list[InstalledGpu]:
    """Return the GPUs in nvidia-smi's order; empty without it."""
    for fields in (_FIELDS, _FIELDS[:3]):  # drivers before 510 do not know compute_cap
        output = _output(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
        if output is not None:
            rows = ([cell.strip() for cell in line.split(",")] for line in output.splitlines())
            return [_read(row) for row in rows if len(row) == len(fields) and row[2].isdecimal()]
    return []


def _read(row: list[str]) -> InstalledGpu:
    uuid, name, mebibytes, *capability = row
    return InstalledGpu(name, int(mebibytes) * 2**20, float(capability[0]) if capability else None, uuid)


#: Prints CUDA's first device. It runs in a process of its own, because a process that has called cuInit cannot fork.
_ASK_CUDA = """
import ctypes, sys
cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
def call(name, *arguments):
    if getattr(cuda, name)(*arguments):
        sys.exit(1)
device, name, size, major, minor, uuid = (
    ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t(), ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
)
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDeviceGetName", name, 256, device)
call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
call("cuDeviceGetUuid", uuid, device)
call("cuDeviceGetAttribute", ctypes.byref(major), 75, device)
call("cuDeviceGetAttribute", ctypes.byref(minor), 76, device)
print(bytes(uuid).hex(), name.value.decode(), size.value, f"{major.value}.{minor.value}", sep="\\n")
"""


def _asked_of_cuda() -> InstalledGpu | None:
    """Return CUDA's first device; None if CUDA cannot be asked."""
    lines = (_output([sys.executable, "-I", "-S", "-c", _ASK_CUDA]) or "").splitlines()
    if len(lines) != 4:
        return None
    digits, name, size, capability = lines
    parts = (digits[start:end] for start, end in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))
    return InstalledGpu(name, int(size), float(capability), f"GPU-{'-'.join(parts)}")


def _output(command: list[str]) -> str | None:
    """Return a command's standard output; None if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
