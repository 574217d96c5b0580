"""An exception that leaves the training loop reaches every callback once, and saves what was trained."""

import importlib
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.patching.patch import Patch, Patcher, registry  # noqa: E402
from kohya_ext.patching.training_loop import Program, Stage, TrainingCallback  # noqa: E402
from kohya_ext.run import journal, last_step, ranks  # noqa: E402
from kohya_ext.run.journal_reader import RunLog  # noqa: E402
from kohya_ext.sdscripts.checkouts import Checkout  # noqa: E402

SCRIPT = """
import argparse
import os
import torch
from library import accelerator_setup, args as args_util

def setup_parser():
    parser = argparse.ArgumentParser()
    args_util.add_training_arguments(parser)
    return parser

class Trainer:
    def __init__(self, fail=lambda place, step: None):
        self.fail = fail

    def train(self, args):
        torch.manual_seed(0)
        accelerator = accelerator_setup.prepare_accelerator(args)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = torch.utils.data.DataLoader([{"x": torch.rand(3)} for _ in range(4)], shuffle=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        if args.resume:
            accelerator.load_state(args.resume)
        global_step = 0
        for epoch in range(2):
            for batch in loader:
                with accelerator.accumulate(model):
                    self.fail("forward", global_step)
                    loss = model(batch["x"]).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    self.fail("after the optimizer", global_step)
                    scheduler.step()
                    optimizer.zero_grad()
                global_step += 1
                self.fail("between steps", global_step)
                if args.save_every_n_steps is not None and global_step % args.save_every_n_steps == 0:
                    accelerator.wait_for_everyone()
                    os.makedirs(args.output_dir, exist_ok=True)
                    torch.save(model.state_dict(), os.path.join(args.output_dir, f"cat-step{global_step:08d}.pt"))
        os.makedirs(args.output_dir, exist_ok=True)
        torch.save(model.state_dict(), os.path.join(args.output_dir, "cat.pt"))

if __name__ == "__main__":
    setup_parser()
    Trainer().train(None)
"""

LIBRARY = {
    "accelerator_setup.py": (
        "from accelerate import Accelerator\ndef prepare_accelerator(args):\n    return Accelerator(cpu=True)\n"
    ),
    "args.py": "def add_training_arguments(parser):\n    pass\n",
}


@pytest.fixture(autouse=True)
def _no_listener_stays(monkeypatch):
    """Observers that fail may not have ended."""
    monkeypatch.setattr(journal, "_listeners", [])


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with a script of its own, whose modules are removed after the test."""
    folder = tmp_path / "checkout"
    (folder / "library").mkdir(parents=True)
    for name, text in LIBRARY.items():
        (folder / "library" / name).write_text(text)
    (folder / "train_cat.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("library", "train_cat")]:
        monkeypatch.delitem(sys.modules, name)
    yield Checkout(folder, "0.11.1", "v0.11", "for the test")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("library", "train_cat")]:
        del sys.modules[name]


@pytest.fixture
def arm(checkout):
    """(patches by name, settings) -> their Patcher, armed; undone after the test."""
    armed = []

    def of(patches=None, settings=None):
        patcher = Patcher(patches or registry(), settings or Settings(), checkout, program=Program(checkout))
        patcher.arm()
        armed.append(patcher)
        return patcher

    yield of
    for patcher in armed:
        patcher.undo()


def arguments(output, **more):
    given = {"output_dir": str(output), "output_name": "cat", "max_train_steps": 8, "gradient_accumulation_steps": 1}
    saving = {"save_every_n_steps": None, "save_state": False, "resume": None, **more}
    return Namespace(**given, **saving, max_grad_norm=0.0, optimizer_type="SGD", gradient_checkpointing=True)


def failing(place, step):
    def fail(where, now):
        if (where, now) == (place, step):
            raise ValueError("injected")

    return fail


def train(args, fail=lambda place, step: None):
    """Import the script and train, as a program that catches exceptions does; return whether there was one."""
    script = importlib.import_module("train_cat")
    script.setup_parser()
    try:
        script.Trainer(fail).train(args)
    except ValueError:
        return True
    return False


#: The weights of a run without a failure, once it has run.
_expected = {}


@pytest.fixture
def expected(arm, tmp_path):
    """The weights of a run without a failure."""
    if not _expected:
        patcher = arm()
        assert not train(arguments(tmp_path / "expected"))
        patcher.undo()
        _expected.update(torch.load(tmp_path / "expected" / "cat.pt"))
    return _expected


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(("place", "at", "step"), [("forward", 3, 3), ("between steps", 4, 4), ("forward", 4, 4)])
def test_a_program_that_catches_the_exception_has_model_and_state(arm, expected, tmp_path, capsys, place, at, step):
    patcher = arm()
    assert train(arguments(tmp_path / "out"), failing(place, at))
    printed = capsys.readouterr().err
    state = tmp_path / "out" / f"cat-rolling{step:08d}-state"
    assert f"no steps lost: state after step {step} saved in {state}" in printed
    assert f"model after step {step} saved: {tmp_path / 'out' / f'cat-step{step:08d}.pt'}" in printed
    patcher.undo()

    arm()
    assert not train(arguments(tmp_path / "out", resume=str(state)))
    assert same(torch.load(tmp_path / "out" / "cat.pt"), expected)


def test_a_step_that_has_begun_to_change_weights_is_not_saved_as_a_state(arm, tmp_path, capsys):
    arm()
    assert train(arguments(tmp_path / "out"), failing("after the optimizer", 3))
    printed = capsys.readouterr().err
    assert "no state is saved, because step 4 had begun to change the weights; newest state: none" in printed
    assert "model after step 3, with a part of step 4 saved: " in printed
    assert not list((tmp_path / "out").glob("*-state"))


def test_nothing_is_saved_before_the_first_complete_step(arm, tmp_path, capsys):
    arm()
    assert train(arguments(tmp_path / "out"), failing("forward", 0))
    assert "saved" not in capsys.readouterr().err.replace("no model", "")
    assert not list((tmp_path / "out").glob("cat-*"))


def test_a_gpu_that_cannot_be_read_is_reported(arm, tmp_path, capsys, monkeypatch):
    problem = "AcceleratorError: CUDA error: an illegal memory access was encountered"
    monkeypatch.setattr(last_step, "gpu_problem", lambda device: problem)
    arm()
    assert train(arguments(tmp_path / "out"), failing("forward", 3))
    expected = f"nothing is saved: the GPU cannot be used after this error ({problem}); newest state: none"
    assert expected in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("cat-*"))


def test_processes_that_save_together_save_nothing(arm, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ranks, "is_sharded", lambda accelerator: True)
    arm()
    assert train(arguments(tmp_path / "out"), failing("forward", 3))
    assert "saves with all processes; newest state: none" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("cat-*"))


def test_without_a_position_the_model_is_saved(arm, tmp_path, capsys):
    arm(settings=Settings(disable_patch=("exact_resume",)))
    assert train(arguments(tmp_path / "out"), failing("forward", 3))
    assert "no state is saved, because no patch counts the position" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").glob("cat-*")] == ["cat-step00000003.pt"]


@pytest.mark.parametrize("problem", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_saves_nothing(arm, tmp_path, problem):
    def stop(place, step):
        if step == 3:
            raise problem

    arm()
    with pytest.raises(problem):
        train(arguments(tmp_path / "out"), stop)
    assert not list((tmp_path / "out").glob("cat-*"))


class Recorder(TrainingCallback):
    def __init__(self, calls):
        self.calls = calls

    def on_exception(self, problem):
        self.calls.append(("exception", str(problem)))

    def on_exit(self):
        self.calls.append("exit")


def recording(calls, name="recorder", kind=Recorder):
    start = lambda args, accelerator, settings: kind(calls)  # noqa: E731
    return Patch(name, "records", (), "exact", "itself", "here", stage=Stage.OBSERVE, on_start=start)


def test_an_exception_reaches_the_callbacks_once(arm, tmp_path):
    calls = []
    arm({"recorder": recording(calls)})
    assert train(arguments(tmp_path), failing("forward", 1))
    sys.excepthook(ValueError, ValueError("again, as in a script that nothing catches"), None)
    assert calls == [("exception", "injected")]


def test_a_failing_callback_does_not_keep_the_exception_from_the_others(arm, tmp_path, capsys):
    class Broken(Recorder):
        def on_exception(self, problem):
            raise OSError("broken")

    calls = []
    arm({"broken": recording(calls, "broken", Broken), "recorder": recording(calls)})
    assert train(arguments(tmp_path), failing("forward", 1))
    assert calls == [("exception", "injected")]
    assert "OSError: broken" in capsys.readouterr().err


PROGRAM = """
import runpy, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.unit.test_failures import Recorder, arguments, failing, recording
from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patcher
from kohya_ext.patching.training_loop import Program
from kohya_ext.sdscripts.checkouts import Checkout

class Printer(Recorder):
    def on_exception(self, problem):
        print("callback", problem, file=sys.stderr)

    def on_exit(self):
        print("exit", file=sys.stderr)

checkout = Checkout(Path(sys.argv[2]), "0.11.1", "v0.11", "for the test")
Patcher({"recorder": recording([], kind=Printer)}, Settings(), checkout, program=Program(checkout)).arm()
lines = ("import train_cat", "train_cat.setup_parser()", "train_cat.Trainer(failing('forward', 2)).train(arguments('.'))")
exec(compile("\\n".join(lines), sys.argv[1], "exec"))
"""


def test_the_traceback_of_a_script_comes_first(checkout, tmp_path):
    """Nothing can catch an exception in a script that Python runs, so the messages follow the traceback."""
    program = checkout.path / "start.py"
    program.write_text(PROGRAM)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(program), str(checkout.path / "train_cat.py"), str(checkout.path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    lines = [line.split()[0] for line in done.stderr.splitlines() if line.startswith(("Traceback", "callback", "exit"))]
    assert lines == ["Traceback", "callback", "exit"], done.stderr
    assert done.returncode == 1


# --- observers -------------------------------------------------------------------------------------------------------


OBSERVERS = ("journal", "notify", "progress_memory", "sample_multipliers", "spill_watch", "step_times", "tracker_values")


def broken(*args, **kwargs):
    raise LookupError("broken")


def calls_of_observers():
    """Yield (object, name) of everything that a run calls in patches that only observe it."""
    for name in OBSERVERS:
        module = importlib.import_module(f"kohya_ext.patches.{name}")
        yield pytest.param(registry()[name], "on_start", id=f"{name}-start")
        kinds = (each for each in vars(module).values() if isinstance(each, type) and issubclass(each, TrainingCallback))
        for kind in kinds:
            for method in vars(kind):
                if callable(vars(kind)[method]) and not method.startswith("__") and kind.__module__ == module.__name__:
                    yield pytest.param(kind, method, id=f"{name}-{kind.__name__}-{method}")
    for name in ("write", "report_problem", "close", "open"):
        yield pytest.param(journal.Journal, name, id=f"Journal-{name}")
    yield pytest.param(RunLog, "add", id="RunLog-add")


@pytest.mark.parametrize(("owner", "name"), list(calls_of_observers()))
def test_observers_never_raise_into_a_run(arm, expected, tmp_path, monkeypatch, capsys, owner, name):
    if isinstance(owner, Patch):
        monkeypatch.setitem(owner.__dict__, name, broken)
    else:
        monkeypatch.setattr(owner, name, broken)
    patcher = arm(settings=Settings(notify="true"))
    assert not train(arguments(tmp_path / "out"))
    journal.event("skip", step=1)
    patcher._loop.run.on_exit()
    assert same(torch.load(tmp_path / "out" / "cat.pt"), expected)
    assert "Traceback" not in capsys.readouterr().err


def test_a_journal_without_settings_says_how_to_resume(arm, tmp_path, monkeypatch, capsys):
    """As where psutil cannot read the process."""
    monkeypatch.setattr("kohya_ext.patches.journal.process_start", broken)
    patcher = arm()
    assert train(arguments(tmp_path / "out"), failing("forward", 3))
    patcher._loop.run.on_exit()
    printed = capsys.readouterr().err
    assert "cat.journal.jsonl has no settings: LookupError: broken" in printed
    assert "to resume: add --resume auto to the command line" in printed
    assert "Traceback" not in printed


def test_all_patches_that_observe_are_declared():
    assert {patch.name for patch in registry().values() if patch.observes} == set(OBSERVERS)
