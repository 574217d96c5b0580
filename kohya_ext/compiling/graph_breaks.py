"""Replacements in dynamo for code in which some of its versions break the graph, and a probe for such code."""

from __future__ import annotations

import dis
import traceback
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

from kohya_ext.config.settings import Settings


def breaks_the_graph(example: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]) -> bool:
    """Return whether dynamo breaks the graph in, or fails to trace, a function.

    ``example`` returns the function and its arguments.
    """
    import torch
    from torch._dynamo.exc import TorchDynamoException

    function, inputs = example()
    try:
        # Without gradients, because this may run inside a checkpoint, which would count tensors saved here.
        with torch.no_grad():
            torch.compile(function, backend="eager", fullgraph=True)(*inputs)
    except TorchDynamoException as error:
        # A frame of torch keeps the error in a variable, and the error all callers' frames with the tensors of the first step:
        # a cycle, which stays until Python's next full garbage collection.
        traceback.clear_frames(error.__traceback__)
        return True
    return False


# --- methods of another module ----------------------------------------------------------------------------------------


def loses_methods() -> bool:
    """Return whether the graph breaks at another module's method that is stored as an attribute: torch 2.6."""
    return breaks_the_graph(_stored_method)


def _stored_method() -> tuple[Any, tuple[Any, ...]]:
    import torch

    holder = torch.nn.Identity()
    holder.method = torch.nn.LayerNorm(1).forward  # has parameters, and its initialization draws no random numbers
    return lambda module, x: module.method(x), (holder, torch.zeros(1, 1))


def keep_source_of_methods(original: Any, settings: Settings) -> Any:
    """Trace a stored method of another module, as torch 2.7 and later do.

    LoRA stores a layer's original method (``self.org_forward = layer.forward``). Dynamo loses the source of the layer in such a
    method. It cannot turn the layer's parameters into graph inputs, so the graph breaks at every layer.
    https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/variables/nn_module.py
    """
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


# --- deleted names ----------------------------------------------------------------------------------------------------

#: Each translator class has its own instruction table.
TRANSLATORS = (
    "InstructionTranslatorBase",
    "InstructionTranslator",
    "InliningInstructionTranslator",
    "InliningGeneratorInstructionTranslator",
)


def lacks_deletions() -> bool:
    """Return whether the graph breaks at ``del`` of a variable that a comprehension or a lambda captures."""
    return breaks_the_graph(_deletion)


def _deletion() -> tuple[Any, tuple[Any, ...]]:
    import torch

    def attention(x: Any) -> Any:
        query = x + 1

        def scores() -> Any:
            return query * 2  # noqa: F821  called before the variable is deleted

        out = scores()
        del query
        return out

    return lambda x: attention(x), (torch.zeros(1, 1),)


def allow_deletions(original: Any, settings: Settings) -> Any:
    """Add the instruction for a deletion of a captured variable to a table.

    HunyuanImage's and Anima's attention uses it in every call below Python 3.12. Newer versions inline comprehensions.
    https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/symbolic_convert.py
    """
    table = list(original)
    table[dis.opmap["DELETE_DEREF"]] = _delete_deref
    return table


def _delete_deref(self: Any, instruction: Any) -> None:
    from torch._dynamo.variables import DeletedVariable

    self.push(DeletedVariable())
    self.STORE_DEREF(instruction)
