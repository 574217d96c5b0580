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
