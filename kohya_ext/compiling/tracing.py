"""Dynamo workarounds, applied if a probe fails, and shortcuts for code that is slow to trace."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Workaround:
    """A patch of dynamo for code that some versions cannot trace."""

    example: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    """Return a function with such code, and its arguments."""
    apply: Callable[[], Callable[[], None]]
    """Patch dynamo; return a function that undoes the patch."""

    def is_needed(self) -> bool:
        """Return whether dynamo breaks the graph in, or fails to trace, the example."""
        import torch
        from torch._dynamo.exc import TorchDynamoException

        function, inputs = self.example()
        try:
            # Without gradients, because this may run inside a checkpoint, which would count tensors saved here.
            with torch.no_grad():
                torch.compile(function, backend="eager", fullgraph=True)(*inputs)
        except TorchDynamoException:
            return True
        return False


def apply_workarounds() -> None:
    """Apply every workaround that is needed, and undo those that do not help."""
    for workaround in WORKAROUNDS:
        if workaround.is_needed():
            undo = workaround.apply()
            if workaround.is_needed():
                undo()


def allow_einops_in_graph() -> None:
    """Keep ``einops.rearrange`` as one call in graphs, as torch does for einops before 0.8.2.

    With newer versions dynamo traces how einops parses its pattern, which is 4 of 7 instructions traced in SDXL's blocks.
    torch's caches accept a graph with this call, but none with einops' other functions.
    https://github.com/pytorch/pytorch/blob/v2.6.0/torch/_functorch/_aot_autograd/autograd_cache.py
    """
    import torch._dynamo

    einops = sys.modules.get("einops")
    if einops is not None:
        torch._dynamo.allow_in_graph(einops.rearrange)


def register_group_norm_shapes() -> None:
    """Register the output shapes of a group norm with dynamic sizes, which torch derives by running its decomposition.

    That takes a ninth of the time to trace SDXL's blocks. It affects only tracing; the compiled code is the same.
    https://github.com/pytorch/pytorch/blob/main/torch/_refs/__init__.py (``native_group_norm``)
    """
    import torch
    from torch._prims_common import suggest_memory_format
    from torch._subclasses import fake_impls

    if not hasattr(fake_impls, "register_fast_op_impl"):
        return

    def fake(mode: Any, x: Any, weight: Any, bias: Any, batch: Any, channels: Any, pixels: Any, groups: Any, eps: Any) -> Any:
        with mode:
            mean, rstd = (x.new_empty((batch, groups)) for _ in range(2))
            return torch.empty_like(x, memory_format=suggest_memory_format(x)), mean, rstd

    fake_impls.register_fast_op_impl(torch.ops.aten.native_group_norm.default)(fake)


# --- a method of another module stored as an attribute: needed up to torch 2.6 ----------------------------------------
#
# LoRA stores the original method of a layer (``self.org_forward = layer.forward``). Dynamo loses the source of the layer in
# such a method. It cannot turn the layer's parameters into graph inputs then, and breaks the graph at every layer.


def _stored_method_example() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import torch

    holder = torch.nn.Identity()
    holder.method = torch.nn.LayerNorm(1).forward  # has parameters, and its initialization draws no random numbers
    return lambda module, x: module.method(x), (holder, torch.zeros(1, 1))


def _track_method_owner() -> Callable[[], None]:
    from types import MethodType

    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import UserMethodVariable
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
    from torch.nn import Module

    original = UnspecializedNNModuleVariable.var_getattr

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        method = self.value.__dict__.get(name)
        owner = method.__self__ if isinstance(method, MethodType) else None
        if not self.source or not isinstance(owner, Module) or owner is self.value:
            return original(self, tx, name)
        # Guard on the function, because each layer has another method object.
        source = AttrSource(self.source, name)
        install_guard(AttrSource(source, "__func__").make_guard(GuardBuilder.CLOSURE_MATCH))
        instance = VariableBuilder(tx, AttrSource(source, "__self__"))(owner)
        return UserMethodVariable(method.__func__, instance, source=source)

    UnspecializedNNModuleVariable.var_getattr = var_getattr
    return lambda: setattr(UnspecializedNNModuleVariable, "var_getattr", original)


# --- ``del`` of a variable that a comprehension or a lambda reads: needed up to torch 2.13 ------------------------------
#
# The attention of HunyuanImage and Anima does this in every call on Python before 3.12, where comprehensions are closures.


def _deleted_closure_variable_example() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import torch

    def attention(x: Any) -> Any:
        query = x + 1

        def scores() -> Any:
            return query * 2  # noqa: F821  called before the variable is deleted

        out = scores()
        del query
        return out

    return lambda x: attention(x), (torch.zeros(1, 1),)


def _support_delete_deref() -> Callable[[], None]:
    import dis

    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables import DeletedVariable

    def delete_deref(self: Any, instruction: Any) -> None:
        self.push(DeletedVariable())
        self.STORE_DEREF(instruction)

    # Each translator class has its own dispatch table.
    translators = [InstructionTranslatorBase, *_all_subclasses(InstructionTranslatorBase)]
    instruction = dis.opmap["DELETE_DEREF"]
    before = [translator.dispatch_table[instruction] for translator in translators]
    for translator in translators:
        translator.dispatch_table[instruction] = delete_deref

    def undo() -> None:
        for translator, original in zip(translators, before, strict=True):
            translator.dispatch_table[instruction] = original

    return undo


def _all_subclasses(kind: Any) -> list[Any]:
    return [each for subclass in kind.__subclasses__() for each in (subclass, *_all_subclasses(subclass))]


WORKAROUNDS = (
    Workaround(_stored_method_example, _track_method_owner),
    Workaround(_deleted_closure_variable_example, _support_delete_deref),
)
