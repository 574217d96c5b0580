"""``--adaptive_lr``: the learning rate is halved when the loss no longer falls, an unusual gradient is clipped to the usual.

The loss of one step says little: it depends mostly on the timestep that was drawn. So means over --adaptive_lr_patience
steps are compared, as ReduceLROnPlateau compares epochs: one that is not 1 % below the best so far halves the rate. A
gradient of more than four times the median of the last hundred is unstable, and scaled down to that median
(AutoClip's idea, https://arxiv.org/abs/2007.14469).

The factor is on the optimizer's rate only while a step is made, and off again before the scheduler looks: so it multiplies
whatever schedule there is, those that compute the next rate from the present one too. It is kept in every state.
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
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, trained_weights

FILE = "kohya_ext_adaptive_lr.json"
"""The file in a state's folder."""

_BETTER = 0.01
_LOWEST = 2**-6
_UNSTABLE = 4.0
_NORMS = 100
_FEW_NORMS = 20
"""With fewer than these nothing is said to be usual."""

_FUSED = ("fused_backward_pass", "fused_optimizer_groups", "blockwise_fused_optimizers")

ADAPTIVE_LR = Option(
    "adaptive_lr",
    False,
    boolean,
    "halve the learning rate when the loss no longer falls, and clip a gradient of an unusual norm to the usual one",
    activates=True,
)
ADAPTIVE_LR_PATIENCE = Option(
    "adaptive_lr_patience",
    500,
    count,
    "of how many steps --adaptive_lr compares the mean loss; few steps' means differ by chance",
    metavar="STEPS",
)


@dataclass
class Adaptive(TrainingCallback):
    """The factor on the learning rate, and what decides about it."""

    accelerator: Any
    patience: int
    """Steps in a mean."""
    max_grad_norm: float = 0.0
    """What the script clips to; 0: it does not clip."""
    fused: bool = False
    """Whether the optimizer steps within backward, where no gradient is left to look at."""
    step: int = 0
    factor: float = 1.0
    best: float | None = None
    """The lowest mean so far."""
    total: Any = 0.0
    """The sum of the finite losses since the last mean was taken, on the device, so that nothing is waited for."""
    seen: Any = 0.0
    """How many there were."""
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=_NORMS))
    norm: Any = None
    """This step's gradient norm, when the script clips."""
    _scheduled: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    """While the factor is on: the groups and their schedule's rates."""

    def before_batch(self, accelerator: Any) -> None:
        """Multiply every rate."""
        groups = self._groups()
        if self.step == 0 and any(group.get("relative_step") for group in groups):
            stop("--adaptive_lr does nothing to Adafactor's relative steps: add --optimizer_args relative_step=False")
        self._scheduled = [(group, group["lr"]) for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * self.factor

    def take_off(self) -> None:
        """Put the schedule's rates back; before the scheduler looks, or after the batch."""
        for group, rate in self._scheduled:
            group["lr"] = rate
        self._scheduled = []

    def sees_loss(self, loss: Any) -> None:
        """Take a micro-batch's loss."""
        import torch

        value = loss.detach().float().mean()
        finite = value.isfinite()
        self.total = self.total + torch.where(finite, value, torch.zeros_like(value))
        self.seen = self.seen + finite.float()

    def steady(self, optimizer: Any) -> None:
        """Scale the gradients down when their norm is unusual; before the optimizer's step."""
        import torch

        gradients = [weight.grad for weight in trained_weights([optimizer]) if weight.grad is not None]
        norm = float(self.norm if self.norm is not None else torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            return
        usual = statistics.median(self.norms) if len(self.norms) >= _FEW_NORMS else norm
        self.norms.append(norm)
        if norm <= _UNSTABLE * usual:
            return
        now = min(norm, self.max_grad_norm) if self.norm is not None and self.max_grad_norm else norm
        if usual < now:
            torch._foreach_mul_(gradients, usual / now)
        note(f"step {self.step + 1}: the gradient's norm is {norm:.4g}, usually {usual:.4g}: clipped to {min(usual, now):.4g}")

    def after_batch(self, accelerator: Any) -> None:
        """Count the step; at the end of a window decide."""
        self.take_off()
        if not accelerator.sync_gradients:
            return
        self.norm = None
        self.step += 1
        if self.step % self.patience == 0:
            mean = self._mean(accelerator)
            if mean is not None:
                self.decide(mean)

    def _mean(self, accelerator: Any) -> float | None:
        import torch

        both = torch.stack([torch.as_tensor(value, device=accelerator.device) for value in (self.total, self.seen)])
        if accelerator.num_processes > 1:
            both = accelerator.reduce(both, reduction="sum")
        total, seen = both.tolist()
        self.total = self.seen = 0.0
        return total / seen if seen else None

    def decide(self, mean: float) -> None:
        """Halve the rate when ``mean``, of the losses of one window, is no better than the best."""
        if self.best is None or mean < self.best * (1 - _BETTER):
            self.best = mean
        elif self.factor > _LOWEST:
            self.factor /= 2
            rates = sorted({float(group["lr"]) * self.factor for group in self._groups()})
            note(
                f"step {self.step}: the loss was {mean:.4g} over {self.patience} steps, the best was {self.best:.4g}: "
                f"learning rate x {self.factor:g}, now {', '.join(f'{rate:.4g}' for rate in rates)}"
            )

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.accelerator._optimizers for group in optimizer.param_groups]

    def on_state_save(self, folder: Path) -> None:
        """Write all that decides into a state."""
        if self.accelerator.is_main_process:
            kept = {name: getattr(self, name) for name in ("step", "factor", "best")}
            kept |= {"total": float(self.total), "seen": float(self.seen), "norms": list(self.norms)}
            (folder / FILE).write_text(json.dumps(kept), encoding="utf-8")

    def on_state_load(self, folder: Path) -> None:
        """Read it back."""
        file = folder / FILE
        if not file.is_file():
            note(f"{folder} was saved without --adaptive_lr: it begins anew")
            return
        for name, value in json.loads(file.read_text(encoding="utf-8")).items():
            setattr(self, name, deque(value, maxlen=_NORMS) if name == "norms" else value)
        if self.factor != 1:
            note(f"learning rate x {self.factor:g}, as --adaptive_lr had it at step {self.step}")


def _start(args: Namespace, accelerator: Any, settings: Settings) -> Adaptive:
    if str(accelerator.distributed_type).endswith("DEEPSPEED"):
        stop("--adaptive_lr does not work with DeepSpeed, which steps its scheduler itself: leave it out")
    note(
        f"--adaptive_lr: halved when {settings[ADAPTIVE_LR_PATIENCE]} steps' mean loss is not {_BETTER:.0%} below the best; "
        "the script's own log shows the schedule's rate"
    )
    fused = any(getattr(args, name, None) for name in _FUSED)
    return Adaptive(accelerator, settings[ADAPTIVE_LR_PATIENCE], getattr(args, "max_grad_norm", None) or 0.0, fused)


def _backward(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def backward(self: Any, loss: Any, **kwargs: Any) -> Any:
        if (adaptive := current(Adaptive)) is not None:
            adaptive.sees_loss(loss)
        return original(self, loss, **kwargs)

    return backward


def _clip(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def clip_grad_norm_(self: Any, *args: Any, **kwargs: Any) -> Any:
        norm = original(self, *args, **kwargs)
        if (adaptive := current(Adaptive)) is not None:
            adaptive.norm = norm
        return norm

    return clip_grad_norm_


def _optimizer_step(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def step(self: Any, closure: Any = None) -> Any:
        adaptive = current(Adaptive)
        # A gradient scaler's gradients are scaled until the script clips them.
        known = adaptive is not None and (self.scaler is None or adaptive.norm is not None)
        if adaptive is not None and known and not adaptive.fused and self.gradient_state.sync_gradients:
            adaptive.steady(self)
        return original(self, closure)

    return step


def _scheduler_step(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (adaptive := current(Adaptive)) is not None:
            adaptive.take_off()
        return original(self, *args, **kwargs)

    return step


PATCH = Patch(
    name="adaptive_lr",
    summary="--adaptive_lr: the rate is halved when the loss no longer falls, an unusual gradient is clipped to the usual",
    targets=(
        Target("accelerate.accelerator", "Accelerator.backward", _backward, takes("self", "loss"), body="runs"),
        Target("accelerate.accelerator", "Accelerator.clip_grad_norm_", _clip, takes("self", "parameters"), body="runs"),
        Target("accelerate.optimizer", "AcceleratedOptimizer.step", _optimizer_step, takes("self", "closure"), body="runs"),
        Target("accelerate.scheduler", "AcceleratedScheduler.step", _scheduler_step, takes("self"), body="runs"),
    ),
    options=(ADAPTIVE_LR, ADAPTIVE_LR_PATIENCE),
    exactness="exact",
    held_to="upstream's run with the same rates as a schedule of its own (piecewise_constant)",
    idea="https://pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.ReduceLROnPlateau.html",
    wanted=lambda settings: settings[ADAPTIVE_LR],
    stage=Stage.COMPUTE,
    on_start=_start,
)
