"""Messages on standard error and the progress line."""

import io
import logging
import re
import subprocess
import sys
import threading
from types import ModuleType

import pytest

from kohya_ext import console

#: A signal arrives during a write to standard error.
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
print("continued")
"""


@pytest.mark.linux("needs POSIX signals")
def test_a_signal_handler_can_print_during_a_write():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (0, "continued\n", "kohya_ext: noticed")


class Listener(io.StringIO):
    """A replacement for standard error that signals each write."""

    def __init__(self, terminal: bool = False) -> None:
        super().__init__()
        self.written = threading.Event()
        self.isatty = lambda: terminal

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


@pytest.mark.parametrize(
    ("terminal", "expected"),
    [(False, "kohya_ext: counting sheep ...\n"), (True, f"\rkohya_ext: counting sheep: 0 s\r{' ' * 30}\r")],
)
def test_a_long_task_is_reported(monkeypatch, terminal, expected):
    monkeypatch.setattr(sys, "stderr", stream := Listener(terminal))
    monkeypatch.setattr(console, "_PROGRESS_DELAY", 0.0)
    with console.progress("counting sheep"):
        assert stream.written.wait(10), "nothing was reported"
    assert stream.getvalue() == expected


def test_a_short_or_silent_task_is_not_reported(monkeypatch, capsys):
    with console.progress("counting sheep"):
        pass
    monkeypatch.setattr(console, "_PROGRESS_DELAY", 0.0)
    before = threading.active_count()
    with console.silent(), console.progress("counting sheep"):
        assert threading.active_count() == before
    assert capsys.readouterr() == ("", "")


def test_a_message_clears_the_progress_bar(capsys):
    tqdm = pytest.importorskip("tqdm")
    with tqdm.tqdm(total=2, desc="steps") as bar:
        bar.update(1)
        console.note("stopped")
    assert re.search(r"steps: .*\r +\rkohya_ext: stopped\n", capsys.readouterr().err)


def test_the_missing_kernel_of_bitsandbytes_is_not_logged(caplog):
    caplog.set_level(logging.WARNING)
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    console.hide_notices_of_libraries()
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "no module kernels")
    logger.warning("another warning")
    assert [record.message for record in caplog.records] == ["another warning"]


def test_note_while_another_thread_imports_tqdm(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", ModuleType("tqdm"))
    console.note("importing")
    assert capsys.readouterr().err == "kohya_ext: importing\n"
