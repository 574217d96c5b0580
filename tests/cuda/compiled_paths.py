"""The longest path that inductor and Triton write below the folder of compiled code, temporary files included, as JSON.

Prints that with inductor's own names of kernels, and that with the names on Windows.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch._inductor.config

from kohya_ext.compiling.configuration import CACHE_VARIABLE, shorten_kernel_names
from tests.cuda.generated_code import cases


def written(folder: str) -> list[str]:
    """Return the paths, relative to ``folder``, of the files that are opened there while a block is compiled."""
    os.environ[CACHE_VARIABLE] = folder
    os.environ["TRITON_CACHE_DIR"] = str(Path(folder, "triton", "0"))  # as inductor sets it
    paths: list[str] = []

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(folder):
            paths.append(os.path.relpath(str(arguments[0]), folder))

    sys.addaudithook(note)
    torch._dynamo.reset()
    _, block, inputs = next(cases())
    torch.compile(block, fullgraph=True)(*inputs).sum().backward()
    return paths


def longest() -> str:
    """Return the longest path."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return max(written(folder), key=len)


if __name__ == "__main__":
    torch.set_default_device("cuda")
    torch._inductor.config.compile_threads = 1  # as on Windows; other processes open files of their own
    own = longest()
    shorten_kernel_names()
    print(json.dumps([own, longest()]))
