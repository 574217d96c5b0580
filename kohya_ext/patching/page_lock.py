"""Page-lock memory of the host, from which a GPU copies several times as fast and without its host's help."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import psutil
import torch

#: Bytes of host memory that stay free.
SPARE = 2 * 2**30

#: The largest part of the machine's memory that is page-locked: Windows allows a half for all of a system's processes.
_LOCKED = 0.4


def free_memory(processes: int = 1) -> int:
    """Return the bytes of host memory that each of some processes may take."""
    return int(psutil.virtual_memory().available // processes - SPARE)


class PageLock:
    """Page-locks memory of this process, up to a limit in bytes, until it is collected."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.locked = 0

    @classmethod
    def of_this_machine(cls, processes: int = 1) -> PageLock:
        """Return one with the limit for each of some processes on this machine."""
        return cls(min(round(_LOCKED * psutil.virtual_memory().total / processes), free_memory(processes)))

    def lock(self, memory: torch.Tensor) -> None:
        """Lock a tensor's memory, if the limit and the machine allow it. Copies from it are faster then, and equal."""
        # The run may have taken memory since the limit was set.
        if not 0 < memory.nbytes <= min(self.limit - self.locked, free_memory()):
            return
        with contextlib.suppress(RuntimeError, AttributeError):  # a build of torch or a GPU without it
            runtime = torch.cuda.cudart()
            if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
                self.locked += memory.nbytes
                # At exit, the driver unlocks it itself.
                weakref.finalize(self, _unlock, runtime, memory).atexit = False
            else:
                self.limit = self.locked
                _forget_error()


def _forget_error() -> None:
    """Let an operator meet the error of a CUDA function that has returned it, or the next one of the run would."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)
        torch.cuda.synchronize()


def _unlock(runtime: Any, memory: torch.Tensor) -> None:
    with contextlib.suppress(RuntimeError):
        runtime.cudaHostUnregister(memory.data_ptr())
