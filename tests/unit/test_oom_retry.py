"""--on_oom retry: the command lines that the launcher starts, their number, and its exit code."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kohya_ext.config import command_line
from kohya_ext.config.command_line import CommandLine, restart_line
from kohya_ext.launch import accelerate_signals, oom_retry
from kohya_ext.launch.accelerate_signals import pass_signals_on

LAUNCHER, SCRIPT = ("-m", "kohya_ext", "--sd_scripts", "there"), "sdxl_train_network.py"


def supervise(*argv):
    return oom_retry.supervise(CommandLine(Path(SCRIPT), ["--on_oom", "retry", *argv], {}, launcher=LAUNCHER))


def outcome(state=None, **changes):
    return {"changes": changes, "description": "less", "state": state}


@pytest.fixture
def runs(monkeypatch):
    """Replace runs by their exit codes, and record their command lines."""
    started = []

    def let(*ends):
        queue = list(ends)
        monkeypatch.setattr(oom_retry, "_run", lambda words: started.append(list(words)) or queue.pop(0))
        return started

    return let


def test_each_restart_applies_the_change_and_resumes_from_the_state(runs, capsys):
    started = runs((1, outcome("out/a-state", train_batch_size=2)), (1, outcome(None, full_bf16=True)), (0, None))
    code = supervise("--train_batch_size", "4", "--seed", "1")
    assert code == 0
    before = [*LAUNCHER, SCRIPT, "--on_oom", "retry"]
    assert [words[:7] for words in started] == [before] * 3
    assert [words[7:] for words in started] == [
        ["--train_batch_size", "4", "--seed", "1"],
        ["--seed", "1", "--train_batch_size", "2", "--resume", "out/a-state"],
        ["--seed", "1", "--train_batch_size", "2", "--full_bf16"],
    ]
    printed = capsys.readouterr().err
    assert "restart 1 of 3, from a-state, with less: --train_batch_size 2 --resume out/a-state" in printed
    assert "restart 2 of 3, from the beginning, with less: --full_bf16" in printed


def test_restarts_are_limited_and_the_last_exit_code_is_returned(runs, capsys):
    started = runs(*[(1, outcome(full_bf16=True))] * 5)
    assert supervise("--oom_max_retries", "2") == 1
    assert len(started) == 3
    assert "after 2 restarts" in capsys.readouterr().err


def test_other_failures_are_not_retried(runs):
    started = runs((3, None))
    assert supervise() == 3
    assert len(started) == 1


@pytest.mark.linux("signals as POSIX has them")
def test_signals_are_forwarded_and_awaited():
    program = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print(flush=True); signal.pause()"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    before = signal.getsignal(signal.SIGTERM)
    with pass_signals_on(child):
        child.stdout.readline()
        os.kill(os.getpid(), signal.SIGTERM)
        assert child.wait(10) == 7
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_was_stopped_is_not_restarted(monkeypatch):
    """It may run out of memory in the step that it finishes."""
    monkeypatch.setattr(oom_retry.subprocess, "Popen", lambda words, env: None)
    monkeypatch.setattr(oom_retry.retry_request, "read", lambda file: outcome(full_bf16=True))
    for stop, request in ((None, outcome(full_bf16=True)), (signal.SIGTERM, None)):
        monkeypatch.setattr(oom_retry, "wait", lambda process, stop=stop: (1, stop))
        assert oom_retry._run([SCRIPT]) == (1, request)


@pytest.fixture
def command_words(monkeypatch, tmp_path):
    """Make these words the command line of this process, in a new folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", "/env/bin/python")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def let(*words, script="/there/sdxl_train.py"):
        monkeypatch.setattr(sys, "orig_argv", list(words))
        place = next(index for index, word in enumerate(words) if "sdxl_train" in word)
        monkeypatch.setattr(sys, "argv", [script, *words[place + 1 :]])

    return let


@pytest.mark.linux("a shell as POSIX has it")
class TestWhatToTypeNext:
    def test_the_scripts_options_change_and_the_launchers_do_not(self, command_words, tmp_path):
        command_words(
            "python", "-m", "kohya_ext", "--sd-scripts", "a b", "sdxl_train", "--seed", "1", "--resume=x", "--cache_latents"
        )
        line = restart_line({"resume": "auto", "cache_latents": False, "optimizer_args": ["a=(1, 2)", "b=3"]})
        assert line == (
            f"cd {tmp_path} && /env/bin/python -m kohya_ext --sd_scripts 'a b' /there/sdxl_train.py --seed 1 "
            "--resume auto --no-cache_latents --optimizer_args 'a=(1, 2)' b=3"
        )

    def test_environment_variables_become_flags(self, command_words, tmp_path, monkeypatch):
        environ = {"KOHYA_EXT": "1", "KOHYA_EXT_PRESET": "12gb,speed", "KOHYA_EXT_EMA": "1", "KOHYA_EXT_PREFLIGHT": "0"}
        for name, value in {**environ, "KOHYA_EXT_NAN_PATIENCE": "3", "CUDA_VISIBLE_DEVICES": "1"}.items():
            monkeypatch.setenv(name, value)
        command_words("/env/bin/python", "-u", "sdxl_train.py", "--nan-patience=5", "--seed", "1")
        assert restart_line({"resume": "out/cat-state"}) == (
            f"cd {tmp_path} && CUDA_VISIBLE_DEVICES=1 /env/bin/python -u -m kohya_ext /there/sdxl_train.py --preset 12gb,speed "
            "--no-preflight --ema --nan-patience=5 --seed 1 --resume out/cat-state"
        )

    def test_the_installed_command_is_recognized_as_launcher(self, command_words, tmp_path):
        command_words("/env/bin/python", "/env/bin/kohya-ext", "sdxl_train.py", "--seed", "1")
        assert restart_line({}) == f"cd {tmp_path} && /env/bin/python /env/bin/kohya-ext /there/sdxl_train.py --seed 1"


def test_the_command_line_is_quoted_for_cmd_on_windows(command_words, monkeypatch):
    monkeypatch.setattr(command_line, "os", SimpleNamespace(name="nt", environ={}, getcwd=lambda: "C:\\my kohya", path=os.path))
    command_words("python", "sdxl_train.py", "--output_name", "cats&dogs", "--train_data_dir", "D:\\two words")
    line = restart_line({})
    assert line.startswith('cd /d "C:\\my kohya" && /env/bin/python -m kohya_ext ')
    assert line.endswith('--output_name "cats&dogs" --train_data_dir "D:\\two words"')


class Process:
    """A process that records its signals."""

    def __init__(self):
        self.terminated = 0

    def terminate(self):
        self.terminated += 1


@pytest.mark.parametrize(("has_sigterm", "times"), [(True, 1), (False, 0)])
def test_ctrl_c_does_not_terminate_the_process_on_windows(monkeypatch, has_sigterm, times):
    monkeypatch.setattr(accelerate_signals, "_HAS_SIGTERM", has_sigterm)
    process = Process()
    with pass_signals_on(process):
        signal.raise_signal(signal.SIGINT)
    assert process.terminated == times


@pytest.mark.parametrize(("code", "reported"), [(0, 0), (3, 3), (-signal.SIGTERM, 130), (-signal.SIGINT, 130)])
def test_the_exit_code_names_the_signal_that_came_and_not_the_one_passed_on(code, reported):
    class Ends(Process):
        def wait(self):
            signal.raise_signal(signal.SIGINT)
            return code

    assert accelerate_signals.wait(Ends()) == (reported, signal.SIGINT)
