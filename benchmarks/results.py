"""The JSON files in results/: where they are, and on which machine, versions and commits they were measured."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from kohya_ext.estimate import cache
from kohya_ext.sdscripts.checkouts import Checkout

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).parent / "results"

PACKAGES = (
    "accelerate", "bitsandbytes", "diffusers", "numpy", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "safetensors", "tensorboard",
    "torch", "transformers", "triton", "wrapt", "xformers",
)  # fmt: skip


def circumstances(checkout: Checkout, **device: Any) -> dict[str, dict[str, Any]]:
    """Return ``machine``, with the description of a ``device``, ``versions`` and ``commits`` of a measurement."""
    return {
        "machine": {
            "system": platform.platform(terse=True),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
            "load_at_start": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
            **device,
        },
        "versions": {
            "python": platform.python_version(),
            **{package: version for package in PACKAGES if (version := cache.version(package)) is not None},
        },
        "commits": {**kohya_ext_commit(), "sd_scripts": checkout.commit, "sd_scripts_version": checkout.version},
    }


def kohya_ext_commit() -> dict[str, Any]:
    """Return the extension's commit, and whether the working tree differs from it."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"))
    except (OSError, subprocess.CalledProcessError):
        return {"kohya_ext": None, "kohya_ext_changed": None}
    return {"kohya_ext": head, "kohya_ext_changed": changed}


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
