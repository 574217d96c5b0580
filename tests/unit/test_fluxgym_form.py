"""Presets as lines for fluxgym's script: after its own options they give a run the memory of the preset alone."""

import os
import shlex
from pathlib import Path

import pytest

from kohya_ext.__main__ import main
from kohya_ext.config.command_line import CommandLine, option_words
from kohya_ext.estimate import memory_config
from kohya_ext.planning.tiers import tiers

SCRIPT = "flux_train_network.py"
TIERS = {tier.name: tier for tier in (*tiers("flux-lora"), *tiers("flux-lora", experimental=True))}

#: The options that change memory of the script that fluxgym writes for 20G, as in 886250e8.
WRITTEN = (
    "--cache_latents_to_disk --sdpa --gradient_checkpointing --mixed_precision bf16 --network_module networks.lora_flux "
    "--network_dim 4 --optimizer_type adamw8bit --learning_rate 8e-4 --cache_text_encoder_outputs "
    "--cache_text_encoder_outputs_to_disk --fp8_base --highvram --timestep_sampling shift --discrete_flow_shift 3.1582 "
    "--model_prediction_type raw --guidance_scale 1"
)


def printed(capsys, *names):
    assert main(["presets", "export", *names, "--for", "fluxgym"]) == 0
    return capsys.readouterr()


@pytest.mark.linux("the lines end as in cmd.exe there")
@pytest.mark.parametrize("name", TIERS)
def test_lines_give_a_run_the_memory_of_the_preset(tmp_path, capsys, name):
    alone = CommandLine(Path(SCRIPT), ["--preset", name], {}, has_bf16=True)
    config = TIERS[name].config
    data = tmp_path / "dataset.toml"
    data.write_text(
        f"[[datasets]]\nresolution = 1024\nbatch_size = {config.train_batch_size}\n[[datasets.subsets]]\nimage_dir = 'x'\n"
    )
    done = printed(capsys, name)
    assumed = option_words(alone.presets.assumed)
    assert ("assumes" in done.err) == bool(assumed)
    words = [*WRITTEN.split(), *assumed, "--dataset_config", str(data), *shlex.split(done.out.replace("\\\n", ""))]
    command = CommandLine(Path(SCRIPT), words, {}, has_bf16=True)
    configs = [memory_config.normalized(memory_config.read(each)[0]) for each in (alone, command)]
    assert configs[0] == configs[1]
    same = ("network_alpha", "network_dim", "learning_rate", "optimizer_type", "guidance_scale", "timestep_sampling", "speed")
    assert {key: command.values.get(key) for key in same} == {key: alone.values.get(key) for key in same}


def test_each_line_ends_as_the_script_does(capsys):
    done = printed(capsys, "48gb")
    assert {line.split()[-1] for line in done.out.splitlines()} == {"^" if os.name == "nt" else "\\"}
    assert "  --no-fp8_base" in done.out
    assert "resolution" not in done.out
    assert "Set resolution 1024,1024 and batch_size 1" in done.err


def test_other_models_and_files_are_errors(capsys):
    assert main(["presets", "export", "12gb", "--script", "sdxl_train.py", "--for", "fluxgym"]) == 2
    assert "fluxgym trains LoRAs of FLUX" in capsys.readouterr().err
    assert main(["presets", "export", "12gb", "--for", "fluxgym", "--output", "x"]) == 2
    assert "--output is for the other programs" in capsys.readouterr().err
