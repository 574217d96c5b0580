"""Images of several sizes share one segment of PyTorch's allocator, on the virtual GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.conftest import ROOT

pytest.importorskip("torch")


@pytest.mark.parametrize(
    "allocator", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}], ids=["default", "user settings"]
)
def test_reserved_memory_does_not_grow_with_the_number_of_sizes(gpu_environment, allocator):
    runs = []
    for name in ("without", "with"):
        command = [sys.executable, str(Path(__file__).with_name("bucket_memory.py")), name]
        variables = {**gpu_environment(), "PYTHONPATH": str(ROOT), **allocator}
        done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    without, shared = (run["reserved"] for run in runs)
    if allocator:
        assert shared == without, "the user's settings are kept"
        return
    assert len({*shared}) == 1, "also after the cache was emptied"
    assert max(shared) < 1.07 * runs[1]["peak"]
    assert max(without[1:]) > 1.1 * runs[0]["peak"], "sizes that leave gaps"
