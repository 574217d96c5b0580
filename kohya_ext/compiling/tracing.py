"""What blocks do in every call: what an older dynamo cannot trace in one piece, made traceable where a probe fails; what need
not be traced at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gap:
    """Something that a version of dynamo cannot trace."""

    example: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    """Make a function that does it, and what it is called with."""
    close: Callable[[], Callable[[], None]]
    """Change dynamo, and return what undoes that."""

    def is_open(self) -> bool:
        """True when dynamo breaks the graph, or gives up, at it."""
        import torch
        from torch._dynamo.exc import TorchDynamoException

        function, inputs = self.example()
        try:
            # Without gradients: this may run inside a checkpoint, which would count what is saved here as the block's.
            with torch.no_grad():
                torch.compile(function, backend="eager", fullgraph=True)(*inputs)
        except TorchDynamoException:
            return True
        return False


def close_gaps() -> None:
    """Make dynamo trace what blocks do; where that does not help, leave it as it was."""
    for gap in GAPS:
        if gap.is_open():
            reopen = gap.close()
            if gap.is_open():
                reopen()


def take_einops_whole() -> None:
    """Put ``einops.rearrange`` into graphs as one call, as torch itself does for einops before 0.8.2.

    From there on dynamo follows how einops reads its patterns, character by character: four of seven instructions that are
    traced of SDXL's blocks, in every start. A graph with that call is kept by torch's caches, unlike one with einops' others.
    https://github.com/pytorch/pytorch/blob/v2.6.0/torch/_functorch/_aot_autograd/autograd_cache.py
    """
    import torch._dynamo

    einops = sys.modules.get("einops")
    if einops is not None:
        torch._dynamo.allow_in_graph(einops.rearrange)


def take_group_norm_whole() -> None:
    """Say what a group norm of dynamic sizes gives, which torch finds out by going through all that a group norm consists of.

    A ninth of what is done to trace SDXL's blocks. Only while dynamo traces: what is compiled is divided into parts as before.
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


# --- a method of another module, kept as an attribute: open up to torch 2.6 ------------------------------------------
#
# LoRA keeps the original method of a layer (``self.org_forward = layer.forward``). Dynamo forgets, in such a method, where
# the layer came from; it can then not make inputs of the layer's parameters, and breaks the graph at every single layer.


def _a_method_of_another_module() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import torch

    holder = torch.nn.Identity()
    holder.method = torch.nn.LayerNorm(1).forward  # a layer with parameters, and one that draws no random numbers
    return lambda module, x: module.method(x), (holder, torch.zeros(1, 1))


def _keep_where_methods_come_from() -> Callable[[], None]:
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
        # Guarded on the function, not on the method object, which is another one for each layer.
        source = AttrSource(self.source, name)
        install_guard(AttrSource(source, "__func__").make_guard(GuardBuilder.CLOSURE_MATCH))
        its_self = VariableBuilder(tx, AttrSource(source, "__self__"))(owner)
        return UserMethodVariable(method.__func__, its_self, source=source)

    UnspecializedNNModuleVariable.var_getattr = var_getattr
    return lambda: setattr(UnspecializedNNModuleVariable, "var_getattr", original)


# --- ``del`` of a name that a comprehension or a lambda reads: open up to torch 2.13 ------------------------------------
#
# Attention of HunyuanImage and Anima does it, below Python 3.12 in every call (from 3.12 on a comprehension is no closure).


def _a_deleted_name_of_a_closure() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import torch

    def attention(x: Any) -> Any:
        query = x + 1

        def scores() -> Any:
            return query * 2  # noqa: F821  called before the name is deleted

        out = scores()
        del query
        return out

    return lambda x: attention(x), (torch.zeros(1, 1),)


def _trace_deletions() -> Callable[[], None]:
    import dis

    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables import DeletedVariable

    def delete_deref(self: Any, instruction: Any) -> None:
        self.push(DeletedVariable())
        self.STORE_DEREF(instruction)

    # Each translator looks instructions up in a table of its own.
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
    return [found for subclass in kind.__subclasses__() for found in (subclass, *_all_subclasses(subclass))]


GAPS = (
    Gap(_a_method_of_another_module, _keep_where_methods_come_from),
    Gap(_a_deleted_name_of_a_closure, _trace_deletions),
)
