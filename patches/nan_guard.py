"""A step whose loss or gradient is not finite is skipped and said; many in a row end the run; NaN weights are never saved.

Upstream trains on and saves a file full of NaN with exit code 0. Where there is a gradient scaler (fp16), skipping is its
job, and only the loss is watched. Where the optimizer steps within the backward pass (fused), a loss that is not finite goes
through backward as well, without the optimizer's hooks: the script's local variables hold the graph, so only backward frees
the activations before the next forward, and only backward brings swapped blocks back. DeepSpeed does its own checks.
"""

from __future__ import annotations

import contextlib
import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from kohya_ext.config.settings import Option, Settings, count
from kohya_ext.console import error, warn
from kohya_ext.patching.patch import Patch, Target, moved, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, current_batch, trained_weights
from kohya_ext.run import resume, stop_request

EXIT_CODE = 3
"""Of a run that was ended by this guard."""

_FILES = "kohya_ext_files"
"""The key of a batch under which the paths of its images are kept."""

_FUSED = ("fused_backward_pass", "fused_optimizer_groups", "blockwise_fused_optimizers")

NAN_PATIENCE = Option(
    "nan_patience",
    10,
    count,
    "end the run, its last finite weights saved, after so many steps in a row whose loss or gradient is not finite",
    metavar="N",
)


@dataclass
class _Guard(TrainingCallback):
    args: Namespace
    accelerator: Any
    fused: bool
    patience: int
    steps: int = 0
    in_row: int = 0
    bad: bool = False
    """Whether the step that is going on is not finite."""
    losses: list[Any] = field(default_factory=list)
    """Of the micro-batches since the last step; left on the device, so that looking costs one wait a step."""
    norm: Any = None
    """The gradients' norm, when the script clips it."""

    def sees_loss(self, loss: Any) -> bool:
        """Take a micro-batch's loss; return whether its gradients may reach the optimizer."""
        self.losses.append(loss.detach().float())
        if self.fused and not bool(loss.detach().isfinite().all().item()):
            self.bad = True
            return False
        return True

    def is_finite(self, optimizer: Any) -> bool:
        import torch

        if self.accelerator.scaler is not None:
            found = self.losses
        else:
            norm = self.norm if self.norm is not None else _gradient_norm(optimizer)
            # The gradients of all processes are one by now, their losses are not: the processes must decide alike.
            found = [norm, *(self.losses if self.accelerator.num_processes == 1 else [])]
        if not found:
            return True
        return bool(torch.stack([value.detach().float().reshape(()).to(found[0].device) for value in found]).isfinite().all())

    def after_batch(self, accelerator: Any) -> None:
        if not accelerator.sync_gradients:
            return
        self.steps += 1
        if self.bad:
            self.in_row += 1
            self._say()
        else:
            self.in_row = 0
        self.bad, self.norm = False, None
        self.losses.clear()
        if self.in_row >= self.patience:
            self._give_up()

    def _say(self) -> None:
        place = resume.position()
        step = place.step if place is not None else self.steps
        losses = ", ".join(f"{float(loss):.4g}" for loss in self.losses) or "?"
        norm = "" if self.norm is None else f", gradient norm {float(self.norm):.4g}"
        files = _files_of_batch()
        warn(f"step {step} is skipped, it is not finite: loss {losses}{norm}" + (f"; {', '.join(files)}" if files else ""))

    def _give_up(self) -> None:
        self.refuse_bad_weights("nothing more is saved")
        reason = f"{self.in_row} steps in a row were not finite"
        error(f"{reason}: the weights from before them are saved, and the run ends. A lower learning rate is the usual cure")
        stopper = stop_request.stopper()
        if stopper is None:
            raise SystemExit(EXIT_CODE)
        stopper.request(reason, EXIT_CODE)

    def refuse_bad_weights(self, consequence: str) -> None:
        """End the run when a trained weight is not finite."""
        import torch

        weights = list(trained_weights(self.accelerator._optimizers))
        if not weights or bool(torch.stack([weight.isfinite().all().cpu() for weight in weights]).all()):
            return
        state = resume.newest_state(Path(self.args.output_dir), self.args.output_name)
        advice = f"go on from {state} with --resume auto and a lower learning rate" if state else "lower the learning rate"
        error(f"the trained weights are not finite (NaN or infinite): {consequence}; {advice}")
        raise SystemExit(EXIT_CODE)


def _start(args: Namespace, accelerator: Any, settings: Settings) -> _Guard | None:
    if str(accelerator.distributed_type).endswith("DEEPSPEED"):
        return None
    return _Guard(args, accelerator, any(getattr(args, name, None) for name in _FUSED), settings[NAN_PATIENCE])


def _backward(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def backward(self: Any, loss: Any, **kwargs: Any) -> Any:
        guard = current(_Guard)
        if guard is None or guard.sees_loss(loss):
            return original(self, loss, **kwargs)
        with _gradients_dropped(list(trained_weights(self._optimizers))):
            return original(self, loss, **kwargs)

    return backward


@contextlib.contextmanager
def _gradients_dropped(weights: Sequence[Any]) -> Iterator[None]:
    """Drop each gradient as soon as backward has made it, in place of the hooks in which a fused optimizer steps.

    ``_post_accumulate_grad_hooks`` is the dictionary behind ``Tensor.register_post_accumulate_grad_hook``.
    """

    def drop(weight: Any) -> None:
        weight.grad = None

    trained = [weight for weight in weights if weight.requires_grad]
    before = [weight._post_accumulate_grad_hooks for weight in trained]
    hooks = {0: drop}
    for weight in trained:
        weight._post_accumulate_grad_hooks = hooks
    try:
        yield
    finally:
        hooks.clear()  # assigning None leaves it attached to the tensor
        for weight, own in zip(trained, before, strict=True):
            weight._post_accumulate_grad_hooks = own


def _clip(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def clip_grad_norm_(self: Any, *args: Any, **kwargs: Any) -> Any:
        norm = original(self, *args, **kwargs)
        guard = current(_Guard)
        if guard is not None and not guard.fused:
            guard.norm = norm
        return norm

    return clip_grad_norm_


def _step(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def step(self: Any, closure: Any = None) -> Any:
        guard = current(_Guard)
        if guard is None or guard.fused or not self.gradient_state.sync_gradients:
            return original(self, closure)
        guard.bad = not guard.is_finite(self)
        if self.scaler is not None:
            return original(self, closure)
        # accelerate's own word for it, by which the learning rate's schedule waits too.
        self._is_overflow = guard.bad
        return None if guard.bad else original(self, closure)

    return step


def _before_saving(original: Any, settings: Settings) -> Any:
    """For a function that writes a model or a state."""

    @wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        guard = current(_Guard)
        if guard is not None and guard.steps:
            guard.refuse_bad_weights("nothing is written")
        return original(*args, **kwargs)

    return save


def _getitem(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def __getitem__(self: Any, index: int) -> Any:  # noqa: N807
        example = original(self, index)
        if getattr(self, "caching_mode", None) is None:
            # Without the names a skipped step is still skipped: not worth an error.
            with contextlib.suppress(AttributeError, KeyError, IndexError, TypeError):
                example[_FILES] = _files_at(self, index)
        return example

    return __getitem__


def _add(original: Any, settings: Settings) -> Any:
    """For the recorder of losses: one that is not finite would make every average after it so."""

    @wraps(original)
    def add(self: Any, *, epoch: int, step: int, loss: float) -> None:
        original(self, epoch=epoch, step=step, loss=loss if math.isfinite(loss) else self.moving_average)

    return add


def _files_at(dataset: Any, index: int) -> list[str]:
    row = dataset.buckets_indices[index]
    keys = dataset.bucket_manager.buckets[row.bucket_index]
    first = row.batch_index * row.bucket_batch_size
    return [dataset.image_data[key].absolute_path for key in keys[first : first + row.bucket_batch_size]]


def _files_of_batch() -> list[str]:
    """The images of the batch that the training loop holds, only asked when a step was bad."""
    return list(current_batch().get(_FILES, []))


def _gradient_norm(optimizer: Any) -> Any:
    import torch

    return torch.nn.utils.get_total_norm([weight.grad for weight in trained_weights([optimizer]) if weight.grad is not None])


PATCH = Patch(
    name="nan_guard",
    summary="a step that is not finite is skipped and named, --nan_patience of them end the run, NaN weights are never saved",
    targets=(
        Target("accelerate.accelerator", "Accelerator.backward", _backward, takes("self", "loss"), body="runs"),
        Target("accelerate.accelerator", "Accelerator.clip_grad_norm_", _clip, takes("self", "parameters"), body="runs"),
        Target("accelerate.optimizer", "AcceleratedOptimizer.step", _step, takes("self", "closure"), body="runs"),
        Target("accelerate.accelerator", "Accelerator.save_state", _before_saving, body="runs"),
        Target("safetensors.torch", "serialize_file", _before_saving, body="runs"),
        Target("torch", "save", _before_saving, body="runs"),
        Target("library.safetensors_utils", "mem_eff_save_file", _before_saving, body="runs"),
        *moved("LossRecorder.add", "library.logging_util", _add, takes("self", "epoch"), body="runs"),
        *moved("BaseDataset.__getitem__", "library.dataset", _getitem, takes("self", "index"), body="runs"),
    ),
    options=(NAN_PATIENCE,),
    exactness="exact",
    held_to="the same run without it, while everything is finite",
    idea="https://github.com/kohya-ss/sd-scripts/issues/201",
    stage=Stage.GUARD,
    on_start=_start,
)
