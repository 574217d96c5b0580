"""The environment variables of a tiny run."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

SITE = Path(__file__).parent / "site"
"""On PYTHONPATH, shrinks the models in every Python process that can import kohya_ext, and does nothing else."""

_ROOT = Path(__file__).parents[2]


def variables(tokenizers: Path) -> dict[str, str]:
    """What a tiny run needs beside the caller's environment: models shrunk, offline, one thread.

    `tokenizers` is a folder written by `tokenizers.write`. One thread, because OpenMP's threads wait actively: where
    cores are shared, they slow tiny steps down many times.
    """
    return {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(tokenizers),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(SITE),
    }


def python_path(*first: Path) -> str:
    """A PYTHONPATH with the folders `first`, then what makes kohya_ext importable, then what the caller's has."""
    folders = [str(folder) for folder in first]
    # Never the folder of installed packages: PYTHONPATH precedes the standard library, which a backport would shadow.
    if str(_ROOT) not in sysconfig.get_paths().values():
        folders.append(str(_ROOT))
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*folders, inherited] if inherited else folders)
