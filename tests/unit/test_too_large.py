"""The remark on a run that does not fit its GPU: from known estimates, in memory and seconds, with what to type."""

import argparse
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.settings import Settings
from kohya_ext.dry_run import estimation
from kohya_ext.estimate import predict
from kohya_ext.installed_gpus import InstalledGpu
from kohya_ext.launch import session
from kohya_ext.planning import too_large
from kohya_ext.preflight import Findings
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.units import GIB
from tests.unit.test_gui_form import config_file, exported

LORA = "sdxl_train_network.py"
RTX_3060 = InstalledGpu("NVIDIA GeForce RTX 3060", 12 * GIB, 8.6)
RTX_3090 = InstalledGpu("NVIDIA GeForce RTX 3090", 24 * GIB, 8.6)

#: What the script's parser has, and these runs leave off.
OFF = {"gradient_checkpointing": False, "blocks_to_swap": None, "fp8_base": False, "network_train_unet_only": False}


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path, "0.11.1", "v0.11", "here")


def run(*argv):
    command = CommandLine(Path(LORA), argv, {}, has_bf16=True)
    return Namespace(**{**OFF, **command.values}), command


@pytest.fixture
def from_gui(tmp_path):
    """A run of the GUI with a form that the preset for 16 GB has filled in, which has no gradient checkpointing."""
    file = Path(config_file(exported(tmp_path, "sdxl-lora/16gb"), "sdxl", tmp_path))
    file.write_text(f'network_module = "networks.lora"\n{file.read_text()}')  # the form's LoRA type
    return run("--config_file", str(file))


def test_run_of_the_gui_names_what_costs_most_in_memory_and_seconds(checkout, from_gui):
    args, command = from_gui
    line = too_large.remark(checkout, args, command, RTX_3060)
    now = predict.known(checkout, args, command).total / 1e9
    after = predict.known(checkout, Namespace(**{**vars(args), "gradient_checkpointing": True}), command).total / 1e9
    assert line.startswith(f"this run is predicted to need {now:.2f} GB, more than 95% of this GPU's 12.88; ")
    assert f"--gradient_checkpointing would bring it to {after:.2f} GB (" in line
    assert " instead of " in line
    assert line.endswith(
        f"`python -m kohya_ext presets export sdxl-lora/12gb --script {LORA} --for kohya_ss` writes a file for the GUI"
    )


def test_other_runs_are_shown_a_preset(checkout):
    line = too_large.remark(checkout, *run("--preset", "sdxl-lora/24gb"), RTX_3060)
    assert line.endswith(f"`python -m kohya_ext presets show sdxl-lora/12gb --script {LORA}` shows settings that fit")


def test_run_that_fits_or_is_not_known_or_has_a_budget_prints_nothing(checkout, from_gui):
    assert too_large.remark(checkout, *from_gui, RTX_3090) is None
    assert too_large.remark(checkout, *run("--preset", "sdxl-lora/24gb", "--network_dim", "77"), RTX_3060) is None
    assert too_large.remark(checkout, *run("--preset", "sdxl-lora/24gb", "--vram_budget", "11GB"), RTX_3060) is None


def test_gpu_for_which_no_preset_fits_is_told_the_figures_alone(checkout, from_gui):
    line = too_large.remark(checkout, *from_gui, InstalledGpu("NVIDIA GeForce GTX 1650", 4 * GIB, 7.5))
    assert "would bring it to" in line
    assert "presets" not in line


@pytest.mark.parametrize("preflight", [True, False])
def test_start_of_a_run_prints_it_with_the_other_checks(checkout, tmp_path, monkeypatch, capsys, preflight):
    argv = ["--output_dir", str(tmp_path), "--output_name", "cat", *([] if preflight else ["--no-preflight"])]
    monkeypatch.setattr(sys, "argv", [LORA, *argv])
    monkeypatch.setattr(session.run_record, "begin", lambda record: None)
    monkeypatch.setattr(session.output_lock, "acquire", lambda args: None)
    monkeypatch.setattr(session.preflight, "inspect", lambda *_: Findings())
    monkeypatch.setattr(session, "first_gpu", lambda: RTX_3060)
    monkeypatch.setattr(
        too_large, "remark", lambda checkout, args, command, gpu: f"{args.output_name} is too large for {gpu.name}"
    )
    parser = argparse.ArgumentParser()
    for option in ("--output_dir", "--output_name"):
        parser.add_argument(option)
    patch = session._options_patch(checkout, CommandLine(Path(LORA), argv, {}))
    patch.targets[0].replace(lambda parser: None, Settings())(parser)
    parser.parse_args()
    assert ("warning: cat is too large for NVIDIA GeForce RTX 3060" in capsys.readouterr().err) == preflight


def test_start_makes_no_estimate_and_survives_a_failure(checkout, from_gui, monkeypatch, capsys):
    monkeypatch.setattr(estimation, "measure", lambda *_: pytest.fail("a new estimate takes 20 seconds"))
    monkeypatch.setattr(session, "first_gpu", lambda: RTX_3060)
    session.warn_if_too_large(checkout, *from_gui)
    assert "kohya_ext: warning: this run is predicted to need" in capsys.readouterr().err
    monkeypatch.setattr(too_large, "remark", lambda *_: json.loads("{"))
    session.warn_if_too_large(checkout, *from_gui)
    assert "the check of the GPU's memory failed: JSONDecodeError" in capsys.readouterr().err
