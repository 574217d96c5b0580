"""Record the model's forward and backward pass as CUDA graphs, one pair per image size, and replay them.

A step of a small model can be bound by Python and kernel launches instead of the GPU. A replay is a single launch. The engine
is `kohya_ext.compiling.graphs`; this patch connects it to the models' forward methods and decides which runs it is for.

FLUX and Chroma copy the frequencies of the timestep embedding from the CPU in every forward pass, which cannot be recorded.
Here they are copied once.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

from kohya_ext.compiling.support import reason_not_to_record
from kohya_ext.config.settings import Option, Settings, boolean
from kohya_ext.console import note
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, trained_weights
from kohya_ext.patching.types import Accelerator
from kohya_ext.sdscripts.families import FAMILIES
from kohya_ext.sdscripts.fingerprints import known_bodies

CUDA_GRAPHS = Option(
    "cuda_graphs",
    False,
    boolean,
    "replay the model's forward and backward pass as CUDA graphs, one pair per image size (experimental)",
)


@dataclass
class _Graphs(TrainingCallback):
    """The recorded model of a run."""

    accelerator: Accelerator
    recorded: Any = None
    """The `RecordedModel`; None before the first forward pass."""
    model: Any = None

    def forward(self, original: Any, model: Any, args: Any, kwargs: Any) -> Any:
        """Return the model's output, from a recording where possible."""
        if self.recorded is None:
            self._begin(model)
        if model is not self.model:
            return original(model, *args, **kwargs)
        return self.recorded(partial(original, model), args, kwargs)

    def _begin(self, model: Any) -> None:
        from kohya_ext.compiling import cuda_recorder
        from kohya_ext.compiling.graphs import RecordedModel

        prepared = [self.accelerator.unwrap_model(each) for each in self.accelerator._models]
        modules = [model, *(each for each in prepared if each is not model)]
        trained = list(trained_weights(self.accelerator._optimizers))
        self.model = model
        self.recorded = RecordedModel(cuda_recorder.CudaRecorder(self.accelerator.device), modules, trained, _report)
        if {id(weight) for weight in model.parameters()} & {id(weight) for weight in trained}:
            self.recorded.off = "the model's own weights are trained"

    def on_end(self) -> None:
        if self.recorded is not None:
            self.recorded.release()


def _report(message: str) -> None:
    note(f"cuda_graphs: {message}")


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Graphs | None:
    reason = _reason_not_to_record(args, accelerator, settings)
    if reason is not None:
        _report(f"{reason}; training continues without CUDA graphs")
        return None
    return _Graphs(accelerator)


def _reason_not_to_record(args: Namespace, accelerator: Accelerator, settings: Settings) -> str | None:
    from kohya_ext.compiling import cuda_recorder

    if (obstacle := cuda_recorder.CudaRecorder.obstacle(accelerator.device)) is not None:
        return obstacle
    if accelerator.num_processes > 1:
        return "the run has several processes"
    if (reason := reason_not_to_record(args)) is not None:
        return reason
    if settings["vram_budget"]:
        return "--vram_budget is not supported"
    if settings["selective_torch_compile"] and (mode := settings["compile_mode"]) in ("reduce-overhead", "max-autotune"):
        return f"--compile_mode {mode} uses CUDA graphs itself; use default or max-autotune-no-cudagraphs"
    return None


def _facts() -> Mapping[str, object]:
    graphs = current(_Graphs)
    if graphs is None or graphs.recorded is None:
        return {}
    off = {} if graphs.recorded.off is None else {"off": graphs.recorded.off}
    return {**graphs.recorded.counts, **off}


def _replayed(original: Any, settings: Settings) -> Any:
    import torch

    from kohya_ext.compiling.graphs import simulation

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        graphs = current(_Graphs)
        recorded = simulation() if graphs is None else graphs.forward
        if recorded is None or not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        return recorded(original, self, args, kwargs)

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
    summary="replay the model's forward and backward pass as CUDA graphs, one pair per image size (experimental)",
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
            body=known_bodies("1e66ea2636b4"),
        ),
    ),
    options=(CUDA_GRAPHS,),
    exactness="exact",
    held_to="the same run without it, bit-identical, on a replayer of recorded operations on the CPU",
    idea="https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/",
    wanted=lambda settings: settings[CUDA_GRAPHS],
    facts=_facts,
    stage=Stage.RECORD,
    on_start=_start,
)
