"""A part of the blocks checkpointed: the file is that of all of them, bit for bit, with so many fewer recomputations."""

import re

import pytest

from tests.real.test_start import assert_identical

LORA, FLUX = "sdxl_train_network.py", "flux_train_network.py"
STEPS = 4

#: Weighs every step of a run.
SPY = {"SPY_MEMORY": "1"}

#: script -> how its models say that a share of them is checkpointed.
MODELS = {LORA: "SdxlUNet2DConditionModel", FLUX: "Flux"}

slow = pytest.mark.slow


@pytest.fixture(scope="session")
def every(train):
    """(checkout, script) -> a run with every block checkpointed; each is run once a session."""
    runs = {}

    def of(checkout, script):
        if (checkout.layout, script) not in runs:
            runs[checkout.layout, script] = train(checkout, script, env=SPY)
        return runs[checkout.layout, script]

    return of


@pytest.mark.parametrize("script", [LORA, pytest.param(FLUX, marks=slow)])
def test_the_file_is_that_of_a_run_with_every_block_checkpointed(checkout, train, every, script):
    whole = every(checkout, script)
    some = train(checkout, script, "--checkpoint_share", "0.3")
    assert_identical(some, whole)
    covered, blocks = map(int, re.search(rf"covers (\d+) of (\d+) blocks of {MODELS[script]}", some.output).groups())
    assert 0 < covered < blocks
    assert covered == blocks - round(blocks * 0.7)
    fewer = whole.checkpoint_calls["non-reentrant"] - some.checkpoint_calls["non-reentrant"]
    assert fewer == (blocks - covered) * STEPS
    assert {row["status"] for row in some.report["patches"] if row["patch"] == "selective_checkpointing"} >= {"applied"}


@slow
def test_a_share_of_0_is_no_checkpointing_of_blocks(checkout, train):
    none = train(checkout, LORA, env={"KOHYA_EXT_CHECKPOINT_SHARE": "0"})
    assert_identical(none, train(checkout, LORA, "--no-gradient_checkpointing"))
    assert re.search(r"covers 0 of \d+ blocks of SdxlUNet2DConditionModel", none.output)
