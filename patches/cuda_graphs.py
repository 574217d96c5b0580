"""Record the model's forward and backward pass as CUDA graphs, one pair per image size, and replay them.

A step of a small model can be bound by Python and kernel launches instead of the GPU. A replay is a single launch. The engine
is `kohya_ext.compiling.graphs`; this patch connects it to the models' forward methods and decides which runs it is for.

The first steps run eager. They show whether the GPU is the limit by far, and how much memory a step needs next to the model's
passes (`kohya_ext.compiling.eager_steps`). A full queue of launches makes the host as slow as the GPU, so the first recording
must also be faster than eager passes. Work between steps, sample images and validation, begins with a forward pass
without gradients. Recordings are dropped before it unless the memory that such work has needed is free, and are not made again
where it comes too often.

FLUX and Chroma copy the frequencies of the timestep embedding from the CPU in every forward pass, which cannot be recorded.
Here they are copied once.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

from kohya_ext.compiling import replay_watch
from kohya_ext.compiling.support import reason_not_to_record
from kohya_ext.config.settings import Option, Settings, boolean
from kohya_ext.console import note
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, current_batch, trained_weights
from kohya_ext.patching.types import Accelerator
from kohya_ext.sdscripts.constraints import PRESERVATION
from kohya_ext.sdscripts.families import FAMILIES
from kohya_ext.sdscripts.fingerprints import known_bodies
from kohya_ext.speed import hang, switches

CUDA_GRAPHS = Option(
    "cuda_graphs",
    None,
    boolean,
    "replay the model's forward and backward pass as CUDA graphs, one pair per image size, if the GPU waits for Python "
    "(default: see --speed)",
)
CUDA_GRAPHS_ALWAYS = Option(
    "cuda_graphs_always",
    False,
    boolean,
    "with --cuda_graphs, do not check whether the GPU waits for Python, and record each image size when it first comes",
)

_OCCURRENCES = 3
"""At which occurrence a size is recorded: a recording costs five passes."""


@dataclass
class _Graphs(TrainingCallback):
    """The recorded model of a run."""

    args: Namespace
    accelerator: Accelerator
    always: bool
    """Whether to record without a measured gain."""
    recorded: Any = None
    """The `RecordedModel`; None before the first forward pass."""
    model: Any = None
    eager: Any = None
    """The `EagerSteps` before the first recording; None after them."""
    watch: replay_watch.ReplayWatch | None = None
    in_step: bool = False
    pixels: int = 0
    """Pixels of the largest micro-batch of the eager steps."""
    micro_batches: int = 0
    """How many have begun."""
    works: int = 0
    """How often work between two steps has come."""
    between: Any = None
    """The meter of the work between two steps; None inside of a step."""
    reserved: int = 0
    """Reserved bytes before that work."""
    needed_between: int | None = None
    """Bytes that such work has needed so far; None before the first one."""

    def before_batch(self, accelerator: Accelerator) -> None:
        self.in_step = True
        self.micro_batches += 1
        if self.between is not None:
            self._end_work()
        if self.eager is not None:
            self.eager.before_batch()

    def after_batch(self, accelerator: Accelerator) -> None:
        self.in_step = False
        if self.eager is not None:
            self.eager.after_batch(accelerator.sync_gradients)
        if self.recorded is not None and self.recorded.off is not None:
            switches.CUDA_GRAPHS.on = False

    def forward(self, original: Any, model: Any, args: Any, kwargs: Any) -> Any:
        """Return the model's output, from a recording where possible."""
        if self.recorded is None:
            self._begin(model)
        if model is not self.model or self.recorded.off is not None:
            return original(model, *args, **kwargs)
        if self.eager is not None:
            if not self.eager.done:
                return self._run_eager(partial(original, model, *args, **kwargs))
            self._decide()
        return self.recorded(partial(original, model), args, kwargs)

    def forward_without_gradients(self, model: Any) -> None:
        """Leave room for work between steps, which begins with the model's forward pass."""
        if self.recorded is None or model is not self.model or self.in_step or self.between is not None:
            return
        if self.recorded.off is None:
            self.works += 1
            self.recorded.leave_room(self.needed_between, self.micro_batches / self.works)
            self.between = self._meter()
            self.reserved = self.between.begin() if self.between is not None else 0

    def _begin(self, model: Any) -> None:
        from kohya_ext.compiling import cuda_recorder
        from kohya_ext.compiling.eager_steps import TIMED, EagerSteps
        from kohya_ext.compiling.graphs import RecordedModel
        from kohya_ext.gpu.memory_meter import TemporaryMemoryMeter

        prepared = [self.accelerator.unwrap_model(each) for each in self.accelerator._models]
        modules = [model, *(each for each in prepared if each is not model)]
        trained = list(trained_weights(self.accelerator._optimizers))
        self.model = model
        recorder = cuda_recorder.CudaRecorder(self.accelerator.device)
        self.eager = EagerSteps(recorder, TemporaryMemoryMeter(self.accelerator.device), 0 if self.always else TIMED)
        self.watch = replay_watch.ReplayWatch(recorder.new_event, partial(hang.end_process, self.args, self.accelerator.device))
        self.recorded = RecordedModel(
            recorder,
            modules,
            trained,
            _report,
            occurrences=1 if self.always else _OCCURRENCES,
            is_largest=self._is_largest,
            must_gain=not self.always,
            watch=self.watch.replay,
        )
        if {id(weight) for weight in model.parameters()} & {id(weight) for weight in trained}:
            self.recorded.off = "the model's own weights are trained"

    def _run_eager(self, forward: Any) -> Any:
        from kohya_ext.gpu.batch_sizes import pixels_of

        self.pixels = max(self.pixels, pixels_of(current_batch(), self.accelerator))
        self.recorded.check_state()
        return self.eager.run(forward)

    def _decide(self) -> None:
        """Record from now on, or not, as the eager steps have shown."""
        from kohya_ext.compiling.eager_steps import BUSY
        from kohya_ext.gpu.batch_sizes import largest_batch

        eager, self.eager = self.eager, None
        larger = largest_batch(self.accelerator) / self.pixels if self.pixels else 1.0
        self.recorded.needed = int(eager.needed * max(1.0, larger))
        seconds = eager.seconds()
        if seconds is None or self.recorded.off is not None:
            return
        host, gpu = seconds
        if gpu > BUSY * host:
            measured = f"Python launches forward and backward in {host:.2f} s, and the GPU takes {gpu:.2f} s"
            self.recorded.off = f"{measured}, so there is nothing to gain"
            _report(f"{self.recorded.off}; training continues without CUDA graphs (--cuda_graphs_always records anyway)")

    def _is_largest(self) -> bool | None:
        """Return whether the batch is the dataset's largest one; None if that is not known."""
        from kohya_ext.gpu.batch_sizes import largest_batch, pixels_of

        largest, pixels = largest_batch(self.accelerator), pixels_of(current_batch(), self.accelerator)
        return pixels >= largest if largest and pixels else None

    def _meter(self) -> Any:
        from kohya_ext.gpu.memory_meter import GPUMemoryMeter

        device = self.accelerator.device
        return GPUMemoryMeter(device) if device.type == "cuda" else None

    def _end_work(self) -> None:
        """Keep the memory that the work between steps has needed, and return what it has left unused."""
        self.needed_between = max(self.needed_between or 0, self.between.end() - self.reserved)
        self.between.release()
        self.between = None

    def on_end(self) -> None:
        if self.watch is not None:
            self.watch.end()
        if self.recorded is not None:
            self.recorded.release()


def _report(message: str) -> None:
    note(f"cuda_graphs: {message}")


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Graphs | None:
    reason = _reason_not_to_record(args, accelerator, settings)
    if reason is not None and not settings[CUDA_GRAPHS]:
        return None
    if reason is not None:
        _report(f"{reason}; training continues without CUDA graphs")
        return None
    return _Graphs(args, accelerator, settings[CUDA_GRAPHS_ALWAYS])


def _reason_not_to_record(args: Namespace, accelerator: Accelerator, settings: Settings) -> str | None:
    import torch

    from kohya_ext.compiling import cuda_recorder

    if (obstacle := cuda_recorder.CudaRecorder.obstacle(accelerator.device)) is not None:
        return obstacle
    if accelerator.num_processes > 1:
        return "the run has several processes"
    if (reason := reason_not_to_record(args)) is not None:
        return reason
    if settings["vram_budget"]:
        return "--vram_budget is not supported"
    if settings[PRESERVATION] is not None:
        return f"--{PRESERVATION} runs the model three times in a step, twice of them with gradients"
    if settings["selective_torch_compile"] and (mode := settings["compile_mode"]) in ("reduce-overhead", "max-autotune"):
        return f"--compile_mode {mode} uses CUDA graphs itself; use default or max-autotune-no-cudagraphs"
    if accelerator.device.type != "cuda" or not torch.cuda.is_available():
        return None
    return replay_watch.reason_forbidden(torch.cuda.get_device_name(accelerator.device))


def _facts() -> Mapping[str, object]:
    graphs = current(_Graphs)
    if graphs is None or graphs.recorded is None:
        return {}
    off = {} if graphs.recorded.off is None else {"off": graphs.recorded.off}
    return {**graphs.recorded.counts, **off}


def _replayed(original: Any, settings: Settings) -> Any:
    import torch

    is_given, switch = bool(settings[CUDA_GRAPHS]), switches.CUDA_GRAPHS

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        graphs = current(_Graphs)
        if graphs is None or switch.is_paused or not (is_given or switch.on):
            return original(self, *args, **kwargs)
        if not torch.is_grad_enabled():
            graphs.forward_without_gradients(self)
            return original(self, *args, **kwargs)
        return graphs.forward(original, self, args, kwargs)

    return forward


def _with_table(original: Any, settings: Settings) -> Any:
    """Return a ``timestep_embedding`` that computes its frequencies once, on the CPU as the original."""
    import math

    import torch

    @cache
    def frequencies(half: int, max_period: float, device: Any) -> Any:
        exponents = -math.log(max_period) * torch.arange(start=0, end=half, dtype=torch.float32) / half
        return torch.exp(exponents).to(device)

    @wraps(original)
    def timestep_embedding(t: Any, dim: int, max_period: float = 10000, time_factor: float = 1000.0) -> Any:
        t = time_factor * t
        args = t[:, None].float() * frequencies(dim // 2, max_period, t.device)[None]
        embedding = torch.cat([torch.cos(args), torch.sin(args)], dim=-1)
        if dim % 2:
            embedding = torch.cat([embedding, torch.zeros_like(embedding[:, :1])], dim=-1)
        return embedding.to(t) if torch.is_floating_point(t) else embedding

    return timestep_embedding


PATCH = Patch(
    name="cuda_graphs",
    summary="replay the model's forward and backward pass as CUDA graphs, one pair per image size, if the GPU waits for Python",
    targets=(
        *(
            Target(family.module, f"{family.model}.forward", _replayed, takes("self", family.first_input), body="runs")
            for family in FAMILIES
        ),
        Target(
            "library.flux_models",
            "timestep_embedding",
            _with_table,
            takes("t", "dim", "max_period", "time_factor", exactly=True),
            body=known_bodies({"1e66ea2636b4": "since 2024-12"}),
        ),
    ),
    options=(CUDA_GRAPHS, CUDA_GRAPHS_ALWAYS),
    torch="2.6",
    exactness="exact",
    held_to="the same run without it, bit-identical, on a replayer of recorded operations on the CPU",
    idea="https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/",
    wanted=partial(switches.is_wanted, switches.CUDA_GRAPHS),
    facts=_facts,
    stage=Stage.RECORD,
    on_start=_start,
)
