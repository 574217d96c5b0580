"""Estimates compared with the scripts' own parsers, and with allocations of the same step on real tensors."""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from kohya_ext.config import preset_files
from kohya_ext.config.preset_files import FAMILIES
from kohya_ext.estimate import cache
from kohya_ext.estimate.memory_config import MemoryConfig, own_fields
from kohya_ext.planning import tiers
from kohya_ext.planning.memory_savings import Attempt, Step, after, steps
from kohya_ext.sdscripts.checkouts import Checkout
from tests.real.conftest import ROOT, Call

SCRIPTS = tuple(FAMILIES)


@pytest.mark.newest
def test_memory_config_has_the_names_and_defaults_of_the_scripts(checkout: Checkout, call: Call) -> None:
    done = call(ROOT / "tests" / "real" / "probes" / "parsers.py", checkout.path, *SCRIPTS)
    assert done.returncode == 0, done.stderr[-2000:]
    parsers = json.loads(done.stdout.split("JSON", 1)[1])
    assert set(parsers) == set(SCRIPTS)
    defaults = {row.name: row.default for row in fields(MemoryConfig) if row.name not in ("script", *own_fields())}
    # This default differs between scripts; the builders know SD3's.
    del defaults["t5xxl_max_token_length"]
    everywhere = {name for parser in parsers.values() for name in parser}
    assert set(defaults) - everywhere == (
        set() if checkout.layout == "v0.11" else {"train_inpainting", "compile", "qwen_image_vae_2d"}
    )
    for parser in parsers.values():
        assert {name: parser[name] for name in defaults if name in parser} == {
            name: value for name, value in defaults.items() if name in parser
        }

    for script, wanted in SAVINGS.items():
        assert {
            step.saving.name for step in all_steps(Attempt(script, parsers[script], parsers[script].__contains__))
        } >= wanted


#: Script -> memory savings that apply to its defaults, if not every script has them.
SAVINGS = {
    "sdxl_train_network.py": {"attention", "mixed precision", "checkpointing", "fp8 base", "text encoders frozen"},
    "sdxl_train.py": {"cached text encoder outputs", "Adafactor", "fused backward pass", "pure bf16"},
    "train_network.py": {"attention", "cached latents", "fp8 base", "text encoders frozen"},
    "flux_train_network.py": {"fp8 base", "block swap", "text encoders frozen"},
    "flux_train.py": {"Adafactor", "fused backward pass", "pure bf16", "block swap"},
    "sd3_train_network.py": {"fp8 base", "block swap"},
    "lumina_train_network.py": {"fp8 base", "text encoders frozen"},
    "anima_train_network.py": {"block swap"},
}


def all_steps(run: Attempt) -> Iterator[Step]:
    while (step := next(steps(run), None)) is not None:
        yield step
        run = after(run, step)


#: Disables the later patches that save memory.
UPSTREAMS_WORK = ("--disable-patch", "skip_unused_gradients,skip_unit_scaling")
WHOLE = ("--gradient_checkpointing_ratio", "1", *UPSTREAMS_WORK)
EIGHT_BITS = ("--no-fused_backward_pass", "--optimizer_type", "AdamW8bit", "--optimizer_args", "weight_decay=0.01")


TIERS = {tier.name: tier for tier in tiers.tiers()}


@pytest.mark.thorough
@pytest.mark.newest
@pytest.mark.parametrize(
    "name",
    [
        "sd15-lora/6gb",
        *(
            pytest.param(next(name for name in TIERS if name.startswith(f"{family}/")), marks=pytest.mark.slow)
            for family in sorted({tier.family for tier in TIERS.values()} - {"sd15-lora"})
        ),
    ],
)
def test_the_table_equals_a_new_estimate(checkout: Checkout, call: Call, name: str) -> None:
    """Run python tools/make_estimate_table.py if this fails: a default patch has changed the memory of a step."""
    script = preset_files.scripts(name.partition("/")[0])[0]
    asked = ("--fresh", "--json", script, "--preset", name)
    done = call("-m", "kohya_ext", "estimate", "--sd-scripts", checkout.path, *asked)
    expected = TIERS[name].estimate
    assert expected is not None
    # Other torch versions than the table's save slightly more or less.
    off = 0 if cache.version("torch") == expected.versions["torch"] else 0.01
    assert json.loads(done.stdout)["reserved"] == pytest.approx(expected.reserved, rel=off), done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "allocated", "reserved"),
    [
        (("sdxl_train_network.py", "--preset", "8gb", *UPSTREAMS_WORK), 6.50, 7.23),
        (("sdxl_train.py", "--preset", "10gb", *WHOLE), 7.15, 8.24),
        (("sdxl_train.py", "--preset", "24gb", *WHOLE), 17.02, 18.56),
        (("sdxl_train.py", "--preset", "24gb", *WHOLE, *EIGHT_BITS), 26.04, 27.38),
    ],
)
def test_full_size_estimates_match_another_method(
    checkout: Checkout, call: Call, argv: tuple[str, ...], allocated: float, reserved: float, tmp_path: Path
) -> None:
    done = call("-m", "kohya_ext", "estimate", "--sd-scripts", checkout.path, "--fresh", "--json", *argv)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    output = json.loads(done.stdout)
    assert output["allocated"] / 1e9 == pytest.approx(allocated, rel=0.01)
    assert output["reserved"] / 1e9 == pytest.approx(reserved, rel=0.01)


def clip_sizes(width: int, layers: int, projected: bool) -> tuple[int, int]:
    """Return the parameters of a CLIP text encoder, and those of its LoRA of rank 1."""
    whole = (49_408 + 77 + 2) * width + layers * (12 * width**2 + 13 * width) + (width**2 if projected else 0)
    return whole, layers * 18 * width


CLIP_L, CLIP_L_PROJECTED, CLIP_G = (clip_sizes(*sizes) for sizes in ((768, 12, False), (768, 12, True), (1280, 32, True)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("preset", "more", "encoders"),
    [
        pytest.param("flux-lora", (), [CLIP_L], marks=pytest.mark.newest),
        pytest.param("flux-lora", ("--cuda_graphs",), [CLIP_L], marks=pytest.mark.slow),
        pytest.param("sd3-lora", (), [CLIP_L_PROJECTED, CLIP_G], marks=pytest.mark.slow),
    ],
)
def test_clip_is_in_memory_and_trained_while_t5_is_cached(
    checkout: Checkout, call: Call, preset: str, more: tuple[str, ...], encoders: list[tuple[int, int]]
) -> None:
    script = preset_files.scripts(preset)[0]
    words = ("--preset", f"{preset}/base", "--gradient_checkpointing", "--resolution", "256", "--no-network_train_unet_only")
    done = call("-m", "kohya_ext", "estimate", "--sd-scripts", checkout.path, "--fresh", "--json", script, *words, *more)
    assert done.returncode == 0, done.stderr[-2000:]
    output = json.loads(done.stdout)
    assert output["config"]["cache_text_encoder_outputs"]
    assert output["parts"]["text encoders"] == pytest.approx(sum(2 * whole for whole, _ in encoders), rel=1e-4)
    untrained = next(tier.estimate for tier in TIERS.values() if tier.family == preset and tier.estimate is not None)
    rank = untrained.config["network_dim"]
    added = sum(rank * of_rank for _, of_rank in encoders)
    assert output["trainable_parameters"] == untrained.trainable_parameters + added
    assert (output["recorded_kernels"] > 0) == bool(more)


@pytest.mark.thorough
@pytest.mark.newest
def test_gradients_leave_recorded_passes_for_a_trained_text_encoder(checkout: Checkout, call: Call) -> None:
    words = ("train_network.py", "--preset", "sd15-lora/base", "--resolution", "256", "--no-network_train_unet_only")
    done = call("-m", "kohya_ext", "estimate", "--sd-scripts", checkout.path, "--fresh", "--json", *words, "--cuda_graphs")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["recorded_kernels"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "phase"),
    [
        (("sdxl_train_network.py", "--preset", "8gb", "--resolution", "512", "--vae_batch_size", "16"), "caching latents"),
        (("sdxl_train_network.py", "--preset", "8gb", "--sample_at_first", "--sample_prompts", "PROMPTS"), "sampling"),
    ],
)
def test_the_peak_can_be_outside_the_step(
    checkout: Checkout, call: Call, argv: tuple[str, ...], phase: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("# of no size\na cat --w 1024 --h 1024 --d 1\na dog\n")
    given = [str(file) if word == "PROMPTS" else word for word in argv]
    done = call("-m", "kohya_ext", "estimate", "--sd-scripts", checkout.path, "--fresh", "--json", *given)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    output = json.loads(done.stdout)
    assert output["peak_phase"] == phase
    assert output["phase_peaks"][phase] == output["allocated"]


@pytest.mark.oldest
@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("sdxl_train.py", "--preset", "16gb", "--learnign_rate", "1"), "Did you mean --learning_rate"),
        (("sdxl_train.py", "--preset", "zero3", "--zero_stage", "0"), "--zero_stage 0 cannot be estimated"),
        (("sdxl_train.py", "--preset", "zero3", "--fused_backward_pass"), "--deepspeed and --fused_backward_pass"),
        (("sdxl_train.py", "--preset", "24gb", "--num_processes", "2"), "several processes and --fused_backward_pass"),
    ],
)
def test_an_unsupported_run_is_one_line_and_exit_code_2(
    checkout: Checkout, call: Call, argv: tuple[str, ...], named: str
) -> None:
    done = call("-m", "kohya_ext", "estimate", "--sd-scripts", checkout.path, *argv)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
