"""How runs end on Windows: by keys, a closed window, the end of the session, and a kill. Resumed, they lose nothing."""

import functools

import pytest

from kohya_ext.run import resume
from tests.windows import console_event

torch = pytest.importorskip("torch")

LORA = "sdxl_train_network.py"

pytestmark = pytest.mark.newest


@pytest.fixture(scope="module")
def undisturbed(train):
    """checkout, options -> the run that nothing ends, once for each."""
    return functools.cache(lambda checkout, *options: train(checkout, LORA, *options))


def sends(event):
    return lambda process: console_event.send(process, event)


def same(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


#: An epoch has eight batches. The runs end in the second, after captions and buckets were shuffled again.
STEPS = ("--max_train_steps", "12", "--shuffle_caption")


@pytest.mark.parametrize(
    ("event", "code"),
    [
        pytest.param(console_event.CLOSE, 143, id="close"),
        pytest.param(console_event.CTRL_BREAK, 149, id="break"),
        pytest.param(console_event.CTRL_C, 130, id="ctrl-c", marks=pytest.mark.slow),
        pytest.param(console_event.LOGOFF, 143, id="logoff", marks=pytest.mark.slow),
        pytest.param(console_event.SHUTDOWN, 143, id="shutdown", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_ended_resumes_bit_identically(checkout, train, undisturbed, event, code):
    ended = train(checkout, LORA, *STEPS, at_step=9, act=sends(event))
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
    assert same(resumed.tensors, undisturbed(checkout, *STEPS).tensors)
