"""How runs end on Windows: by keys, a closed window, the end of the session, a kill, with outputs open elsewhere."""

import functools
import os
import random
import signal
import time

import pytest

from kohya_ext.run import resume
from tests.conftest import runs_in_wine
from tests.real.conftest import ROOT
from tests.windows import console_event

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

LORA = "sdxl_train_network.py"

pytestmark = pytest.mark.newest


#: An epoch has eight batches. The runs end in the second, after captions and buckets were shuffled again.
STEPS = ("--max_train_steps", "12", "--shuffle_caption")


@pytest.fixture(scope="module")
def run_of_gui(checkout, train, output, gui_options):
    """A run that nothing ends, and whose outputs are loaded elsewhere, for example in ComfyUI.

    Upstream removes old models, and replaces the final one.
    """
    folder = output()
    final = folder / "tiny.safetensors"
    final.write_bytes((ROOT / "LICENSE").read_bytes())
    opened = [final.open("rb")]

    def open_outputs(process):
        names = ("tiny-step00000004.safetensors", "tiny-step00000004-state/optimizer.bin")
        opened.extend((folder / name).open("rb") for name in names)

    options = gui_options(folder, save_every_n_steps=4, save_last_n_steps=2, save_state=True)
    try:
        return train(checkout, LORA, *options, *STEPS, start="gui", output=folder, at_step=5, act=open_outputs)
    finally:
        for file in opened:
            file.close()


@pytest.fixture(scope="module")
def undisturbed(run_of_gui):
    """The trained weights of a run that nothing ends."""
    return load_file(run_of_gui.folder / "tiny.2.safetensors")


def sends(event):
    return lambda process: console_event.send(process, event)


def same(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


NO_BREAK = "its C runtime turns Ctrl-C into a signal, and not Ctrl-Break"

NO_DESKTOP = "its desktop would keep the pipes of the tests open, so windows are off"


def test_outputs_that_are_open_elsewhere_are_left_and_written_under_another_name(run_of_gui):
    folder, printed = run_of_gui.folder, run_of_gui.output
    assert run_of_gui.code == 0, printed[-4000:]
    assert printed.count("is open in another program and cannot be removed; training continues") == 2
    assert "tiny.safetensors is open in another program and cannot be replaced: saved tiny.2.safetensors instead" in printed
    assert run_of_gui.file.read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (folder / "tiny.2.safetensors").stat().st_size > 1000
    state = folder / "tiny-step00000004-state"  # Wine lets a folder be renamed in which a file is open
    assert (runs_in_wine() and not state.exists()) or resume.state_problem(state) is None
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param(sends(console_event.CLOSE), 143, id="close"),
        pytest.param(sends(console_event.CTRL_BREAK), 149, id="break", marks=[pytest.mark.slow, pytest.mark.wine(NO_BREAK)]),
        pytest.param(sends(console_event.CTRL_C), 130, id="ctrl-c", marks=pytest.mark.slow),
        pytest.param(console_event.end_session, 143, id="session", marks=[pytest.mark.slow, pytest.mark.wine(NO_DESKTOP)]),
    ],
)
def test_a_run_that_is_ended_resumes_bit_identically(checkout, train, output, undisturbed, end, code):
    ended = train(checkout, LORA, *STEPS, output=output(), at_step=9, act=end)
    assert ended.code == code, ended.output[-3000:]
    assert "to resume: " in ended.output
    assert not [line for line in ended.output.splitlines() if line.startswith("kohya_ext:") and "?" in line]
    assert not ended.file.exists()
    assert not list(ended.folder.glob("*.partial"))
    assert not list(ended.folder.glob(".*.lock")), "the exit handlers did not run"
    (state,) = ended.folder.glob("*-state")
    assert resume.state_problem(state) is None

    resumed = train(checkout, LORA, *STEPS, "--resume", "auto", output=ended.folder)
    assert resumed.code == 0, resumed.output[-3000:]
    assert state.name in resumed.output
    assert same(resumed.tensors, undisturbed)


def terminate(process):
    """Kill a process as the Task Manager, ``taskkill /F`` and the stop button of the kohya_ss GUI do."""
    os.kill(process, signal.SIGTERM)


def later(seconds, end, process):
    time.sleep(seconds)
    end(process)


KILLS = int(os.environ.get("KILLS", "20"))


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_kills_at_random_moments_lose_nothing(checkout, train, tmp_path):
    """With a state after every step, each start trains for some steps until it is ended in the middle of one."""
    steps = ("--max_train_steps", str(3 * KILLS + 4), "--shuffle_caption", "--save_state_every_n_minutes", "0")
    numbers, step = random.Random(1), 0
    ends = [sends(console_event.CLOSE), sends(console_event.CTRL_C), terminate]
    ends += [] if runs_in_wine() else [sends(console_event.CTRL_BREAK), console_event.end_session]
    for number in range(KILLS):
        step += numbers.randint(1, 3)

        end = functools.partial(later, numbers.random(), ends[number % len(ends)])
        run = train(checkout, LORA, *steps, "--resume", "auto", output=tmp_path, at_step=step, act=end)
        assert run.code != 0, run.output[-3000:]
        assert not run.file.exists()
    finished = train(checkout, LORA, *steps, "--resume", "auto", output=tmp_path)
    assert finished.code == 0, finished.output[-3000:]
    assert same(finished.tensors, train(checkout, LORA, *steps).tensors)
