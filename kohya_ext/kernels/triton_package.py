"""The package Triton, which PyTorch brings along for CUDA on Linux, and not on Windows. Imports torch in its functions only."""

from __future__ import annotations

import functools
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from kohya_ext.config.command_line import quoted
from kohya_ext.console import warn

#: The oldest compute capability that Triton supports since version 3.3 (torch 2.7). It still compiles for older ones, untested:
#: https://github.com/triton-lang/triton/pull/5066.
OLDEST = (8, 0)
FIRST_WITHOUT_OLDER = Version("3.3")

#: Minor release of torch -> the release of Triton that it works with, for builds that do not require one in their metadata.
#: https://github.com/triton-lang/triton-windows, "PyTorch and Triton", and the metadata of PyTorch's builds for Linux
_RELEASES = {
    "2.4": "3.0",
    "2.5": "3.1",
    "2.6": "3.2",
    "2.7": "3.3",
    "2.8": "3.4",
    "2.9": "3.5",
    "2.10": "3.6",
    "2.11": "3.6",
    "2.12": "3.7",
    "2.13": "3.7",
    "2.14": "3.8",
    "2.15": "3.9",
}


#: The package's names on PyPI: PyTorch's own, and the one for Windows.
_PACKAGES = ("triton", "triton-windows")


def missing_triton() -> str | None:
    """Return that the package is missing and how to install it into this environment; None if it is installed."""
    from torch.utils import _triton

    if _triton.has_triton_package():
        return None
    return f"Triton is not installed; run: {_command(_release())}"


def mismatched_triton() -> str | None:
    """Return that the package's release is not the one that torch works with, and what to type; None if it is."""
    release, installed = _release(), next(filter(None, map(_version, _PACKAGES)), None)
    if not release or installed is None or installed.startswith(f"{release}."):
        return None
    torch = ".".join(version("torch").split(".")[:2])
    return f"Triton {installed} is installed, and torch {torch} works with {release}; run: {_command(release)}"


def _command(release: str) -> str:
    package = _PACKAGES[os.name == "nt"] + (f"=={release}.*" if release else "")
    return quoted([sys.executable, "-m", "pip", "install", package])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def is_missing(device: Any = None) -> bool:
    """Return whether the package is missing. Warn, once per process, if it would support a CUDA device."""
    import torch

    if (missing := missing_triton()) is None:
        return False
    if torch.cuda.get_device_capability(device) >= OLDEST or Version(_release() or "99") < FIRST_WITHOUT_OLDER:
        _warn(f"blocks are not compiled, and fused operations take more passes over memory: {missing}")
    return True


@functools.cache
def _warn(message: str) -> None:
    warn(message)


def _release() -> str:
    """Return the release of Triton for the installed torch, ``3.4``: a newer one fails. Empty if it is not known."""
    for requirement in map(Requirement, requires("torch") or ()):
        if requirement.name == "triton" and (release := re.search(r"\d+\.\d+", str(requirement.specifier))):
            return release.group()
    return _RELEASES.get(".".join(version("torch").split(".")[:2]), "")
