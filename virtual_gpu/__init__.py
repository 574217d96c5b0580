"""A virtual NVIDIA GPU: an ordinary CUDA build of PyTorch runs on it, and nothing is computed.

``python -m virtual_gpu 4090 -- python train.py`` starts a command on it. In that process, these functions read and set what
the GPU counts. README.md describes which parts are real.
"""

from __future__ import annotations

import ctypes
import functools
import json
from typing import Any


def launches() -> int:
    """Return the number of kernels launched since the last :func:`reset`; one call of cuBLAS or cuDNN counts as one."""
    return int(_library().virtual_gpu_launches())


def syncs() -> int:
    """Return how often the host has waited for the GPU since the last :func:`reset`."""
    return int(_library().virtual_gpu_syncs())


def counters() -> dict[str, Any]:
    """Return all counters since the last :func:`reset`.

    ``launches``, ``launches_by_kind`` and ``kernels`` (name -> launches), ``syncs`` and ``syncs_by_call``, copies and their
    bytes by direction, ``mallocs``, ``frees``, ``out_of_memory`` (refused allocations), ``graph_launches``,
    ``launches_in_graphs`` (part of ``launches``), ``launches_outside_capture``, ``devices`` (bytes and peak bytes of each GPU),
    and ``unknown_calls`` (functions that are not implemented -> calls).
    """
    result: dict[str, Any] = json.loads(_library().virtual_gpu_json())
    return result


def reset() -> None:
    """Set all counters to 0, and each GPU's peak to its current bytes."""
    _library().virtual_gpu_reset()


def set_finite(value: bool) -> None:
    """Set whether results are finite: with False, each number that the host reads is NaN and each boolean false."""
    _library().virtual_gpu_set_finite(value)


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    if not hasattr(library, "virtual_gpu_json"):
        raise RuntimeError("this process does not use the virtual GPU; start it with: python -m virtual_gpu 4090 -- python ...")
    library.virtual_gpu_json.restype = ctypes.c_char_p
    library.virtual_gpu_launches.restype = library.virtual_gpu_syncs.restype = ctypes.c_uint64
    return library
