"""Checkpointing a share of the blocks trains to the same file, bit for bit, with so many fewer recomputations."""

import re

import pytest

from tests.real.test_start import assert_identical

STEPS = 4

#: script -> how its models say that a share of them is checkpointed.
MODELS = {"sdxl_train_network.py": "SdxlUNet2DConditionModel", "flux_train_network.py": "Flux"}


@pytest.mark.parametrize("script", ["sdxl_train_network.py", pytest.param("flux_train_network.py", marks=pytest.mark.slow)])
def test_the_file_is_that_of_a_run_with_every_block_checkpointed(checkout, train, script):
    every = train(checkout, script)
    some = train(checkout, script, "--checkpoint_share", "0.3")
    assert_identical(some, every)
    covered, blocks = map(int, re.search(rf"covers (\d+) of (\d+) blocks of {MODELS[script]}", some.output).groups())
    assert 0 < covered < blocks
    assert covered == blocks - round(blocks * 0.7)
    fewer = every.checkpoint_calls["non-reentrant"] - some.checkpoint_calls["non-reentrant"]
    assert fewer == (blocks - covered) * STEPS
    assert {row["status"] for row in some.report["patches"] if row["patch"] == "selective_checkpointing"} >= {"applied"}


@pytest.mark.slow
def test_a_share_of_0_is_no_checkpointing_of_blocks(checkout, train):
    none = train(checkout, "sdxl_train_network.py", env={"KOHYA_EXT_CHECKPOINT_SHARE": "0"})
    assert_identical(none, train(checkout, "sdxl_train_network.py", "--no-gradient_checkpointing"))
    assert re.search(r"covers 0 of \d+ blocks of SdxlUNet2DConditionModel", none.output)
