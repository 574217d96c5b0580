"""What is said, and from where."""

import os
import subprocess
import sys

import pytest

#: A signal comes while standard error is being written to.
SCRIPT = """
import io, os, signal, sys
from kohya_ext import console

class Terminal(io.RawIOBase):
    def writable(self):
        return True

    def write(self, data):
        os.kill(os.getpid(), signal.SIGTERM)
        return len(data)

sys.stderr = io.TextIOWrapper(io.BufferedWriter(Terminal()), write_through=True)
signal.signal(signal.SIGTERM, lambda *ignored: console.note_at_once("noticed"))
sys.stderr.write("a progress bar")
sys.stderr.flush()
print("went on")
"""


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_a_signals_handler_speaks_in_the_midst_of_a_write():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (0, "went on\n", "kohya_ext: noticed")
