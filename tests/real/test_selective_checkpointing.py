"""Checkpointing only some blocks gives a bit-identical model with fewer recomputations."""

import re

import pytest

from kohya_ext.sdscripts import families
from tests.real.test_start import assert_identical

pytestmark = pytest.mark.thorough

LORA, FLUX = "sdxl_train_network.py", "flux_train_network.py"
STEPS = 4

#: Measures the peak memory and FLOPs of every step.
SPY = {"SPY_MEMORY": "1"}

#: Script -> model class in the message about checkpointed blocks.
MODELS = {LORA: "SdxlUNet2DConditionModel", FLUX: "Flux"}

slow = pytest.mark.slow


@pytest.fixture(scope="session")
def checkpointed_run(train):
    """(checkout, script) -> a run with every block checkpointed; each runs once per session."""
    runs = {}

    def of(checkout, script):
        if (checkout.layout, script) not in runs:
            runs[checkout.layout, script] = train(checkout, script, env=SPY)
        return runs[checkout.layout, script]

    return of


@slow
@pytest.mark.parametrize("script", [LORA, FLUX])
def test_ratio_checkpoints_fewer_blocks_with_identical_results(checkout, train, checkpointed_run, script):
    full = checkpointed_run(checkout, script)
    some = train(checkout, script, "--gradient_checkpointing_ratio", "0.3")
    assert_identical(some, full)
    covered, blocks = map(int, re.search(rf"covers (\d+) of (\d+) blocks of {MODELS[script]}", some.output).groups())
    assert 0 < covered < blocks
    assert covered == blocks - round(blocks * 0.7)
    fewer = sum(full.checkpoint_calls.values()) - sum(some.checkpoint_calls.values())
    assert fewer == (blocks - covered) * STEPS
    assert {row["status"] for row in some.report["patches"] if row["patch"] == "selective_checkpointing"} >= {"applied"}


@slow
def test_ratio_0_checkpoints_no_block(checkout, train):
    none = train(checkout, LORA, env={"KOHYA_EXT_GRADIENT_CHECKPOINTING_RATIO": "0"})
    assert_identical(none, train(checkout, LORA, "--no-gradient_checkpointing"))
    assert re.search(r"covers 0 of \d+ blocks of SdxlUNet2DConditionModel", none.output)


#: Model family -> its LoRA script.
FAMILIES = {family.name: family.lora for family in families.FAMILIES}

#: Options for batches of equal memory, most of it activations. On the CPU the prefetched batch counts too, so an epoch must
#: have at least as many batches as the run has steps.
EQUAL_BATCHES = ("--no-enable_bucket", "--train_batch_size", "2", "--network_train_unet_only")


@pytest.fixture(scope="session")
def bounds(train):
    """(checkout, family) -> runs with every block checkpointed and with none, in batches of equal memory."""
    runs = {}

    def of(checkout, family):
        if (checkout.layout, family) not in runs:
            options = ((), ("--no-gradient_checkpointing",))
            runs[checkout.layout, family] = tuple(
                train(checkout, FAMILIES[family], *EQUAL_BATCHES, *more, family=family, env=SPY) for more in options
            )
        return runs[checkout.layout, family]

    return of


def peak_and_flops(run):
    """Return the highest peak of a run's steps in bytes, and the FLOPs of each step."""
    return max(peak for peak, _ in run.measured_steps), [flops for _, flops in run.measured_steps]


@slow
@pytest.mark.parametrize("family", FAMILIES)
def test_budget_frees_blocks_in_every_family(checkout, train, bounds, family):
    full, none = bounds(checkout, family)
    (low, most), (high, least) = peak_and_flops(full), peak_and_flops(none)
    budget = f"{(low + 0.85 * (high - low)) / 0.97 / 1e6:.3f}MB"
    run = train(checkout, FAMILIES[family], *EQUAL_BATCHES, "--vram_budget", budget, family=family, env=SPY)
    assert_identical(run, full)
    facts, (peak, work) = run.report["facts"]["vram_budget"], peak_and_flops(run)
    assert low < facts["limit"] < high
    assert peak <= facts["limit"]
    assert work[:2] == most[:2]
    assert least[-1] < work[-1] < most[-1]
    assert facts["rerun"] == 0


@slow
def test_budget_counts_kept_attention(checkout, train, bounds):
    full, none = bounds(checkout, "flux")
    (low, most), (high, least) = peak_and_flops(full), peak_and_flops(none)
    budget = ("--vram_budget", f"{(low + 0.85 * (high - low)) / 0.97 / 1e6:.3f}MB")
    run = train(checkout, FLUX, *EQUAL_BATCHES, *budget, "--keep_attention", family="flux", env=SPY)
    assert_identical(run, full)
    facts, (peak, work) = run.report["facts"]["vram_budget"], peak_and_flops(run)
    assert peak <= facts["limit"] < high
    assert least[-1] < work[-1] < work[0] < most[0]


@slow
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_compiled_blocks_save_the_fraction_of_activations_that_fits(checkout, train, bounds, family):
    full, none = bounds(checkout, family)
    (low, most), (high, least) = peak_and_flops(full), peak_and_flops(none)
    compiled = ("--selective_torch_compile",)
    budget = f"{(low + 0.5 * (high - low)) / 0.97 / 1e6:.3f}MB"
    run = train(checkout, FAMILIES[family], *EQUAL_BATCHES, *compiled, "--vram_budget", budget, family=family, env=SPY)
    facts, (peak, work) = run.report["facts"]["vram_budget"], peak_and_flops(run)
    assert 0.1 < facts["kept_share_of_free_blocks"] < 1
    assert facts["checkpointed"] == 0
    assert run.report["facts"]["selective_torch_compile"]["graph_breaks"] == 0
    assert peak <= facts["limit"] < high
    assert least[-1] < work[-1] < most[-1]
    for name, tensor in full.tensors.items():
        assert (run.tensors[name] - tensor).abs().max() <= 1e-5


def budget_above(full, factor=1.2):
    """Return a budget slightly above the peak with every block checkpointed. The tiny model is mostly weights."""
    return f"{factor * max(peak for peak, _ in full.measured_steps) / 1e6:.2f}MB"


@pytest.mark.newest
def test_the_budget_frees_blocks_and_is_not_exceeded(checkout, train, checkpointed_run):
    """The last step also simulates an out-of-memory error in the forward pass of a block."""
    full = checkpointed_run(checkout, LORA)
    run = train(checkout, LORA, "--vram_budget", budget_above(full), env={**SPY, "SPY_OUT_OF_MEMORY_AT": str(STEPS)})
    assert_identical(run, full)
    facts = run.report["facts"]["vram_budget"]
    assert max(peak for peak, _ in run.measured_steps) <= facts["limit"]
    # Two steps measure the blocks and the peak. After that some blocks are no longer recomputed.
    work, without = [[flops for _, flops in other.measured_steps] for other in (run, full)]
    assert work[:2] == without[:2]
    assert work[2] < without[2]
    assert 0 < facts["recomputed_flops"] < facts["recomputed_flops_at_first"]
    assert (facts["rerun"], facts["settled"]) == (1, True)
    assert "out of memory in forward of a BasicTransformerBlock; it runs again checkpointed" in run.output


@slow
def test_large_budget_frees_every_block(checkout, train, checkpointed_run):
    for script in (LORA, FLUX):
        run = train(checkout, script, "--no-gradient_checkpointing", env={**SPY, "KOHYA_EXT_VRAM_BUDGET": "1GB"})
        assert_identical(run, checkpointed_run(checkout, script))
        facts = run.report["facts"]["vram_budget"]
        assert facts["recomputed_flops"] == 0 < facts["recomputed_flops_at_first"]
        assert run.measured_steps[-1][1] < checkpointed_run(checkout, script).measured_steps[-1][1]
