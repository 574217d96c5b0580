"""``--ema``: the trained weights averaged over the steps, saved beside every model as ``NAME-ema`` and in every state.

The average is upstream's own model file made a second time with the averaged weights in place, so its names, formats and
metadata are the script's. It is kept in float32 whatever the weights' type: in bf16 a share of 0.001 would be rounded away.
Only what is trained is averaged. Samples are made with the weights themselves.

decay = min(--ema_decay, n / (n + 9)) at the n-th update from 0, so that the first steps do not linger: TensorFlow's
ExponentialMovingAverage with ``num_updates``, from which diffusers' EMAModel has it too.
"""

from __future__ import annotations

import contextlib
import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from kohya_ext.config.settings import Option, Settings, boolean, fraction, one_of
from kohya_ext.console import note, stop, warn
from kohya_ext.patching.attributes import Replacement, replace_attribute
from kohya_ext.patching.patch import Patch, moved
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, program, trained_weights

FILE = "kohya_ext_ema.safetensors"
"""The average in a state's folder."""

_AT_ONCE = 8
"""How many weights are averaged in one call; copies of as many are made where their type or device is another."""

EMA = Option(
    "ema",
    False,
    boolean,
    "keep an average of the trained weights over the steps, in float32, and save it beside each model as NAME-ema",
    activates=True,
)
EMA_DECAY = Option(
    "ema_decay",
    0.999,
    fraction,
    "how much of --ema's average stays at each step, from 0 to 1; less in the first steps",
    metavar="FRACTION",
)
EMA_DEVICE = Option(
    "ema_device",
    "cpu",
    one_of("cpu", "gpu"),
    "where --ema's average lies: cpu costs a copy of the trained weights at each step, gpu their memory, 4 bytes a weight",
    metavar="cpu|gpu",
)


@dataclass
class _Average(TrainingCallback):
    """Kept by the main process, the one that saves."""

    accelerator: Any
    decay: float
    device: Any
    updates: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    """Name -> the average, float32; empty before the first update."""
    weights: dict[str, Any] = field(default_factory=dict)
    """Name -> the trained weight; known from the first step on, when everything has been prepared."""
    written: dict[Path, Path] = field(default_factory=dict)
    """Model file or folder -> its average's, as saved in this process."""
    replaced: list[Replacement] = field(default_factory=list)
    """The networks' methods that save."""

    def before_batch(self, accelerator: Any) -> None:
        if self.weights:
            return
        models = [accelerator.unwrap_model(model) for model in accelerator._models]
        names = {id(weight): f"{at}.{name}" for at, model in enumerate(models) for name, weight in model.named_parameters()}
        for at, weight in enumerate(trained_weights(accelerator._optimizers)):
            if weight.requires_grad:
                self.weights[names.get(id(weight), f"optimizer.{at}")] = weight
        if self.values and {name: value.shape for name, value in self.values.items()} != {
            name: weight.shape for name, weight in self.weights.items()
        }:
            stop("the state's EMA is of other weights than those that are trained: resume without --ema, or from another state")
        for model in models:
            if hasattr(model, "save_weights"):  # a network; full models are saved by functions
                also = replace_attribute(model, "save_weights", self.also(model.save_weights, _file_beside))
                self.replaced.append(also)
        size = sum(weight.numel() for weight in self.weights.values()) * 4
        note(f"EMA of {len(self.weights)} weights, {size / 1e9:.2f} GB on {self.device}, decay {self.decay:g}")

    def after_batch(self, accelerator: Any) -> None:
        if not accelerator.sync_gradients or accelerator.optimizer_step_was_skipped:
            return
        import torch

        decay = min(self.decay, self.updates / (self.updates + 9))
        self.updates += 1
        with torch.no_grad():
            if not self.values:
                self.values = {name: weight.float().to(self.device, copy=True) for name, weight in self.weights.items()}
            names = list(self.weights)
            for at in range(0, len(names), _AT_ONCE):
                some = names[at : at + _AT_ONCE]
                now = [self.weights[name].detach().to(self.device, torch.float32) for name in some]
                torch._foreach_lerp_([self.values[name] for name in some], now, 1 - decay)

    def also(self, save: Callable[..., Any], beside: Callable[[str], str]) -> Callable[..., Any]:
        """Return ``save(path, ...)`` that makes the average's file, too."""

        @wraps(save)
        def save_both(path: Any, *args: Any, **kwargs: Any) -> Any:
            result = save(path, *args, **kwargs)
            if self.values:
                with self._in_place():
                    save(beside(path), *args, **kwargs)
                self._remove_orphans()
                self.written[Path(path)] = Path(beside(path))
            return result

        return save_both

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        own = {name: weight.data for name, weight in self.weights.items()}
        try:
            for name, weight in self.weights.items():
                average = self.values[name]
                # Converted averages are copies, for which a card that trains may have no room left.
                weight.data = average if average.dtype == weight.dtype else average.to("cpu", weight.dtype)
            yield
        finally:
            for name, weight in self.weights.items():
                weight.data = own[name]

    def _remove_orphans(self) -> None:
        """Upstream removes old models (``--save_last_n_steps``); their averages go with them."""
        for model, average in list(self.written.items()):
            if not model.exists():
                del self.written[model]
                if average.is_file():
                    average.unlink()

    def on_end(self) -> None:
        """Put the networks' methods back."""
        while self.replaced:
            self.replaced.pop().undo()

    def on_state_save(self, folder: Path) -> None:
        """Write the average into a state."""
        if self.values:
            from safetensors.torch import save_file

            save_file(self.values, str(folder / FILE), {"updates": str(self.updates)})

    def on_state_load(self, folder: Path) -> None:
        """Read the average of a state."""
        from safetensors import safe_open

        file = folder / FILE
        if not file.is_file():
            warn(f"{folder} was saved without --ema: the average begins anew")
            return
        with safe_open(file, framework="pt", device=str(self.device)) as stream:
            self.values = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 - it is no dictionary
            self.updates = int(stream.metadata()["updates"])


def _file_beside(path: str) -> str:
    """``cat.safetensors`` -> ``cat-ema.safetensors``."""
    return str(Path(path).with_name(f"{Path(path).stem}-ema{Path(path).suffix}"))


def _folder_beside(path: str) -> str:
    return f"{path}-ema"


def _start(args: Namespace, accelerator: Any, settings: Settings) -> _Average | None:
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        stop(f"--ema does not work with {kind}, where no process has whole weights: leave it out")
    script = program().command.name
    if "control_net" in script or "textual_inversion" in script:
        stop(f"--ema is for networks (LoRA) and full fine-tuning, not for {script}: leave it out")
    if (getattr(args, "optimizer_type", None) or "").lower().endswith("schedulefree"):
        stop("--ema and a schedule-free optimizer cannot go together: it averages the weights itself")
    if not accelerator.is_main_process:
        return None
    return _Average(accelerator, settings[EMA_DECAY], accelerator.device if settings[EMA_DEVICE] == "gpu" else "cpu")


def _save_model(original: Any, settings: Settings) -> Any:
    """For upstream's functions that are given the two ways to write a full model."""
    signature = inspect.signature(original)

    @wraps(original)
    def save_sd_model(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        average = current(_Average)
        for name, beside in _SAVERS.items():
            if average is not None and given.arguments.get(name) is not None:
                given.arguments[name] = average.also(given.arguments[name], beside)
        return original(*given.args, **given.kwargs)

    return save_sd_model


_SAVERS = {"sd_saver": _file_beside, "diffusers_saver": _folder_beside}


def _expect_savers(original: Any) -> str | None:
    parameters = list(inspect.signature(original).parameters)
    return None if parameters[-2:] == list(_SAVERS) else f"its parameters are {parameters}"


_MAKERS = ("save_sd_model_on_epoch_end_or_stepwise_common", "save_sd_model_on_train_end_common")

PATCH = Patch(
    name="ema",
    summary="--ema: an average of the trained weights, saved beside the model and resumed with it",
    targets=tuple(
        target for name in _MAKERS for target in moved(name, "library.checkpoint_io", _save_model, _expect_savers, body="runs")
    ),
    options=(EMA, EMA_DECAY, EMA_DEVICE),
    exactness="exact",
    held_to="the model saved without it; the average itself to one made of the files of every step, within 1e-6",
    idea="https://github.com/kohya-ss/sd-scripts/pull/893",
    wanted=lambda settings: settings[EMA],
    stage=Stage.COMPUTE,
    on_start=_start,
)
