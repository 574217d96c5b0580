"""A CUDA graph without a GPU: records the operations of a region on the CPU, and replays them on the same memory.

A replay runs no Python of the model, no autograd and no autocast. Before each replayed forward pass, the memory of all
recordings is overwritten, because on a GPU they share it with each other and with eager work.
"""

import contextlib
import time
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operations without values.
_ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")

#: Operations that CUDA forbids while it captures.
_FORBIDDEN = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")


def _tensors(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


class Recording(TorchDispatchMode):
    """Operations, with the tensors that they were given."""

    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder
        self.operations = []
        self.memory = {}
        """Address -> a tensor in each storage that the region allocated."""
        self._outer = set()

    @classmethod
    def is_infra_mode(cls):
        # Compiled code runs as in a capture, and its operations are recorded.
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name in _FORBIDDEN:
            raise RuntimeError(f"{func._schema.name} while capturing")
        before = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        results = _tensors(result := func(*args, **kwargs))
        new = [tensor for tensor in results if tensor.untyped_storage().data_ptr() not in before]
        self._outer |= before - self.memory.keys()
        # Keeps every tensor alive, so that no address is used twice.
        self.operations.append((func, args, kwargs, results, bool(new) or func._schema.is_mutable))
        for tensor in new:
            address = tensor.untyped_storage().data_ptr()
            if address not in self._outer:
                self.memory[address] = tensor
        return result

    def replay(self):
        self.recorder.replays += 1
        self.recorder.overwrite_before(self)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for func, args, kwargs, results, computes in self.operations:
                if not computes or func._schema.name.removeprefix("aten::") in _ALLOCATIONS:
                    continue
                outputs = _tensors(func(*args, **kwargs))
                if not func._schema.is_mutable:
                    for before, now in zip(results, outputs, strict=True):
                        before.copy_(now)


def _read(tensor):
    # Of a CPU's tensor it is not an operation, and no dispatch mode sees it.
    raise RuntimeError("tolist while capturing")


class Done:
    """An event of a device whose work is done immediately."""

    def record(self):
        pass

    def query(self):
        return True


class CpuRecorder:
    """Stands for `kohya_ext.compiling.cuda_recorder.CudaRecorder`."""

    def __init__(self, device=None, free=2**40, bytes_per_recording=0, busy=1.0):
        self.device = torch.device("cpu")
        self.generators = (torch.default_generator,)
        self.recordings = []
        self.replays = 0
        self.used = 0
        self.released = 0
        self.busy = busy
        self.free, self._bytes = free, bytes_per_recording

    @staticmethod
    def obstacle(device):
        return None

    @contextlib.contextmanager
    def in_pool(self):
        yield

    @contextlib.contextmanager
    def record(self):
        recording = Recording(self)
        with recording, patch.object(torch.Tensor, "tolist", _read):
            yield recording
        self.recordings.append(recording)

    def overwrite_before(self, recording):
        """Overwrite the memory of all recordings before a forward pass, the first recording of a pair."""
        if self.recordings.index(recording) % 2:
            return
        for each in self.recordings:
            for tensor in each.memory.values():
                whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                whole.fill_(float("nan") if whole.dtype.is_floating_point else 0)

    def free_bytes(self):
        return self.free - self._bytes * len(self.recordings)

    def pool_bytes(self):
        return self.used

    def return_unused(self):
        pass

    @staticmethod
    def new_event():
        return Done()

    def mark(self):
        return time.perf_counter()

    def seconds(self, start, end):
        return end - start, (end - start) * self.busy

    def release(self):
        self.released += 1
        self.recordings.clear()
