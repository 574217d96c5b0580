"""Presets, plans and estimates for a GPU without bf16."""

from pathlib import Path

import pytest

from kohya_ext import installed_gpus
from kohya_ext.config import preset_files
from kohya_ext.config.arguments import preset_line
from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate import gpus
from kohya_ext.installed_gpus import InstalledGpu
from kohya_ext.planning import automatic
from kohya_ext.units import GIB

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


def test_fine_tuning_presets_keep_no_16_bit_weights(turing):
    assert CommandLine(Path("flux_train.py"), ["--preset", "24gb"], {}).values["full_bf16"] is False


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
