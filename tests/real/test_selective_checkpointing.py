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


def budget_between(whole):
    """A budget with a little room beside what every block checkpointed needs: the tiny model is mostly weights."""
    return f"{1.12 * max(peak for peak, _ in whole.weighed_steps) / 1e6:.2f}MB"


def test_a_budget_is_spent_and_kept(checkout, train, every):
    """Also where a block is out of memory in forward all the same, in the last step."""
    whole = every(checkout, LORA)
    run = train(checkout, LORA, "--vram_budget", budget_between(whole), env={**SPY, "SPY_OUT_OF_MEMORY_AT": str(STEPS)})
    assert_identical(run, whole)
    facts = run.report["facts"]["vram_budget"]
    assert max(peak for peak, _ in run.weighed_steps) <= facts["limit"]
    # Two steps to weigh the blocks and the peak; then some of them are not computed twice any more.
    work, without = [[flops for _, flops in each.weighed_steps] for each in (run, whole)]
    assert work[:2] == without[:2]
    assert work[2] < without[2]
    assert 0 < facts["recomputed_flops"] < facts["recomputed_flops_at_first"]
    assert (facts["rerun"], facts["settled"]) == (1, True)
    assert "out of memory in a BasicTransformerBlock in forward: it runs again checkpointed" in run.output


@slow
def test_a_budget_for_everything_frees_every_block(checkout, train, every):
    for script in (LORA, FLUX):
        run = train(checkout, script, "--no-gradient_checkpointing", env={**SPY, "KOHYA_EXT_VRAM_BUDGET": "1GB"})
        assert_identical(run, every(checkout, script))
        facts = run.report["facts"]["vram_budget"]
        assert facts["recomputed_flops"] == 0 < facts["recomputed_flops_at_first"]
        assert run.weighed_steps[-1][1] < every(checkout, script).weighed_steps[-1][1]


@slow
def test_a_budget_goes_to_compiled_blocks_as_a_share_of_their_activations(checkout, train, every):
    compiled = ("--selective_torch_compile", "--compile_backend", "aot_eager")
    run = train(checkout, LORA, *compiled, "--vram_budget", budget_between(every(checkout, LORA)))
    assert 0 < int(re.search(r"compiled blocks keep (\d+)% of their activations", run.output).group(1)) < 100
    assert run.report["facts"]["selective_torch_compile"]["graph_breaks"] == 0
    for name, tensor in every(checkout, LORA).tensors.items():
        assert (run.tensors[name] - tensor).abs().max() <= 1e-5
