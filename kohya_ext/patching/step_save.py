"""Save the model with the statements of a script's own training loop.

Every script saves in its loop, in ``if args.save_every_n_steps ... % ...``. That statement is compiled once and executed with
the variables of a loop that has failed. Names, formats and metadata are therefore the script's own.
"""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from kohya_ext.patching.attributes import replaced
from kohya_ext.patching.step_loss import definition_of, local_names, variables

#: Arguments that the scripts read after a step -> values that save model and state and remove nothing.
SAVE_NOW = {
    "save_every_n_steps": 1,
    "save_state": True,
    "save_last_n_steps": None,
    "save_last_n_steps_state": None,
}

_EVERY, _STEP, _IS_FILE = "save_every_n_steps", "global_step", "save_stable_diffusion_format"


@dataclass(frozen=True)
class StepSave:
    """The statements of a training loop that save the model, and the variables that they use."""

    code: CodeType
    variables: Mapping[str, Any]

    @property
    def saves_folders(self) -> bool:
        """Whether the model is saved in Diffusers' format, which needs other files, but could be saved as one file."""
        return self.variables.get(_IS_FILE) is False

    def run(self, step: int, args: Namespace, accelerator: Any, as_file: bool = False) -> None:
        """Save the model as that of a step. The processes of a run do not wait for each other."""
        # Upstream deletes some of its variables before it saves the last model.
        scope = {"args": args, "accelerator": accelerator, **self.variables, _STEP: step}
        if as_file:
            scope |= {_IS_FILE: True, "use_safetensors": True}
        scope.get("optimizer_eval_fn", _nothing)()  # schedule-free optimizers have other weights for training
        with _saving_only_the_model(args), replaced(accelerator, "wait_for_everyone", _nothing):
            exec(self.code, scope)


@contextmanager
def _saving_only_the_model(args: Namespace) -> Iterator[None]:
    wanted = {**SAVE_NOW, "save_state": False}
    before = {name: getattr(args, name) for name in wanted if hasattr(args, name)}
    vars(args).update({name: wanted[name] for name in before})
    try:
        yield
    finally:
        vars(args).update(before)


def step_save(frame: FrameType) -> StepSave | None:
    """Return what saves the model of a running or failed training function; None for any other function."""
    if _STEP not in local_names(frame.f_code):
        return None
    module = saving_statements(frame.f_code)
    if module is None:
        return None
    names = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)} | {"optimizer_eval_fn"}
    known = variables(frame)  # to keep all of them would keep the activations of the failed step
    code = compile(module, frame.f_code.co_filename, "exec")
    return StepSave(code, {name: known[name] for name in names if name in known})


def saving_statements(function: CodeType) -> ast.Module | None:
    """Return the statements of a function that save its model every some steps; None if it has none."""
    definition = definition_of(function)
    for node in ast.walk(definition) if definition is not None else ():
        if isinstance(node, ast.If) and _is_due(node.test):
            return ast.Module(node.body, type_ignores=[])
    return None


def _is_due(test: ast.expr) -> bool:
    """Return whether a condition is that the steps are a multiple of ``args.save_every_n_steps``."""
    return any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mod)
        and isinstance(node.right, ast.Attribute)
        and node.right.attr == _EVERY
        for node in ast.walk(test)
    )


def _nothing() -> None:
    """Do nothing."""
