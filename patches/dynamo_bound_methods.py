"""Let torch.compile trace another module's method that is stored as an attribute, as torch 2.7 and later do.

LoRA stores a layer's original method (``self.org_forward = layer.forward``). Dynamo loses the source of the layer in such a
method. It cannot turn the layer's parameters into graph inputs, so the graph breaks at every layer.
"""

from __future__ import annotations

from functools import partial, wraps
from types import MethodType
from typing import Any

from kohya_ext.compiling.tracing import breaks_the_graph
from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.sdscripts.fingerprints import known_bodies


def _with_source(original: Any, settings: Settings) -> Any:
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import UserMethodVariable
    from torch._dynamo.variables.builder import VariableBuilder
    from torch.nn import Module

    @wraps(original)
    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        method = self.value.__dict__.get(name)
        owner = method.__self__ if isinstance(method, MethodType) else None
        if not self.source or not isinstance(owner, Module) or owner is self.value:
            return original(self, tx, name)
        # Guard on the function, because each layer has its own method object.
        source = AttrSource(self.source, name)
        install_guard(AttrSource(source, "__func__").make_guard(GuardBuilder.CLOSURE_MATCH))
        owner_variable = VariableBuilder(tx, AttrSource(source, "__self__"))(owner)
        return UserMethodVariable(method.__func__, owner_variable, source=source)

    return var_getattr


def _example() -> tuple[Any, tuple[Any, ...]]:
    import torch

    holder = torch.nn.Identity()
    holder.method = torch.nn.LayerNorm(1).forward  # has parameters, and its initialization draws no random numbers
    return lambda module, x: module.method(x), (holder, torch.zeros(1, 1))


PATCH = Patch(
    name="dynamo_bound_methods",
    summary="torch 2.6: let torch.compile trace LoRA's reference to a layer's method, instead of breaking the graph",
    targets=(
        Target(
            "torch._dynamo.variables.nn_module",
            "UnspecializedNNModuleVariable.var_getattr",
            _with_source,
            takes("self", "tx", "name", exactly=True),
            body=known_bodies("4640a6a879dd", releases="torch 2.6"),
        ),
    ),
    exactness="exact",
    held_to="one unbroken graph, as later versions of torch trace it",
    idea="https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/variables/nn_module.py",
    wanted=lambda settings: settings["selective_torch_compile"],
    needed=partial(breaks_the_graph, _example),
)
