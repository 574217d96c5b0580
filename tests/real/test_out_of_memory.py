"""Out-of-memory errors in the real scripts: messages, the saved state, and the launcher's restart."""

import re
import signal

import pytest

from tests.real.test_losing_nothing import FULL, LORA, SCRIPTS, assert_all_complete, orphans, posix, same, send

#: With them, gradient checkpointing is the cheapest change.
ARGUMENTS = ("--mixed_precision", "bf16")
TOO_MUCH = (*ARGUMENTS, "--no-gradient_checkpointing")
AT_STEP_3 = {"SPY_OUT_OF_MEMORY_AT": "3"}

slow = pytest.mark.slow


@slow
@pytest.mark.parametrize("script", [LORA, FULL])
def test_the_launcher_restarts_with_the_next_change_and_loses_nothing(checkout, train, script):
    run = train(checkout, script, *TOO_MUCH, "--on_oom", "retry", env=AT_STEP_3, bare=True)
    assert "out of memory (step 3, forward): CUDA out of memory. Tried to allocate 20.00 MiB." in run.output
    assert "no steps lost: state after step 2 saved" in run.output
    assert "the cheapest change: gradient checkpointing of every block (--gradient_checkpointing)" in run.output
    assert "restart 1 of 3, from tiny-rolling00000002-state, with gradient checkpointing" in run.output
    assert "resumed after step 2" in run.output
    assert "restart 2" not in run.output
    # Recomputing is exact, and no step was lost or repeated.
    assert same(run.tensors, train(checkout, script, *ARGUMENTS).tensors)
    assert_all_complete(run.folder)


@slow
def test_a_plain_start_prints_the_command_line(checkout, train):
    run = train(checkout, LORA, *TOO_MUCH, start="environment", env={**AT_STEP_3, "KOHYA_EXT_ON_OOM": "retry"}, bare=True)
    assert run.code == 1
    assert "--on_oom retry needs the launcher" in run.output
    (line,) = re.findall(r"to resume from tiny-rolling00000002-state with it: (.*)", run.output)
    assert "--no-gradient_checkpointing" not in line
    assert "--gradient_checkpointing --resume" in line
    assert re.search(
        r"for an estimate by part, run: python -m kohya_ext estimate sdxl_train_network.py .*--pretrained", run.output
    )


@slow
def test_restarts_are_limited(checkout, train):
    # Without checkpointing neither bf16 nor any other change helps.
    run = train(
        checkout,
        LORA,
        "--no-gradient_checkpointing",
        "--on_oom",
        "retry",
        "--oom_max_retries",
        "1",
        env={"SPY_OUT_OF_MEMORY_AT": "1"},
        bare=True,
    )
    assert run.code == 1
    assert "restart 1 of 1, from the beginning, with 16-bit mixed precision" in run.output
    assert "out of memory after 1 restarts" in run.output
    assert not run.file.exists()


@slow
@posix
@pytest.mark.parametrize("scripts", SCRIPTS[:1])
def test_a_signal_to_the_launcher_stops_the_run_safely(checkout, train, scripts):
    options = ("--max_train_steps", "500", "--on_oom", "retry")
    run = train(checkout, scripts[checkout.layout], *options, at_step=2, act=send(signal.SIGTERM), bare=True)
    assert run.code == 128 + signal.SIGTERM, run.output[-3000:]
    assert "to resume: " in run.output
    assert not orphans(run.folder)
    assert_all_complete(run.folder)


@slow
@posix
def test_the_run_does_not_outlive_its_launcher(checkout, train):
    run = train(checkout, LORA, "--max_train_steps", "500", "--on_oom", "retry", at_step=2, act=send(signal.SIGKILL), bare=True)
    assert run.code == -signal.SIGKILL
    # The pipe is closed: the training process has saved its state and ended too.
    assert not orphans(run.folder)
    assert list(run.folder.glob("*-state")), run.output[-3000:]
