"""Optimizer steps wait for the GPU only as often as they need its values."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("bitsandbytes")
pytest.importorskip("prodigyopt")

ROOT = Path(__file__).parents[2]


def test_steps_do_not_wait_once_per_parameter(gpu_environment):
    script = Path(__file__).with_name("optimizer_steps.py")
    environ = {**gpu_environment(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    parameters = results["parameters"]
    ours, theirs = ({name: syncs for name, (syncs, _) in results[side].items()} for side in ("ours", "theirs"))
    assert theirs == {
        "AdamW8bit": parameters,
        "Lion8bit": parameters,
        "PagedAdamW8bit": parameters + 1,
        "Prodigy": 2 * parameters,
    }
    assert ours == {"AdamW8bit": 0, "Lion8bit": 0, "PagedAdamW8bit": parameters + 1, "Prodigy": 1}
    for name, (_, launches) in results["ours"].items():
        assert launches <= results["theirs"][name][1] + (name == "Prodigy"), "one launch gathers Prodigy's sums"
