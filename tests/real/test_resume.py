"""Resuming and locking: a run resumes only its own states, and never destroys another run's."""

import os
import re
import shutil
import signal
import subprocess

import pytest

from kohya_ext.run import run_record
from kohya_ext.tiny import environment
from tests.real.test_losing_nothing import LORA, SCRIPTS, assert_all_complete, posix, read, same, send

torch = pytest.importorskip("torch")

EVERY_STEP = ("--save_state_every_n_minutes", "0")


@pytest.mark.thorough
@pytest.mark.oldest
@pytest.mark.parametrize("scripts", SCRIPTS)
def test_rerun_removes_and_resumes_only_its_own_states(checkout, train, scripts, tmp_path):
    script = scripts[checkout.layout]
    first = train(checkout, script, *EVERY_STEP, "--max_train_steps", "6", output=tmp_path)
    expected = first.tensors
    earlier = ["tiny-rolling00000005-state", "tiny-rolling00000006-state"]
    assert sorted(path.name for path in tmp_path.glob("*-state")) == earlier

    rerun = train(checkout, script, *EVERY_STEP, "--max_train_steps", "3", output=tmp_path)
    assert rerun.code == 0, rerun.output[-3000:]
    own = ["tiny-rolling00000002-state", "tiny-rolling00000003-state"]
    assert sorted(path.name for path in tmp_path.glob("*-state")) == own
    assert sorted(path.name for path in tmp_path.glob("*-state.previous")) == [f"{name}.previous" for name in earlier]
    assert "renamed the states of an earlier run to NAME.previous" in rerun.output

    resumed = train(checkout, script, *EVERY_STEP, "--max_train_steps", "6", "--resume", "auto", output=tmp_path)
    assert "tiny-rolling00000003-state, step 3 of the run started" in resumed.output
    assert same(resumed.tensors, expected)
    assert sorted(path.name for path in tmp_path.glob("*-state")) == earlier
    ids = {run_record.read(tmp_path / name).id for name in earlier}
    assert len(ids) == 1
    assert ids.isdisjoint(run_record.read(tmp_path / f"{name}.previous").id for name in earlier)

    # A run with other settings does not continue it.
    other = train(checkout, script, *EVERY_STEP, "--max_train_steps", "1", "--resume", "auto", "--seed", "7", output=tmp_path)
    assert other.code == 0, other.output[-3000:]
    assert "saved by another run (--seed was" in other.output
    assert "starting a new run" in other.output


@pytest.mark.oldest
@posix
def test_second_run_of_a_name_is_rejected_and_the_first_continues(checkout, call, train, upstream, tmp_path):
    second = []

    def start_another(process):
        os.kill(process, signal.SIGSTOP)  # otherwise it ends before the others start
        second.append(train(checkout, LORA, output=tmp_path))
        options = ("--output_dir", tmp_path, "--output_name", "tiny")
        second.append(call("-m", "kohya_ext", "check", "--sd-scripts", checkout.path, LORA, *options))
        os.kill(process, signal.SIGCONT)

    options = (*EVERY_STEP, "--disable_patch", "nonreentrant_checkpointing")
    first = train(checkout, LORA, *options, output=tmp_path, at_step=1, act=start_another)
    assert same(first.tensors, upstream(checkout, LORA).tensors)
    assert_all_complete(tmp_path)
    run, check = second
    assert run.code == check.returncode == 2, run.output[-3000:] + check.stderr
    for output in (run.output, check.stderr):
        assert re.search(r"another run uses --output_name tiny in .* \(process \d+ on ", output)
    assert "U-Net" not in run.output
    assert not list(tmp_path.glob(".*.lock"))


@posix
def test_system_exit_that_upstream_catches_stops_before_the_first_step(checkout, train, tmp_path):
    git = tmp_path / "bin" / "git"
    git.parent.mkdir()
    git.write_text("#!/bin/sh\nkill -TERM $PPID\nsleep 1\n")
    git.chmod(0o755)
    path = f"{git.parent}{os.pathsep}{os.environ['PATH']}"
    run = train(checkout, LORA, "--max_train_steps", "500", env={"PATH": path})
    assert run.code == 143, run.output[-3000:]
    assert "SIGTERM: stopping before the first step" in run.output
    assert not list(run.folder.glob("*.safetensors"))


@pytest.mark.thorough
@pytest.mark.oldest
@posix
def test_printed_resume_command_continues_the_run_in_a_new_shell(checkout, train, models):
    options = ("--max_train_steps", "6", "--shuffle_caption")
    # The preset changes the result through its learning-rate warmup.
    environ = {"KOHYA_EXT_PRESET": "quality", "KOHYA_EXT_SAVE_STATE_EVERY_N_MINUTES": "0"}
    uninterrupted = train(checkout, LORA, *options, start="environment", env=environ)
    stopped_run = train(checkout, LORA, *options, start="environment", env=environ, at_step=3, act=send(signal.SIGTERM))
    (command,) = re.findall(r"to resume: (.*)", stopped_run.output)
    assert "--preset quality" in command
    # Only what every shell has, and the variables for the tiny models.
    shell = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    shell |= environment.variables(models("sdxl").tokenizers)
    done = subprocess.run(["sh", "-c", command], cwd="/", env=shell, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert same(read(stopped_run.file), uninterrupted.tensors)


@pytest.fixture(scope="module")
def finished_folder(train):
    """(checkout) -> the folder of a finished run with timed states; tests damage copies of it."""
    runs = {}

    def of(checkout):
        if checkout.layout not in runs:
            runs[checkout.layout] = train(checkout, LORA, *EVERY_STEP, "--max_train_steps", "2").folder
        return runs[checkout.layout]

    return of


def without_model(state):
    (state / "model.safetensors").unlink()


def with_truncated_optimizer(state):
    file = state / "optimizer.bin"
    file.write_bytes(file.read_bytes()[:-100])


def with_damaged_random_state(state):
    file = state / "random_states_0.pkl"
    content = bytearray(file.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 8] = b"damaged!"
    file.write_bytes(content)


DAMAGE = {
    without_model: "model.safetensors is missing",
    with_truncated_optimizer: r"optimizer.bin is truncated: \d+ of \d+ bytes",
    with_damaged_random_state: "random_states_0.pkl is damaged",
}


@pytest.mark.newest
@pytest.mark.parametrize("damage", DAMAGE, ids=[damage.__name__ for damage in DAMAGE])
def test_damaged_state_stops_the_run_before_the_model_is_loaded(checkout, train, finished_folder, damage, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(finished_folder(checkout), folder)
    for state in folder.glob("*-state"):
        damage(state)
    for preflight in ((), ("--no-preflight",)):
        run = train(checkout, LORA, "--max_train_steps", "4", "--resume", "auto", *preflight, output=folder)
        assert run.code == 2, run.output[-3000:]
        assert re.search(f"every state in .* is damaged .*{DAMAGE[damage]}", run.output)
        assert "remove --resume to start from the beginning" in run.output
        assert "U-Net" not in run.output


@pytest.mark.slow
def test_upstream_state_with_damaged_random_state_needs_inexact_resume(checkout, train):
    options = ("--save_state", "--save_every_n_steps", "2", "--max_train_steps", "4")
    first = train(checkout, LORA, *options, start="plain")
    state = first.folder / "tiny-step00000002-state"
    with_damaged_random_state(state)
    resume = ("--resume", str(state), "--max_train_steps", "4")
    for more in ((), ("--no-preflight",)):
        run = train(checkout, LORA, *resume, *more)
        assert run.code == 2, run.output[-3000:]
        assert "random_states_0.pkl" in run.output
    assert "--inexact_resume" in run.output
    assert train(checkout, LORA, *resume, "--inexact_resume").code == 0
