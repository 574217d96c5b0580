"""Commands as they are printed, run by cmd.exe."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kohya_ext.config import command_line
from kohya_ext.config.command_line import CommandLine, quoted

ECHO = """
import json, os, sys
print(json.dumps([os.getcwd(), sys.argv[1:], os.environ.get("CUDA_VISIBLE_DEVICES")]))
"""

#: Values of options, with what cmd.exe interprets.
VALUES = (
    "plain",
    "a b",
    r"C:\Users\Jörg\My images\1_cat",
    "1024,768",
    "a=1;b=2",
    "cats & dogs",
    "100%",
    "50% to 100%",
    "a^b",
    "wow!",
    "(a)",
    "a|b <c> d",
    'say "hi"',
    'say "hi" & more > file',
    "it's",
    "$x `y`",
    "",
    "C:\\folder with space\\",
    "学習",
)


def cmd(line: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line as if it were typed."""
    command = f'cmd.exe /s /c "{line}"'
    return subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "utf-8", **environ}, timeout=120)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    script = tmp_path / "a & b (1)" / "echo script.py"
    script.parent.mkdir()
    script.write_text(ECHO)
    return script


@pytest.fixture(autouse=True)
def _cmd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "shell", lambda: "cmd")


VARIABLES = ("%PATH%", 'say "hi" & %PATH% > file')
in_windows = pytest.mark.wine("its cmd.exe removes carets before it replaces variables")


@pytest.mark.slow
@pytest.mark.parametrize("value", [*VALUES, *(pytest.param(value, marks=in_windows) for value in VARIABLES)])
def test_a_value_arrives_as_it_was(script, value):
    done = cmd(quoted([sys.executable, str(script), "--before", value, "--after", "x & y"]))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[1] == ["--before", value, "--after", "x & y"]


def test_the_folder_and_the_gpus_are_those_of_the_run(script, monkeypatch):
    monkeypatch.chdir(script.parent)
    arguments = [word for value in VALUES for word in ("--training_comment", value)]
    line = CommandLine(script, arguments, {"CUDA_VISIBLE_DEVICES": "0,1"}, launcher=()).shell_line()
    monkeypatch.chdir(script.parents[1])
    done = cmd(line)
    assert done.returncode == 0, done.stderr
    folder, words, gpus = json.loads(done.stdout)
    assert (Path(folder), words, gpus) == (script.parent, arguments, "0,1")
