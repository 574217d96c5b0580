"""A part of the blocks checkpointed: the file is that of all of them, bit for bit, with so many fewer recomputations."""

import re

import pytest

from kohya_ext.sdscripts import families
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
    some = train(checkout, script, "--gradient_checkpointing_ratio", "0.3")
    assert_identical(some, whole)
    covered, blocks = map(int, re.search(rf"covers (\d+) of (\d+) blocks of {MODELS[script]}", some.output).groups())
    assert 0 < covered < blocks
    assert covered == blocks - round(blocks * 0.7)
    fewer = whole.checkpoint_calls["non-reentrant"] - some.checkpoint_calls["non-reentrant"]
    assert fewer == (blocks - covered) * STEPS
    assert {row["status"] for row in some.report["patches"] if row["patch"] == "selective_checkpointing"} >= {"applied"}


@slow
def test_a_share_of_0_is_no_checkpointing_of_blocks(checkout, train):
    none = train(checkout, LORA, env={"KOHYA_EXT_GRADIENT_CHECKPOINTING_RATIO": "0"})
    assert_identical(none, train(checkout, LORA, "--no-gradient_checkpointing"))
    assert re.search(r"covers 0 of \d+ blocks of SdxlUNet2DConditionModel", none.output)


#: Family of models -> its script.
FAMILIES = {family.name: family.lora for family in families.FAMILIES}

#: Batches that weigh the same, activations for the most part. Without a card the batch that is loaded ahead counts, so that an
#: epoch has at least as many as the run has steps before it is not.
ALIKE = ("--no-enable_bucket", "--train_batch_size", "2", "--network_train_unet_only")


@pytest.fixture(scope="session")
def bounds(train):
    """(checkout, family) -> runs with every block checkpointed and with none, in batches that weigh the same."""
    runs = {}

    def of(checkout, family):
        if (checkout.layout, family) not in runs:
            whole, none = ((), ("--no-gradient_checkpointing",))
            runs[checkout.layout, family] = tuple(
                train(checkout, FAMILIES[family], *ALIKE, *more, family=family, env=SPY) for more in (whole, none)
            )
        return runs[checkout.layout, family]

    return of


def weighed(run):
    """The highest peak of a run's steps in bytes, and every step's work."""
    return max(peak for peak, _ in run.weighed_steps), [flops for _, flops in run.weighed_steps]


@slow
@pytest.mark.parametrize("family", FAMILIES)
def test_most_of_what_checkpointing_saves_is_spent_in_every_family(checkout, train, bounds, family):
    whole, none = bounds(checkout, family)
    (low, most), (high, least) = weighed(whole), weighed(none)
    budget = f"{(low + 0.85 * (high - low)) / 0.97 / 1e6:.3f}MB"
    run = train(checkout, FAMILIES[family], *ALIKE, "--vram_budget", budget, family=family, env=SPY)
    assert_identical(run, whole)
    facts, (peak, work) = run.report["facts"]["vram_budget"], weighed(run)
    assert low < facts["limit"] < high
    assert peak <= facts["limit"]
    assert work[:2] == most[:2]
    assert least[-1] < work[-1] < most[-1]
    assert facts["rerun"] == 0


@slow
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_compiled_blocks_keep_the_share_of_their_activations_that_fits(checkout, train, bounds, family):
    whole, none = bounds(checkout, family)
    (low, most), (high, least) = weighed(whole), weighed(none)
    compiled = ("--selective_torch_compile", "--compile_backend", "aot_eager")  # whose operators can be weighed
    budget = f"{(low + 0.5 * (high - low)) / 0.97 / 1e6:.3f}MB"
    run = train(checkout, FAMILIES[family], *ALIKE, *compiled, "--vram_budget", budget, family=family, env=SPY)
    facts, (peak, work) = run.report["facts"]["vram_budget"], weighed(run)
    assert 0.1 < facts["kept_share_of_free_blocks"] < 1
    assert facts["checkpointed"] == 0
    assert run.report["facts"]["selective_torch_compile"]["graph_breaks"] == 0
    assert peak <= facts["limit"] < high
    assert least[-1] < work[-1] < most[-1]
    for name, tensor in whole.tensors.items():
        assert (run.tensors[name] - tensor).abs().max() <= 1e-5


def budget_between(whole, room=1.12):
    """A budget with a little room beside what every block checkpointed needs: the tiny model is mostly weights."""
    return f"{room * max(peak for peak, _ in whole.weighed_steps) / 1e6:.2f}MB"


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
    assert "out of memory in forward of a BasicTransformerBlock; it runs again checkpointed" in run.output


@slow
def test_a_budget_for_everything_frees_every_block(checkout, train, every):
    for script in (LORA, FLUX):
        run = train(checkout, script, "--no-gradient_checkpointing", env={**SPY, "KOHYA_EXT_VRAM_BUDGET": "1GB"})
        assert_identical(run, every(checkout, script))
        facts = run.report["facts"]["vram_budget"]
        assert facts["recomputed_flops"] == 0 < facts["recomputed_flops_at_first"]
        assert run.weighed_steps[-1][1] < every(checkout, script).weighed_steps[-1][1]
