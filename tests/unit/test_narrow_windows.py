"""What `presets`, `options` and `plan` print into a window of 80 columns, and into a pipe."""

import sys

import pytest
from rich import console

from kohya_ext.__main__ import main
from kohya_ext.commands import options, plan, presets
from kohya_ext.config import preset_files
from kohya_ext.config.settings import options as every_option
from kohya_ext.output import Console
from tests.unit.test_plan import LORA, checkout  # noqa: F401


@pytest.fixture
def window(monkeypatch, capsys):
    """Run a command in a window of 80 columns and return its lines."""

    def lines(*words: str) -> list[str]:
        for command in (options, plan, presets):
            monkeypatch.setattr(
                command,
                "Console",
                lambda **more: console.Console(file=sys.stdout, force_terminal=True, color_system=None, width=80, **more),
            )
        assert main(words) == 0
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    return lines


def test_presets_of_one_gpu_are_ten_lines(window):
    lines = window("presets", "list", "--script", LORA, "--vram", "12")
    assert len(lines) <= 10
    names = [line.split()[0] for line in lines]
    assert {"12gb", "12gb-int8", "quality"} <= set(names)
    assert not {"6gb", "16gb"} & set(names)
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(("vram", "tier"), [("11", "10gb"), ("15360MiB", "16gb"), ("24564MiB", "24gb")])
def test_presets_of_one_gpu_are_those_of_its_size(window, vram, tier):
    names = [line.split()[0] for line in window("presets", "list", "--script", LORA, "--vram", vram)]
    assert tier in names


def test_a_script_with_two_models_has_the_presets_of_both(window):
    lines = window("presets", "list", "--script", "flux_train_network", "--vram", "24")
    assert [line.split()[0] for line in lines if "(flux_train_network.py)" in line] == ["chroma-lora", "flux-lora"]


def test_presets_of_a_script_without_sizes_are_an_error_that_names_the_others(capsys):
    assert main(["presets", "list", "--script", "train_leco.py"]) == 2
    assert "has no presets of its own; those for every script: balanced, fp16" in capsys.readouterr().err


def test_keys_and_values_of_a_preset_are_whole(window):
    lines = window("presets", "show", "12gb", "--script", LORA)
    for key, value in preset_files.load(["12gb"], LORA).values.items():
        assert f"{key} = {presets.value_text(value.value)}  ({value.preset})" in lines
        assert " ".join(value.why.split()) in " ".join(" ".join(lines).split())
    assert all(len(line) <= 80 for line in lines)


def test_names_of_options_and_variables_are_whole(window):
    words = {word for line in window("options") for word in line.split()}
    assert words >= {f"--{name}" for name, _ in every_option()}
    assert words >= {option.variable for _, option in every_option() if option.variable}


def test_the_plan_fits_a_window(window, checkout):  # noqa: F811
    lines = window("plan", "--sd-scripts", str(checkout.path), LORA, "--vram", "12")
    assert lines[0] == f"{LORA} on the 12 GB GPU (12.88e9 bytes): preset sdxl-lora/12gb"
    assert lines[1].startswith("time: ")
    assert lines.index(f"  python -m kohya_ext {LORA} --preset 12gb") < 8


def test_a_pipe_has_no_width(capsys):
    Console().print("word " * 1000)
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    ("value", "text"), [(("12gb",), "12gb"), ([1, 2], "1, 2"), (True, "true"), ("bf16", "bf16"), (0.5, "0.5")]
)
def test_values_are_printed_as_they_are_written(value, text):
    assert presets.value_text(value) == text
