"""``--adaptive_lr``: halve the learning rate when the loss stops falling, and clip unusually large gradients.

A single step's loss depends mostly on its random timestep. The patch therefore compares mean losses of --adaptive_lr_patience
steps, as ReduceLROnPlateau compares epochs: a mean that is not 1 % below the best so far halves the rate. A gradient whose norm
exceeds four times the median of the last hundred norms is scaled down to that median, as in AutoClip
(https://arxiv.org/abs/2007.14469).

The factor is applied to the optimizer's rate before each step and removed before the scheduler's step. It therefore also works
with schedulers that compute the next rate from the current one. Every state contains it.
"""

from __future__ import annotations

import json
import math
import statistics
from argparse import Namespace
from collections import deque
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from kohya_ext.config.settings import Option, Settings, boolean, count
from kohya_ext.console import note, stop
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, step_values, trained_weights
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import ranks
from kohya_ext.sdscripts.constraints import stepping_in_backward

FILE = "kohya_ext_adaptive_lr.json"
"""The file in a state's folder."""

_BETTER = 0.01
_LOWEST = 2**-6
_UNSTABLE = 4.0
_NORMS = 100
_FEW_NORMS = 20
"""Minimum number of norms for a median."""

ADAPTIVE_LR = Option(
    "adaptive_lr",
    False,
    boolean,
    "halve the learning rate when the loss stops falling, and clip unusually large gradients to the median norm",
    activates=True,
)
ADAPTIVE_LR_PATIENCE = Option(
    "adaptive_lr_patience",
    500,
    count,
    "steps averaged per comparison of --adaptive_lr; small values are noisy",
    metavar="STEPS",
)


@dataclass
class Adaptive(TrainingCallback):
    """A factor on the learning rate, with the loss and gradient statistics that determine it."""

    accelerator: Accelerator
    patience: int
    """Steps per mean loss."""
    max_grad_norm: float = 0.0
    """The script's clipping threshold; 0: no clipping."""
    fused: bool = False
    """Whether the optimizer steps within backward, which leaves no gradients to clip."""
    step: int = 0
    factor: float = 1.0
    best: float | None = None
    """The lowest mean so far."""
    loss_sum: Any = 0.0
    """The sum of finite losses since the last mean. A tensor on the device, to avoid a sync each step."""
    loss_count: Any = 0.0
    """The number of finite losses since the last mean."""
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=_NORMS))
    _scheduled: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    """Parameter groups with the scheduler's rates, while the factor is applied."""

    def before_batch(self, accelerator: Accelerator) -> None:
        """Multiply every learning rate by the factor."""
        groups = self._groups()
        if self.step == 0 and any(group.get("relative_step") for group in groups):
            stop("--adaptive_lr has no effect on Adafactor's relative steps; add --optimizer_args relative_step=False")
        self._scheduled = [(group, group["lr"]) for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * self.factor

    def restore_rates(self) -> None:
        """Restore the scheduler's rates, before its step or after the batch."""
        for group, rate in self._scheduled:
            group["lr"] = rate
        self._scheduled = []

    def add_loss(self, loss: Any) -> None:
        """Add the losses of a micro-batch of all processes to the mean, unless they are not finite."""
        import torch

        value = loss.detach().float().mean()
        finite = value.isfinite()
        value, count = torch.where(finite, value, torch.zeros_like(value)), finite.float()
        if self.accelerator.num_processes > 1:
            value, count = self.accelerator.reduce(torch.stack([value, count]), reduction="sum")
        self.loss_sum = self.loss_sum + value
        self.loss_count = self.loss_count + count

    def clip_unusual(self, optimizer: Any) -> None:
        """Scale the gradients to the median norm if theirs is unusually large, before the optimizer's step."""
        import torch

        gradients = [weight.grad for weight in trained_weights([optimizer]) if weight.grad is not None]
        values = step_values()
        is_clipped = values.has_norm and self.max_grad_norm > 0
        norm = values.read_norm(gradients)
        if not math.isfinite(norm):
            return
        median = statistics.median(self.norms) if len(self.norms) >= _FEW_NORMS else norm
        self.norms.append(norm)
        if norm <= _UNSTABLE * median:
            return
        clipped = min(norm, self.max_grad_norm) if is_clipped else norm
        if median < clipped:
            torch._foreach_mul_(gradients, median / clipped)
        note(f"step {self.step + 1}: gradient norm {norm:.4g} clipped to {min(median, clipped):.4g} (median: {median:.4g})")

    def after_batch(self, accelerator: Accelerator) -> None:
        """Count the step, and update the factor at the end of each window."""
        self.restore_rates()
        if not accelerator.sync_gradients:
            return
        self.step += 1
        if self.step % self.patience == 0:
            mean = self._mean()
            if mean is not None:
                self.update_factor(mean)

    def _mean(self) -> float | None:
        import torch

        loss_sum, loss_count = torch.stack([torch.as_tensor(value) for value in (self.loss_sum, self.loss_count)]).tolist()
        self.loss_sum = self.loss_count = 0.0
        return loss_sum / loss_count if loss_count else None

    def update_factor(self, mean: float) -> None:
        """Halve the factor unless ``mean``, the mean loss of a window, is below the best."""
        if self.best is None or mean < self.best * (1 - _BETTER):
            self.best = mean
        elif self.factor > _LOWEST:
            self.factor /= 2
            rates = sorted({float(group["lr"]) * self.factor for group in self._groups()})
            note(
                f"step {self.step}: mean loss {mean:.4g} over {self.patience} steps is not {_BETTER:.0%} below "
                f"{self.best:.4g}; learning rate x {self.factor:g}, now {', '.join(f'{rate:.4g}' for rate in rates)}"
            )

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.accelerator._optimizers for group in optimizer.param_groups]

    def on_state_save(self, folder: Path) -> None:
        """Write the factor and its statistics into the state, and the scheduler's rates after an error within a step."""
        self.restore_rates()
        if self.accelerator.is_main_process:
            values = {name: getattr(self, name) for name in ("step", "factor", "best")}
            values |= {"loss_sum": float(self.loss_sum), "loss_count": float(self.loss_count), "norms": list(self.norms)}
            (folder / FILE).write_text(json.dumps(values), encoding="utf-8")

    def on_state_load(self, folder: Path) -> None:
        """Read the factor and its statistics from the state."""
        file = folder / FILE
        if not file.is_file():
            note(f"{folder} was saved without --adaptive_lr; starting with a factor of 1")
            return
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            norms = deque(map(float, values["norms"]), maxlen=_NORMS)
            numbers = {name: float(values[name]) for name in ("step", "factor", "loss_sum", "loss_count")}
            step = int(numbers["step"])
            best = None if values["best"] is None else float(values["best"])  # None in the first window
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            stop(f"{file} is damaged; resume from another state, or without --adaptive_lr")
        for name, value in {**numbers, "step": step, "best": best, "norms": norms}.items():
            setattr(self, name, value)
        if self.factor != 1:
            note(f"--adaptive_lr resumed at step {self.step}: learning rate x {self.factor:g}")


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> Adaptive:
    if ranks.is_deepspeed(accelerator):
        stop("--adaptive_lr does not support DeepSpeed, which steps its own scheduler; remove it")
    note(
        f"--adaptive_lr halves the rate when the mean loss of {settings[ADAPTIVE_LR_PATIENCE]} steps is not {_BETTER:.0%} "
        "below the best; the script's log shows the scheduler's rate"
    )
    fused = stepping_in_backward(args, settings) is not None
    return Adaptive(accelerator, settings[ADAPTIVE_LR_PATIENCE], getattr(args, "max_grad_norm", None) or 0.0, fused)


def _backward(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def backward(self: Any, loss: Any, **kwargs: Any) -> Any:
        if (adaptive := current(Adaptive)) is not None:
            adaptive.add_loss(loss)
        return original(self, loss, **kwargs)

    return backward


def _clip(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def clip_grad_norm_(self: Any, *args: Any, **kwargs: Any) -> Any:
        norm = original(self, *args, **kwargs)
        if (adaptive := current(Adaptive)) is not None and not adaptive.fused:
            step_values().record_norm(norm)
        return norm

    return clip_grad_norm_


def _optimizer_step(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def step(self: Any, closure: Any = None) -> Any:
        adaptive = current(Adaptive)
        # With a gradient scaler, the norm is known only once the script has unscaled the gradients to clip them.
        is_unscaled = self.scaler is None or step_values().has_norm
        if adaptive is not None and is_unscaled and not adaptive.fused and self.gradient_state.sync_gradients:
            adaptive.clip_unusual(self)
        return original(self, closure)

    return step


def _scheduler_step(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (adaptive := current(Adaptive)) is not None:
            adaptive.restore_rates()
        return original(self, *args, **kwargs)

    return step


PATCH = Patch(
    name="adaptive_lr",
    summary="--adaptive_lr: halve the learning rate when the loss stops falling, and clip unusually large gradients",
    targets=(
        Target("accelerate.accelerator", "Accelerator.backward", _backward, takes("self", "loss"), body="runs"),
        Target("accelerate.accelerator", "Accelerator.clip_grad_norm_", _clip, takes("self", "parameters"), body="runs"),
        Target("accelerate.optimizer", "AcceleratedOptimizer.step", _optimizer_step, takes("self", "closure"), body="runs"),
        Target("accelerate.scheduler", "AcceleratedScheduler.step", _scheduler_step, takes("self"), body="runs"),
    ),
    options=(ADAPTIVE_LR, ADAPTIVE_LR_PATIENCE),
    exactness="exact",
    held_to="training with the same rates set by --lr_scheduler piecewise_constant",
    idea="https://pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.ReduceLROnPlateau.html",
    wanted=lambda settings: settings[ADAPTIVE_LR],
    stage=Stage.COMPUTE,
    on_start=_start,
)
