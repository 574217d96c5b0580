"""The demo's training loop, which needs no sd-scripts."""

import pytest

from kohya_ext.config import preset_files
from kohya_ext.config.arguments import find_problem
from kohya_ext.launch import demo_training

PRESETS = [name for family, name, _ in preset_files.shipped() if family == "sdxl-lora"]


@pytest.mark.parametrize("name", PRESETS)
def test_the_demo_accepts_every_key_of_a_preset(name):
    presets = preset_files.load([name], demo_training.STANDS_FOR)
    parser = demo_training.setup_parser()
    demo_training.accept_presets(parser, presets)
    problems = [find_problem(parser, key, value.value) for key, value in presets.values.items()]
    assert problems
    assert not any(problems)
