"""Compute the loss of another batch with the statements of a script's own training loop.

The fine-tuning scripts have no function that returns the loss of a batch: it is computed in the body of their loop. Its
statements, from ``with accelerator.accumulate(...)`` up to ``accelerator.backward(loss)``, are compiled once and executed with
the loop's variables. Assignments in them do not reach the loop.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

BATCH = "batch"
"""The loop's variable for the current batch."""


@dataclass(frozen=True)
class StepLoss:
    """The statements of a training loop that compute the loss."""

    code: CodeType
    name: str
    """The variable of the loss."""

    def of(self, variables: dict[str, Any], batch: Any) -> Any:
        """Return the loss of a batch, computed with the loop's :func:`variables`."""
        scope = {**variables, BATCH: batch}
        exec(self.code, scope)
        return scope[self.name]


def step_loss(function: CodeType) -> StepLoss | None:
    """Return the statements in the source file of a training function; None if it has no such loop."""
    definition = definition_of(function)
    for loop in (node for node in ast.walk(definition) if isinstance(node, ast.For)) if definition is not None else ():
        if _assigns_batch(loop) and (loss := _before_backward(loop, function.co_filename)) is not None:
            return loss
    return None


def definition_of(function: CodeType) -> ast.FunctionDef | None:
    """Return the definition of a function in its source file; None if it is not there."""
    try:
        module = ast.parse(Path(function.co_filename).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    definitions = (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef))
    return next((each for each in definitions if _first_line(each) == function.co_firstlineno), None)


def _first_line(definition: ast.FunctionDef) -> int:
    return min([definition.lineno, *(decorator.lineno for decorator in definition.decorator_list)])


def _assigns_batch(loop: ast.For) -> bool:
    return any(isinstance(node, ast.Name) and node.id == BATCH for node in ast.walk(loop.target))


def _before_backward(loop: ast.For, file: str) -> StepLoss | None:
    for block in (node for node in loop.body if isinstance(node, ast.With)):
        if not any(_is_call(item.context_expr, "accumulate") for item in block.items):
            continue
        for index, statement in enumerate(block.body):
            if isinstance(statement, ast.Expr) and (call := _is_call(statement.value, "backward")) and call.args:
                loss = call.args[0]
                if isinstance(loss, ast.Name):
                    body = ast.Module(block.body[:index], type_ignores=[])
                    return StepLoss(compile(body, file, "exec"), loss.id)
    return None


def _is_call(node: ast.expr, method: str) -> ast.Call | None:
    """Return the node if it is a call of ``accelerator.METHOD``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method:
        return node if isinstance(node.func.value, ast.Name) and node.func.value.id == "accelerator" else None
    return None


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and the frames that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def local_names(function: CodeType) -> frozenset[str]:
    """Return the names of a function's local variables and parameters."""
    return frozenset((*function.co_varnames, *function.co_cellvars))


def variables(frame: FrameType) -> dict[str, Any]:
    """Return the global and local variables that a running function sees."""
    snapshot = frame.f_locals
    values = {**frame.f_globals, **snapshot}
    if type(snapshot) is dict:  # up to Python 3.12 the frame would keep a copy of its tensors alive
        snapshot.clear()
    return values
