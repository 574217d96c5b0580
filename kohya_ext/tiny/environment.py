"""Environment variables for tiny runs."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

SITE = Path(__file__).parent / "site"
"""Folder for PYTHONPATH that shrinks the models in every Python process that can import kohya_ext."""

_ROOT = Path(__file__).parents[2]


def variables(tokenizers: Path) -> dict[str, str]:
    """Return the variables that a tiny run adds to the environment: for shrunk models, offline use and one thread.

    `tokenizers` is a folder written by `tokenizers.write`. OpenMP threads busy-wait, which makes tiny steps many times
    slower on shared cores, so only one is used.
    """
    return {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(tokenizers),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(SITE),
    }


def python_path(*first: Path) -> str:
    """Return a PYTHONPATH with the folders `first`, the parent of kohya_ext, and the caller's PYTHONPATH."""
    folders = [str(folder) for folder in first]
    # Never add site-packages: PYTHONPATH precedes the standard library, so backports would shadow it.
    if str(_ROOT) not in sysconfig.get_paths().values():
        folders.append(str(_ROOT))
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*folders, inherited] if inherited else folders)
