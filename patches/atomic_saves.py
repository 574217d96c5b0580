"""Write every model, state and cache file atomically.

Upstream writes to the final name, so a full disk or a kill leaves a truncated file in place of the earlier one. This patch
writes to a temporary name in the same folder and renames the complete file. A model from before the run is kept as
``NAME.previous``, so that rerunning a command does not destroy an earlier result.

All of upstream's writers call the functions below. ``safetensors.torch.serialize_file`` is replaced instead of ``save_file``:
``from safetensors.torch import save_file`` creates references that a patch cannot replace, but ``save_file`` itself looks up
``serialize_file`` on each call.
"""

from __future__ import annotations

import inspect
import os
import time
from argparse import Namespace
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from kohya_ext.config.settings import Option, Settings, boolean, minutes, path
from kohya_ext.console import warn
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current
from kohya_ext.patching.types import Accelerator
from kohya_ext.renames import is_open, patiently
from kohya_ext.run import journal, ranks, run_record
from kohya_ext.run.atomic_write import (
    WritePolicy,
    folders_elsewhere,
    in_temporary_folder,
    preserve,
    previous,
    rename_to_previous,
    renamed_to_remove,
    write_atomically,
    write_together,
)
from kohya_ext.run.output_files import final_models, models, output_name, previous_states
from kohya_ext.run.resume import position, stale_states
from kohya_ext.run.state_size import state_bytes, tensor_bytes

DISK_FULL_TIMEOUT = Option(
    "disk_full_timeout",
    10.0,
    minutes,
    "when the disk is full or the output folder cannot be written to, keep the weights in memory and retry the save for this "
    "many minutes",
    metavar="MINUTES",
)
FALLBACK_DIR = Option[Path | None](
    "fallback_dir",
    None,
    path,
    "save to this folder, on another disk, when the disk of --output_dir is full or the folder cannot be written to",
    metavar="FOLDER",
)
KEEP_PREVIOUS = Option(
    "keep_previous",
    True,
    boolean,
    "rename an existing model of the same name to NAME.previous instead of replacing it",
)


@dataclass
class _Outputs(TrainingCallback):
    """The output folder, in which the models and states of an earlier run are kept."""

    folder: Path
    name: str | None
    args: Namespace
    keeps: bool
    fallback: Path | None = None

    def before_training(self, accelerator: Accelerator) -> None:
        """Mark models and rename states: before the first save, and after any resume."""
        if not self.keeps:
            return
        # A resumed run may replace the models of its own epochs and steps.
        resumed = getattr(self.args, "resume", None)
        for model in final_models(self.folder, self.name) if resumed else models(self.folder, self.name):
            preserve(model)
        run = run_record.current()
        if run is not None and accelerator.is_main_process:
            resumed_state = Path(resumed) if resumed else None
            earlier = stale_states(self.folder, self.name, run, resumed_state, folders_elsewhere(self.fallback))
            elsewhere = (older for state in earlier if (older := previous(state)).exists())
            rename_to_previous(earlier, list(dict.fromkeys([*previous_states(self.folder, self.name), *elsewhere])))


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Outputs | None:
    if not getattr(args, "output_dir", None):
        return None
    name = getattr(args, "output_name", None)
    return _Outputs(Path(args.output_dir), name, args, settings[KEEP_PREVIOUS], settings[FALLBACK_DIR])


def _policy(settings: Settings, file: Path) -> WritePolicy:
    """Return how to handle a write that fails. Only models and states go to another folder: caches are read from theirs."""
    seconds = settings[DISK_FULL_TIMEOUT] * 60
    if not _is_output_folder(file.parent):
        return WritePolicy(seconds)
    return WritePolicy(seconds, settings[FALLBACK_DIR], is_output=True)


def _is_output_folder(folder: Path) -> bool:
    outputs = current(_Outputs)
    # An output name may contain folders.
    places = () if outputs is None else (outputs.folder, Path(outputs.folder, output_name(outputs.args)).parent)
    return os.path.abspath(folder) in map(os.path.abspath, places)


def _is_path(value: object) -> bool:
    return isinstance(value, (str, os.PathLike))


def _serialize_file(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def serialize_file(tensor_dict: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        return write_atomically(
            Path(filename),
            in_temporary_folder(lambda temporary: original(tensor_dict, str(temporary), *args, **kwargs)),
            lambda: sum(map(_tensor_size, tensor_dict.values())),
            _policy(settings, Path(filename)),
        )

    return serialize_file


def _tensor_size(spec: Any) -> int:
    """Return the size of a tensor, bytes. safetensors 0.4 passes a dictionary with the data, 0.8 an object with a pointer."""
    return len(spec["data"]) if isinstance(spec, dict) else int(spec.data_len)


def _save(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_path(f):
            return original(obj, f, *args, **kwargs)
        return write_atomically(
            Path(f),
            lambda temporary: original(obj, str(temporary), *args, **kwargs),
            lambda: tensor_bytes(obj),
            _policy(settings, Path(f)),
        )

    return save


def _mem_eff_save_file(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def mem_eff_save_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        return write_atomically(
            Path(filename),
            lambda temporary: original(tensors, str(temporary), *args, **kwargs),
            lambda: tensor_bytes(tensors),
            _policy(settings, Path(filename)),
        )

    return mem_eff_save_file


def _savez(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def savez(file: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_path(file):
            return original(file, *args, **kwargs)
        name = os.fspath(file)

        def write(temporary: Path) -> Any:
            with open(temporary, "wb") as stream:  # numpy appends .npz to a file name
                return original(stream, *args, **kwargs)

        size = sum(getattr(array, "nbytes", 0) for array in (*args, *kwargs.values()))
        final = Path(name if name.endswith(".npz") else f"{name}.npz")
        return write_atomically(final, write, lambda: size, _policy(settings, final))

    return savez


def _save_state(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def save_state(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        kind = str(self.distributed_type).rpartition(".")[2]
        is_shared = kind not in ("NO", "MULTI_GPU", "MULTI_CPU") or (self.num_processes > 1 and position() is None)
        if not is_shared and not self.is_main_process:
            return None  # the first process also saves the random states of the others
        if output_dir is None or (is_shared and not ranks.is_deepspeed(self)):
            # Several processes write into one folder, so it is not renamed. Its files are still written atomically.
            began = time.monotonic()
            result = original(self, output_dir, *args, **kwargs)
            if output_dir is not None:
                journal.saved(Path(output_dir), time.monotonic() - began)
            return result

        def write(temporary: Path) -> None:
            original(self, str(temporary), *args, **kwargs)
            if is_shared:
                self.wait_for_everyone()
            if self.is_main_process and (run := run_record.current()) is not None:
                current = position()
                run_record.write(temporary, run, current.step if current is not None else 0)

        if is_shared:
            write_together(Path(output_dir), write, self.is_main_process, self.wait_for_everyone)
        else:
            write_atomically(Path(output_dir), write, lambda: state_bytes(self), _policy(settings, Path(output_dir)))
        return output_dir

    return save_state


def _save_diffusers(original: Any, settings: Settings) -> Any:
    """Wrap a writer of a model folder in Diffusers' format."""
    signature = inspect.signature(original)

    @wraps(original)
    def save_diffusers_checkpoint(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        final = Path(bound.arguments["output_dir"])

        def write(temporary: Path) -> Any:
            bound.arguments["output_dir"] = str(temporary)
            return original(*bound.args, **bound.kwargs)

        return write_atomically(final, write, lambda: 0, _policy(settings, final))

    return save_diffusers_checkpoint


def _makedirs(original: Any, settings: Settings) -> Any:
    """Return a ``makedirs`` that leaves an output folder that cannot be created to the write that follows, which waits."""

    @wraps(original)
    def makedirs(name: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(name, *args, **kwargs)
        except OSError:
            if not _is_path(name) or not _is_output_folder(Path(name)):
                raise

    return makedirs


def _remove(original: Any, settings: Settings) -> Any:
    """Return a function that removes an old model or state whole, or keeps it if another program has it open on Windows."""

    @wraps(original)
    def remove(path: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not _is_path(path) or not _is_output_folder(Path(path).parent) or Path(path).is_symlink():
            return original(path, *args, **kwargs)
        try:
            target = renamed_to_remove(Path(path))
            return patiently(lambda: original(target))
        except OSError as error:
            if not is_open(error):
                raise
            warn(f"{path} is open in another program and cannot be removed; training continues")

    return remove


def _expect_output_dir(original: Any) -> str | None:
    parameters = list(inspect.signature(original).parameters)
    return None if "output_dir" in parameters else f"its parameters are {parameters}"


PATCH = Patch(
    name="atomic_saves",
    summary="write model, state and cache files atomically, so that a crash, a full disk or a second run loses no earlier file",
    targets=(
        Target("safetensors.torch", "serialize_file", _serialize_file, takes("tensor_dict", "filename"), body="runs"),
        Target("torch", "save", _save, takes("obj", "f"), body="runs"),
        Target("library.safetensors_utils", "mem_eff_save_file", _mem_eff_save_file, takes("tensors", "filename"), body="runs"),
        Target("numpy", "savez", _savez, takes("file"), body="runs"),
        Target("os", "makedirs", _makedirs, takes("name"), body="runs"),
        Target("os", "remove", _remove, takes("path"), body="runs"),
        Target("shutil", "rmtree", _remove, takes("path"), body="runs"),
        Target("library.model_util", "save_diffusers_checkpoint", _save_diffusers, _expect_output_dir, body="runs"),
        Target("library.sdxl_model_util", "save_diffusers_checkpoint", _save_diffusers, _expect_output_dir, body="runs"),
        Target("accelerate.accelerator", "Accelerator.save_state", _save_state, takes("self", "output_dir"), body="runs"),
    ),
    options=(DISK_FULL_TIMEOUT, FALLBACK_DIR, KEEP_PREVIOUS),
    exactness="exact",
    held_to="the tensors that upstream saves",
    idea="https://lwn.net/Articles/457667/",
    stage=Stage.WRITE,
    on_start=_start,
)
