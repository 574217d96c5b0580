"""Count the work of a function, which a clock on a busy machine cannot measure."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def lines_run(function: Callable[[], object]) -> int:
    """Return how many lines of Python a function runs; each turn of a loop counts its lines again."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@contextmanager
def recorded_operators() -> Iterator[list[str]]:
    """Record the names of torch's operators that run inside the block: ``aten::mul``."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Record():
        yield names
