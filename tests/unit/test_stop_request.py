"""What stops a run: the end of its launcher, and Windows, which leaves time for a save in another thread while a step runs."""

import os
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from types import SimpleNamespace

import pytest

from kohya_ext.run import last_step, stop_request
from kohya_ext.run.last_step import LastStep

#: More seconds than any of these tests takes.
LONG = 60.0


class Saves(LastStep):
    """Notes what the main thread was about to do when its state was saved."""

    saved_at: int | None = None

    def _save(self, statements):
        self.saved_at = self.steps


@pytest.fixture
def last():
    last = Saves(Namespace(), SimpleNamespace())
    finish(last)
    return last


def finish(last):
    """Finish an optimizer step."""
    last.after_batch(SimpleNamespace(sync_gradients=True))


def ends(last, seconds=LONG):
    thread = threading.Thread(target=last.save_before_end, args=(seconds, 143))
    thread.start()
    return thread


def test_a_step_in_forward_is_not_waited_for_and_changes_no_weights(last):
    last.before_data()
    last.after_data()
    last.before_backward()
    ends(last).join(LONG)
    assert last.saved_at == 1
    with pytest.raises(SystemExit) as end:
        last.before_optimizer_step()
    assert end.value.code == 143
    assert last.intact


def test_an_optimizer_step_is_waited_for(last, monkeypatch):
    waits = threading.Event()
    monkeypatch.setattr(last_step.time, "sleep", lambda seconds: waits.set())
    last.before_optimizer_step()
    thread = ends(last)
    assert waits.wait(LONG)
    assert last.saved_at is None
    with pytest.raises(SystemExit):
        finish(last)
    thread.join(LONG)
    assert last.saved_at == 2


def test_the_next_batch_is_not_loaded_meanwhile(last):
    ends(last).join(LONG)
    with pytest.raises(SystemExit):
        last.before_data()


def test_a_change_that_takes_longer_than_windows_allows_saves_nothing(last):
    last.before_data()
    last.save_before_end(0.0, 143)
    assert last.saved_at is None
    last.after_data()
    with pytest.raises(SystemExit):
        last.before_optimizer_step()


def test_optimizers_that_step_in_backward_change_weights_there(last):
    last.steps_in_backward = True
    last.before_backward()
    last.save_before_end(0.0, 143)
    assert last.saved_at is None


def test_before_the_first_step_there_is_nothing_to_save(tmp_path, capfd):
    stopper = stop_request.Stopper(Namespace(), SimpleNamespace(), tmp_path / "stop", 0)
    stopper.on_closing("the console window was closed")
    assert not stopper.reason
    assert capfd.readouterr().err == ""


def test_after_training_a_signal_leaves_out_the_rest(tmp_path, capfd):
    stopper = stop_request.Stopper(Namespace(), SimpleNamespace(), tmp_path / "stop", 0, stepping=True)
    stopper.after_training()
    stopper.left_out = "the remaining samples"
    with pytest.raises(SystemExit) as end:
        stopper.on_signal(int(signal.SIGTERM), None)
    assert end.value.code == 0
    assert "the model is saved; leaving out the remaining samples" in capfd.readouterr().err
    stopper.left_out = ""
    stopper.on_signal(int(signal.SIGTERM), None)
    assert "SIGTERM: everything is saved, and the run is ending" in capfd.readouterr().err
    stopper.on_closing("the console window was closed")
    assert not stopper.reason


def test_a_signal_in_the_last_save_announces_no_state(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(stop_request.resume, "position", lambda: SimpleNamespace(step=4))
    stopper = stop_request.Stopper(Namespace(max_train_steps=4), SimpleNamespace(), tmp_path / "stop", 0, stepping=True)
    stopper.on_signal(int(signal.SIGTERM), None)
    assert "SIGTERM: saving the last model\n" in capfd.readouterr().err


LAUNCHER = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
"""

LAUNCHED = """
import sys, time
from kohya_ext.run.stop_request import _runs_below
while _runs_below(int(sys.argv[1])):
    time.sleep(0.01)
print("ended")
"""


def test_the_end_of_the_launcher_is_noticed():
    """On Windows a process keeps the ID of a parent that has ended."""
    done = subprocess.run([sys.executable, "-c", LAUNCHER, LAUNCHED], capture_output=True, timeout=300)
    assert done.stdout.split() == [b"ended"], done.stderr


KEYS = """
import signal
from kohya_ext.run import stop_request
stop_request.leave_to_parent()
for number in stop_request._KEYS:
    signal.raise_signal(number)
print("alive")
"""


def test_a_worker_leaves_the_keys_to_its_parent():
    done = subprocess.run([sys.executable, "-c", KEYS], capture_output=True, timeout=300)
    assert done.stdout.split() == [b"alive"], done.stderr


@pytest.mark.parametrize(("size", "minutes", "advised"), [(8e9, None, True), (8e9, 10.0, False), (1e8, None, False)])
def test_a_state_that_a_closed_window_cannot_save_is_reported_on_windows(tmp_path, monkeypatch, capsys, size, minutes, advised):
    monkeypatch.setattr(stop_request, "state_bytes", lambda accelerator: size)
    monkeypatch.setattr(stop_request, "os", SimpleNamespace(name="nt", path=os.path, getpid=os.getpid))
    stopper = stop_request.Stopper(Namespace(), SimpleNamespace(), tmp_path / "stop", 0, timed_states=minutes is not None)
    for _ in range(2):
        stopper.after_batch(SimpleNamespace(sync_gradients=True, is_main_process=True, num_processes=1, device="cpu"))
    assert capsys.readouterr().err.count("too few to save its state of 8.0 GB; use --save_state_every_n_minutes") == advised


HANGUP = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
from argparse import Namespace
from pathlib import Path
from kohya_ext.run.stop_request import Stopper

stopper = Stopper(Namespace(), None, Path("a.stop"), 0, stepping=True)
stopper.install_handlers()
os.kill(os.getpid(), signal.SIGHUP)
print(stopper.reason or "continues", stopper.code)
stopper.on_end()
print(signal.getsignal(signal.SIGHUP).name)
"""


@pytest.mark.linux("a closed console of Windows sends an event")
@pytest.mark.parametrize(
    ("how", "printed"), [("plain", ["SIGHUP", "129", "SIG_DFL"]), ("nohup", ["continues", "0", "SIG_IGN"])]
)
def test_a_closed_terminal_stops_a_run_without_nohup(how, printed):
    done = subprocess.run([sys.executable, "-c", HANGUP, how], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == printed
