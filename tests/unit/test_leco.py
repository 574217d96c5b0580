"""Checks of LECO's scripts, which train without images."""

from argparse import Namespace
from pathlib import Path

import pytest

from kohya_ext import preflight
from kohya_ext.config.settings import Settings
from kohya_ext.preflight import data, options


def check(file):
    findings = preflight.Findings()
    data.check(Path("train_leco.py"), Namespace(prompts_file=str(file), max_train_steps=500), findings, settings=Settings())
    return findings


def test_images_are_not_demanded_and_steps_are_known(tmp_path):
    (tmp_path / "prompts.toml").write_text('[[prompts]]\ntarget = "a cat"\n')
    findings = check(tmp_path / "prompts.toml")
    assert (findings.errors, findings.warnings, findings.steps) == ([], [], 500)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "No such file"), ("", "is empty; add a [[prompts]] section"), ("[[prompts", "not valid TOML")],
)
def test_unreadable_prompts_are_an_error(content, expected, tmp_path):
    if content is not None:
        (tmp_path / "prompts.toml").write_text(content)
    (error,) = check(tmp_path / "prompts.toml").errors
    assert error.startswith("--prompts_file ")
    assert expected in error


@pytest.mark.parametrize("option", ["save_state", "save_state_on_train_end"])
def test_a_state_that_leco_does_not_save_is_an_error(option):
    for script, wanted in (("train_leco.py", 1), ("train_textual_inversion.py", 0)):
        findings = preflight.Findings()
        options.check(Path(script), Namespace(**{option: True}), findings)
        assert sum("use --save_state_every_n_minutes" in error for error in findings.errors) == wanted
