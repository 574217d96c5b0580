"""Let torch.compile trace a method of another module that is kept as an attribute, as torch does from 2.7 on.

LoRA keeps the original method of a layer (``self.org_forward = layer.forward``). Dynamo forgets, in such a method, where the
layer came from. It then cannot make inputs of the layer's parameters, and breaks the graph at every layer.
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
        # Guarded on the function, not on the method object, which is another one for each layer.
        source = AttrSource(self.source, name)
        install_guard(AttrSource(source, "__func__").make_guard(GuardBuilder.CLOSURE_MATCH))
        its_self = VariableBuilder(tx, AttrSource(source, "__self__"))(owner)
        return UserMethodVariable(method.__func__, its_self, source=source)

    return var_getattr


def _example() -> tuple[Any, tuple[Any, ...]]:
    import torch

    holder = torch.nn.Identity()
    holder.method = torch.nn.LayerNorm(1).forward  # a layer with parameters, and one that draws no random numbers
    return lambda module, x: module.method(x), (holder, torch.zeros(1, 1))


PATCH = Patch(
    name="dynamo_bound_methods",
    summary="torch 2.6: torch.compile traces the method of a layer that LoRA keeps, instead of breaking the graph there",
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
    held_to="the same graph in one piece, as later versions of torch trace it",
    idea="https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/variables/nn_module.py",
    wanted=lambda settings: settings["selective_torch_compile"],
    needed=partial(breaks_the_graph, _example),
)
