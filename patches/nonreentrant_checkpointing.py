"""Keep every gradient under gradient checkpointing, without the overhead of saved-tensor hooks.

The SDXL U-Net and all text encoders of sd-scripts use torch's reentrant checkpointing. It connects a block to the graph only
through inputs that require grad. Without such an input (frozen base, latents, token ids of a text encoder) all gradients in
the block are lost, with a warning at best. Its nested backward pass also makes DistributedDataParallel mark parameters ready
twice. https://pytorch.org/docs/stable/checkpoint.html

Here a block is one node of the graph, and the weights that are trained in it are inputs of the node. The node recomputes the
block and returns their gradients with those of the block's inputs. Like ``use_reentrant=False`` it loses no gradient,
accumulates each weight's gradient once, in the outer graph, and adds all gradients in the order of a graph without
checkpointing. Unlike ``use_reentrant=False`` it runs no Python per saved tensor: 5,402 in a step of an SDXL LoRA.

Compiled blocks use ``use_reentrant=False`` itself: a forward pass without a graph would be compiled a second time. So do blocks
whose weights DeepSpeed's ZeRO-3 divides among processes: as inputs of the node they would be empty. All other
U-Nets and DiTs of sd-scripts are non-reentrant already.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.checkpointed_blocks import KEEPS_GRADIENTS
from kohya_ext.patching.patch import Patch, Target
from kohya_ext.sdscripts.fingerprints import known_bodies
from kohya_ext.speed import switches

_calls = Counter({"checkpointed_blocks": 0, "recomputed_blocks": 0})


def _facts() -> Mapping[str, object]:
    return dict(_calls)


# --- the weights of a block ------------------------------------------------------------------------------------------


#: The way from a root to a node that uses inputs: the number of the root, then the index of each edge.
_Path = tuple[int, ...]
#: (index of the edge, number of the input) for each edge from a node to an input.
_Edges = tuple[tuple[int, int], ...]


@dataclass(eq=False)
class _Block:
    """The weights of a checkpointed block, and the uses of its inputs."""

    weights: list[Any]
    """The parameters that it can use: its own and those of networks that replaced the forward of its layers."""
    paths: dict[int, dict[_Path, _Edges]] = field(default_factory=dict)
    """Number of inputs that require a gradient -> the ways through the graph to the nodes that use them."""

    @property
    def is_partitioned(self) -> bool:
        """Whether its weights are divided among processes."""
        return bool(self.weights) and hasattr(self.weights[0], "ds_id")


_blocks: weakref.WeakKeyDictionary[Any, _Block] = weakref.WeakKeyDictionary()


def _known(block: Any) -> _Block:
    if block not in _blocks:
        modules = {id(module): module for module in block.modules()}
        for module in (queue := list(modules.values())):
            for function in _replaced_methods(module):
                for owner in _owners(function):
                    new = {id(part): part for part in owner.modules() if id(part) not in modules}
                    if id(block) not in new:  # not a model that contains the block
                        modules.update(new)
                        queue.extend(new.values())
        own = (parameter for module in modules.values() for parameter in module.parameters(recurse=False))
        _blocks[block] = _Block(list(dict.fromkeys(own)))
    return _blocks[block]


def _replaced_methods(module: Any) -> Iterator[Any]:
    """Yield the functions of an instance: a layer's replaced ``forward``, and the ``org_forward`` of a LoRA module."""
    return (value for value in vars(module).values() if isinstance(value, (FunctionType, MethodType, functools.partial)))


def _owners(function: Any, depth: int = 4) -> Iterator[Any]:
    """Yield the modules that a function calls: its own, or those in a partial's or closure's variables."""
    import torch

    if isinstance(function, torch.nn.Module):
        yield function
    elif isinstance(function, MethodType) and isinstance(function.__self__, torch.nn.Module):
        yield function.__self__
    elif depth:
        inner: Sequence[Any] = ()
        if isinstance(function, functools.partial):
            inner = (function.func, *function.args)
        elif isinstance(function, FunctionType):
            inner = [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
        for value in inner:
            yield from _owners(value, depth - 1)


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


# --- the graph of a recomputation ------------------------------------------------------------------------------------

#: Stands for a tensor among the arguments of a block that autograd has saved.
_SAVED = object()

#: How often an input is passed to the node of a block: once for each gradient that it can return for the input.
_USES = 8


class _Graph:
    """The graph of a recomputed block.

    An input can have uses inside and outside of the block: a U-Net's skip connections, text embeddings. Autograd adds the
    gradients of all uses one by one, in the order of backward. Their sum in a block must not be added first, because rounding
    depends on the order. So the node returns the gradients of the uses separately.
    """

    def __init__(self, roots: Sequence[Any], inputs: Sequence[Any], block: _Block) -> None:
        from torch.autograd.graph import get_gradient_edge

        self.uses: list[list[Any]] = [[] for _ in inputs]
        """The gradients of each input, in the order of backward."""
        self.other_leaves: list[Any] = []
        """Tensors other than inputs and weights that the graph accumulates gradients for, if it was searched."""
        self._block = block
        first = [root.grad_fn for root in roots]
        leaves = [get_gradient_edge(tensor).node for tensor in inputs]
        # The hooks refer to this object, so it must not refer to nodes: autograd's nodes in a cycle are never freed.
        for node, edges in self._follow(first, leaves) or self._search(first, leaves):
            node.register_hook(functools.partial(self._take, edges))

    def _follow(self, roots: Sequence[Any], leaves: Sequence[Any]) -> list[tuple[Any, _Edges]]:
        """Return the nodes at the end of the known paths; nothing if one is not there, as with dropout of modules."""
        nodes = []
        for (root, *path), edges in self._block.paths.get(len(leaves), {}).items():
            node = roots[root] if root < len(roots) else None
            for index in path:
                after = node.next_functions if node is not None else ()
                node = after[index][0] if index < len(after) else None
            after = node.next_functions if node is not None else ()
            if not all(index < len(after) and after[index][0] is leaves[number] for index, number in edges):
                return []
            nodes.append((node, edges))
        return nodes

    def _search(self, roots: Sequence[Any], leaves: Sequence[Any]) -> list[tuple[Any, _Edges]]:
        """Return the nodes that use inputs, with their edges, and keep the shortest paths to them."""
        numbers = {node: number for number, node in enumerate(leaves)}
        known = {id(weight) for weight in self._block.weights}
        queue: deque[tuple[Any, _Path]] = deque((root, (number,)) for number, root in enumerate(roots))
        seen, nodes = {*roots}, []
        paths = self._block.paths[len(leaves)] = {}
        while queue:
            node, path = queue.popleft()
            edges = [(index, before) for index, (before, _) in enumerate(node.next_functions) if before is not None]
            if of_inputs := tuple((index, numbers[before]) for index, before in edges if before in numbers):
                paths[path] = of_inputs
                nodes.append((node, of_inputs))
            for index, before in edges:
                if before not in seen and before not in numbers:
                    seen.add(before)
                    queue.append((before, (*path, index)))
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in known:
                self.other_leaves.append(leaf)
        return nodes

    def _take(self, edges: Sequence[tuple[int, int]], gradients: Sequence[Any], _: Any) -> tuple[Any, ...]:
        """Keep the gradients that a node passes to inputs, and remove them from the graph, which would add them."""
        kept = list(gradients)
        for index, number in edges:
            if gradients[index] is not None:
                self.uses[number].append(gradients[index])
                kept[index] = None
        return tuple(kept)

    def gradients(self, number: int) -> list[Any]:
        """Return `_USES` gradients of an input, None where it has fewer."""
        uses = self.uses[number]
        first, rest = uses[: _USES - 1], uses[_USES - 1 :]
        last = functools.reduce(lambda total, gradient: total + gradient, rest) if rest else None
        return [*first, *[None] * (_USES - 1 - len(first)), last]


# --- state of the forward pass ---------------------------------------------------------------------------------------


@dataclass
class _RandomState:
    """The states of the random number generators before a forward pass that used them."""

    generators: Sequence[Any]
    states: Sequence[Any] = ()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        before = [generator.get_state() for generator in self.generators]
        yield
        after = [generator.get_state() for generator in self.generators]
        # Compared without torch, whose operators have no values under an estimate's fake mode.
        if any(state.numpy().tobytes() != now.numpy().tobytes() for state, now in zip(before, after, strict=True)):
            self.states = before

    @contextmanager
    def restored(self) -> Iterator[None]:
        if not self.states:
            yield
            return
        outer = [generator.get_state() for generator in self.generators]
        self._set(self.states)
        try:
            yield
        finally:
            self._set(outer)

    def _set(self, states: Sequence[Any]) -> None:
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)


def _autocast_states(devices: Sequence[str]) -> list[tuple[str, bool, Any]]:
    import torch

    return [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]


# --- the checkpoint --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Call:
    """A call of a checkpointed block."""

    function: Callable[..., Any]
    args: Sequence[Any]
    """The arguments of ``function``; tensors among them are removed after forward, and saved by autograd."""
    block: _Block
    random: _RandomState
    devices: Sequence[str]
    attention: Any
    """The :class:`Store` of the block's attention; None if it is computed again."""
    autocast: list[tuple[str, bool, Any]] = field(init=False)
    trained: list[Any] = field(init=False)
    """The weights of the block that require a gradient after forward, in which DyLoRA chooses its rank."""

    def __post_init__(self) -> None:
        self.autocast = _autocast_states(self.devices)

    def compute(self) -> Any:
        """Return the outputs of the block, without a graph."""
        import torch

        _calls["checkpointed_blocks"] += 1
        # A cast weight in autocast's cache would have no graph here, and would stay in memory for the whole forward pass.
        is_cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with torch.no_grad(), self.random.recorded(), self.attention.recorded() if self.attention else nullcontext():
                outputs = self.function(*self.args)
        finally:
            torch.set_autocast_cache_enabled(is_cached)
        self.trained = [weight for weight in self.block.weights if weight.requires_grad]
        return outputs

    def recompute(self, args: Sequence[Any]) -> list[Any]:
        """Run the block again as in forward, and return its outputs with a graph; None for an output without one."""
        import torch

        _calls["recomputed_blocks"] += 1
        with ExitStack() as stack:
            stack.enter_context(self.random.restored())
            stack.enter_context(torch.enable_grad())
            if self.attention is not None:
                stack.enter_context(self.attention.replayed())
            for device, enabled, dtype in set(self.autocast) - set(_autocast_states(self.devices)):
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            outputs = self.function(*args)
            if isinstance(outputs, torch.Tensor):
                outputs = (outputs,)
            # An input that is returned as it is has no node; its view has one.
            nodes = [output.view_as(output) if getattr(output, "is_leaf", False) else output for output in outputs]
            return [output if _requires_grad(output) else None for output in nodes]


def _with_weights_as_inputs(original: Any, settings: Settings) -> Any:
    import torch

    from kohya_ext.patching.kept_attention import Store

    module = sys.modules[original.__module__]
    is_compiled = switches.works(switches.COMPILED_BLOCKS, settings)

    class CheckpointFunction(original):  # type: ignore[misc]
        @classmethod
        def apply(cls, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            block = next(_owners(function), None)
            generators = _generators(args)
            needs_plain = is_compiled() or _carries_gradients(function)
            if needs_plain or block is None or generators is None or _known(block).is_partitioned:
                return module.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
            devices = ("cpu", *{arg.device.type for arg in args if isinstance(arg, torch.Tensor)} - {"cpu"})
            # A CUDA graph draws no numbers in a checkpointed block, and torch 2.6 cannot read the state while it is captured.
            preserves = preserve_rng_state and not (len(generators) > 1 and torch.cuda.is_current_stream_capturing())
            random = _RandomState(generators if preserves else ())
            call = _Call(function, args, _known(block), random, devices, Store() if settings["keep_attention"] else None)
            outputs = call.compute()
            uses = [arg for arg in args if _requires_grad(arg) for _ in range(_USES)]
            # In a list, the outputs are not inputs of the node.
            return super().apply(call, [outputs], *uses, *call.trained)

        @staticmethod
        def forward(ctx: Any, call: _Call, outputs: list[Any], *uses_and_weights: Any) -> Any:
            ctx.call = call
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*(arg for arg in call.args if isinstance(arg, torch.Tensor)))
            call.args = [_SAVED if isinstance(arg, torch.Tensor) else arg for arg in call.args]
            return outputs.pop()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            call, block = ctx.call, ctx.call.block
            while True:
                tensors = iter([tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors])
                args = [next(tensors) if arg is _SAVED else arg for arg in call.args]
                inputs = [arg for arg in args if _requires_grad(arg)]
                outputs = call.recompute(args)
                if isinstance(outputs, torch.Tensor):
                    outputs = (outputs,)
                pairs = [
                    pair for pair in zip(outputs, gradients, strict=True) if pair[1] is not None and _requires_grad(pair[0])
                ]
                if not pairs:
                    return (None,) * (2 + _USES * len(inputs) + len(call.trained))
                roots, root_gradients = zip(*pairs, strict=True)
                graph = _Graph(roots, inputs, block)
                leaves = [*inputs, *call.trained, *graph.other_leaves]
                results = torch.autograd.grad(roots, leaves, root_gradients, allow_unused=True)
                if all(gradient is None for gradient in results[: len(inputs)]):
                    break
                block.paths.pop(len(inputs))  # The block uses an input once more than when the paths were found.
            of_inputs = [gradient for number in range(len(inputs)) for gradient in graph.gradients(number)]
            of_weights = results[len(inputs) : len(inputs) + len(call.trained)]
            if graph.other_leaves:
                # Weights that no module of the block refers to: from the next step on they are inputs of the node, too.
                torch.autograd.backward(graph.other_leaves, results[len(inputs) + len(call.trained) :])
                block.weights.extend(graph.other_leaves)
            return (None, None, *of_inputs, *of_weights)

    setattr(CheckpointFunction, KEEPS_GRADIENTS, True)
    return CheckpointFunction


def _requires_grad(value: Any) -> bool:
    return getattr(value, "requires_grad", False) is True


def _carries_gradients(function: Any) -> bool:
    """Return whether a tensor that requires a gradient is passed otherwise than as an argument."""
    return isinstance(function, functools.partial) and any(
        _requires_grad(value) for value in (*function.args, *function.keywords.values())
    )


def _generators(args: Sequence[Any]) -> list[Any] | None:
    """Return the generators of the CPU and of all devices of ``args``; None for a device whose generators are unknown."""
    import torch

    generators = [torch.default_generator]
    for device in dict.fromkeys(arg.device for arg in args if isinstance(arg, torch.Tensor) and arg.device.type != "cpu"):
        of_type = getattr(torch.get_device_module(device), "default_generators", None)
        if of_type is None:
            return None
        generators.append(of_type[device.index])
    return generators


def _expect_known_parameters(original: Any) -> str | None:
    parameters = list(inspect.signature(original.forward).parameters)
    return None if parameters == ["ctx", "run_function", "preserve_rng_state", "args"] else f"its parameters are {parameters}"


PATCH = Patch(
    name="nonreentrant_checkpointing",
    summary="gradient checkpointing that loses no gradient in the SDXL U-Net, ControlNet, LLLite and text encoders",
    targets=(
        # Read at call time by torch.utils.checkpoint.checkpoint. That function itself is never rebound: dynamo recognizes the
        # function object and would break the graph at any other.
        Target(
            "torch.utils.checkpoint",
            "CheckpointFunction",
            _with_weights_as_inputs,
            _expect_known_parameters,
            body=known_bodies({"fee6063a9fc0": "2.6 to 2.15"}, package="torch"),
        ),
    ),
    torch="2.6",
    exactness="exact",
    held_to="the gradients without checkpointing, bit-identical",
    idea="https://github.com/kohya-ss/sd-scripts/issues/323",
    facts=_facts,
)
