"""Benchmarks run sd-scripts' own model step, and each variant applies exactly its patches."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.results import read
from kohya_ext.tiny import environment
from tests.real.conftest import ROOT


def run(suite, checkout, folder, *more):
    """Measure a suite on the CPU; return the result file and its content."""
    file = folder / f"{suite}.json"
    command = ["-m", "benchmarks.run", suite, "--device", "cpu", "--sd-scripts", str(checkout.path), "--scratch", str(folder)]
    environ = {**os.environ, "PYTHONPATH": environment.python_path(ROOT)}
    command += ["--output", str(file), *more]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return file, read(file)


@pytest.mark.slow
@pytest.mark.newest
def test_step_suite_compares_upstream_and_patched_steps(checkout, tmp_path):
    more = ("--family", "lumina-lora", "--variants", "upstream,patched", "--rounds", "2", "--steps", "1")
    file, result = run("step", checkout, tmp_path, *more)
    assert result.complete
    assert result.reduced
    (comparison,) = result.comparisons
    upstream, patched = comparison.variants
    assert upstream.facts["patches"] == []
    assert "skip_unit_scaling" in patched.facts["patches"]
    for variant in comparison.variants:
        assert variant.facts["profile"]["operators"]["aten::mm"]["calls"] > 0
        assert variant.memory["allocated"] > 1e6
    assert [len(samples) for samples in upstream.rounds] == [1, 1] == [len(samples) for samples in patched.rounds]
    assert comparison.flops > 1e8
    assert json.loads(file.read_text())["comparisons"][0]["summary"]["patched"]["ratio"]["rounds"] == 2


@pytest.mark.slow
def test_patched_steps_need_fewer_operations_than_upstreams(checkout, tmp_path):
    _, result = run("work", checkout, tmp_path, "--family", "sd15-lora")
    assert result.complete
    assert not result.reduced
    for comparison in result.comparisons:
        upstream, gradients, patched, fused = (variant.rounds[0][0] for variant in comparison.variants)
        assert upstream >= gradients >= patched >= fused
    moved, _, flops = result.comparisons
    assert moved.summary()["patched"]["ratio"]["of_medians"] > 1.15
    assert moved.summary()["fused"]["ratio"]["of_medians"] > 1.5
    assert flops.variants[1].rounds == flops.variants[2].rounds, "skip_unit_scaling must not remove a matrix product"


def test_blocks_of_both_generations_are_compared(checkout):
    """An SD 1.5 block; wider ones take minutes."""
    code = (
        f"import sys; sys.path.insert(0, {str(checkout.path)!r})\n"
        "import json; from benchmarks.base_weights_quality import CASES, base_of, block_errors\n"
        "print(json.dumps(block_errors(CASES[0], base_of(CASES[0]))))"
    )
    environ = {**os.environ, "PYTHONPATH": environment.python_path(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    error = {name: conditions["outliers 20, depth 1"]["output"][0] for name, conditions in measured.items()}
    assert 0 < error["bf16"] < error["int8"] < error["fp8"] < error["int8 not rotated"]
