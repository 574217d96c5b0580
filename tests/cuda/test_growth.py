"""Memory does not grow over steps, samples, validations and epochs, on the virtual GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.conftest import ROOT

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.thorough

EPOCH = 8
"""Batches in an epoch."""


def memory_after(run) -> list[tuple[int, int]]:
    """Return (allocated, reserved) bytes at the end of each step."""
    assert run.code == 0, run.output[-4000:]
    (journal,) = run.folder.glob("*.journal.jsonl")
    lines = map(json.loads, journal.read_text().splitlines())
    return [(line["allocated"], line["reserved"]) for line in lines if line["kind"] == "step"]


@pytest.mark.newest
@pytest.mark.parametrize(
    ("script", "steps"),
    [
        ("sdxl_train.py", 3 * EPOCH),
        pytest.param("flux_train_network.py", 3 * EPOCH, marks=pytest.mark.slow),
        pytest.param("sdxl_train_network.py", 125 * EPOCH, marks=pytest.mark.slow),
        pytest.param("sdxl_train.py", 125 * EPOCH, marks=pytest.mark.slow),
    ],
)
def test_memory_is_that_of_the_first_epoch(checkout, train_on_gpu, tmp_path, script, steps):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle --w 64 --h 64 --s 2 --d 1\n")
    options = ("--max_train_steps", str(steps), "--mixed_precision", "bf16", "--optimizer_type", "AdamW8bit")
    options += ("--sample_prompts", str(prompts), "--sample_every_n_steps", str(steps // 8), "--validation_split", "0.25")
    options += ("--validation_seed", "1", "--validate_every_n_steps", str(steps // 6))
    memory = memory_after(train_on_gpu(checkout, script, *options))
    assert len(memory) == steps
    # The optimizer's state is complete after two steps. Small tensors take one segment of 2 MiB more or less.
    first, later = memory[2:EPOCH], memory[EPOCH:]
    for index, allowed in enumerate((0, 2**21)):
        before, after = ([step[index] for step in steps] for steps in (first, later))
        assert max(after) <= max(before) + allowed
        assert min(after) <= min(before)


@pytest.mark.newest
def test_sampling_with_swapped_blocks_copies_less_and_leaves_the_blocks_in_place(checkout, gpu_environment):
    counters = []
    for patch in ((), ("sampling_block_swap",)):
        command = [sys.executable, str(Path(__file__).with_name("swapped_sampling.py")), str(checkout.path), *patch]
        done = subprocess.run(
            command, env={**gpu_environment(), "PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        counters.append(json.loads(done.stdout.split("JSON", 1)[1]))
    upstream, ours = counters
    assert ours["same places"]
    assert upstream["same places"]
    for name in ("bytes_to_device", "bytes_to_host", "frees"):
        assert ours[name] < upstream[name], (name, ours, upstream)
