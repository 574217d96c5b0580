"""Anima checkpoints with another number of blocks."""

import json
import struct
from pathlib import Path

import pytest

from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate import memory_config
from kohya_ext.planning.memory_savings import Attempt, after, steps
from kohya_ext.run.safetensors_header import count_blocks

SCRIPT = "anima_train_network.py"


def checkpoint(file: Path, blocks: int, prefix: str = "net.") -> Path:
    names = [f"{prefix}blocks.{block}.mlp.layer1.weight" for block in range(blocks)]
    names += [f"{prefix}llm_adapter.blocks.{block}.mlp.0.weight" for block in range(6)]
    header = json.dumps({name: {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]} for name in names}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    return file


@pytest.mark.parametrize(("blocks", "prefix"), [(28, "net."), (40, "net."), (40, ""), (40, "model.diffusion_model.")])
def test_blocks_are_counted_in_the_header(tmp_path, blocks, prefix):
    assert count_blocks(checkpoint(tmp_path / "anima.safetensors", blocks, prefix)) == blocks


@pytest.mark.parametrize(("blocks", "model"), [(28, None), (40, "40"), (20, "20")])
def test_an_estimate_is_for_the_checkpoints_blocks(tmp_path, blocks, model):
    file = checkpoint(tmp_path / "anima.safetensors", blocks)
    command = CommandLine(Path(SCRIPT), ["--preset", "16gb", "--pretrained_model_name_or_path", str(file)], {})
    config = memory_config.normalized(memory_config.read(command)[0])
    assert config.pretrained_model_name_or_path == model
    assert memory_config.normalized(config) == config


@pytest.mark.parametrize(("blocks", "most"), [(28, 26), (40, 38), (None, 26)])
def test_all_blocks_but_two_can_be_swapped(tmp_path, blocks, most):
    file = "missing.safetensors" if blocks is None else str(checkpoint(tmp_path / "anima.safetensors", blocks))
    run = Attempt(SCRIPT, {"pretrained_model_name_or_path": file, "mixed_precision": "bf16"}, lambda key: True)
    swapped = []
    while (step := next(steps(run), None)) is not None:
        swapped += [step.changes["blocks_to_swap"]] if "blocks_to_swap" in step.changes else []
        run = after(run, step)
    assert swapped == [most // 2, most]
