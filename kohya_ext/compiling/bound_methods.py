"""Tracing LoRA with torch 2.5 and 2.6.

LoRA keeps the original method of a layer as an attribute of its own module (``self.org_forward = layer.forward``). Until
torch 2.7 dynamo forgets, in such a method, where the layer came from; it can then not make inputs of the layer's
parameters, and breaks the graph at every single layer.
"""

from __future__ import annotations

from typing import Any


def trace_methods_of_other_modules() -> None:
    """Make dynamo trace a method of another module, kept as an attribute, in one graph. Does nothing where it can.

    Leaves dynamo as it was when this does not help.
    """
    if _traces_them():
        return
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    original = UnspecializedNNModuleVariable.var_getattr
    UnspecializedNNModuleVariable.var_getattr = _with_source(original)
    if not _traces_them():
        UnspecializedNNModuleVariable.var_getattr = original


def _traces_them() -> bool:
    import torch
    from torch._dynamo.exc import TorchDynamoException

    holder = torch.nn.Identity()
    holder.method = torch.nn.LayerNorm(1).forward  # a layer with parameters, and one that draws no random numbers
    try:
        # Without gradients: this may run inside a checkpoint, which would count what is saved here as the block's.
        with torch.no_grad():
            torch.compile(lambda module, x: module.method(x), backend="eager", fullgraph=True)(holder, torch.zeros(1, 1))
    except TorchDynamoException:
        return False
    return True


def _with_source(original: Any) -> Any:
    from types import MethodType

    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import UserMethodVariable
    from torch._dynamo.variables.builder import VariableBuilder
    from torch.nn import Module

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

    return var_getattr
