"""Several processes on CPUs: upstream's results, and no run is lost when one process is stopped, fails or is killed."""

import os
import random
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import pytest

from kohya_ext.run import resume
from tests.real.test_journal import lines_of, log_of
from tests.real.test_losing_nothing import (
    FULL,
    LORA,
    SCRIPTS,
    TWO,
    assert_all_complete,
    orphans,
    posix,
    read,
    same,
    write_images_with_nan,
)

torch = pytest.importorskip("torch")

pytestmark = [posix, pytest.mark.thorough]

#: Every part of a state: timed and scheduled saves, averages, statistics of losses, and captions in random order.
EVERYTHING = ("--save_every_n_steps", "2", "--save_state", "--ema", "--ema_decay", "0.4", "--shuffle_caption")
EVERYTHING += ("--adaptive_lr", "--adaptive_lr_patience", "1", "--max_train_steps", "12")


def end_rank(rank, number):
    """Return an action that sends a signal to one process of a run, whose IDs or whose launcher's ID it is given."""

    def act(processes):
        psutil = pytest.importorskip("psutil")
        if isinstance(processes, int):
            children = psutil.Process(processes).children(recursive=True)
            processes = [child.pid for child in children if child.environ().get("RANK") == str(rank)]
            os.kill(processes[0], number)
        else:
            os.kill(processes[rank], number)

    return act


@pytest.mark.parametrize("scripts", SCRIPTS)
def test_two_processes_train_as_upstream(checkout, train, scripts):
    script = scripts[checkout.layout]
    upstream = train(checkout, script, start="plain", env={"WRAP_AS_ON_GPUS": "1"}, ranks=2)
    ours = train(checkout, script, "--disable_patch", "nonreentrant_checkpointing", ranks=2)
    assert same(ours.tensors, upstream.tensors)
    end = lines_of(ours)[-1]
    assert [row["rank"] for row in end["ranks"]] == [0, 1]
    assert all(row["own_seconds"] > 0 and row["host_resident"] > 2**28 for row in end["ranks"])
    assert not list(ours.folder.glob("*.rank*"))


@pytest.mark.slow
@pytest.mark.skipif(version("rich") < "15", reason="rich draws random numbers for logged lines, more of them in a new process")
def test_two_processes_resume_bit_identically_after_a_stop_an_error_and_a_kill_of_one(checkout, train, tmp_path):
    common = {"without": ("--gradient_checkpointing",)}
    again = {**common, "output": tmp_path}
    uninterrupted = train(checkout, LORA, *EVERYTHING, ranks=2, **common)

    stopped = train(checkout, LORA, *EVERYTHING, ranks=2, at_step=2, act=end_rank(1, signal.SIGTERM), **again)
    assert stopped.code == 143, stopped.output[-3000:]
    assert stopped.output.count("to resume: ") == 1
    step = lines_of(stopped)[-1]["step"]
    assert resume.newest_state(tmp_path, "tiny").name == f"tiny-step{step:08d}-state"
    assert len(torch.load(tmp_path / f"tiny-step{step:08d}-state" / resume.FILE, weights_only=True)["ranks"]) == 2

    exhausted = {"SPY_OUT_OF_MEMORY_AT": "3", "SPY_ONLY_RANK": "1"}
    failed = train(checkout, LORA, *EVERYTHING, "--resume", "auto", ranks=2, env=exhausted, **again)
    assert failed.code == 1, failed.output[-3000:]
    assert f"resumed after step {step}" in failed.output
    assert f"no steps lost: state after step {step + 2} saved" in failed.output
    assert f"model after step {step + 2} saved" in failed.output
    assert "the cheapest change: " in failed.output
    assert log_of(failed).summary()["reason"].startswith(f"rank 1 on {socket.gethostname()}: out of memory (forward)")

    kill = end_rank(1, signal.SIGKILL)
    options = {**again, **TWO, "before": ("--num_processes", "2"), "at_step": step + 4, "act": kill}
    killed = train(checkout, LORA, *EVERYTHING, "--resume", "auto", **options)
    assert killed.code == 128 + signal.SIGKILL, killed.output[-3000:]
    assert not orphans(tmp_path)
    reason = f"rank 1 on {socket.gethostname()}: ended by SIGKILL"
    summary = log_of(killed).summary()
    assert (summary["status"], summary["reason"]) == ("FAILED", reason)
    assert "--num_processes 2" in summary["next_command"]
    assert_all_complete(tmp_path)

    resumed = train(checkout, LORA, *EVERYTHING, "--resume", "auto", ranks=2, **again)
    assert "will differ" not in resumed.output
    assert same(resumed.tensors, uninterrupted.tensors)
    assert same(read(tmp_path / "tiny-ema.safetensors"), read(uninterrupted.folder / "tiny-ema.safetensors"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(version("rich") < "15", reason="rich draws random numbers for logged lines, more of them in a new process")
@pytest.mark.parametrize("script", [LORA, FULL])
def test_ten_kills_of_one_or_two_processes_at_random_moments_lose_nothing(checkout, train, tmp_path, script):
    options = (*EVERYTHING, "--max_train_steps", "40")
    common = {"without": ("--gradient_checkpointing",), "ranks": 2}
    uninterrupted = train(checkout, script, *options, **common)
    generator = random.Random(f"{script} {checkout.layout}")
    killed = 0

    def kill(processes):
        nonlocal killed
        time.sleep(generator.uniform(0, 0.5))
        for process in generator.choice((processes[:1], processes[1:], processes)):
            os.kill(process, signal.SIGKILL)
        killed += 1

    for _ in range(10):
        state = resume.newest_state(tmp_path, "tiny")
        step = int(state.name.split("-")[1].removeprefix("step")) if state is not None else 0
        moment = {"at_step": step + generator.randint(1, 5), "act": kill}
        run = train(checkout, script, *options, "--resume", "auto", **common, output=tmp_path, **moment)
        assert run.code != 0, run.output[-3000:]
        assert not orphans(tmp_path)
    assert killed == 10

    resumed = train(checkout, script, *options, "--resume", "auto", **common, output=tmp_path)
    assert "will differ" not in resumed.output
    assert_all_complete(tmp_path)
    assert same(resumed.tensors, uninterrupted.tensors)
    assert same(read(tmp_path / "tiny-ema.safetensors"), read(uninterrupted.folder / "tiny-ema.safetensors"))


@pytest.mark.slow
def test_two_processes_skip_the_same_step(checkout, train, tmp_path):
    write_images_with_nan(tmp_path)
    run = train(
        *(checkout, FULL, "--max_train_steps", "8", "--train_data_dir", str(tmp_path)),
        *("--cache_latents_to_disk", "--caching_workers", "0", "--nan_patience", "8"),
        ranks=2,
    )
    assert run.code == 0, run.output[-5000:]
    assert "skipped: loss or gradient is not finite" in run.output
    assert all(tensor.isfinite().all() for tensor in run.tensors.values())


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def on_two_machines(train, *words, before=None, **options):
    """Train in a process on each of two "machines", the launchers of this one; return their runs.

    ``before``: the launcher's options on both, if not those of accelerate.
    """
    address = ("--main_process_ip", "127.0.0.1", "--main_process_port", free_port())
    machines = ("--num_processes", "2", "--num_machines", "2", *address, "--machine_rank")

    def start(rank):
        act = {} if rank == 0 else {"act": None}
        return train(*words, before=before or (*machines, str(rank)), **{**options, **act})

    with ThreadPoolExecutor(2) as launchers:
        return list(launchers.map(start, range(2)))


@pytest.mark.slow
def test_two_machines_restart_together_when_one_is_out_of_memory(checkout, train, tmp_path):
    first, second = on_two_machines(
        *(train, checkout, LORA, "--max_train_steps", "6", "--mixed_precision", "bf16", "--on_oom", "retry"),
        env={**TWO["env"], "SPY_OUT_OF_MEMORY_AT": "3", "SPY_ONLY_RANK": "1"},
        without=("--gradient_checkpointing",),
        output=tmp_path,
    )
    assert (first.code, second.code) == (0, 0), first.output[-3000:]
    for run in (first, second):
        assert "restart 1 of 3, from tiny-rolling00000002-state, with gradient checkpointing" in run.output
        assert "restart 2" not in run.output
    assert log_of(first).summary()["status"] == "DONE"
    assert not orphans(tmp_path)


@pytest.mark.slow
def test_process_killed_on_one_machine_ends_both(checkout, train, tmp_path):
    options = {"env": TWO["env"], "output": tmp_path, "at_step": 2, "act": end_rank(0, signal.SIGKILL)}
    first, second = on_two_machines(train, checkout, FULL, "--max_train_steps", "500", **options)
    assert first.code == 128 + signal.SIGKILL, first.output[-3000:]
    assert second.code not in (0, -signal.SIGKILL), second.output[-3000:]
    assert not orphans(tmp_path)


RESTARTED = {"start": "torchrun", "env": {**TWO["env"], "OMP_NUM_THREADS": "1"}, "without": ("--gradient_checkpointing",)}
ELASTIC = (*EVERYTHING, "--resume", "auto")


def kill_at_random(generator):
    """Return an action that kills one of two processes within half a second."""

    def kill(launcher):
        time.sleep(generator.uniform(0, 0.5))
        end_rank(generator.choice((0, 1)), signal.SIGKILL)(launcher)

    return kill


@pytest.mark.slow
@pytest.mark.skipif(version("rich") < "15", reason="rich draws random numbers for logged lines, more of them in a new process")
@pytest.mark.parametrize("script", [LORA, FULL])
def test_torchrun_restarts_after_a_kill_and_loses_nothing(checkout, train, tmp_path, script):
    uninterrupted = train(checkout, script, *EVERYTHING, ranks=2, without=RESTARTED["without"])
    generator = random.Random(f"{script} {checkout.layout}")
    kill = {"at_step": generator.randint(3, 7), "act": kill_at_random(generator)}
    torchrun = ("--nnodes", "1", "--nproc_per_node", "2", "--master_port", free_port(), "--max-restarts", "2")
    run = train(checkout, script, *ELASTIC, before=torchrun, output=tmp_path, **RESTARTED, **kill)
    assert "resumed after step" in run.output
    assert "will differ" not in run.output
    assert same(run.tensors, uninterrupted.tensors)
    assert same(read(tmp_path / "tiny-ema.safetensors"), read(uninterrupted.folder / "tiny-ema.safetensors"))
    assert log_of(run).summary()["status"] == "DONE"
    assert_all_complete(tmp_path)
    assert not orphans(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(version("rich") < "15", reason="rich draws random numbers for logged lines, more of them in a new process")
def test_torchrun_restarts_two_machines_together(checkout, train, tmp_path):
    uninterrupted = train(checkout, LORA, *EVERYTHING, ranks=2, without=RESTARTED["without"])
    rendezvous = ("--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}", "--rdzv_id", "two")
    torchrun = ("--nnodes", "2", "--nproc_per_node", "1", "--max-restarts", "2", *rendezvous)

    def kill(launcher):
        psutil = pytest.importorskip("psutil")
        (worker,) = (child for child in psutil.Process(launcher).children() if "RANK" in child.environ())
        worker.kill()

    words = (train, checkout, LORA, *ELASTIC)
    first, second = on_two_machines(*words, before=torchrun, output=tmp_path, at_step=5, act=kill, **RESTARTED)
    assert (first.code, second.code) == (0, 0), first.output[-3000:] + second.output[-3000:]
    assert "resumed after step" in first.output + second.output
    assert same(read(tmp_path / "tiny.safetensors"), uninterrupted.tensors)
    assert not orphans(tmp_path)
