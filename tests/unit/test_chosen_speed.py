"""What --speed is predicted to turn on: the fastest variant that fits and that the run may try."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate import cache, gpus, memory_config
from kohya_ext.estimate.seconds import Kernels, Work
from kohya_ext.planning import chosen_speed, tiers

RTX_4090 = gpus.named("RTX 4090")
BASE = next(tier for tier in tiers.tiers("sdxl-lora") if tier.name == "sdxl-lora/12gb").estimate
CARD = RTX_4090.memory


def command(*argv):
    return CommandLine(Path("sdxl_train_network.py"), ["--preset", "sdxl-lora/12gb", *argv], {}, has_bf16=True)


def known(kernels=10_000, fused=6_000, recorded=0, missing=()):
    """Return a look-up of estimates with so many small kernels, and so many bytes of recordings."""

    def look_up(config):
        names = {name for name in ("cuda_graphs", "fused_operations") if getattr(config, name)}
        if names in map(set, missing):
            return None
        count = fused if config.fused_operations else kernels
        work = Work([Kernels("memory", count, 0, count * 1e6)], [], from_python=count).as_row()
        reserved = BASE.reserved + recorded * config.cuda_graphs
        return asdict(replace(BASE, reserved=reserved, work=work, recorded_kernels=count * config.cuda_graphs))

    return look_up


def features(*argv, gpu=RTX_4090, triton=True, **estimates):
    chosen = chosen_speed.choice(command(*argv), gpu, CARD, known(**estimates), triton)
    return None if chosen is None else chosen.features


def test_fastest_variant_is_chosen():
    assert features() == ("cuda_graphs", "fused_operations")
    assert features(fused=10_000) == ("cuda_graphs",)  # the simpler of two that are as fast
    assert features(fused=9_900) == ("cuda_graphs",)  # less than 3% faster
    assert features(kernels=10, fused=10) == ()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--speed", "off"], ()),
        (["--speed", "exact"], ("cuda_graphs",)),
        (["--no-cuda_graphs"], ("fused_operations",)),
        (["--cuda_graphs", "--fused_operations"], ()),  # forced: nothing is left to choose
        (["--vram_budget", "12GB"], ()),
        (["--disable_patch", "speed"], ()),
    ],
)
def test_only_what_the_run_may_try_is_chosen(argv, expected):
    assert features(*argv) == expected


def test_machine_decides_what_is_possible():
    assert features(triton=False) == ("cuda_graphs",)
    assert features(gpu=gpus.named("RTX 2060")) == ("cuda_graphs",)
    assert chosen_speed.has_triton(RTX_4090)


def test_variant_that_does_not_fit_is_left_out():
    assert features(recorded=CARD) == ("fused_operations",)


def test_without_estimates_nothing_is_predicted():
    assert features(missing=[()]) is None
    assert features(missing=[("cuda_graphs", "fused_operations")]) == ("cuda_graphs",)


def test_lines_name_the_choice_and_its_figures():
    (line,) = chosen_speed.lines(command(), RTX_4090, CARD, known())
    assert line.startswith("--speed auto: CUDA graphs and fused operations, predicted 0.0")
    assert "GB" in line
    (line,) = chosen_speed.lines(command(), RTX_4090, CARD, known(missing=[("fused_operations",)]))
    assert "`estimate` with --cuda_graphs --fused_operations" in line
    (line,) = chosen_speed.lines(command(), RTX_4090, CARD, known(kernels=10, fused=10))
    assert line == "--speed auto: nothing is predicted to make the steps faster"
    assert chosen_speed.lines(command("--speed", "off"), RTX_4090, CARD, known()) == []


@pytest.mark.parametrize("tier", [*tiers.tiers(), *tiers.tiers(experimental=True)], ids=lambda tier: tier.name)
def test_variants_of_every_tier_are_in_the_table(tier):
    asked = CommandLine(Path(chosen_speed.preset_files.scripts(tier.family)[0]), ["--preset", tier.name], {}, has_bf16=True)
    for variant in chosen_speed.variants(asked):
        changed = chosen_speed.with_features(asked, variant)
        row = cache.shipped(memory_config.normalized(memory_config.read(changed)[0]))
        assert (row or {}).get("work") is not None, variant
