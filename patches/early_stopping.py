"""Stop when the validation loss no longer improves, and keep the model with the lowest one.

After each validation that is better than the best one before by more than its standard error, the model is saved as
``NAME-best-stepN`` with the script's own statements, and the earlier best one of this run is removed. After some validations
without one the run stops as after Ctrl-C, with exit code 0. The evaluations are part of each state, so a resumed run counts on.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

from kohya_ext.config.settings import Option, Settings, count
from kohya_ext.console import note, warn
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.step_loss import callers
from kohya_ext.patching.step_save import step_save
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current
from kohya_ext.patching.types import Accelerator
from kohya_ext.renames import replace_text, unlink
from kohya_ext.run import evaluations, resume, stop_request
from kohya_ext.run.atomic_write import final_path, written_files
from kohya_ext.run.evaluations import Evaluation
from kohya_ext.run.output_files import BEST, output_name
from kohya_ext.run.validation import Validation, preserved_random_state

EARLY_STOPPING = Option[int | None](
    "early_stopping",
    None,
    count,
    "stop after this many validations without an improvement, and keep the best model; without --validation_split a few "
    "training images are validated",
    metavar="PATIENCE",
)

FILE = "kohya_ext_evaluations.json"
"""The file in a state's folder."""

LATER_FILE = "kohya_ext_later_evaluations.json"
"""The same with the validation of the state's own step, which comes after the state: its files stay as they were recorded."""


@dataclass
class _EarlyStopping(TrainingCallback):
    args: Namespace
    accelerator: Accelerator
    patience: int
    evaluations: list[Evaluation] = field(default_factory=list)
    _new_states: list[Path] = field(default_factory=list)
    """States that were saved after this step, before its validation."""
    _best: set[Path] = field(default_factory=set)
    """The files of the best model. Others of such a name may be an earlier run's."""
    _checked: bool = False

    def before_batch(self, accelerator: Accelerator) -> None:
        """Forget the states of the last step."""
        self._new_states.clear()
        if not self._checked:
            self._checked = True
            if current(Validation) is None:
                warn("--early_stopping has no effect: this run validates nothing; add --validation_split 0.1, or remove it")

    def after_validation(self, evaluation: Evaluation) -> None:
        """Save the model if it is the best, and request a stop if none was for long."""
        self.evaluations = [each for each in self.evaluations if each.step < evaluation.step] + [evaluation]
        if self.accelerator.is_main_process:
            if evaluations.best(self.evaluations) is evaluation:
                self._save(evaluation)
            for state in filter(Path.is_dir, self._new_states):
                with contextlib.suppress(OSError):  # a full disk; the state is complete without it
                    replace_text(state / LATER_FILE, self._text())
        if self._is_over() and (stopper := stop_request.stopper()) is not None:
            note(f"early stopping: {self._reason()}{self._kept()}; saving the model and the state")
            stopper.request(f"early stopping: {self._reason()}", 0)

    def after_training(self) -> None:
        """Print a warning if the run was shorter than the time to its first validation."""
        stopper = stop_request.stopper()
        if not self.evaluations and (stopper is None or not stopper.reason):
            warn("--early_stopping had no effect: nothing was validated; add --validate_every_n_steps with fewer steps")

    def _is_over(self) -> bool:
        return evaluations.without_improvement(self.evaluations) >= self.patience

    def _reason(self) -> str:
        best = evaluations.best(self.evaluations)
        assert best is not None
        return f"no validation since step {best.step} was better than its loss of {best.loss:.4g}"

    def _kept(self) -> str:
        """Return the file of the best model for a message; empty if this run or one that it resumes has saved none."""
        files = sorted((str(file) for file in self._best if file.is_file()), key=len)
        return f"; the best model is {files[0]}" if files else ""

    def _save(self, evaluation: Evaluation) -> None:
        """Save the model, and then remove the best one before."""
        save = next(filter(None, map(step_save, callers(sys._getframe(1)))), None)
        if save is None:
            return
        name, best = self.args.output_name, f"{output_name(self.args)}{BEST.removesuffix('-step')}"
        position = resume.position()
        preserving = position.preserving_random_state() if position is not None else contextlib.nullcontext()
        self.args.output_name = best
        try:
            with preserved_random_state(), preserving, written_files() as files:
                save.run(evaluation.step, self.args, self.accelerator, as_file=save.saves_folders)
        finally:
            self.args.output_name = name
        before, self._best = self._best, set(files)
        for file in before - self._best:
            with contextlib.suppress(OSError):  # on Windows another program may have it open
                unlink(file)

    def on_state_save(self, folder: Path) -> None:
        """Write the evaluations into the state."""
        if self.accelerator.is_main_process:
            (folder / FILE).write_text(self._text(), encoding="utf-8")
            self._new_states.append(final_path(folder))

    def _text(self) -> str:
        lines = [{"step": each.step, **each.line()} for each in self.evaluations]
        # A copied state that is resumed in another folder must not remove a file of this one.
        names = [os.path.relpath(file, self.args.output_dir) for file in self._best if self._is_in_output(file)]
        return json.dumps({"evaluations": lines, "best": names})

    def _is_in_output(self, file: Path) -> bool:
        return Path(os.path.abspath(self.args.output_dir)) in Path(os.path.abspath(file)).parents

    def on_state_load(self, folder: Path) -> None:
        """Read the evaluations from the state; end a run that has stopped early."""
        file = next(filter(Path.is_file, (folder / LATER_FILE, folder / FILE)), None)
        if file is None:
            return
        saved = json.loads(file.read_text(encoding="utf-8"))
        self.evaluations = evaluations.of_lines(saved["evaluations"])
        self._best = {Path(self.args.output_dir, name) for name in saved["best"]}
        best = evaluations.best(self.evaluations)
        if best is not None and self._best and not self._kept():
            missing = min(map(str, self._best), key=len)
            warn(
                f"{missing}, the best model so far, is missing; another is saved when a loss is below that of step {best.step}"
            )
        if self._is_over():
            advice = "to train on, increase --early_stopping or remove it"
            note(f"nothing left to train: {self._reason()}{self._kept()}; {advice}")
            if (stopper := stop_request.stopper()) is not None:
                stopper.request(f"early stopping: {self._reason()}", 0)
            raise SystemExit(0)


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _EarlyStopping:
    patience = settings[EARLY_STOPPING]
    assert patience is not None
    return _EarlyStopping(args, accelerator, patience)


PATCH = Patch(
    name="early_stopping",
    summary="--early_stopping: keep the model with the lowest validation loss, and stop when it no longer improves",
    targets=(),
    options=(EARLY_STOPPING,),
    exactness="exact",
    held_to="the same steps of a run without it",
    idea="https://github.com/Akegarasu/lora-scripts/issues/705",
    wanted=lambda settings: settings[EARLY_STOPPING] is not None,
    only_trains=True,
    stage=Stage.GUARD,
    on_start=_start,
)
