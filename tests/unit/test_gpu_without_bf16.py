"""Presets, plans and estimates for a GPU without bf16."""

from pathlib import Path

import pytest

from kohya_ext import installed_gpus
from kohya_ext.__main__ import main
from kohya_ext.config import preset_files
from kohya_ext.config.arguments import preset_line
from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate import gpus
from kohya_ext.installed_gpus import InstalledGpu
from kohya_ext.planning import automatic, tiers
from kohya_ext.planning.memory_savings import Attempt, steps
from kohya_ext.planning.plan import plan
from kohya_ext.units import GIB
from tests.unit.test_plan import checkout  # noqa: F401

LORA = Path("sdxl_train_network.py")
TURING, AMPERE = InstalledGpu("NVIDIA GeForce RTX 2060", 6 * GIB, 7.5), InstalledGpu("NVIDIA GeForce RTX 3060", 12 * GIB, 8.6)


@pytest.fixture
def turing(monkeypatch):
    monkeypatch.setattr(installed_gpus, "first_gpu", lambda: TURING)


@pytest.mark.parametrize(
    ("script", "half_vae"),
    [
        ("sdxl_train_network.py", False),
        ("flux_train_network.py", False),
        ("anima_train_network.py", True),
        ("train_network.py", True),
    ],
)
def test_a_preset_gives_fp16_on_it(turing, script, half_vae):
    run = CommandLine(Path(script), ["--preset", "12gb"], {})
    assert run.values["mixed_precision"] == "fp16"
    assert run.values.get("no_half_vae", False) is not half_vae
    family = preset_files.FAMILIES[script]
    fp16 = f"{family if half_vae else 'any'}/fp16"
    assert run.presets.label.endswith(f" + {fp16} (the GPU has no bf16)")
    assert run.presets.values["mixed_precision"].preset == fp16
    assert "mixed_precision=fp16" in preset_line(run)


def test_auto_gives_fp16_on_it(turing):
    run = CommandLine(LORA, ["--preset", "auto"], {}, automatic)
    assert [preset.name for preset in run.presets.presets] == ["sdxl-lora/base", "sdxl-lora/6gb", "any/fp16"]


def test_a_plan_for_it_says_so(checkout, capsys):  # noqa: F811
    words = ["plan", "--sd-scripts", str(checkout.path), LORA.name]
    assert main([*words, "--gpu", "RTX 2060"]) == 0
    printed = capsys.readouterr().out
    assert "precision: fp16, because the GPU has no bf16" in printed
    assert "s per step on the RTX 2060" in printed
    assert f"python -m kohya_ext {LORA} --preset 6gb\n" in printed
    assert main([*words, "--gpu", "RTX 3060"]) == 0
    assert "fp16" not in capsys.readouterr().out


def test_figures_of_presets_are_known_on_it(turing):
    assert all(tier.estimate is not None for tier in tiers.tiers("sdxl-lora"))


def test_a_plan_on_it_is_from_the_table(turing, checkout):  # noqa: F811
    result = plan(checkout, CommandLine(checkout.script(LORA.name), [], {}), 8 * GIB, gpus.named("RTX 2070"), pytest.fail)
    assert result.answer.name == "preset sdxl-lora/8gb"
    assert result.answer.command.values["mixed_precision"] == "fp16"


def test_memory_savings_offer_fp16_on_it():
    for bf16, precision in ((True, "bf16"), (False, "fp16")):
        run = Attempt(LORA.name, {}, lambda key: True, bf16=bf16)
        assert {"mixed_precision": precision} in [step.changes for step in steps(run)]


def test_fine_tuning_presets_keep_no_16_bit_weights(turing):
    values = CommandLine(Path("sdxl_train.py"), ["--preset", "12gb"], {}).values
    assert (values["mixed_precision"], values["full_bf16"]) == ("fp16", False)


def test_a_script_that_cannot_train_in_fp16_keeps_bf16(turing):
    run = CommandLine(Path("flux_train.py"), ["--preset", "24gb"], {})
    assert (run.values["mixed_precision"], run.values["full_bf16"]) == ("bf16", True)
    assert "flux_train.py cannot train in fp16" in run.presets.remarks[0]


def test_the_users_precision_stays(turing):
    run = CommandLine(LORA, ["--preset", "6gb", "--mixed_precision", "bf16"], {})
    assert run.values["mixed_precision"] == "bf16"
    assert "no_half_vae" not in run.values


@pytest.mark.parametrize("gpu", [AMPERE, AMPERE._replace(capability=None), None])
def test_other_gpus_keep_bf16(monkeypatch, gpu):
    monkeypatch.setattr(installed_gpus, "first_gpu", lambda: gpu)
    assert CommandLine(LORA, ["--preset", "6gb"], {}).values["mixed_precision"] == "bf16"


def test_a_planned_gpu_decides_instead_of_the_machines(turing):
    assert CommandLine(LORA, ["--preset", "6gb"], {}, has_bf16=True).values["mixed_precision"] == "bf16"
    assert not gpus.named("RTX 2060").has_bf16
    assert not gpus.named("Tesla T4").has_bf16
    assert gpus.named("RTX 3060").has_bf16
