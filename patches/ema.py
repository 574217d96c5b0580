"""``--ema``: average the trained weights over the steps; save the average with every model as ``NAME-ema`` and in every state.

To save it, upstream's own function saves the model a second time with the averaged weights in place. Its keys, formats and
metadata are therefore the script's. The average is float32 for any weight dtype, because bf16 would round away an update of
0.001. Only trained weights are averaged. Samples use the current weights.

decay = min(--ema_decay, n / (n + 9)) at update n, counted from 0, so that the first weights do not dominate. TensorFlow's
ExponentialMovingAverage with ``num_updates`` and diffusers' EMAModel do the same.

On the CPU a thread computes the average. Training only queues copies of its weights to pinned memory, and waits for neither.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from kohya_ext.config.settings import Option, Settings, boolean, fraction, one_of
from kohya_ext.console import note, stop, warn
from kohya_ext.patching.attributes import Replacement, replace_attribute
from kohya_ext.patching.patch import Patch, Target, moved, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, program, trained_weights
from kohya_ext.patching.types import Accelerator
from kohya_ext.sdscripts.families import trains_control_net

FILE = "kohya_ext_ema.safetensors"
"""The file in a state's folder."""

MODELS_FILE = "kohya_ext_ema_models.json"
"""The file in a state's folder for the names of the models that were saved with their average; only if there are any."""

_STAGED = 2**29
"""Bytes of pinned memory for the copies of weights. More weights are copied in several groups, each after the one before."""

EMA = Option(
    "ema",
    False,
    boolean,
    "average the trained weights over the steps, in float32, and save the average with each model as NAME-ema",
    activates=True,
)
EMA_DECAY = Option(
    "ema_decay",
    0.999,
    fraction,
    "decay of the --ema average per step, from 0 to 1; lower in the first steps",
    metavar="FRACTION",
)
EMA_DEVICE = Option(
    "ema_device",
    "cpu",
    one_of("cpu", "gpu"),
    "device of the --ema average: cpu copies the trained weights at each step, gpu uses 4 bytes of memory per parameter",
    metavar="cpu|gpu",
)


def _update(averages: list[Any], weights: list[Any], share: float) -> None:
    """Move averages towards weights by a share of the difference. Weights of another dtype or device are copied one by one."""
    import torch

    with torch.no_grad():
        pairs = [*zip(averages, weights, strict=True)]
        if all(weight.dtype is torch.float32 and weight.device == average.device for average, weight in pairs):
            torch._foreach_lerp_(averages, [weight.detach() for weight in weights], share)
            return
        for average, weight in pairs:
            average.lerp_(weight.detach().to(average.device, torch.float32), share)


def _staging_memory(size: int) -> Any:
    """Return bytes on the host to which the GPU can copy without waiting, if there are any."""
    import torch

    if torch.cuda.is_available():
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:  # WSL limits pinned memory
            warn(f"--ema found no pinned memory ({str(error).splitlines()[0]}); each step waits for its copy of the weights")
    return torch.empty(size, dtype=torch.uint8)


class _HostUpdates:
    """Copies weights to pinned memory and updates averages on the host, in a thread, during training."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        sizes = {name: -(-weight.nbytes // 64) * 64 for name, weight in weights.items()}
        limit = max(_STAGED, *sizes.values())
        buffer = _staging_memory(min(limit, sum(sizes.values())))
        self._weights = weights
        self._groups: list[dict[str, Any]] = [{}]
        """Name -> its place in the buffer, for weights that are copied together."""
        self._thread = ThreadPoolExecutor(1, "kohya_ext-ema")
        self._running: Future[None] | None = None
        start = 0
        for name, weight in weights.items():
            if start + sizes[name] > limit:
                start = 0
                self._groups.append({})
            part = buffer[start : start + weight.nbytes]
            self._groups[-1][name] = part.view(weight.dtype).view(weight.shape)
            start += sizes[name]

    def begin(self, averages: Mapping[str, Any], share: float) -> None:
        """Queue an update of the averages with the current weights."""
        import torch

        for group in self._groups:
            self.finish()
            with torch.no_grad():
                torch._foreach_copy_([*group.values()], [self._weights[name] for name in group], non_blocking=True)
            copied = None
            if torch.cuda.is_available():
                copied = torch.cuda.Event()
                copied.record()
            self._running = self._thread.submit(self._run, copied, [averages[name] for name in group], [*group.values()], share)

    def finish(self) -> None:
        """Wait until the last update is complete."""
        if self._running is not None:
            self._running.result()  # an interrupted wait leaves the update for the next call
            self._running = None

    @staticmethod
    def _run(copied: Any, averages: list[Any], weights: list[Any], share: float) -> None:
        if copied is not None and not copied.query():
            copied.synchronize()
        _update(averages, weights, share)


@dataclass
class _Average(TrainingCallback):
    """The average of the trained weights, in the main process only, because only that one saves models."""

    accelerator: Accelerator
    folder: Path
    """The output folder."""
    decay: float
    device: Any
    updates: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    """Name -> average, float32; empty before the first update."""
    weights: dict[str, Any] = field(default_factory=dict)
    """Name -> trained weight; empty before the training, because accelerate prepares the model after the start."""
    written: set[Path] = field(default_factory=set)
    """Absolute paths of the models that were saved with their average, by this run or by those that it resumes."""
    replaced: list[Replacement] = field(default_factory=list)
    """Replaced ``save_weights`` methods of the networks."""
    on_host: _HostUpdates | None = None
    """What updates ``values`` on the CPU; None before the first update and with an average on the GPU."""

    def before_training(self, accelerator: Accelerator) -> None:
        models = [accelerator.unwrap_model(model) for model in accelerator._models]
        names = {id(weight): f"{i}.{name}" for i, model in enumerate(models) for name, weight in model.named_parameters()}
        for i, weight in enumerate(trained_weights(accelerator._optimizers)):
            if weight.requires_grad:
                self.weights[names.get(id(weight), f"optimizer.{i}")] = weight
        if self.values and {name: value.shape for name, value in self.values.items()} != {
            name: weight.shape for name, weight in self.weights.items()
        }:
            stop("the EMA in the state does not match the trained weights; remove --ema or resume from another state")
        for model in models:
            if hasattr(model, "save_weights"):  # a network; functions save full models
                save = self.saving_average(model.save_weights, _average_file)
                self.replaced.append(replace_attribute(model, "save_weights", save))
        size = sum(weight.numel() for weight in self.weights.values()) * 4
        note(f"--ema averages {len(self.weights)} tensors ({size / 1e9:.2f} GB on {self.device}) with decay {self.decay:g}")

    def after_batch(self, accelerator: Accelerator) -> None:
        import torch

        if not accelerator.sync_gradients or accelerator.optimizer_step_was_skipped:
            return
        decay = min(self.decay, self.updates / (self.updates + 9))
        self.updates += 1
        if not self.values:
            self.values = {
                name: weight.detach().to(self.device, torch.float32, copy=True) for name, weight in self.weights.items()
            }
        if self.device == "cpu":
            self.on_host = self.on_host or _HostUpdates(self.weights)
            self.on_host.begin(self.values, 1 - decay)
        else:
            _update([self.values[name] for name in self.weights], [*self.weights.values()], 1 - decay)

    def complete(self) -> Mapping[str, Any]:
        """Return the averages after the last update."""
        if self.on_host is not None:
            self.on_host.finish()
        return self.values

    def saving_average(self, save: Callable[..., Any], average_path: Callable[[str], str]) -> Callable[..., Any]:
        """Return a function that saves the model and then its average, with the signature of ``save(path, ...)``."""

        @wraps(save)
        def save_both(path: Any, *args: Any, **kwargs: Any) -> Any:
            result = save(path, *args, **kwargs)
            if self.values:
                with self._in_place():
                    save(average_path(path), *args, **kwargs)
                self.written.add(_absolute(path))
            return result

        return save_both

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        averages = self.complete()
        originals = {name: weight.data for name, weight in self.weights.items()}
        try:
            for name, weight in self.weights.items():
                average = averages[name]
                # Converted averages are copies, which may not fit in GPU memory during training.
                weight.data = average if average.dtype == weight.dtype else average.to("cpu", weight.dtype)
            yield
        finally:
            for name, weight in self.weights.items():
                weight.data = originals[name]

    def after_removal(self, path: str, average_path: Callable[[str], str], remove: Callable[[str], object]) -> None:
        """Remove a model's average after the script has removed the model (``--save_last_n_steps``).

        The average of a model that the user has moved or deleted stays: it is the only one.
        """
        model = _absolute(path)
        if model in self.written and not model.exists():
            self.written.remove(model)
            with contextlib.suppress(OSError):  # on Windows another program may have it open
                remove(average_path(path))

    def on_end(self) -> None:
        """Complete the average and restore the networks' methods."""
        self.complete()
        while self.replaced:
            self.replaced.pop().undo()

    def on_state_save(self, folder: Path) -> None:
        """Write the average into the state."""
        if self.values:
            from safetensors.torch import save_file

            save_file(dict(self.complete()), str(folder / FILE), {"updates": str(self.updates)})
        # A copied state that is resumed in another folder must not remove a file of this one.
        root = _absolute(self.folder)
        if models := sorted(model.relative_to(root).as_posix() for model in self.written if root in model.parents):
            (folder / MODELS_FILE).write_text(json.dumps(models), encoding="utf-8")

    def on_state_load(self, folder: Path) -> None:
        """Read the average from the state."""
        from safetensors import safe_open

        file = folder / FILE
        if not file.is_file():
            warn(f"{folder} was saved without --ema; starting a new average")
            return
        with safe_open(file, framework="pt", device=str(self.device)) as stream:
            self.values = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 - not a dictionary
            self.updates = int(stream.metadata()["updates"])
        if (models := folder / MODELS_FILE).is_file():
            self.written = {_absolute(self.folder / name) for name in json.loads(models.read_text(encoding="utf-8"))}


def _absolute(path: str | Path) -> Path:
    return Path(os.path.abspath(path))


def _average_file(path: str) -> str:
    """Return the path of a model's average: ``cat-ema.safetensors`` for ``cat.safetensors``."""
    return str(Path(path).with_name(f"{Path(path).stem}-ema{Path(path).suffix}"))


def _average_folder(path: str) -> str:
    return f"{path}-ema"


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Average | None:
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        stop(f"--ema does not support {kind}, which shards the weights; remove it")
    for problem in _problems(program().command.name, args, settings):
        stop(problem)
    if not accelerator.is_main_process:
        return None
    device = accelerator.device if settings[EMA_DEVICE] == "gpu" else "cpu"
    return _Average(accelerator, Path(args.output_dir or "."), settings[EMA_DECAY], device)


def _problems(script: str, args: Namespace, settings: Settings) -> Iterator[str]:
    if trains_control_net(script) or "textual_inversion" in script:
        yield f"--ema supports networks (LoRA) and full fine-tuning, not {script}; remove it"
    if (getattr(args, "optimizer_type", None) or "").lower().endswith("schedulefree"):
        yield "--ema does not support schedule-free optimizers, which average the weights themselves; remove it"


def _save_model(original: Any, settings: Settings) -> Any:
    """Wrap a function that takes both savers of a full model, so that they save the average too."""
    signature = inspect.signature(original)

    @wraps(original)
    def save_sd_model(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        average = current(_Average)
        for name, average_path in _SAVERS.items():
            if average is not None and bound.arguments.get(name) is not None:
                bound.arguments[name] = average.saving_average(bound.arguments[name], average_path)
        return original(*bound.args, **bound.kwargs)

    return save_sd_model


def _removing(average_path: Callable[[str], str]) -> Callable[[Any, Settings], Any]:
    """Return a wrapper of a function that removes a model, so that it removes the average too."""

    def wrap(original: Any, settings: Settings) -> Any:
        @wraps(original)
        def remove(path: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(path, *args, **kwargs)
            average = current(_Average)
            if average is not None and isinstance(path, (str, os.PathLike)):
                average.after_removal(os.fspath(path), average_path, original)
            return result

        return remove

    return wrap


_SAVERS = {"sd_saver": _average_file, "diffusers_saver": _average_folder}


def _expect_savers(original: Any) -> str | None:
    parameters = list(inspect.signature(original).parameters)
    return None if parameters[-2:] == list(_SAVERS) else f"its parameters are {parameters}"


_NAMES = ("save_sd_model_on_epoch_end_or_stepwise_common", "save_sd_model_on_train_end_common")

PATCH = Patch(
    name="ema",
    summary="--ema: save an average of the trained weights with each model and state",
    targets=(
        *(
            target
            for name in _NAMES
            for target in moved(name, "library.checkpoint_io", _save_model, _expect_savers, body="runs")
        ),
        Target("os", "remove", _removing(_average_file), takes("path"), body="runs"),
        Target("shutil", "rmtree", _removing(_average_folder), takes("path"), body="runs"),
    ),
    options=(EMA, EMA_DECAY, EMA_DEVICE),
    exactness="exact",
    held_to="the model saved without it; the average within 1e-6 of one computed from the models of every step",
    idea="https://github.com/kohya-ss/sd-scripts/pull/893",
    wanted=lambda settings: settings[EMA],
    problems=_problems,
    stage=Stage.COMPUTE,
    on_start=_start,
)
