"""Let torch.compile trace ``del`` of a variable that a comprehension or a lambda captures.

Dynamo may not support that instruction. HunyuanImage's and Anima's attention uses it in every call below Python 3.12. Newer
versions inline comprehensions.
"""

from __future__ import annotations

import dis
from functools import partial
from typing import Any

from kohya_ext.compiling.tracing import breaks_the_graph
from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target

#: Each translator class has its own instruction table.
_TRANSLATORS = (
    "InstructionTranslatorBase",
    "InstructionTranslator",
    "InliningInstructionTranslator",
    "InliningGeneratorInstructionTranslator",
)


def _with_deletions(original: Any, settings: Settings) -> Any:
    table = list(original)
    table[dis.opmap["DELETE_DEREF"]] = _delete_deref
    return table


def _delete_deref(self: Any, instruction: Any) -> None:
    from torch._dynamo.variables import DeletedVariable

    self.push(DeletedVariable())
    self.STORE_DEREF(instruction)


def _example() -> tuple[Any, tuple[Any, ...]]:
    import torch

    def attention(x: Any) -> Any:
        query = x + 1

        def scores() -> Any:
            return query * 2  # noqa: F821  called before the variable is deleted

        out = scores()
        del query
        return out

    return lambda x: attention(x), (torch.zeros(1, 1),)


PATCH = Patch(
    name="dynamo_deleted_names",
    summary="let torch.compile trace the deletion of a variable that a nested function captures",
    targets=tuple(
        Target("torch._dynamo.symbolic_convert", f"{translator}.dispatch_table", _with_deletions, body="runs")
        for translator in _TRANSLATORS
    ),
    exactness="exact",
    held_to="one unbroken graph, as without the deletion",
    idea="https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/symbolic_convert.py",
    wanted=lambda settings: settings["selective_torch_compile"],
    needed=partial(breaks_the_graph, _example),
)
