"""CUDA's streams and events on the CPU, for copies of swapped blocks: as early or as late as the events allow.

Kernels are the CPU's own and run where they are called. A copy checks that its stream has waited for an event after the last
use of the memory that it writes. It is done when it is enqueued, or in ``late`` mode only when an event after it is waited for.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import torch

_copy = torch.Tensor.copy_


class Event:
    def __init__(self, stream: "Stream", time: int, copies: int) -> None:
        self.stream, self.time, self.copies = stream, time, copies


class Stream:
    """A stream of copies, or that of the kernels."""

    def __init__(self, streams: "Streams") -> None:
        self.streams, self.seen = streams, 0
        self.copies: list[Callable[[], Any]] = []
        self.done = 0

    def record_event(self) -> Event:
        self.streams.time += 1
        return Event(self, self.streams.time, len(self.copies))

    def wait_event(self, event: Event) -> None:
        self.seen = max(self.seen, event.time)
        event.stream.finish(event.copies)

    def synchronize(self) -> None:
        self.finish(len(self.copies))

    def finish(self, count: int) -> None:
        for copy in self.copies[self.done : count]:
            copy()
        self.done = max(self.done, count)


class Now(Executor):
    """Runs a submitted function immediately, in its caller's thread."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future


def to_device(layer: torch.nn.Module, device: torch.device) -> None:
    """Move a block's weights as upstream does. ``cpu:0`` is the GPU, to which they are copied."""
    for module in layer.modules():
        if device.index is not None and getattr(module, "weight", None) is not None:
            module.weight.data = module.weight.data.clone()


class Streams:
    """Replaces what :mod:`kohya_ext.patching.swapped_blocks` uses of ``torch.cuda``."""

    def __init__(self, late: bool) -> None:
        self.late, self.time, self.copied = late, 0, 0
        self.kernels = self.current = Stream(self)
        self.others: list[Stream] = []
        self.used: dict[int, int] = {}
        """Address of a weight -> the time of its last use."""

    def install(self, replace: Callable[[Any, str, Any], None] = setattr) -> None:
        """Replace the functions with ``replace(object, name, value)``."""
        replace(torch.cuda, "Stream", self._new)
        replace(torch.cuda, "current_stream", lambda device=None: self.current)
        replace(torch.cuda, "stream", self._use)
        replace(torch.Tensor, "copy_", lambda *args, **kwargs: self._copy(*args, **kwargs))
        self._hook = torch.nn.modules.module.register_module_forward_hook(self._note)

    def remove(self) -> None:
        """Remove what :meth:`install` has added to all modules; its caller puts the functions back."""
        self._hook.remove()

    def _new(self, device: Any = None) -> Stream:
        self.others.append(Stream(self))
        return self.others[-1]

    def _note(self, module: Any, inputs: Any, output: Any) -> None:
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor):
            self.used[weight.data_ptr()] = self.time

    @contextlib.contextmanager
    def _use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def _copy(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        stream = self.current
        if stream is self.kernels:
            for each in self.others:  # copies to pageable memory have ended when their call returns
                each.synchronize()
            return _copy(to, source, non_blocking)
        assert stream.seen > self.used.get(to.data_ptr(), 0), "the copy may overwrite a weight that a kernel still reads"
        self.copied += to.nbytes
        if self.late:
            stream.copies.append(lambda: _copy(to, source))
            return to
        return _copy(to, source)
