"""Read checkpoints whose weights are stored in 8 bits with scales, as people download them for ComfyUI.

sd-scripts takes the values of such a file as they are, without their scales: it trains on wrong weights without a message, or
ends with an error about unexpected tensors (https://github.com/kohya-ss/sd-scripts/issues/2166). Here its readers return the
weights in bf16, as from the same checkpoint in bf16. Under a network they stay in the file in 8 bits until they move to the
GPU, as those of ``mapped_weights``. Elsewhere they are computed while the file is read.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kohya_ext.config.settings import Settings
from kohya_ext.console import stop
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, program
from kohya_ext.patching.types import Accelerator
from kohya_ext.run.scaled_checkpoints import Stored, StoredWeights, UnreadableError, stored_weights
from kohya_ext.sdscripts.families import of

if TYPE_CHECKING:
    from kohya_ext.weights.postponed import History

_ATTRIBUTE = "kohya_ext_stored"
"""The attribute of an open file that has its :class:`StoredWeights`."""


@dataclass
class _Files(TrainingCallback):
    """The files of a run that have such weights."""

    can_wait: bool
    """Whether the run's weights are frozen, so that they can be computed when they move to the GPU."""
    names: set[str] = field(default_factory=set)

    def before_batch(self, accelerator: Accelerator) -> None:
        self.can_wait = False


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Files:
    script = program().command.name
    family = of(script or "", vars(args))
    return _Files(family is not None and script == family.lora and not getattr(args, "deepspeed", False))


def _stored(file: Any) -> StoredWeights | None:
    """Return the weights with scales in a file that is about to be read; None if sd-scripts reads it."""
    path = Path(file)
    try:
        stored = stored_weights(path)
    except UnreadableError as error:
        stop(str(error))
    except (ValueError, OSError):  # the original's error names the file
        return None
    if stored is not None and (files := current(_Files)) is not None:
        files.names.add(path.name)
    return stored


def _weights(history: History) -> Any:
    """Return a weight in bf16, postponed where the run allows it."""
    from kohya_ext.weights.postponed import PostponedCast

    files = current(_Files)
    waits = files is not None and files.can_wait and history.source.device.type == "cpu"
    return PostponedCast(history) if waits else history.value()


def _history(values: Any, scales: Any, stored: Stored) -> History:
    from kohya_ext.weights.postponed import History
    from kohya_ext.weights.scaling import Scaling, values_of

    return History(values_of(values, stored), scaling=Scaling(scales, stored.rotation))


def _load_file(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def load_file(filename: Any, device: Any = "cpu", *args: Any, **kwargs: Any) -> Any:
        stored = _stored(filename)
        tensors = original(filename, device, *args, **kwargs)
        if stored is None:
            return tensors
        scales = {name: tensors[each.scale] for name, each in stored.weights.items()}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in stored.left_out}
        for name, each in stored.weights.items():
            tensors[name] = _weights(_history(tensors[name], scales[name], each))
        return tensors

    return load_file


def _open(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def __init__(self: Any, filename: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, filename, *args, **kwargs)
        setattr(self, _ATTRIBUTE, _stored(filename))

    return __init__


def _keys(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def keys(self: Any) -> Any:
        stored = getattr(self, _ATTRIBUTE, None)
        return [name for name in original(self) if stored is None or name not in stored.left_out]

    return keys


def _get_tensor(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def get_tensor(self: Any, key: str, device: Any = None, dtype: Any = None) -> Any:
        stored = getattr(self, _ATTRIBUTE, None)
        if stored is None or key not in stored.weights:
            return original(self, key, device, dtype)
        each = stored.weights[key]
        values, scales = (original(self, name, device, None) for name in (key, each.scale))
        weights = _weights(_history(values, scales, each))
        return weights if dtype is None else weights.to(dtype)

    return get_tensor


def _facts() -> Mapping[str, object]:
    files = current(_Files)
    return {"files": sorted(files.names)} if files is not None else {}


PATCH = Patch(
    name="scaled_checkpoints",
    summary="read checkpoints whose weights are stored in fp8 or int8 with scales",
    targets=(
        Target("safetensors.torch", "load_file", _load_file, takes("filename", "device"), body="runs"),
        *(
            Target("library.safetensors_utils", f"MemoryEfficientSafeOpen.{name}", replace, takes(*parameters), body="runs")
            for name, replace, parameters in (
                ("__init__", _open, ("self", "filename")),
                ("keys", _keys, ("self",)),
                ("get_tensor", _get_tensor, ("self", "key", "device", "dtype")),
            )
        ),
    ),
    exactness="exact",
    held_to="the same run from a bf16 file of the scaled weights, computed in float32",
    idea="https://github.com/kohya-ss/sd-scripts/issues/2166",
    facts=_facts,
    stage=Stage.RECORD,
    on_start=_start,
)
