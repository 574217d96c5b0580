"""What the activation memory budget leaves of each compiled block's activations, at full size and without weights.

The blocks are compiled as ``--selective_torch_compile`` compiles them, on tensors without data, by a backend that makes no
code: torch's partitioner divides each traced graph once for every budget, and both halves are run for what they keep and
compute.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from kohya_ext.estimate.compiled import one_mode, registered, traceable
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.estimate.step import faking, forward, prepare, settle
from kohya_ext.estimate.tracker import Tracker

#: The backend's name for torch.compile.
BACKEND = "kohya_ext_budgets"

BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)


@dataclass(frozen=True)
class Cost:
    """What a block costs in one training step."""

    kept: int
    """Bytes kept from forward for backward, beside weights and what enters or leaves the block: that is kept anyway, by its
    neighbours or, under checkpointing, for the block itself."""
    flops: int
    """Of forward and backward, with what is computed again; a multiply-add is two."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.kept + other.kept, self.flops + other.flops)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.kept * times, self.flops * times)


NOTHING = Cost(0, 0)


@dataclass
class Graph:
    """One graph that dynamo traced: blocks of the same class, widths and shapes share it."""

    block: str
    """The class."""
    enters: tuple[int, ...]
    """The shape of the largest tensor that enters and is no weight."""
    calls: int = 0
    """How often a step runs it."""
    eager: Cost = NOTHING
    checkpointed: Cost = NOTHING
    budgets: dict[float, Cost] = field(default_factory=dict)


def total(graphs: Iterable[Graph], cost: Callable[[Graph], Cost]) -> Cost:
    """Add up a cost over all blocks."""
    return sum((cost(graph) * graph.calls for graph in graphs), NOTHING)


def measure(choices: MemoryConfig, arguments: Namespace, trainer: Any) -> list[Graph]:
    """Run one forward of the script's step with its blocks compiled, and return their graphs.

    ``choices`` are normalized and without checkpointing; what compiles the blocks must do so with :data:`BACKEND`.
    """
    settle(choices, arguments, trainer)
    mode = traceable()
    with faking(mode) as assumptions, _collecting(mode) as graphs:
        training = prepare(choices, arguments, trainer)
        assumptions.integer = training.models.caption_tokens
        forward(training)
    return graphs


@contextmanager
def _collecting(mode: Any) -> Iterator[list[Graph]]:
    """Have the backend inside the block, and the list that it adds its graphs to."""
    graphs: list[Graph] = []
    seen: dict[str, int] = {}

    def compile_graph(traced: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = Graph(_class_of_newest(seen), _largest(inputs))
        graphs.append(graph)
        with one_mode(mode):
            graph.budgets = _partition(traced, inputs)

        def run(*given: Any) -> Any:
            if not graph.calls:
                graph.eager = _eager(traced, given)
                graph.checkpointed = _eager(partial(checkpoint, traced, use_reentrant=False), given)
                # A block before the first trained weight has no backward, and nothing is divided.
                graph.budgets = graph.budgets or dict.fromkeys(BUDGETS, graph.eager)
            graph.calls += 1
            return traced(*given)

        return run

    with registered(BACKEND, compile_graph):
        yield graphs


def _class_of_newest(seen: dict[str, int]) -> str:
    """The class whose graph is being compiled: the one that has counted one more."""
    from kohya_ext.compiling.blocks import RUN

    newest = next(block for block in RUN.blocks.values() if block.graphs != seen.get(block.label, 0))
    seen[newest.label] = newest.graphs
    return newest.name


def _largest(inputs: Sequence[Any]) -> tuple[int, ...]:
    tensors = [one for one in inputs if isinstance(one, torch.Tensor) and not isinstance(one, torch.nn.Parameter)]
    return tuple(max(tensors, key=lambda one: one.numel()).shape) if tensors else ()


# --- costs -----------------------------------------------------------------------------------------------------------


def _partition(traced: Any, inputs: Sequence[Any]) -> dict[float, Cost]:
    """Return what each budget makes of a graph, with inductor's decompositions and passes before the partitioner."""
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

    def as_it_is(graph: Any, example: Any) -> Any:
        return make_boxed_func(graph.forward)

    aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition, decompositions=select_decomp_table())(
        traced, inputs
    )
    return costs


def _cost(forward_half: Any, backward_half: Any, outputs: int) -> Cost:
    inputs = _placeholders(forward_half)
    with Tracker() as tracker:
        made = forward_half(*inputs)
        size = _bytes_beside(made[outputs:], inputs, made[:outputs])
        backward_half(*_placeholders(backward_half))
    return Cost(size, tracker.flops)


def _placeholders(half: Any) -> list[Any]:
    return [node.meta["val"] for node in half.graph.nodes if node.op == "placeholder"]


def _eager(function: Callable[..., Any], given: Sequence[Any]) -> Cost:
    saved: list[Any] = []

    def note(tensor: Any) -> Any:
        saved.append(tensor)
        return tensor

    with Tracker() as tracker, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        made = function(*given)
        size = _bytes_beside(saved, given, made)
        wanted = [one for one in made if isinstance(one, torch.Tensor) and one.requires_grad]
        leaves = [one for one in given if isinstance(one, torch.Tensor) and one.requires_grad]
        if wanted:
            torch.autograd.grad(wanted, leaves, [torch.ones_like(one) for one in wanted], allow_unused=True)
    return Cost(size, tracker.flops)


def _bytes_beside(kept: Iterable[Any], *others: Iterable[Any]) -> int:
    """Bytes of the storages of some tensors that are none of the others'."""
    storages = _storages(kept)
    known = {key for values in others for key in _storages(values)}
    return sum(storage.nbytes() for key, storage in storages.items() if key not in known)


def _storages(values: Iterable[Any]) -> dict[int, Any]:
    storages = (one.untyped_storage() for one in values if isinstance(one, torch.Tensor))
    return {id(storage): storage for storage in storages}
