"""Profile one step: its time by operator, and on a CPU its peak of allocated bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

#: Number of operators or kernels in a summary.
MOST = 15


def profile(take: Callable[[], float], alive: Iterable[Any], on_cuda: bool) -> dict[str, Any]:
    """Take a step and return a summary of its trace.

    ``take()`` runs the step and returns its seconds; ``alive`` are the tensors that exist before it. ``operators``: seconds and
    calls of the :data:`MOST` expensive (CUDA: kernels; CPU: operators, without those they call). ``device_seconds``, CUDA only:
    how long kernels ran; the GPU waited for Python during the rest of ``seconds``. ``allocated``, CPU only: the peak in bytes,
    including the workspaces of kernels.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, profile_memory=not on_cuda) as trace:
        seconds = take()
    kernels = (
        _kernels(trace) if on_cuda else {row.key: (row.self_cpu_time_total / 1e6, row.count) for row in trace.key_averages()}
    )
    most = Counter({name: spent for name, (spent, _) in kernels.items()}).most_common(MOST)
    summary: dict[str, Any] = {
        "seconds": seconds,
        "operators": {name: {"seconds": spent, "calls": kernels[name][1]} for name, spent in most},
        "calls": sum(calls for _, calls in kernels.values()),
    }
    if on_cuda:
        summary["device_seconds"] = sum(spent for spent, _ in kernels.values())
    else:
        summary["allocated"] = _bytes(alive) + peak_of(trace)
    return summary


def _kernels(trace: Any) -> dict[str, tuple[float, int]]:
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in trace.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.name() != "[memory]":
            spent[event.name()] += event.duration_ns() / 1e9
            calls[event.name()] += 1
    return {name: (spent[name], calls[name]) for name in spent}


def _bytes(tensors: Iterable[Any]) -> int:
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def peak_of(trace: Any) -> int:
    """Return the peak of bytes on the CPU that were allocated during a trace with ``profile_memory``."""
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most
