"""The demo's own training loop, where no sd-scripts can be had."""

import pytest

from kohya_ext import overlay
from kohya_ext.arguments import find_problem
from kohya_ext.tiny import embedded

PRESETS = [name for family, name, _ in overlay.shipped() if family == "sdxl-lora"]


@pytest.mark.parametrize("name", PRESETS)
def test_the_embedded_loop_reads_every_key_of_a_preset(name):
    presets = overlay.load([name], embedded.STANDS_FOR)
    parser = embedded.setup_parser()
    embedded.accept_presets(parser, presets)
    problems = [find_problem(parser, key, value.value) for key, value in presets.values.items()]
    assert problems and not any(problems)
