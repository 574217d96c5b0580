"""Turn on the features that make this run faster on this GPU, after a self-test and a trial on the real model: ``--speed``.

- ``exact``, the default: CUDA graphs, whose results are bit-identical, if the GPU waits for Python.
- ``auto``, in presets for GPUs: also fused operations or compiled blocks, whose results differ by rounding. Before the
  first step a trial times all combinations on the first batch and compares their gradients with eager ones
  (`kohya_ext.speed.trial`). Blocks are compiled if the run is long enough.
- ``off``: neither.

A feature is used only on a GPU whose self-test it has passed, in a process of its own (`kohya_ext.speed.proof`). The first
micro-batch is always eager, so that a run with a trial and one with a verdict that was kept compute the same. A saved state
keeps the choice, so that a resumed run computes as before.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, NoReturn

from kohya_ext.compiling.blocks import RUN
from kohya_ext.compiling.support import find_obstacle, reason_not_to_compile, reason_not_to_record
from kohya_ext.config.command_line import restart_line
from kohya_ext.config.settings import Option, Settings, one_of
from kohya_ext.console import error as print_error
from kohya_ext.console import note
from kohya_ext.errors import first_line
from kohya_ext.kernels.triton_package import is_missing
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, trained_weights
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import fresh_start, journal, last_step, step_times
from kohya_ext.sdscripts.constraints import PRESERVATION, RELEASE, Run
from kohya_ext.sdscripts.families import FAMILIES
from kohya_ext.speed import hang, proof, switches, verdicts
from kohya_ext.speed.switches import COMPILED_BLOCKS, CUDA_GRAPHS, FUSED_OPERATIONS, FUSED_STEPS, Switch
from kohya_ext.speed.verdicts import Verdict

SPEED = Option(
    "speed",
    "exact",
    one_of("off", "exact", "auto"),
    "what may be turned on to make this run faster, if a test on this GPU shows that it does: exact, only what gives "
    "bit-identical results (CUDA graphs); auto, also what differs by rounding (fused operations or compiled blocks); "
    "off, nothing",
    metavar="off|exact|auto",
)


@dataclass
class _Speed(TrainingCallback):
    """The choice of a run."""

    args: Namespace
    accelerator: Accelerator
    features: Sequence[Switch]
    """The features that may be turned on."""
    machine: Mapping[str, str]
    settings: str
    """A hash of the options that affect a step."""
    of_steps: Sequence[Switch] = ()
    """What works with any choice of a trial."""
    model: Any = None
    """The model of the first forward pass; None before it."""
    chosen: tuple[str, ...] = ()
    """What a trial has chosen of :attr:`decided`."""
    decided: Sequence[Switch] = ()
    of_state: tuple[str, ...] | None = None
    """The features of the state that this run resumes; None without one."""
    is_first: bool = True
    facts: dict[str, object] = field(default_factory=dict)

    @property
    def close(self) -> list[Switch]:
        """The features that change results."""
        return [switch for switch in self.features if switch.exactness == "close"]

    def on_state_load(self, folder: Path) -> None:
        self.of_state = verdicts.read_from_state(folder)

    def on_state_save(self, folder: Path) -> None:
        if self.close:
            verdicts.write_to_state(folder, [switch.name for switch in (*self.close, *self.of_steps) if switch.on])

    def before_batch(self, accelerator: Accelerator) -> None:
        if self.is_first and self.of_state is not None:
            self._continue(self.of_state)

    def after_batch(self, accelerator: Accelerator) -> None:
        # Not earlier: checkpointed passes of this micro-batch were recomputed as they had run.
        if self.is_first:
            self.is_first = False
            switches.use(self.chosen, self.decided)
            if self.decided:
                switches.use([switch.name for switch in self.of_steps], self.of_steps)

    def on_end(self) -> None:
        switches.reset()

    def forward(self, forward: Any, model: Any, args: Any, kwargs: Any) -> None:
        """Choose in the first forward pass that trains."""
        if self.model is not None:
            return
        self.model = model
        if not self.close or self.of_state is not None:
            return
        trained = [weight for weight in trained_weights(self.accelerator._optimizers) if weight.requires_grad]
        reason = _reason_without_trial(trained)
        if reason is None:
            reason = self._choose(trained, partial(forward, model), args, kwargs)
        if reason is not None:
            _report(f"{reason}; the run computes as with --speed exact")

    def _continue(self, features: Sequence[str]) -> None:
        """Compute as the run of a state did."""
        changing = [*self.close, *self.of_steps]
        missing = [name for name in features if name not in {switch.name for switch in changing}]
        if missing:
            _report(
                f"the resumed run computed with {switches.describe(missing)}, which this run does not use, so results "
                "differ by rounding"
            )
        switches.use(features, changing)

    def _choose(self, trained: Sequence[Any], forward: Any, args: Any, kwargs: Any) -> str | None:
        """Take the verdict that was kept for this machine, these settings and this batch, or that of a trial.

        Returns why there is none.
        """
        from kohya_ext.compiling.cuda_recorder import CudaRecorder
        from kohya_ext.compiling.replay_watch import ReplayWatch
        from kohya_ext.gpu.memory_meter import TemporaryMemoryMeter
        from kohya_ext.speed.trial import NoTrialError, Trial

        device = self.accelerator.device
        recorder = CudaRecorder(device)
        watch = ReplayWatch(recorder.new_event, partial(hang.end_process, self.args, device))
        prepared = [self.accelerator.unwrap_model(each) for each in self.accelerator._models]
        trial = Trial(
            recorder,
            [self.model, *(each for each in prepared if each is not self.model)],
            trained,
            passes_left=(getattr(self.args, "max_train_steps", None) or 0) * self.accelerator.gradient_accumulation_steps,
            needed=sum(_OPTIMIZER_BYTES * weight.numel() for weight in trained),
            meter=TemporaryMemoryMeter(device),
            watch=watch.replay,
        )
        shapes = [list(value.shape) for value in (*args, *kwargs.values(), *trained) if hasattr(value, "shape")]
        key = verdicts.key(self.machine, self.settings, shapes, [switch.name for switch in self.features])
        trial.fatal, trial.noted = verdicts.fatal(key), partial(verdicts.noted, key)
        trial.is_lost = lambda: bool(last_step.gpu_problem(device))
        try:
            known = verdicts.load(key)
            if known is None or known.lacks(trial.allowed(known.eager)):
                return self._try(key, trial, forward, args, kwargs)
            return self._take(_without_setup(known, trial.passes_left), trial, forward, args, kwargs)
        except NoTrialError as error:
            return str(error)
        except Exception as error:  # such as one of memory
            if trial.trying and trial.is_lost():
                _start_again(key, trial.trying, error)
            return f"the trial failed: {first_line(error)}"
        finally:
            watch.end()
            if COMPILED_BLOCKS.name not in self.chosen:
                RUN.forget()

    def _take(self, known: Verdict, trial: Any, forward: Any, args: Any, kwargs: Any) -> str | None:
        close = [switch for switch in self.close if switch.name in known.features]
        if close and (problem := trial.check(forward, args, kwargs, close)) is not None:
            return f"{switches.describe(known.features)}: {problem}"
        _report(f"{_sentence(known)}, as found on {known.day}")
        self._decide(known, self.features)
        return None

    def _try(self, key: str, trial: Any, forward: Any, args: Any, kwargs: Any) -> str | None:
        from kohya_ext.speed.trial import choose

        if not trial.is_worthwhile:
            return "the run is too short to be worth a trial"
        begun = time.monotonic()
        candidates = trial.run(forward, args, kwargs, self.features)
        best = choose(candidates)
        rows = [asdict(candidate) for candidate in candidates]
        eager = candidates[0].seconds or 0.0
        verdict = Verdict(best.features, eager, best.seconds or 0.0, candidates=rows, allowed=trial.allowed(eager))
        _report(f"{_sentence(verdict)}; chosen in {time.monotonic() - begun:.0f} s")
        for candidate in candidates:
            if candidate.rejected is not None:
                _report(f"not {switches.describe(candidate.features)}: {candidate.rejected}")
        tried = {name for candidate in candidates if candidate.in_time for name in candidate.features}
        self._decide(verdict, [switch for switch in self.features if switch.name in tried])
        try:
            verdicts.store(key, verdict)
        except OSError as error:
            _report(f"the choice cannot be kept, and the next run makes it again: {error}")
        return None

    def _decide(self, verdict: Verdict, about: Sequence[Switch]) -> None:
        self.chosen, self.decided = verdict.features, about
        self.facts = asdict(verdict)
        journal.event("speed", **self.facts)


def _start_again(key: str, features: Sequence[str], problem: Exception) -> NoReturn:
    """End a process whose GPU does nothing more for it, and start its run again without the features. No step is lost."""
    _report(f"{switches.describe(features)}: {first_line(problem)}. The GPU does nothing more for this process")
    journal.event("lost_gpu", problem=first_line(problem), features=list(features))
    with suppress(OSError):  # the next process would try it again
        verdicts.condemn(key, features)
        if fresh_start.is_possible():
            _report(f"starting the run again, without {switches.describe(features)}")
            fresh_start.start_again()
    print_error(f"no step was done; to start without {switches.describe(features)}: {restart_line({'speed': 'exact'})}")
    raise SystemExit(1)


#: Bytes of an optimizer's state for each trained weight: AdamW's.
_OPTIMIZER_BYTES = 8


def _without_setup(known: Verdict, passes: int) -> Verdict:
    """Return a verdict, or the best one without compiled blocks if compiling them would take longer than it saves."""
    from kohya_ext.speed.trial import Candidate, choose

    if COMPILED_BLOCKS.name not in known.features:
        return known
    candidates = [Candidate(**{**row, "features": tuple(row["features"])}) for row in known.candidates]
    setup = sum(candidate.setup for candidate in candidates if set(candidate.features) <= set(known.features))
    if (known.eager - known.seconds) * passes > setup:
        return known
    best = choose([candidate for candidate in candidates if not candidate.is_compiled])
    return replace(known, features=best.features, seconds=best.seconds or known.eager)


def _sentence(verdict: Verdict) -> str:
    if not verdict.features:
        return f"forward and backward take {verdict.eager:.2f} s, and nothing makes them faster"
    gain = verdict.eager / verdict.seconds
    return (
        f"{switches.describe(verdict.features)}: forward and backward take {verdict.seconds:.2f} instead of "
        f"{verdict.eager:.2f} s ({gain:.1f} times as fast)"
    )


def _report(line: str) -> None:
    note(f"speed: {line}")


def _reason_without_trial(trained: Sequence[Any]) -> str | None:
    """Return why passes cannot be tried before the first step; None if they can.

    They can if the model's own weights are trained: the gradients of the passes need no more memory than a step's, before the
    optimizer has a state.
    """
    if any(weight._backward_hooks for weight in trained):
        return "weights have hooks"
    return None if trained else "nothing is trained"


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Speed | None:
    from kohya_ext.compiling.cuda_recorder import CudaRecorder

    switches.reset()
    features = [switch for switch in switches.ALL if switches.may_choose(switch, settings)]
    for switch in features:
        switch.is_chosen = True
    if not features or CudaRecorder.obstacle(accelerator.device) is not None:
        return None
    if (reason := _reason_not_to_choose(args, accelerator, settings)) is not None:
        if settings[SPEED] == "auto":
            _report(f"{reason}; the run computes as with --speed off")
        return None
    if reason_not_to_record(args) is not None:
        features = [switch for switch in features if switch is not CUDA_GRAPHS]
    if COMPILED_BLOCKS in features and _reason_not_to_compile(args, accelerator.device, settings) is not None:
        features = [switch for switch in features if switch is not COMPILED_BLOCKS]
    machine, start = proof.machine(accelerator.device), proof.starter(accelerator.device.index or 0)
    problems = proof.problems(machine, [switch.name for switch in features], start, _report)
    for switch in features:
        if (problem := problems[switch.name]) is not None:
            _report(f"no {switch.title} on this GPU: {problem}; to test it again: python -m kohya_ext tune --self_test")
    features = [switch for switch in features if problems[switch.name] is None]
    CUDA_GRAPHS.on = CUDA_GRAPHS in features
    key = step_times.cache_key(Path(sys.argv[0]), args, settings)
    may_have_kernels = Run("", vars(args)).uses_adafactor or settings[RELEASE]
    of_steps = [FUSED_STEPS] if may_have_kernels and FUSED_OPERATIONS in features else []
    return _Speed(args, accelerator, features, machine, key, of_steps) if features else None


def _reason_not_to_choose(args: Namespace, accelerator: Accelerator, settings: Settings) -> str | None:
    if accelerator.num_processes > 1:
        return "the run has several processes"
    if getattr(args, "deepspeed", False):
        return "--deepspeed is not supported"
    if settings["vram_budget"] is not None:
        return "--vram_budget is not supported"
    if settings[PRESERVATION] is not None:
        return f"--{PRESERVATION} runs the model three times in a step, twice of them with gradients"
    return None


def _reason_not_to_compile(args: Namespace, device: Any, settings: Settings) -> str | None:
    if settings["activation_memory_budget"] is not None or settings["compile_mode"] in ("reduce-overhead", "max-autotune"):
        return "its options are for --selective_torch_compile"
    if (reason := reason_not_to_compile(args)) is not None:
        return reason
    if device.type == "cuda":
        is_missing(device)  # a preset leaves no other sign of what it could do
    reason = find_obstacle(device.type, RUN.backend)
    if reason is None and device.type == "cuda":
        from kohya_ext.kernels.support import unsupported_gpu

        return unsupported_gpu(device)
    return reason


def _chosen(original: Any, settings: Settings) -> Any:
    import torch

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        speed = current(_Speed)
        if speed is not None and torch.is_grad_enabled():
            speed.forward(original, self, args, kwargs)
        return original(self, *args, **kwargs)

    return forward


def _facts() -> Mapping[str, object]:
    speed = current(_Speed)
    return {} if speed is None else {**speed.facts, "on": switches.added()}


PATCH = Patch(
    name="speed",
    summary="turn on the features that a self-test and a trial on this GPU show to be correct and faster",
    targets=tuple(
        Target(family.module, f"{family.model}.forward", _chosen, takes("self", family.first_input), body="runs")
        for family in FAMILIES
    ),
    options=(SPEED,),
    torch="2.6",
    exactness="exact",
    held_to="the same run with the chosen features' own options; --speed auto as close as fused_operations",
    idea="https://github.com/pytorch/pytorch/tree/main/torch/_inductor (kernels chosen by measurement)",
    facts=_facts,
    stage=Stage.CHOOSE,
    on_start=_start,
)
