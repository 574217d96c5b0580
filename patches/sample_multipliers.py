"""Sample the prompts once more after training, with the LoRA at several multipliers.

At multiplier 0 the samples are the base model's, with the same noise for a prompt with a seed. They are made when the last
model is saved, so a failure costs nothing but them, and Ctrl-C leaves out those that are missing.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, cast

from kohya_ext.config.settings import Option, Settings
from kohya_ext.console import note, warn
from kohya_ext.errors import first_line
from kohya_ext.patching.attributes import Replacement, replace_attribute
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.step_loss import callers, local_names, variables
from kohya_ext.patching.training_loop import Stage, TrainingCallback
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import stop_request
from kohya_ext.run.output_files import MULTIPLIER, output_name


def multipliers(value: object) -> tuple[float, ...]:
    """Read one or several numbers: a list, or text with commas. Raises ValueError for anything else."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
    try:
        numbers = tuple(float(cast(Any, part)) for part in parts)
    except (TypeError, ValueError):
        numbers = ()
    if not numbers or not all(map(math.isfinite, numbers)):
        raise ValueError(f"must be numbers such as 0,0.5,1, not {value!r}")
    return tuple(dict.fromkeys(numbers))


SAMPLE_MULTIPLIERS = Option[tuple[float, ...] | None](
    "sample_multipliers",
    None,
    multipliers,
    "after training, sample the --sample_prompts with the LoRA at these multipliers: 0,0.5,1; 0 is the base model",
    metavar="NUMBERS",
)

_SAMPLE = "sample_images"
"""The method of a trainer that samples all prompts. Scripts call it after every step, also when no sample is due."""


@dataclass
class _Samples(TrainingCallback):
    args: Namespace
    accelerator: Accelerator
    multipliers: tuple[float, ...]
    _call: inspect.BoundArguments | None = None
    """The arguments of the script's last call."""
    _sample: Callable[..., Any] | None = None
    _replaced: list[Replacement] = field(default_factory=list)

    def watch(self, trainer: Any) -> None:
        """Keep the arguments of each call of the trainer's method."""
        self._sample = method = getattr(trainer, _SAMPLE)
        signature = inspect.signature(method)

        @wraps(method)
        def sample_images(*args: Any, **kwargs: Any) -> Any:
            self._call = signature.bind(*args, **kwargs)
            return method(*args, **kwargs)

        self._replaced.append(replace_attribute(trainer, _SAMPLE, sample_images))

    def after_training(self) -> None:
        """Sample with each multiplier."""
        network = next(filter(_has_multiplier, map(self.accelerator.unwrap_model, self.accelerator._models)), None)
        if self._call is None:
            return
        if network is None:
            warn("--sample_multipliers has no effect: the network's multiplier cannot be set")
            return
        if (stopper := stop_request.stopper()) is not None:
            stopper.left_out = "the remaining samples"  # until the last one: nothing may end what follows
        note(f"sampling with the multipliers {', '.join(map(_text, self.multipliers))}")
        for optimizer in self.accelerator._optimizers:
            if callable(evaluate := getattr(optimizer.optimizer, "eval", None)):  # Schedule-Free: the averaged weights
                evaluate()
        network.eval()
        for multiplier in self.multipliers:
            network.set_multiplier(multiplier)
            self._make(multiplier)
        if stopper is not None:
            stopper.left_out = ""

    def _make(self, multiplier: float) -> None:
        """Call the trainer's method with its last arguments, as if a sample was due."""
        assert self._call is not None
        assert self._sample is not None
        args = copy.copy(self.args)
        args.output_name = f"{output_name(args)}{MULTIPLIER}{_text(multiplier)}"
        args.sample_every_n_epochs, args.sample_every_n_steps = None, 1
        self._call.arguments.update(args=args, epoch=None)
        try:
            self._sample(*self._call.args, **self._call.kwargs)
        except Exception as problem:
            warn(f"sampling with the multiplier {_text(multiplier)} failed: {first_line(problem)}; the model is saved")

    def on_end(self) -> None:
        """Restore the trainer's method."""
        while self._replaced:
            self._replaced.pop().undo()


def _text(multiplier: float) -> str:
    return f"{multiplier:g}"


def _has_multiplier(model: Any) -> bool:
    return hasattr(model, "set_multiplier")


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Samples | None:
    if accelerator.num_processes > 1:
        warn("--sample_multipliers has no effect with several processes")
        return None
    chosen = settings[SAMPLE_MULTIPLIERS]
    assert chosen is not None
    samples = _Samples(args, accelerator, chosen)
    functions = (each for each in callers(sys._getframe(1)) if "prepare_accelerator" in each.f_code.co_names)
    frame = next((each for each in functions if "self" in local_names(each.f_code)), None)
    if frame is not None and hasattr(variables(frame)["self"], _SAMPLE):
        samples.watch(variables(frame)["self"])
    return samples


def _problems(script: str, args: Any, settings: Settings) -> Iterable[str]:
    if "network" not in script:
        yield f"--sample_multipliers has no effect: {script} trains no network; remove it"
    elif not getattr(args, "sample_prompts", None):
        yield "--sample_multipliers has no effect without --sample_prompts; add --sample_prompts FILE"


PATCH = Patch(
    name="sample_multipliers",
    summary="--sample_multipliers: sample once more after training, with the LoRA at several multipliers",
    targets=(),
    options=(SAMPLE_MULTIPLIERS,),
    exactness="exact",
    held_to="the same run without the patch: it samples when everything is saved",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/docs/gen_img_README.md",
    wanted=lambda settings: settings[SAMPLE_MULTIPLIERS] is not None,
    problems=_problems,
    only_trains=True,
    observes=True,
    stage=Stage.OBSERVE,
    on_start=_start,
)
