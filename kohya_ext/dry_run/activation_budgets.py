"""Saved activations and FLOPs of each compiled block by activation memory budget, at full size and without weights.

The blocks are compiled as ``--selective_torch_compile`` compiles them, on fake tensors and without code generation. torch's
partitioner splits each traced graph once for every budget, and both halves run to count what they save and compute.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._guards import TracingContext
from torch.utils.checkpoint import checkpoint

from kohya_ext.dry_run.device import device_for_cpp
from kohya_ext.dry_run.inductor import registered_backend
from kohya_ext.dry_run.tracker import DEVICE, Tracker
from kohya_ext.patching.attributes import replaced

#: The backend's name for torch.compile.
BACKEND = "kohya_ext_budgets"

BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)


@dataclass(frozen=True)
class Cost:
    """Memory and work of a block in one training step."""

    kept: int
    """Bytes saved for backward, without weights and the block's inputs and outputs: those are saved anyway, by the neighbouring
    blocks or, under checkpointing, for the block itself."""
    flops: int
    """FLOPs of forward and backward, including recomputation; a multiply-add counts as two."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.kept + other.kept, self.flops + other.flops)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.kept * times, self.flops * times)


NOTHING = Cost(0, 0)


@dataclass
class Graph:
    """One traced graph, shared by blocks of the same class, widths and shapes."""

    block: str
    """The class name."""
    enters: tuple[int, ...]
    """The shape of the largest input that is not a weight."""
    calls: int = 0
    """Number of calls in one step."""
    eager: Cost = NOTHING
    checkpointed: Cost = NOTHING
    budgets: dict[float, Cost] = field(default_factory=dict)


def from_row(row: Mapping[str, Any]) -> Graph:
    """Return a graph from its fields as JSON has them."""
    budgets = {float(budget): Cost(**cost) for budget, cost in row["budgets"].items()}
    costs = {name: Cost(**row[name]) for name in ("eager", "checkpointed")}
    return Graph(**{**row, **costs, "enters": tuple(row["enters"]), "budgets": budgets})


def total(graphs: Iterable[Graph], cost: Callable[[Graph], Cost]) -> Cost:
    """Return the sum of a cost over all blocks."""
    return sum((cost(graph) * graph.calls for graph in graphs), NOTHING)


@contextmanager
def collecting(mode: Any, running: Callable[[], AbstractContextManager[None]] = nullcontext) -> Iterator[list[Graph]]:
    """Register the backend inside the block; yield the list that it appends its graphs to. They run inside of ``running``."""
    graphs: list[Graph] = []
    seen: dict[str, int] = {}

    def compile_graph(traced: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = Graph(_newest_class(seen), _largest(inputs))
        graphs.append(graph)
        with _tracing_in(mode):
            graph.budgets = _partition(traced, [_on_cpu(value, mode) for value in inputs])

        def run(*given: Any) -> Any:
            if not graph.calls:
                graph.eager = _eager(traced, given)
                graph.checkpointed = _eager(partial(checkpoint, traced, use_reentrant=False), given)
                # A block before the first trainable weight has no backward, so it is not partitioned.
                graph.budgets = graph.budgets or dict.fromkeys(BUDGETS, graph.eager)
            graph.calls += 1
            return traced(*given)

        def run_as_uncompiled(*given: Any) -> Any:
            with running():
                return run(*given)

        return run_as_uncompiled

    with registered_backend(BACKEND, compile_graph):
        yield graphs


@contextmanager
def _tracing_in(mode: Any) -> Iterator[None]:
    """Trace AOTAutograd in the tensors' own fake mode: dynamo creates another one before about torch 2.7."""
    with replaced(TracingContext.get(), "fake_mode", mode):
        yield


def _on_cpu(value: Any, mode: Any) -> Any:
    """Return a tensor of the CPU in place of one of a GPU, which C++ takes for the CPU's."""
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).requires_grad_(value.requires_grad)


def _newest_class(seen: dict[str, int]) -> str:
    """Return the class of the graph being compiled: its count of graphs has grown."""
    from kohya_ext.compiling.blocks import RUN

    newest = next(block for block in RUN.blocks.values() if block.graphs != seen.get(block.label, 0))
    seen[newest.label] = newest.graphs
    return newest.name


def _largest(inputs: Sequence[Any]) -> tuple[int, ...]:
    tensors = [value for value in inputs if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)]
    return tuple(max(tensors, key=lambda tensor: tensor.numel()).shape) if tensors else ()


class _Flops(Tracker):
    """Answers C++ as dry runs do when it asks for a device: autocast leaves tensors of other devices as they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return device_for_cpp(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


# --- costs -----------------------------------------------------------------------------------------------------------


def _partition(traced: Any, inputs: Sequence[Any]) -> dict[float, Cost]:
    """Return a graph's cost at each budget, with inductor's decompositions and passes before the partitioner."""
    import torch._functorch.config as functorch
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    costs: dict[float, Cost] = {}

    def partition(joint: Any, joint_inputs: Any, *, num_fwd_outputs: int, **rest: Any) -> Any:
        joint_graph_passes(joint)
        halves: tuple[Any, Any] = (None, None)
        for budget in BUDGETS:
            with functorch.patch(activation_memory_budget=budget):
                halves = min_cut_rematerialization_partition(
                    copy.deepcopy(joint), joint_inputs, num_fwd_outputs=num_fwd_outputs, **rest
                )
            costs[budget] = _cost(*halves, num_fwd_outputs)
        return halves

    def uncompiled(graph: Any, example: Any) -> Any:
        return make_boxed_func(graph.forward)

    aot_autograd(fw_compiler=uncompiled, bw_compiler=uncompiled, partition_fn=partition, decompositions=select_decomp_table())(
        traced, inputs
    )
    return costs


def _cost(forward_half: Any, backward_half: Any, outputs: int) -> Cost:
    inputs = _placeholders(forward_half)
    with _Flops() as tracker:
        results = forward_half(*inputs)
        size = _bytes_without(results[outputs:], inputs, results[:outputs])
        backward_half(*_placeholders(backward_half))
    return Cost(size, tracker.flops)


def _placeholders(half: Any) -> list[Any]:
    return [node.meta["val"] for node in half.graph.nodes if node.op == "placeholder"]


def _eager(function: Callable[..., Any], given: Sequence[Any]) -> Cost:
    saved: list[Any] = []

    def note(tensor: Any) -> Any:
        saved.append(tensor)
        return tensor

    with _Flops() as tracker, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        results = function(*given)
        size = _bytes_without(saved, given, results)
        outputs = [value for value in results if isinstance(value, torch.Tensor) and value.requires_grad]
        leaves = [value for value in given if isinstance(value, torch.Tensor) and value.requires_grad]
        if outputs:
            torch.autograd.grad(outputs, leaves, [torch.ones_like(value) for value in outputs], allow_unused=True)
    return Cost(size, tracker.flops)


def _bytes_without(kept: Iterable[Any], *others: Iterable[Any]) -> int:
    """Return the bytes of the storages of some tensors, without those that the others share."""
    storages = _storages(kept)
    known = {key for values in others for key in _storages(values)}
    return sum(storage.nbytes() for key, storage in storages.items() if key not in known)


def _storages(values: Iterable[Any]) -> dict[int, Any]:
    storages = (value.untyped_storage() for value in values if isinstance(value, torch.Tensor))
    return {id(storage): storage for storage in storages}
