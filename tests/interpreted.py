"""Run code whose Triton kernels are interpreted on the CPU, where an access outside of a kernel's tensors is an error.

    python -m tests.interpreted CODE

A GPU ends the process that makes such an access, or uses another tensor's memory, which is what the interpreter would do.
"""

import os
import subprocess
import sys
from typing import Any


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process with Triton's interpreter, and return its result."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "tests.interpreted", code], env=environment, capture_output=True, text=True)


def check_bounds() -> None:
    """Let each kernel that is interpreted from now on read and write elements of its arguments only."""
    import numpy
    import wrapt
    from triton.runtime import interpreter

    extents: list[tuple[int, int]] = []

    def remember(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        arguments, named = wrapped(*args, **kwargs)
        tensors = [each for each in (*arguments, *named.values()) if hasattr(each, "data_ptr")]
        extents[:] = [(each.data_ptr(), each.data_ptr() + bytes_of(each)) for each in tensors]
        return arguments, named

    def bytes_of(tensor: Any) -> int:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return (last + 1) * tensor.element_size() if tensor.numel() else 0

    def check(pointers: Any, mask: Any) -> None:
        addresses = pointers.data[numpy.broadcast_to(mask.data, pointers.data.shape)]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        inside = numpy.zeros(addresses.shape, dtype=bool)
        for start, end in extents:
            inside |= (addresses >= start) & (addresses + size <= end)
        if not inside.all():
            raise IndexError(f"{(~inside).sum()} of {inside.size} elements are outside of the kernel's tensors")

    def load(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        check(*args[:2])
        return wrapped(*args, **kwargs)

    def store(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        check(args[0], args[2])
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(interpreter.GridExecutor, "_init_args_hst", remember)
    wrapt.wrap_function_wrapper(interpreter.InterpreterBuilder, "create_masked_load", load)
    wrapt.wrap_function_wrapper(interpreter.InterpreterBuilder, "create_masked_store", store)


if __name__ == "__main__":
    check_bounds()
    exec(compile(sys.argv[1], "interpreted", "exec"), {"__name__": "interpreted"})
