"""Summarize the events of a profiler: where the time of a training step goes, and which option shortens it.

This module computes; patches/profile_steps.py records. It does not import torch. Times of events are in nanoseconds on one
clock. A summary has seconds per optimizer step.
"""

from __future__ import annotations

import bisect
import itertools
import re
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from kohya_ext.compiling.support import reason_not_to_compile, reason_not_to_record
from kohya_ext.sdscripts.constraints import PRESERVATION
from kohya_ext.units import format_size

Kind = Literal[
    "matmul", "attention", "convolution", "elementwise", "reduction", "copy", "optimizer", "other", "transfer", "communication"
]
"""What a kernel does: arithmetic, memory traffic within the GPU, and copies to and from it."""

ARITHMETIC: tuple[Kind, ...] = ("matmul", "attention", "convolution")
MEMORY_TRAFFIC: tuple[Kind, ...] = ("elementwise", "reduction", "copy", "optimizer", "other")

Limit = Literal["arithmetic", "memory traffic", "transfers", "communication", "host", "data", "saving"]

PART, STEP, DATA, SAVING = "kohya_ext: ", "step ", "wait for data", "save and sample"
"""Names of ranges that the recorder adds. The first two precede the name of a part of the model and the number of a step."""

NO_KERNELS = "no kernel times, because CUPTI is not available on this GPU (a virtual one, or without permission)"

PYTHON = "(Python outside operators)"
"""The row of operators for the time of steps outside operators."""

_KERNELS: tuple[tuple[Kind, str], ...] = (
    ("communication", r"nccl|rccl"),
    ("transfer", r"memcpy \w*(htod|dtoh|ptop|host)"),
    ("copy", r"^mem(cpy|set)"),
    # Inductor's names contain the operations that it has fused, also those of the neighbouring library calls.
    ("attention", r"^triton_tem_.*attention"),
    ("matmul", r"^triton_tem_|^triton_mm"),
    ("reduction", r"^triton_(red|per)_"),
    ("optimizer", r"^triton_for_"),
    ("elementwise", r"^triton_poi_"),
    ("optimizer", r"adam|koptimizer|kpreconditionoptimizer|adafactor|prodigy|lion"),
    ("attention", r"flash|fmha|attention|attn|sdpa|mem_eff"),
    ("copy", r"nchwtonhwc|nhwctonchw|transpose|im2col|col2im"),
    ("convolution", r"conv|wgrad|dgrad|fprop|winograd"),
    ("matmul", r"gemm|gemv|gett|nvjet|cutlass|matmul|xmma|splitk|dot_kernel|cublas|mma_|s16816"),
    ("reduction", r"reduce|norm|softmax|welford|moments|cunn_|cub::"),
    ("copy", r"copy|catarray|_cast|index|gather|scatter|fillfunctor|dequantize|quantize"),
    ("elementwise", r"elementwise|pointwise|vectorized|multi_tensor|gelu|silu|dropout|triton|distribution"),
)
_OPERATORS: tuple[tuple[Kind, str], ...] = (
    ("communication", r"^(c10d|nccl)"),
    ("attention", r"attention"),
    ("convolution", r"conv"),
    ("matmul", r"::_?(mm|addmm|bmm|baddbmm|linear|matmul|mkldnn_linear|dot|mv|addmv|einsum)(_out)?$"),
    ("optimizer", r"_foreach|_fused_adam|^Optimizer\.step|addcdiv|addcmul"),
    ("reduction", r"norm|softmax|::(sum|mean|var|std|max|min|all|any|isfinite)"),
    ("copy", r"copy|clone|contiguous|::_?to\b|cat$|stack|index|gather|scatter|fill_|zero_|pad|select"),
)
_KERNELS_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _KERNELS)
_OPERATORS_COMPILED = tuple((kind, re.compile(pattern)) for kind, pattern in _OPERATORS)

_WAITS = re.compile(r"^(cu|cuda|hip)(Stream|Device|Event|Ctx)Synchronize|^(cuda|hip)Memcpy$")
"""Functions of the CUDA API in which the host waits for the GPU."""

_LAUNCHES = re.compile(r"^(cu|cuda|hip)(Graph)?(Launch|ExtModuleLaunch|ModuleLaunch)")
_API = re.compile(r"^(cu|cuda|hip)[A-Z]")
_OVERHEAD = re.compile(
    r"^(Activity Buffer|Buffer Flush|Instrumentation|Resource|Lazy Function|Runtime Triggered|Overhead|CUPTI)", re.I
)

_NAMESPACES = re.compile(r"^void |\bat::native::|\bc10::|\(anonymous namespace\)::")

_OPTIMIZER_STEP = "Optimizer.step#"
"""Start of the name of the range that PyTorch records around an optimizer's step."""

_CHECKPOINT = "CheckpointFunctionBackward"
"""The autograd node that recomputes a checkpointed block and runs its backward pass."""

_NOTABLE = 0.15
"""Smallest share of the time for which options are named."""

_POINTS = 200
"""Number of points of the memory's timeline."""


def kind_of_kernel(name: str) -> Kind:
    """Return what a CUDA kernel, copy or fill does, from its name."""
    return next((kind for kind, pattern in _KERNELS_COMPILED if pattern.search(name)), "other")


def kind_of_operator(name: str) -> Kind:
    """Return what an operator computes on the CPU, from its name."""
    return next((kind for kind, pattern in _OPERATORS_COMPILED if pattern.search(name)), "elementwise")


def is_api(name: str) -> bool:
    """Return whether a host event is a call of the CUDA API."""
    return _API.match(name) is not None


def is_overhead(name: str) -> bool:
    """Return whether a host event is the profiler's own work."""
    return _OVERHEAD.match(name) is not None


class HostEvent(NamedTuple):
    """An operator, a range or a call of the CUDA API on a host thread."""

    begin: int
    end: int
    name: str
    thread: int
    id: int = 0
    """Identifies an operator; 0 for calls of the CUDA API."""
    sequence: int = -1
    """The number of the autograd node that a forward operator creates or a backward operator runs; -1 without one."""
    forward_thread: int = 0
    """The thread that created the autograd node which a backward operator runs; 0 in other operators."""


class DeviceEvent(NamedTuple):
    """A kernel or copy on the GPU."""

    begin: int
    end: int
    name: str
    operator: int = 0
    """:attr:`HostEvent.id` of the operator that launched it; 0 if it is not known."""


@dataclass
class Row:
    """A row of a table, per optimizer step."""

    name: str
    device: float = 0.0
    """Seconds on the GPU."""
    host: float = 0.0
    """Seconds on the host, without other rows' events inside."""
    count: float = 0.0
    kind: str = ""


@dataclass
class Summary:
    """Where the time of the profiled steps goes."""

    steps: int
    wall: float
    """Seconds per step, without the profiler's own time if :attr:`usual` is known."""
    device: Literal["cuda", "cpu"]
    profiled: float
    """Seconds per step with the profiler."""
    usual: float | None = None
    """Seconds per step before the profile."""
    busy: float | None = None
    """Share of the time in which the GPU works, or the CPU in operators; None without kernel times."""
    shares: dict[Limit, float] = field(default_factory=dict)
    """Share of the time by what limits it; the sum is 1. Empty without kernel times."""
    kinds: dict[Kind, float] = field(default_factory=dict)
    """Share of the time by kind of kernel."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of kernels in ``forward``, ``recompute``, ``backward``."""
    launches: float = 0.0
    """Number of kernel launches per step."""
    waiting: float = 0.0
    """Seconds per step in which the host waits for the GPU."""
    blocks: list[Row] = field(default_factory=list)
    operators: list[Row] = field(default_factory=list)
    kernels: list[Row] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the start, bytes of tensors): the largest value of each interval."""
    peak: int = 0
    """Largest number of bytes of tensors."""
    peak_in: str = ""
    """Part of the model at the peak."""

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON data, with the 20 largest rows of each table."""
        data = asdict(self)
        for table in ("blocks", "operators", "kernels"):
            data[table] = [_rounded(row) for row in data[table][:20]]
        for name in ("shares", "kinds", "phases"):
            data[name] = {key: round(value, 4) for key, value in data[name].items()}
        return data


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 7) if isinstance(value, float) else value for key, value in row.items()}


# --- intervals -------------------------------------------------------------------------------------------------------

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return sorted intervals that do not touch and cover the same time."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        elif end > begin:
            merged.append((begin, end))
    return merged


def total(intervals: Sequence[Interval]) -> int:
    """Return the length of intervals that do not overlap."""
    return sum(end - begin for begin, end in intervals)


def clipped(intervals: Iterable[Interval], window: Interval) -> Iterator[Interval]:
    """Yield the parts of intervals within a window."""
    for begin, end in intervals:
        begin, end = max(begin, window[0]), min(end, window[1])
        if begin < end:
            yield begin, end


def common(first: Sequence[Interval], second: Sequence[Interval]) -> int:
    """Return the length of the time that two unions of intervals share."""
    return total(first) + total(second) - total(union([*first, *second]))


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass
class _Open:
    """A host event that has not ended yet."""

    event: HostEvent
    part: str
    phase: str
    inner: int = 0
    """Nanoseconds of the events inside it."""


@dataclass
class _Walk:
    """Assigns host events to parts of the model, in the order of their starts."""

    wanted: frozenset[int]
    """Operators that have launched kernels."""
    launched_by: dict[int, tuple[str, str, str]] = field(default_factory=dict)
    """Operator -> (its name, part, phase)."""
    parts: defaultdict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    """(part, phase) -> nanoseconds on the host, number of passes."""
    operators: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    """Name -> nanoseconds on the host, calls."""
    times: list[int] = field(default_factory=list)
    """Times at which the part changes, for the memory's timeline."""
    names: list[str] = field(default_factory=list)
    """The part from each of these times on."""
    main_thread: int = 0
    """The thread of the steps."""
    others: list[Interval] = field(default_factory=list)
    """Times in which other threads run the backward pass."""
    _stacks: dict[int, list[_Open]] = field(default_factory=dict)
    _forward: dict[tuple[int, int], str] = field(default_factory=dict)
    """(thread, number of the autograd node) -> the part that created it."""

    def add(self, event: HostEvent) -> None:
        stack = self._stacks.setdefault(event.thread, [])
        while stack and stack[-1].event.end <= event.begin:
            self._close(stack)
        part, phase = (stack[-1].part, stack[-1].phase) if stack else ("", "")
        name = event.name
        if name.startswith(STEP):
            self.main_thread = event.thread
        elif not stack and event.id and event.thread != self.main_thread:
            self.others.append((event.begin, event.end))
        if event.forward_thread > 0 and event.sequence >= 0 and name != _CHECKPOINT:
            part = self._forward.get((event.forward_thread, event.sequence), part)
            phase = "backward"
        elif name == _CHECKPOINT:
            phase = "recompute"
        elif name.startswith(PART):
            part = name[len(PART) :]
            phase = "recompute" if phase in ("backward", "recompute") else "forward"
            self.parts[part, phase][1] += 1
        elif name.startswith(_OPTIMIZER_STEP):
            part, phase = "optimizer", ""
            self.parts[part, phase][1] += 1
        if event.sequence >= 0 and event.forward_thread == 0:
            self._forward[event.thread, event.sequence] = part
            if phase == "backward":  # only recomputation creates autograd nodes there
                phase = "recompute"
        if event.id in self.wanted:
            self.launched_by[event.id] = (name, part, phase)
        if part and (not self.names or self.names[-1] != _label(part, phase)):
            self.times.append(event.begin)
            self.names.append(_label(part, phase))
        stack.append(_Open(event, part, phase))

    def finish(self) -> None:
        """Close all events. Steps wait for the backward pass in other threads, which is not Python's time."""
        for stack in self._stacks.values():
            while stack:
                self._close(stack)
        if self.main_thread:
            waiting = total(union(self.others))
            for row in (self.parts["", ""], self.operators[PYTHON]):
                row[0] = max(row[0] - waiting, 0)

    def _close(self, stack: list[_Open]) -> None:
        closed = stack.pop()
        event = closed.event
        duration = event.end - event.begin
        own = max(duration - closed.inner, 0)
        if stack:
            stack[-1].inner += duration
        self.parts[closed.part, closed.phase][0] += own
        if not event.name.startswith(PART):
            row = self.operators[PYTHON if event.name.startswith(STEP) else event.name]
            row[0] += own
            row[1] += 1


def _short(kernel: str) -> str:
    """Return a kernel's name without the namespaces that most names have."""
    return _NAMESPACES.sub("", kernel)[:100]


def _label(part: str, phase: str) -> str:
    return " ".join(filter(None, (part or "other", phase)))


def summarize(
    host: Sequence[HostEvent],
    device: Sequence[DeviceEvent],
    window: Interval,
    steps: int,
    kind: Literal["cuda", "cpu"],
    memory: Iterable[tuple[int, int]] = (),
    allocated: int = 0,
    usual: float | None = None,
) -> Summary:
    """Return where the time of ``steps`` optimizer steps within a window goes.

    ``memory``: (time, bytes allocated or freed) of tensors, of which ``allocated`` bytes existed at the start. ``usual``:
    seconds per step without the profiler, whose own time on the host is subtracted.
    """
    walk = _Walk(frozenset(event.operator for event in device) - {0})
    waits: list[Interval] = []
    data: list[Interval] = []
    saving: list[Interval] = []
    launches = 0
    for event in sorted(host, key=lambda event: (event.begin, -event.end)):
        if event.name == DATA:
            data.append(event[:2])
        elif event.name == SAVING:
            saving.append(event[:2])
        elif event.id == 0 and is_api(event.name):
            if _WAITS.match(event.name):
                waits.append(event[:2])
            launches += bool(_LAUNCHES.match(event.name))
        walk.add(event)
    walk.finish()
    per_step = 1e-9 / steps
    wall = window[1] - window[0]
    seconds = wall * per_step
    summary = Summary(steps, seconds, kind, seconds, usual, launches=launches / steps, waiting=total(union(waits)) * per_step)
    _add_tables(summary, walk, device, per_step)
    _add_memory(summary, walk, sorted(memory), window, allocated)
    if kind == "cuda" and device:
        busy = _add_gpu_shares(summary, device, window)
    elif kind == "cpu":
        busy = _add_cpu_shares(summary, walk, host, window)
    else:
        return summary
    idle_data, idle_saving = (
        (total(ranges) - common(ranges, busy)) / wall
        for ranges in (union(clipped(intervals, window)) for intervals in (data, saving))
    )
    summary.busy = total(busy) / wall
    summary.shares["data"], summary.shares["saving"] = idle_data, idle_saving
    summary.shares["host"] = max(1 - sum(summary.shares.values()), 0.0)
    if usual is not None:
        _subtract_profiler(summary, usual)
    return summary


def _subtract_profiler(summary: Summary, usual: float) -> None:
    """Subtract the profiler's own time, which it takes on the host, as far as the host was the limit."""
    own = min(max(summary.wall - usual, 0.0), summary.shares["host"] * summary.wall)
    scale = summary.wall / (summary.wall - own)
    summary.wall -= own
    summary.shares["host"] = max(1 - scale * (1 - summary.shares["host"]), 0.0)
    for limit in summary.shares.keys() - {"host"}:
        summary.shares[limit] *= scale
    summary.kinds = {kind: share * scale for kind, share in summary.kinds.items()}
    if summary.busy is not None:
        summary.busy = min(summary.busy * scale, 1.0)


def _add_gpu_shares(summary: Summary, device: Sequence[DeviceEvent], window: Interval) -> list[Interval]:
    """Add shares by kind of kernel; return the union of all kernels' intervals."""
    kinds = {name: kind_of_kernel(name) for name in {event.name for event in device}}
    by_kind: defaultdict[Kind, list[Interval]] = defaultdict(list)
    for event in device:
        by_kind[kinds[event.name]].append(event[:2])
    wall = window[1] - window[0]
    computing = union(clipped(_intervals(by_kind, *ARITHMETIC, *MEMORY_TRAFFIC), window))
    seconds = {
        kind: sum(end - begin for begin, end in clipped(by_kind.get(kind, ()), window))
        for kind in (*ARITHMETIC, *MEMORY_TRAFFIC)
    }
    # Kernels on several streams overlap; the time is divided between them.
    scale = total(computing) / max(sum(seconds.values()), 1) / wall
    summary.kinds = {kind: value * scale for kind, value in seconds.items() if value}
    with_transfers = union([*computing, *clipped(by_kind.get("transfer", ()), window)])
    busy = union([*with_transfers, *clipped(by_kind.get("communication", ()), window)])
    summary.shares["transfers"] = summary.kinds["transfer"] = (total(with_transfers) - total(computing)) / wall
    summary.shares["communication"] = summary.kinds["communication"] = (total(busy) - total(with_transfers)) / wall
    _add_limits(summary)
    return busy


def _intervals(by_kind: Mapping[Kind, list[Interval]], *kinds: Kind) -> Iterator[Interval]:
    return itertools.chain.from_iterable(by_kind.get(kind, ()) for kind in kinds)


def _add_cpu_shares(summary: Summary, walk: _Walk, host: Sequence[HostEvent], window: Interval) -> list[Interval]:
    """Add shares by kind of operator; return the union of all operators' intervals."""
    operators = {name: row[0] for name, row in walk.operators.items() if "::" in name and not name.startswith("autograd::")}
    busy = union(clipped((event[:2] for event in host if event.name in operators), window))
    seconds: Counter[Kind] = Counter()
    for name, own in operators.items():
        seconds[kind_of_operator(name)] += own
    scale = total(busy) / max(sum(seconds.values()), 1) / (window[1] - window[0])
    summary.kinds = {kind: value * scale for kind, value in seconds.items() if value}
    _add_limits(summary)
    return busy


def _add_limits(summary: Summary) -> None:
    summary.shares["arithmetic"] = sum(summary.kinds.get(kind, 0.0) for kind in ARITHMETIC)
    summary.shares["memory traffic"] = sum(summary.kinds.get(kind, 0.0) for kind in MEMORY_TRAFFIC)


def _add_tables(summary: Summary, walk: _Walk, device: Sequence[DeviceEvent], per_step: float) -> None:
    blocks = {
        key: Row(_label(*key), host=own * per_step, count=passes * summary.steps**-1)
        for key, (own, passes) in walk.parts.items()
    }
    operators = {
        name: Row(name, host=own * per_step, count=calls / summary.steps) for name, (own, calls) in walk.operators.items()
    }
    kernels: dict[str, Row] = {}
    phases: defaultdict[str, float] = defaultdict(float)
    unknown = ("", "", "")
    for event in device:
        seconds = (event.end - event.begin) * per_step
        name, part, phase = walk.launched_by.get(event.operator, unknown)
        blocks.setdefault((part, phase), Row(_label(part, phase))).device += seconds
        operators.setdefault(name, Row(name or "(unknown)")).device += seconds
        kernel = kernels.get(event.name)
        if kernel is None:
            kernel = kernels[event.name] = Row(_short(event.name), kind=kind_of_kernel(event.name))
        kernel.device += seconds
        kernel.count += 1 / summary.steps
        phases[phase] += seconds
    summary.phases = {phase: seconds for phase, seconds in phases.items() if phase}
    summary.blocks, summary.operators, summary.kernels = (
        sorted(rows, key=lambda row: (row.device, row.host), reverse=True)
        for rows in (blocks.values(), operators.values(), kernels.values())
    )


def _add_memory(summary: Summary, walk: _Walk, changes: Sequence[tuple[int, int]], window: Interval, allocated: int) -> None:
    if not changes:
        return
    width = max((window[1] - window[0]) / _POINTS, 1.0)
    points: dict[int, int] = {}
    peak_time = window[0]
    summary.peak = allocated
    for time, change in changes:
        allocated += change
        point = min(max(int((time - window[0]) / width), 0), _POINTS - 1)
        points[point] = max(points.get(point, 0), allocated)
        if allocated > summary.peak:
            summary.peak, peak_time = allocated, time
    summary.memory = [(round((point + 0.5) * width * 1e-9, 6), size) for point, size in sorted(points.items())]
    index = bisect.bisect_right(walk.times, peak_time) - 1
    summary.peak_in = walk.names[index] if index >= 0 else ""


# --- verdict ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The limit of the profiled steps, and what to change."""

    limit: Limit | None
    sentence: str
    advice: tuple[str, ...] = ()
    """Options to type, each with its reason; the most useful first."""


def verdict(summary: Summary, options: Mapping[str, Any]) -> Verdict:
    """Return the limit and the options that shift it. ``options``: values of the script's and the extension's options."""
    if not summary.shares:
        return Verdict(None, f"{NO_KERNELS}; the limit is not known")
    shares = sorted(summary.shares.items(), key=lambda item: item[1], reverse=True)
    limit = shares[0][0]
    advice = [line for name, share in shares if share >= _NOTABLE or name == limit for line in _ADVICE[name](summary, options)]
    advice += _advice_for_frozen_models(summary, options)
    by_option = {line.split(" ")[0]: line for line in reversed(advice)}  # the first line of each
    return Verdict(limit, _sentence(summary, limit), tuple(line for line in advice if line in by_option.values()))


def _sentence(summary: Summary, limit: Limit) -> str:
    unit = "GPU" if summary.device == "cuda" else "CPU"
    shares = summary.shares
    if limit == "arithmetic":
        kinds = ", ".join(f"{kind} {summary.kinds[kind]:.0%}" for kind in ARITHMETIC if summary.kinds.get(kind, 0) >= 0.005)
        return f"the {unit}'s arithmetic is the limit: {shares[limit]:.0%} of the time ({kinds})"
    if limit == "memory traffic":
        kinds = ", ".join(f"{kind} {summary.kinds[kind]:.0%}" for kind in MEMORY_TRAFFIC if summary.kinds.get(kind, 0) >= 0.005)
        return f"the {unit}'s memory traffic is the limit: {shares[limit]:.0%} of the time ({kinds})"
    if limit == "host":
        launches = f" and {summary.launches:,.0f} launches per step" if summary.launches else ""
        waits = f"the GPU waits for Python{launches}" if unit == "GPU" else "Python runs between operators"
        return f"the host is the limit: {waits} {shares[limit]:.0%} of the time"
    what = {
        "data": f"data is the limit: the {unit} waits for images",
        "saving": f"saving and sampling are the limit: the {unit} waits for them",
        "transfers": "copies between host and GPU are the limit: the GPU waits for them",
        "communication": "communication between GPUs is the limit: the GPU waits for it",
    }[limit]
    return f"{what} {shares[limit]:.0%} of the time"


def _is_set(options: Mapping[str, Any], *names: str) -> bool:
    return any(options.get(name) for name in names)


def _is_compiled(options: Mapping[str, Any]) -> bool:
    return _is_set(options, "selective_torch_compile", "torch_compile", "compile")


def _can_be_compiled(options: Mapping[str, Any]) -> bool:
    return not _is_compiled(options) and reason_not_to_compile(Namespace(**options)) is None


def _can_be_recorded(options: Mapping[str, Any]) -> bool:
    is_set = any(_is_set(options, name) for name in ("vram_budget", PRESERVATION))
    return not is_set and reason_not_to_record(Namespace(**options)) is None


def _host_advice(summary: Summary, options: Mapping[str, Any]) -> Iterator[str]:
    if summary.device == "cpu":
        return
    graphs = _is_set(options, "cuda_graphs")
    is_off = options.get("speed") == "off" or options.get("cuda_graphs") is False  # else the run has tried it
    if is_off and not graphs and _can_be_recorded(options):
        yield "--cuda_graphs replays the model's passes with one launch each"
    if not graphs and _can_be_compiled(options):
        yield "--selective_torch_compile launches fewer kernels"
    if not graphs and not _is_compiled(options) and not _is_set(options, "fused_operations"):
        yield "--fused_operations launches fewer kernels without a compiler"
    size = options.get("train_batch_size")
    yield f"--train_batch_size {2 * size if isinstance(size, int) else 2} gives each launch more work, if memory allows"


def _traffic_advice(summary: Summary, options: Mapping[str, Any]) -> Iterator[str]:
    if summary.device == "cpu":
        return
    if _can_be_compiled(options):
        yield "--selective_torch_compile fuses operations, so that activations are read and written less often"
    if not _is_compiled(options) and not _is_set(options, "fused_operations"):
        yield "--fused_operations needs fewer passes over each activation, without a compiler"
    unfused = all(name in options and not options[name] for name in ("sdpa", "xformers", "mem_eff_attn"))
    if unfused:
        yield "--sdpa computes attention without writing its scores to memory"
    optimizer = str(options.get("optimizer_type") or "AdamW").lower()
    arguments = " ".join(options.get("optimizer_args") or ())
    if summary.kinds.get("optimizer", 0) >= 0.05 and optimizer == "adamw" and "fused" not in arguments:
        yield "--optimizer_args fused=True updates all parameters in one pass"


def _arithmetic_advice(summary: Summary, options: Mapping[str, Any]) -> Iterator[str]:
    if summary.device == "cuda" and options.get("mixed_precision", "bf16") in (None, "no"):
        yield "--mixed_precision bf16 computes matrix products in 16 bits"
    recomputed = summary.phases.get("recompute", 0.0) / max(summary.wall, 1e-9)
    if recomputed >= 0.05 and not _is_set(options, "vram_budget"):
        yield f"--vram_budget auto checkpoints as few blocks as memory allows ({recomputed:.0%} of the time is recomputation)"
    elif summary.shares["arithmetic"] >= 0.6:
        yield "the GPU is well used; only less work is faster, for example a smaller --resolution"


def _data_advice(summary: Summary, options: Mapping[str, Any]) -> Iterator[str]:
    if not _is_set(options, "cache_latents", "cache_latents_to_disk"):
        yield "--cache_latents --cache_latents_to_disk computes latents once and reads no images"
    workers = options.get("max_data_loader_n_workers") or 0
    yield f"--max_data_loader_n_workers {max(2 * int(workers), 4)} loads more batches in parallel"
    if not _is_set(options, "persistent_data_loader_workers"):
        yield "--persistent_data_loader_workers keeps the workers between epochs"


def _saving_advice(summary: Summary, options: Mapping[str, Any]) -> Iterator[str]:
    yield "profile steps without a save or sample to see the rest; if most steps have one, save and sample less often"


def _transfer_advice(summary: Summary, options: Mapping[str, Any]) -> Iterator[str]:
    swapped = options.get("blocks_to_swap") or 0
    if swapped:
        yield f"--blocks_to_swap {int(swapped) // 2} copies fewer blocks, if memory allows; `plan` prints what fits"
    for name in ("cpu_offload_checkpointing", "unsloth_offload_checkpointing"):
        if _is_set(options, name):
            yield f"leave out --{name}, if memory allows"
    if not swapped and not _is_set(options, "cache_latents", "cache_latents_to_disk"):
        yield "--cache_latents copies smaller batches to the GPU"


def _communication_advice(summary: Summary, options: Mapping[str, Any]) -> Iterator[str]:
    steps = options.get("gradient_accumulation_steps") or 1
    yield f"--gradient_accumulation_steps {2 * int(steps)} averages gradients less often"


def _advice_for_frozen_models(summary: Summary, options: Mapping[str, Any]) -> Iterator[str]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for row in summary.blocks:
        seconds[row.name.removesuffix(" forward")] += row.device if summary.device == "cuda" else row.host
    every = max(sum(seconds.values()), 1e-12)
    share = seconds["VAE"] / every
    if share >= 0.05 and not _is_set(options, "cache_latents", "cache_latents_to_disk"):
        yield f"--cache_latents --cache_latents_to_disk runs the VAE once per image ({share:.0%} of the work)"
    share = seconds["text encoder"] / every
    trains_texts = options.get("network_module") and not options.get("network_train_unet_only")
    if share >= 0.05 and not trains_texts and not _is_set(options, "cache_text_encoder_outputs", "train_text_encoder"):
        yield f"--cache_text_encoder_outputs runs the text encoders once per caption ({share:.0%} of the work)"


_ADVICE = {
    "host": _host_advice,
    "memory traffic": _traffic_advice,
    "arithmetic": _arithmetic_advice,
    "data": _data_advice,
    "saving": _saving_advice,
    "transfers": _transfer_advice,
    "communication": _communication_advice,
}


# --- text ------------------------------------------------------------------------------------------------------------


def lines(summary: Summary, result: Verdict, rows: int = 15) -> Iterator[str]:
    """Yield the text of a profile: shares, tables with at most ``rows`` rows each, memory and verdict."""
    unit = "GPU" if summary.device == "cuda" else "CPU"
    usual = "" if summary.usual is None else f", {summary.usual:.4g} s without it"
    yield f"{summary.steps} steps, {summary.profiled:.4g} s per step with the profiler{usual}"
    if summary.busy is not None:
        waiting = f"; host waiting for the GPU {summary.waiting / summary.profiled:.0%}" if summary.device == "cuda" else ""
        yield f"{unit} busy {summary.busy:.0%}{waiting}"
        for shares in (summary.shares, summary.kinds):
            yield ""
            shown = sorted(((share, name) for name, share in shares.items() if share >= 0.005), reverse=True)
            yield from (f"  {name:<16}{share:>5.0%}" for share, name in shown)
    for title, table in (("part", summary.blocks), ("operator", summary.operators), ("kernel", summary.kernels)):
        longest = [row for row in table if max(row.device, row.host) > 0][:rows]
        if longest:
            yield ""
            yield from _table(title, longest, summary)
    if summary.memory:
        place = f" in {summary.peak_in}" if summary.peak_in else ""
        yield ""
        yield f"memory of tensors: at most {format_size(summary.peak)}{place}"
    yield ""
    yield f"{result.sentence}"
    yield from (f"  try {line}" if line.startswith("--") else f"  {line}" for line in result.advice)


def _table(title: str, rows: Sequence[Row], summary: Summary) -> Iterator[str]:
    has_gpu = summary.device == "cuda" and summary.busy is not None
    yield f"{'GPU ms' if has_gpu else '':>10}{'host ms':>10}{'% of step':>11}{'count':>9}  {title}, per step"
    for row in rows:
        share = row.device / summary.wall if has_gpu else row.host / summary.profiled
        name = f"{row.name}{f' ({row.kind})' if row.kind else ''}"
        count = f"{row.count:.0f}" if row.count else ""
        device = f"{row.device * 1e3:.2f}" if has_gpu else ""
        yield f"{device:>10}{row.host * 1e3:>10.2f}{share:>11.1%}{count:>9}  {name}"
