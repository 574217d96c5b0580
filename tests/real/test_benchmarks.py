"""Benchmarks run the blocks of sd-scripts."""

import json
import os
import subprocess
import sys

from kohya_ext.tiny import environment
from tests.real.conftest import ROOT


def test_blocks_of_both_generations_are_compared(checkout):
    """An SD 1.5 block; wider ones take minutes."""
    code = (
        f"import sys; sys.path.insert(0, {str(checkout.path)!r})\n"
        "import json; from benchmarks.base_weights_quality import CASES, base_of, block_errors\n"
        "print(json.dumps(block_errors(CASES[0], base_of(CASES[0]), [(20, 1)])))"
    )
    environ = {**os.environ, "PYTHONPATH": environment.python_path(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    error = {name: conditions["outliers 20, depth 1"]["output"][0] for name, conditions in measured.items()}
    assert 0 < error["bf16"] < error["int8"] < error["fp8"] < error["int8 not rotated"]
