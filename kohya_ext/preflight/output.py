"""Where the result goes: a folder that can be written, with room, and nothing of that name in it."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from argparse import Namespace
from pathlib import Path

from kohya_ext.preflight import Findings
from kohya_ext.writing import PARTIAL


def look(script: Path, args: Namespace, found: Findings) -> None:
    """Check the output folder; remove what a killed run left half-written under this output name."""
    if not getattr(args, "output_dir", None):
        found.errors.append("no --output_dir: the trained model would have nowhere to go")
        return
    folder, name = Path(args.output_dir), getattr(args, "output_name", None) or "last"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        found.errors.append(f"--output_dir {folder} cannot be written to: {error.strerror or error}")
        return
    _look_for_room(script, args, folder, found)
    _look_for_older(args, folder, name, found)
    _remove_partial(folder, name, found)


def _look_for_room(script: Path, args: Namespace, folder: Path, found: Findings) -> None:
    if "network" in script.name or "textual_inversion" in script.name or "lllite" in script.name:
        return  # megabytes, which only the network itself could tell
    model = Path(getattr(args, "pretrained_model_name_or_path", None) or "")
    if not model.is_file():
        return
    free, needed = shutil.disk_usage(folder).free, model.stat().st_size
    if free < needed:
        found.errors.append(
            f"there is no room for the model in {folder}: it takes about {needed / 1e9:.2f} GB (as much as {model.name}), "
            f"{free / 1e9:.2f} GB is free"
        )


def _look_for_older(args: Namespace, folder: Path, name: str, found: Findings) -> None:
    kind = getattr(args, "save_model_as", None) or "safetensors"
    older = folder / (name if kind.startswith("diffusers") else f"{name}.{kind}")
    if older.exists() and not getattr(args, "resume", None):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(older.stat().st_mtime))
        found.warnings.append(f"{older} of {when} will be replaced at the end; another --output_name keeps it")


def _remove_partial(folder: Path, name: str, found: Findings) -> None:
    pattern = re.compile(rf"{re.escape(name)}(-\d{{6}}|-(step|rolling)\d{{8}})?(-state|(-ema)?\.\w+)?{re.escape(PARTIAL)}")
    for path in [path for path in folder.iterdir() if pattern.fullmatch(path.name)]:
        size = sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else os.unlink(path)
        found.notes.append(f"removed {path.name}, {size / 1e9:.2f} GB, which a killed run had left half-written")
