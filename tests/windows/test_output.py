"""What the commands print to a pipe, as a GUI reads it: in the legacy code page, and without losing a character."""

import os
import re
import subprocess
import sys

import pytest

from kohya_ext import commands

LORA = "sdxl_train_network.py"

COMMANDS = (
    ("--help",),
    ("setup", "--list"),
    ("presets", "list"),
    ("presets", "show", "16gb", "--script", LORA),
    ("sdxl_trian_network.py",),
    *(
        pytest.param(words, marks=pytest.mark.slow)
        for words in (
            ("doctor",),
            ("options",),
            ("check", LORA, "--output_dir", "missing"),
            ("watch", "--once"),
            ("report", "missing.jsonl"),
            ("inspect", "missing.safetensors"),
            *((name, "--help") for name in commands.names()),
        )
    ),
)

#: The question marks that the commands print themselves: a suggestion, and the commit of a checkout without git.
QUESTION = re.compile(r"Did you mean [^?]*\?|\| \? +\|")


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_pipe_in_the_legacy_code_page_shows_every_character(words):
    """Python prints a question mark for a character that the code page lacks, or raises an exception."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONIOENCODING", "PYTHONUTF8")}
    command = [sys.executable, "-m", "kohya_ext", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ, timeout=300)
    printed = done.stdout.decode("cp1252")
    assert "Traceback" not in printed, printed
    assert printed.strip()
    assert "?" not in QUESTION.sub("", printed), printed


CONSOLE = """
import ctypes, sys
from ctypes import wintypes
from kohya_ext.watching.terminal import turn_on_escape_sequences

def mode():
    kernel32, value = ctypes.WinDLL("kernel32"), wintypes.DWORD()
    kernel32.GetStdHandle.restype = wintypes.HANDLE
    return kernel32.GetConsoleMode(wintypes.HANDLE(kernel32.GetStdHandle(-11)), ctypes.byref(value)) and value.value & 4

before, are_on = mode(), turn_on_escape_sequences()
print(before, are_on, mode(), sys.stdout.encoding, file=open(sys.argv[1], "w"))
"""


@pytest.mark.wine("without a display it has no window for a console")
def test_a_new_console_interprets_escape_sequences_once_watch_runs(tmp_path):
    file = tmp_path / "modes"
    done = subprocess.run([sys.executable, "-c", CONSOLE, str(file)], creationflags=subprocess.CREATE_NEW_CONSOLE, timeout=120)
    assert done.returncode == 0
    _, are_on, after, encoding = file.read_text().split()
    assert (are_on, after, encoding) == ("True", "4", "utf-8")


def test_a_pipe_is_left_as_it_is(tmp_path):
    done = subprocess.run([sys.executable, "-c", CONSOLE, str(tmp_path / "modes")], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "modes").read_text().split()[:3] == ["0", "True", "0"]
