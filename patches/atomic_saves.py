"""Every model, state and cache file is written beside and renamed when it is whole.

Upstream writes straight to the final name: a full disk or a kill leaves a truncated file there, over the good one it
replaced. Its writers all end in the functions below. A model that was there before the run began is kept as
``NAME.previous``: rerunning a command must not cost last night's result. ``safetensors.torch.serialize_file`` is taken
instead of ``save_file``, because ``from safetensors.torch import save_file`` makes bindings that no patch reaches, and
each of them looks this name up when it is called.
"""

from __future__ import annotations

import inspect
import os
from argparse import Namespace
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, trained_weights
from kohya_ext.run import run_record
from kohya_ext.run.atomic_write import DiskFullPolicy, in_temporary_folder, preserve, rename_to_previous, write_atomically
from kohya_ext.run.output_files import final_models, models, previous_states
from kohya_ext.run.resume import position, stale_states


@dataclass
class _Earlier(TrainingCallback):
    """The models and states of an earlier run in the output folder."""

    folder: Path
    name: str | None
    args: Namespace
    kept: bool = False
    """Whether they are out of the way."""

    def before_batch(self, accelerator: Any) -> None:
        """Move them, before this run has saved any, and when it is known whether it continues the earlier one."""
        if self.kept:
            return
        self.kept = True
        # The files of each epoch and step are those of the run that is resumed.
        resumed = getattr(self.args, "resume", None)
        for model in final_models(self.folder, self.name) if resumed else models(self.folder, self.name):
            preserve(model)
        run = run_record.current()
        if run is not None and accelerator.is_main_process:
            earlier = stale_states(self.folder, self.name, run, Path(resumed) if resumed else None)
            rename_to_previous(earlier, list(previous_states(self.folder, self.name)))


def _start(args: Namespace, accelerator: Any, settings: Settings) -> _Earlier | None:
    if not settings.keep_previous or not getattr(args, "output_dir", None):
        return None
    return _Earlier(Path(args.output_dir), getattr(args, "output_name", None), args)


def _policy(settings: Settings) -> DiskFullPolicy:
    return DiskFullPolicy(settings.disk_full_timeout * 60, settings.fallback_dir)


def _is_path(value: object) -> bool:
    return isinstance(value, (str, os.PathLike))


def _serialize_file(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def serialize_file(tensor_dict: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        return write_atomically(
            Path(filename),
            in_temporary_folder(lambda beside: original(tensor_dict, str(beside), *args, **kwargs)),
            lambda: sum(map(_tensor_size, tensor_dict.values())),
            _policy(settings),
        )

    return serialize_file


def _tensor_size(spec: Any) -> int:
    """The bytes of a tensor: safetensors 0.4 hands over dictionaries that hold them, 0.8 objects that point to them."""
    return len(spec["data"]) if isinstance(spec, dict) else int(spec.data_len)


def _save(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_path(f):
            return original(obj, f, *args, **kwargs)
        return write_atomically(
            Path(f),
            lambda beside: original(obj, str(beside), *args, **kwargs),
            lambda: tensor_bytes(obj),
            _policy(settings),
        )

    return save


def _mem_eff_save_file(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def mem_eff_save_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        return write_atomically(
            Path(filename),
            lambda beside: original(tensors, str(beside), *args, **kwargs),
            lambda: tensor_bytes(tensors),
            _policy(settings),
        )

    return mem_eff_save_file


def _savez(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def savez(file: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_path(file):
            return original(file, *args, **kwargs)
        name = os.fspath(file)

        def write(beside: Path) -> Any:
            with open(beside, "wb") as stream:  # given a name, numpy would add .npz to it
                return original(stream, *args, **kwargs)

        size = sum(getattr(array, "nbytes", 0) for array in (*args, *kwargs.values()))
        return write_atomically(Path(name if name.endswith(".npz") else f"{name}.npz"), write, lambda: size, _policy(settings))

    return savez


def _save_state(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def save_state(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        if output_dir is None or self.num_processes > 1:
            # Several processes write into one folder, and not all of them may: its files are whole each for itself.
            return original(self, output_dir, *args, **kwargs)

        def write(beside: Path) -> None:
            original(self, str(beside), *args, **kwargs)
            if (run := run_record.current()) is not None:
                current = position()
                run_record.write(beside, run, current.step if current is not None else 0)

        write_atomically(Path(output_dir), write, lambda: _state_bytes(self), _policy(settings))
        return output_dir

    return save_state


#: Bytes that torch.save and safetensors take for each tensor beside its data: measured on a LoRA's state, 170.
_ENTRY = 200


def _state_bytes(accelerator: Any) -> int:
    """Return the bytes of a state's largest parts: the trained weights, and what the optimizer keeps of each."""
    optimizers = accelerator._optimizers
    slots = [each for optimizer in optimizers for each in optimizer.state_dict()["state"].values()]
    tensors = [*trained_weights(optimizers), *(value for each in slots if isinstance(each, dict) for value in each.values())]
    return tensor_bytes(tensors) + _ENTRY * len(tensors)


def _save_diffusers(original: Any, settings: Settings) -> Any:
    """For upstream's writers of a model in Diffusers' format: a folder."""
    signature = inspect.signature(original)

    @wraps(original)
    def save_diffusers_checkpoint(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        final = Path(given.arguments["output_dir"])

        def write(beside: Path) -> Any:
            given.arguments["output_dir"] = str(beside)
            return original(*given.args, **given.kwargs)

        return write_atomically(final, write, lambda: 0, _policy(settings))

    return save_diffusers_checkpoint


def _expect_output_dir(original: Any) -> str | None:
    parameters = list(inspect.signature(original).parameters)
    return None if "output_dir" in parameters else f"its parameters are {parameters}"


def tensor_bytes(obj: Any) -> int:
    """Return the bytes of all tensors in nested dictionaries, lists and tuples; shared storage counts once."""
    seen: dict[int, int] = {}
    stack = [obj]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif hasattr(item, "untyped_storage"):
            seen[item.untyped_storage().data_ptr()] = item.numel() * item.element_size()
    return sum(seen.values())


PATCH = Patch(
    name="atomic_saves",
    summary="model, state and cache files get their name only when they are whole; a full disk and a second run lose nothing",
    targets=(
        Target("safetensors.torch", "serialize_file", _serialize_file, takes("tensor_dict", "filename"), body="runs"),
        Target("torch", "save", _save, takes("obj", "f"), body="runs"),
        Target("library.safetensors_utils", "mem_eff_save_file", _mem_eff_save_file, takes("tensors", "filename"), body="runs"),
        Target("numpy", "savez", _savez, takes("file"), body="runs"),
        Target("library.model_util", "save_diffusers_checkpoint", _save_diffusers, _expect_output_dir, body="runs"),
        Target("library.sdxl_model_util", "save_diffusers_checkpoint", _save_diffusers, _expect_output_dir, body="runs"),
        Target("accelerate.accelerator", "Accelerator.save_state", _save_state, takes("self", "output_dir"), body="runs"),
    ),
    exactness="exact",
    held_to="the tensors that upstream writes",
    idea="https://lwn.net/Articles/457667/",
    stage=Stage.WRITE,
    on_start=_start,
)
