"""Skip steps whose loss or gradient is not finite, stop after many in a row, and never save NaN weights.

Upstream continues training and saves a file full of NaN with exit code 0. With a gradient scaler (fp16), the scaler skips
steps, and this patch only checks the loss. With a fused optimizer step, backward still runs for a loss that is not finite,
but without the optimizer's hooks. The script's local variables hold the graph, so only backward frees the activations before
the next forward pass, and only backward moves swapped blocks back. DeepSpeed skips such steps itself, in all processes; this
patch reports them and stops the run.
"""

from __future__ import annotations

import contextlib
import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from kohya_ext.config.settings import Option, Settings, count
from kohya_ext.console import error, note
from kohya_ext.patching.patch import Patch, Target, moved, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, current_batch, step_values, trained_weights
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import journal, ranks, resume, stop_request
from kohya_ext.sdscripts.constraints import stepping_in_backward

EXIT_CODE = 3
"""Exit code of a run that this patch ended."""

NAN_PATIENCE = Option(
    "nan_patience",
    10,
    count,
    "save the last finite weights and stop after this many consecutive steps whose loss or gradient is not finite",
    metavar="N",
)


@dataclass
class _Guard(TrainingCallback):
    args: Namespace
    accelerator: Accelerator
    fused: bool
    patience: int
    steps: int = 0
    consecutive: int = 0
    bad: bool = False
    """Whether the current step is not finite."""

    def may_train(self, loss: Any) -> bool:
        """Record the loss of a micro-batch; return whether its gradients may reach a fused optimizer."""
        values = step_values()
        values.record_loss(loss)
        if self.fused and not math.isfinite(values.read_losses()[-1]):
            self.bad = True
            return False
        return True

    def is_finite(self, optimizer: Any) -> bool:
        """Return whether the losses and gradients of the current step are finite."""
        values = step_values()
        norm = 0.0
        if self.accelerator.scaler is None:
            norm = values.read_norm([weight.grad for weight in trained_weights([optimizer]) if weight.grad is not None])
        losses = values.read_losses()
        values.move_loss_to_host()
        # All processes must decide alike. They share averaged gradients by now, but each has its own losses.
        shared = self.accelerator.scaler is None and self.accelerator.num_processes > 1
        return all(map(math.isfinite, [norm, *([] if shared else losses)]))

    def after_batch(self, accelerator: Accelerator) -> None:
        if not accelerator.sync_gradients:
            return
        self.steps += 1
        if ranks.is_deepspeed(accelerator):
            self.bad = accelerator.optimizer_step_was_skipped and not self._scale_is_too_high()
        if self.bad:
            self.consecutive += 1
            self._warn()
        else:
            self.consecutive = 0
        self.bad = False
        if self.consecutive >= self.patience:
            self._stop_run()

    def _scale_is_too_high(self) -> bool:
        """Return whether DeepSpeed skipped this step to lower its loss scale, as it does in every fp16 run."""
        return self.accelerator.mixed_precision == "fp16" and all(map(math.isfinite, step_values().read_losses()))

    def _warn(self) -> None:
        place = resume.position()
        step = place.step if place is not None else self.steps
        values = step_values()
        losses = ", ".join(f"{loss:.4g}" for loss in values.read_losses()) or "?"
        norm = f", gradient norm {values.read_norm([]):.4g}" if values.has_norm else ""
        files = list(current_batch().get("kohya_ext_files", []))
        images = f"; images: {', '.join(files)}" if files else ""
        note(f"warning: step {step} skipped: loss or gradient is not finite (loss {losses}{norm}){images}")
        journal.event("skip", step=step, problem=f"loss {losses}{norm}", images=files)

    def _stop_run(self) -> None:
        self.check_weights()
        reason = f"{self.consecutive} consecutive steps were not finite"
        error(f"{reason}; saving the last finite weights and stopping. Try a lower learning rate")
        stopper = stop_request.stopper()
        if stopper is None:
            raise SystemExit(EXIT_CODE)
        stopper.request(reason, EXIT_CODE)

    def check_weights(self) -> None:
        """Exit unless all trained weights are finite. With DeepSpeed they are, because it skips steps that are not."""
        if ranks.is_deepspeed(self.accelerator) or _are_finite(
            [weight.detach() for weight in trained_weights(self.accelerator._optimizers) if weight.numel()]
        ):
            return
        state = resume.newest_state(Path(self.args.output_dir), self.args.output_name)
        advice = f"resume from {state} with --resume auto and a lower learning rate" if state else "lower the learning rate"
        error(f"the trained weights are not finite (NaN or infinite) and were not saved; {advice}")
        journal.set_exit_code(EXIT_CODE)
        raise SystemExit(EXIT_CODE)


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Guard:
    return _Guard(args, accelerator, stepping_in_backward(args, settings) is not None, settings[NAN_PATIENCE])


def _backward(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def backward(self: Any, loss: Any, **kwargs: Any) -> Any:
        guard = current(_Guard)
        if guard is None:
            return original(self, loss, **kwargs)
        weights = [] if guard.may_train(loss) else list(trained_weights(self._optimizers))
        with _gradients_dropped(weights):
            result = original(self, loss, **kwargs)
        if guard.fused:
            step_values().move_loss_to_host()
        return result

    return backward


@contextlib.contextmanager
def _gradients_dropped(weights: Sequence[Any]) -> Iterator[None]:
    """Drop each gradient as soon as backward has computed it, instead of running the hooks of a fused optimizer.

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
        hooks.clear()  # assigning None leaves the dictionary attached to the tensor
        for weight, original in zip(trained, before, strict=True):
            weight._post_accumulate_grad_hooks = original


def _clip(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def clip_grad_norm_(self: Any, *args: Any, **kwargs: Any) -> Any:
        norm = original(self, *args, **kwargs)
        guard = current(_Guard)
        if guard is not None and not guard.fused and not ranks.is_deepspeed(self):
            step_values().record_norm(norm)
        return norm

    return clip_grad_norm_


def _step(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def step(self: Any, closure: Any = None) -> Any:
        guard = current(_Guard)
        if guard is None or not self.gradient_state.sync_gradients:
            return original(self, closure)
        if not guard.fused:  # else the loss alone has decided, before the backward pass
            guard.bad = not guard.is_finite(self)
        if self.scaler is not None:
            return original(self, closure)
        # accelerate's flag for a skipped step, which also holds back the learning rate scheduler.
        self._is_overflow = guard.bad
        return None if guard.bad else original(self, closure)

    return step


def _before_saving(original: Any, settings: Settings) -> Any:
    """Check the weights before a function writes a model or a state."""

    @wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        guard = current(_Guard)
        if guard is not None and guard.steps:
            guard.check_weights()
        return original(*args, **kwargs)

    return save


def _getitem(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def __getitem__(self: Any, index: int) -> Any:  # noqa: N807
        example = original(self, index)
        if getattr(self, "caching_mode", None) is None:
            # A skipped step does not need the names of its images, so their absence raises no error.
            with contextlib.suppress(AttributeError, KeyError, IndexError, TypeError):
                example["kohya_ext_files"] = _files_at(self, index)
        return example

    return __getitem__


def _add(original: Any, settings: Settings) -> Any:
    """Replace a loss that is not finite by the average, which it would turn into NaN for good."""

    @wraps(original)
    def add(self: Any, *, epoch: int, step: int, loss: float) -> None:
        original(self, epoch=epoch, step=step, loss=loss if math.isfinite(loss) else self.moving_average)

    return add


def _are_finite(weights: Sequence[Any]) -> bool:
    """Return whether all weights are finite, with few launches and one synchronization per device.

    The largest absolute value is NaN or infinite if any value is, and unlike a sum it does not overflow.
    """
    import torch

    by_device: dict[Any, list[Any]] = {}
    for weight in weights:
        by_device.setdefault(weight.device, []).append(weight)
    largest = [torch.stack([value.float() for value in torch._foreach_norm(group, math.inf)]) for group in by_device.values()]
    return all(bool(values.isfinite().all()) for values in largest)


def _files_at(dataset: Any, index: int) -> list[str]:
    row = dataset.buckets_indices[index]
    keys = dataset.bucket_manager.buckets[row.bucket_index]
    first = row.batch_index * row.bucket_batch_size
    return [dataset.image_data[key].absolute_path for key in keys[first : first + row.bucket_batch_size]]


PATCH = Patch(
    name="nan_guard",
    summary="skip steps that are not finite, stop after --nan_patience of them in a row, never save NaN weights",
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
    held_to="the same run without the patch, while losses and gradients are finite",
    idea="https://github.com/kohya-ss/sd-scripts/issues/201",
    stage=Stage.GUARD,
    on_start=_start,
)
