"""Read the state of NVIDIA GPUs through NVML: utilization, memory, temperature, power, throttling and processes.

The viewer samples it, so that runs are not slowed down. The package nvidia-ml-py is optional.
See https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_REASONS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x10: "slower GPU of a group",
    0x20: "temperature",
    0x40: "temperature (hardware)",
    0x80: "power supply",
}
"""Bits of nvmlDeviceGetCurrentClocksThrottleReasons that slow a GPU under load."""


@dataclass(frozen=True)
class GpuProcess:
    """Another process that uses a GPU."""

    pid: int
    name: str
    memory: int
    """Bytes."""


@dataclass(frozen=True)
class GpuStatus:
    """The current state of a GPU. None for values that the driver does not report."""

    name: str
    utilization: float | None = None
    """Share of the last sampling period in which a kernel ran, from 0 to 1."""
    memory_used: int | None = None
    """Bytes, of all processes and the driver."""
    memory_total: int | None = None
    temperature: int | None = None
    """Degrees Celsius."""
    power: float | None = None
    """Watts."""
    power_limit: float | None = None
    throttling: tuple[str, ...] = ()
    """Why the clocks are lower than possible."""
    others: tuple[GpuProcess, ...] = ()
    """Other processes than the run's, the largest first."""

    @property
    def others_memory(self) -> int:
        """Bytes of all other processes."""
        return sum(process.memory for process in self.others)


@dataclass
class Gpus:
    """The GPUs of this machine."""

    library: Any
    """The module ``pynvml``, initialized."""
    _handles: dict[str, Any] = field(default_factory=dict)
    """Run -> its GPU."""

    def status(self, start: Mapping[str, Any]) -> GpuStatus | None:
        """Return the state of the GPU of the run with this ``start`` line; None for another machine's or an unknown GPU."""
        if start.get("host") != socket.gethostname() or not start.get("gpu"):
            return None
        pid, run = int(start.get("pid") or 0), f"{start.get('run')} {start.get('pid')}"
        if (handle := self._handles.get(run)) is None:
            handle = self._handle(start["gpu"], pid)
            if handle is None:
                return None
            self._handles[run] = handle
        get = self._get
        memory, utilization = get("nvmlDeviceGetMemoryInfo", handle), get("nvmlDeviceGetUtilizationRates", handle)
        power, limit = get("nvmlDeviceGetPowerUsage", handle), get("nvmlDeviceGetEnforcedPowerLimit", handle)
        reasons = get("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        return GpuStatus(
            name=_text(get("nvmlDeviceGetName", handle) or start["gpu"].get("name") or "GPU"),
            utilization=None if utilization is None else utilization.gpu / 100,
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            temperature=get("nvmlDeviceGetTemperature", handle, self.library.NVML_TEMPERATURE_GPU),
            power=None if power is None else power / 1000,
            power_limit=None if limit is None else limit / 1000,
            throttling=tuple(name for bit, name in _REASONS.items() if reasons & bit),
            others=tuple(sorted(self._others(handle, pid), key=lambda process: process.memory, reverse=True)),
        )

    def _get(self, function: str, *arguments: Any) -> Any:
        """Call a function of the library; return None if the driver does not support it."""
        call: Callable[..., Any] | None = getattr(self.library, function, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except self.library.NVMLError:
            return None

    def _handle(self, gpu: Mapping[str, Any], pid: int) -> Any:
        """Return the GPU with the uuid of the journal, or that the process uses, or the only one with its name."""
        handles = [self._get("nvmlDeviceGetHandleByIndex", index) for index in range(self._get("nvmlDeviceGetCount") or 0)]
        available = [handle for handle in handles if handle is not None]
        if gpu.get("uuid"):
            for handle in available:
                if _text(self._get("nvmlDeviceGetUUID", handle) or "").removeprefix("GPU-") == gpu["uuid"]:
                    return handle
        for handle in available:
            if any(process.pid == pid for process in self._processes(handle)):
                return handle
        named = [handle for handle in available if _text(self._get("nvmlDeviceGetName", handle) or "") == gpu.get("name")]
        return named[0] if len(named) == 1 else None

    def _processes(self, handle: Any) -> Iterator[Any]:
        for kind in ("Compute", "Graphics"):
            yield from self._get(f"nvmlDeviceGet{kind}RunningProcesses", handle) or ()

    def _others(self, handle: Any, pid: int) -> Iterator[GpuProcess]:
        others = {process.pid: process.usedGpuMemory or 0 for process in self._processes(handle) if process.pid != pid}
        for other, memory in others.items():
            yield GpuProcess(other, _process_name(other), int(memory))


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _process_name(pid: int) -> str:
    try:
        import psutil
    except ImportError:
        return f"process {pid}"
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return f"process {pid}"


def connect() -> Gpus | None:
    """Return the GPUs of this machine; None without nvidia-ml-py or an NVIDIA driver."""
    with contextlib.suppress(Exception):  # the driver and the package may not match
        import pynvml

        pynvml.nvmlInit()
        return Gpus(pynvml)
    return None
