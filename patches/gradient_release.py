"""``--gradient_release``: step each weight of a full fine-tune as soon as the backward pass has its gradient, and free that.

Upstream does so for Adafactor alone (``--fused_backward_pass``), and with several optimizers for others. This patch steps the
weights with upstream's one optimizer (:mod:`kohya_ext.optimizers.weight_steps`), so the scheduler and saved states stay as they
are. The loop's own ``optimizer.step()`` then finds no gradient, and only counts the step.

bf16 weights are stepped in float32 and rounded stochastically, and so are the states that the optimizer keeps in the type of
the weights: AdamW's two states then take 4 bytes per weight, and lose no small update. ``--no-stochastic_rounding`` steps as
upstream. ``--master_weights`` keeps the bits of the weights that rounding drops (:mod:`kohya_ext.optimizers.master_weights`).

``--max_grad_norm`` needs the norm of all gradients before the first weight is stepped. Each gradient is scaled as if the norm
were the larger one of that of the last step, and that of the gradients so far in this step. So a step whose gradients explode
is clipped, too. Gradients are left as they are, exactly, while neither norm is above the limit.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kohya_ext.config.settings import Option, Settings, boolean, fraction
from kohya_ext.console import note, stop, warn
from kohya_ext.errors import UserError, first_line
from kohya_ext.optimizers import probes
from kohya_ext.optimizers.master_weights import LOWER
from kohya_ext.optimizers.stochastic_rounding import StochasticRounding
from kohya_ext.optimizers.weight_steps import PART, RoundedSteps, WeightSteps, prepare, without_states
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, program, trained_weights
from kohya_ext.patching.types import Accelerator
from kohya_ext.sdscripts.constraints import CONSTRAINTS, MASTERS, ON_HOST, ON_HOST_RATIO, RELEASE, Run
from kohya_ext.speed import switches
from kohya_ext.units import gigabytes

if TYPE_CHECKING:
    from kohya_ext.optimizers.host_states import HostStates

FILE = "kohya_ext_gradient_release.pt"
"""The file in a state's folder."""

GRADIENT_RELEASE = Option(
    RELEASE,
    False,
    boolean,
    "in a full fine-tune, step each weight during the backward pass and free its gradient, with any optimizer that treats each "
    "weight by itself",
    activates=True,
)
STOCHASTIC_ROUNDING = Option(
    "stochastic_rounding",
    True,
    boolean,
    "with --gradient_release and bf16 weights (--full_bf16): compute steps in float32 and round them to bf16 stochastically, "
    "so that no small update is lost",
)
MASTER_WEIGHTS = Option(
    MASTERS,
    False,
    boolean,
    "with --gradient_release and bf16 weights (--full_bf16): keep float32 master weights, as the bits that bf16 drops, so that "
    "no update is lost; 2 bytes per weight",
)
OPTIMIZER_STATES_ON_HOST = Option(
    ON_HOST,
    False,
    boolean,
    "with --gradient_release, keep the optimizer's states in host memory, and copy those of each weight to the GPU and back "
    "while others are stepped",
)
OPTIMIZER_STATES_ON_HOST_RATIO = Option(
    ON_HOST_RATIO,
    1.0,
    fraction,
    f"with --{ON_HOST}, about the fraction of the states that are kept in host memory, from 0 (none) to 1 (all); `plan` finds "
    "the smallest that fits",
    metavar="FRACTION",
)


@dataclass
class _Release(TrainingCallback):
    """The steps of a run's weights, and what decides on them: the norms of their gradients and the rounding's generator."""

    rounding: StochasticRounding | None
    max_norm: float
    """The limit of the norm of all gradients; 0: no limit."""
    host: HostStates | None = None
    """The optimizer's states on the host; None if they are on the GPU."""
    masters: bool = False
    """Whether bf16 weights are the upper halves of float32 ones."""
    accelerator: Accelerator | None = None
    """The run's."""
    fuses: Callable[[], bool] = lambda: False
    """Whether steps are fused now."""
    stepped: int = 0
    """Weights stepped in this run."""
    fused: int = 0
    """Those of them that were stepped by Triton kernels, and rounded."""
    earlier: Any = 0.0
    """The sum of the squares of all gradients in the last step."""
    squares: Any = 0.0
    """That of the gradients so far in this step."""
    _hooks: list[Any] = field(default_factory=list)

    def before_batch(self, accelerator: Accelerator) -> None:
        """Hook the weights, once accelerate has prepared the optimizer and loaded a state."""
        if self._hooks:
            return
        from kohya_ext.optimizers.host_states import states_on_gpu

        optimizer = _optimizer(accelerator)
        if self.masters and hasattr(optimizer, "eval"):
            stop(f"--{MASTERS} cannot be combined with {type(optimizer).__name__}, which changes weights between steps")
        vars(optimizer).pop("load_state_dict", None)
        weights = [weight for weight in trained_weights([optimizer]) if weight.requires_grad]
        if self.host is not None:
            self.host.choose(weights)
            self.host.adopt(optimizer)
        with nullcontext() if self.host is None else without_states(optimizer):
            _check(optimizer)
        if self.host is None:
            for weight, name, value in states_on_gpu(optimizer):
                optimizer.state[weight][name] = value.to(accelerator.device)
        steps = self._steps(optimizer, weights)
        for weight in weights:
            self._hooks.append(weight.register_post_accumulate_grad_hook(lambda weight: self._step(steps, weight)))
        self._describe(type(optimizer).__name__, weights)
        if self.host is not None:
            _check_host_memory(self.host.moved)

    def _steps(self, optimizer: Any, weights: list[Any]) -> WeightSteps:
        if self.rounding is None or not _has_bf16(weights):
            return WeightSteps(optimizer, self.host)
        states = probes.states_of_the_weights_type(optimizer)
        part = PART if probes.steps_elements_separately(optimizer, states) else None
        steps = RoundedSteps(optimizer, self.rounding, states, part, self.host, self._fused_step, self.masters)
        steps.reserve(weights)
        return steps

    def _describe(self, optimizer: str, weights: list[Any]) -> None:
        how = "keeps float32 master weights" if self.masters else "rounds stochastically to bf16"
        rounded = f", {how}" if self.rounding is not None and _has_bf16(weights) else ""
        clipped = f", clips to --max_grad_norm {self.max_norm:g} by the norm of the last step" if self.max_norm else ""
        of_all = "its states" if self.host is None or self.host.ratio == 1 else f"about {self.host.ratio:.0%} of its states"
        on_host = f", keeps {of_all} in host memory" if self.host is not None else ""
        note(f"--{RELEASE} steps {len(weights)} weights with {optimizer} during the backward pass{rounded}{clipped}{on_host}")

    def _step(self, steps: WeightSteps, weight: Any) -> None:
        if self.max_norm:
            self._clip(weight.grad)
        steps.step(weight)
        self.stepped += 1

    def _fused_step(self, optimizer: Any, weight: Any, group: Any, rounding: StochasticRounding) -> bool:
        """Step a bf16 weight with kernels of its optimizer, if there are some and steps are fused."""
        import torch
        from transformers import Adafactor

        from kohya_ext.kernels import adafactor, adamw

        if not self.fuses():
            return False
        kind, is_stepped, lower = type(optimizer), False, optimizer.state.get(weight, {}).get(LOWER)
        if kind is Adafactor:
            is_stepped = adafactor.step(optimizer, weight, group, rounding.bits, lower)
        elif kind is torch.optim.AdamW:
            is_stepped = adamw.step(optimizer, weight, group, rounding.seed, lower)
        self.fused += is_stepped
        return is_stepped

    def _clip(self, gradient: Any) -> None:
        """Scale a gradient as if the norm were the larger one of the last step's, and of the gradients so far in this one."""
        import torch

        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        self.squares = norm.square().add_(self.squares)
        larger = torch.maximum(self.squares, torch.as_tensor(self.earlier, dtype=torch.float32, device=norm.device))
        gradient.mul_(larger.rsqrt_().mul_(self.max_norm).clamp_(max=1))

    def after_batch(self, accelerator: Accelerator) -> None:
        """Keep the norm of this step, unless it was skipped."""
        if self.host is not None:
            self.host.end_step()
            if hasattr(_optimizer(accelerator), "eval"):  # a schedule-free optimizer, which reads its states between steps
                self.host.drain()
        if isinstance(self.squares, float):
            return
        self.earlier, self.squares = self.squares, 0.0

    def on_state_save(self, folder: Path) -> None:
        """Write the norm of the last step and the rounding's random state."""
        import torch

        if self.host is not None:
            self.host.drain()  # accelerate writes the states next
        rounding = None if self.rounding is None else self.rounding.state()
        torch.save({"squares": float(self.earlier), "rounding": rounding}, folder / FILE)

    def on_state_load(self, folder: Path) -> None:
        """Read the norm of the last step and the rounding's random state."""
        import torch

        from kohya_ext.optimizers import saved_states

        optimizer = _optimizer(self.accelerator)
        load = optimizer.load_state_dict
        load = load if self.host is None else partial(saved_states.load_on_host, optimizer, load)
        optimizer.load_state_dict = partial(saved_states.load, optimizer, load, masters=self.masters)
        file = folder / FILE
        if not file.is_file():
            if self.max_norm:
                warn(f"{folder} was saved without --{RELEASE}, so the resumed run has no norm of its last step")
            return
        saved = torch.load(file, map_location="cpu", weights_only=True)
        self.earlier = saved["squares"]
        if self.rounding is not None and saved["rounding"] is not None:
            try:
                self.rounding.restore(saved["rounding"])
            except RuntimeError:
                warn(f"{folder} was saved on another kind of device: the result will differ from an uninterrupted run")

    def on_end(self) -> None:
        """Remove the hooks."""
        if self.host is not None:
            self.host.drain()
        while self._hooks:
            self._hooks.pop().remove()


def _optimizer(accelerator: Any) -> Any:
    (prepared,) = accelerator._optimizers
    return prepared.optimizer


def _has_bf16(weights: list[Any]) -> bool:
    import torch

    return any(weight.dtype is torch.bfloat16 for weight in weights)


#: Packages whose optimizers step each weight by itself, although some do not run on the host.
_SEPARATE = ("torch.", "bitsandbytes.")


def _check(optimizer: Any) -> None:
    """Exit unless the optimizer steps each weight by itself."""
    name, advice = type(optimizer).__name__, "use AdamW, AdamW8bit or Adafactor, or remove it"
    try:
        prepare(optimizer)
    except Exception as problem:  # an optimizer of any package
        stop(f"--{RELEASE} cannot step one weight at a time with {name} ({first_line(problem)}); {advice}")
    if type(optimizer).__module__.startswith(_SEPARATE):
        return
    try:
        is_separate = probes.steps_weights_separately(optimizer)
    except Exception as problem:
        stop(f"--{RELEASE} could not try {name} on the host ({first_line(problem)}); {advice}")
    if not is_separate:
        reason = "whose step depends on the gradients of all weights or counts its calls"
        stop(f"--{RELEASE} cannot be combined with {name}, {reason}; {advice}")


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Release:
    given = {RELEASE: True, MASTERS: settings[MASTER_WEIGHTS], "num_processes": accelerator.num_processes}
    run = Run(program().command.name, {**vars(args), **given})
    for problem in (problem for each in CONSTRAINTS if {RELEASE, MASTERS} & {*each.options} for problem in each.problems(run)):
        stop(problem)  # preflight, which reports them earlier, may be off
    rounding = StochasticRounding(accelerator.device, args.seed or 0) if settings[STOCHASTIC_ROUNDING] else None
    ratio = settings[OPTIMIZER_STATES_ON_HOST_RATIO]
    host = _host_states(accelerator, ratio) if settings[OPTIMIZER_STATES_ON_HOST] else None
    fuses = switches.works_in_steps(settings)
    return _Release(rounding, args.max_grad_norm or 0.0, host, settings[MASTER_WEIGHTS], accelerator, fuses)


def _host_states(accelerator: Accelerator, ratio: float) -> HostStates | None:
    """Return the place of states on the host; None on a CPU, where they are there already."""
    import torch

    from kohya_ext.optimizers.host_states import HostMemory, HostStates
    from kohya_ext.patching.page_lock import PageLock

    device = accelerator.device
    if not _has_streams(device):
        return None
    to_gpu, to_host = torch.cuda.Stream(device), torch.cuda.Stream(device)
    return HostStates(device, to_gpu, to_host, HostMemory(PageLock.of_this_machine()), ratio)


def _check_host_memory(weights: Collection[Any]) -> None:
    """Print a warning if the states of most optimizers, two values for each weight, are larger than the free memory."""
    from kohya_ext.patching.page_lock import free_memory

    size, free = 2 * sum(weight.nbytes for weight in weights), max(free_memory(), 0)
    if size > free:
        note(
            f"warning: states like AdamW's take {gigabytes(size)} GB of host memory, and {gigabytes(free)} GB are free; "
            "--optimizer_type AdamW8bit needs half of that or less, and Adafactor a few MB"
        )


def _has_streams(device: Any) -> bool:
    return bool(device.type == "cuda")


def _wanted(settings: Settings) -> bool:
    if settings[OPTIMIZER_STATES_ON_HOST] and not settings[GRADIENT_RELEASE]:
        raise UserError(f"--{ON_HOST} needs --{RELEASE}: add it, or remove the first")
    if settings[OPTIMIZER_STATES_ON_HOST_RATIO] != 1 and not settings[OPTIMIZER_STATES_ON_HOST]:
        raise UserError(f"--{ON_HOST_RATIO} needs --{ON_HOST}: add it, or remove the first")
    if settings[MASTER_WEIGHTS] and not settings[GRADIENT_RELEASE]:
        raise UserError(f"--{MASTERS} needs --{RELEASE}: add it, or remove the first")
    if settings[MASTER_WEIGHTS] and not settings[STOCHASTIC_ROUNDING]:
        raise UserError(f"--{MASTERS} and --no-stochastic_rounding cannot be combined: remove either")
    return bool(settings[GRADIENT_RELEASE])


def _facts() -> dict[str, object]:
    release = current(_Release)
    if release is None:
        return {}
    memory = None if release.host is None else release.host.memory
    on_host = {} if memory is None else {"host_bytes": memory.allocated, "page_locked_bytes": memory.lock.locked}
    fused = {"fused": release.fused} if release.fused else {}
    return {"weights": release.stepped, **fused, **on_host}


PATCH = Patch(
    name=RELEASE,
    summary="--gradient_release: step each weight of a fine-tune during the backward pass, with any optimizer",
    targets=(),
    options=(GRADIENT_RELEASE, STOCHASTIC_ROUNDING, MASTER_WEIGHTS, OPTIMIZER_STATES_ON_HOST, OPTIMIZER_STATES_ON_HOST_RATIO),
    exactness="exact",
    held_to="the same run without it, for float32 weights or with --no-stochastic_rounding, while no gradient is clipped; the "
    "mean of stochastic roundings, to the value",
    idea="https://github.com/kohya-ss/sd-scripts/pull/1259",
    wanted=_wanted,
    facts=_facts,
    stage=Stage.COMPUTE,
    on_start=_start,
)
