"""What is said, and from where."""

import io
import os
import re
import subprocess
import sys
import threading

import pytest

from kohya_ext import console

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


class Listener(io.StringIO):
    """Standard error that can be waited for."""

    def __init__(self, terminal: bool = False) -> None:
        super().__init__()
        self.written = threading.Event()
        self.isatty = lambda: terminal

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


@pytest.mark.parametrize(
    ("terminal", "said"),
    [(False, "kohya_ext: counting sheep ...\n"), (True, f"\rkohya_ext: counting sheep: 0 s\r{' ' * 30}\r")],
)
def test_work_that_takes_long_is_reported_on_standard_error(monkeypatch, terminal, said):
    monkeypatch.setattr(sys, "stderr", heard := Listener(terminal))
    monkeypatch.setattr(console, "_PATIENCE", 0.0)
    with console.progress("counting sheep"):
        assert heard.written.wait(10), "nothing was reported"
    assert heard.getvalue() == said


def test_work_that_is_done_soon_or_in_silence_is_not_reported(monkeypatch, capsys):
    with console.progress("counting sheep"):
        pass
    monkeypatch.setattr(console, "_PATIENCE", 0.0)
    before = threading.active_count()
    with console.silent(), console.progress("counting sheep"):
        assert threading.active_count() == before
    assert capsys.readouterr() == ("", "")


def test_a_message_is_not_glued_to_a_progress_bar(capsys):
    tqdm = pytest.importorskip("tqdm")
    with tqdm.tqdm(total=2, desc="steps") as bar:
        bar.update(1)
        console.note("stopped")
    assert re.search(r"steps: .*\r +\rkohya_ext: stopped\n", capsys.readouterr().err)
