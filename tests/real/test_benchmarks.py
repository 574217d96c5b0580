"""The model step that benchmarks time is sd-scripts' own: it runs, and each variant holds what it says and nothing else."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.results import read
from kohya_ext.tiny import environment
from tests.real.conftest import ROOT


@pytest.mark.newest
def test_upstream_and_patched_steps_run_beside_each_other(checkout, tmp_path):
    file = tmp_path / "step.json"
    command = [
        "-m",
        "benchmarks.run",
        "step",
        "--device",
        "cpu",
        "--sd-scripts",
        str(checkout.path),
        "--scratch",
        str(tmp_path),
    ]
    command += ["--variants", "upstream,patched", "--rounds", "2", "--steps", "1", "--output", str(file)]
    environ = {**os.environ, "PYTHONPATH": environment.python_path(ROOT)}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = read(file)
    assert result.complete
    assert result.reduced
    (comparison,) = result.comparisons
    upstream, patched = comparison.variants
    assert upstream.facts["patches"] == []
    assert "nonreentrant_checkpointing" in patched.facts["patches"]
    assert [len(samples) for samples in upstream.rounds] == [1, 1] == [len(samples) for samples in patched.rounds]
    assert comparison.flops > 1e8
    assert json.loads(file.read_text())["comparisons"][0]["summary"]["patched"]["ratio"]["rounds"] == 2
