"""Failures that processes publish for each other."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kohya_ext.run import ranks
from kohya_ext.run.ranks import Failure, FailureWatch

torch = pytest.importorskip("torch")


@pytest.fixture
def connections(monkeypatch):
    """(rank) -> a watch of that process, connected to a store of this test."""
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=os.name != "nt")
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    device = torch.device("cpu")

    def connect(rank, **more):
        accelerator = SimpleNamespace(process_index=rank, is_main_process=rank == 0, device=device, num_processes=2)
        return FailureWatch(accelerator, ranks.store({**environment, **more}))

    yield connect
    del server


def test_first_failure_reaches_the_others_as_the_reason(connections):
    first, second = connections(0), connections(1)
    assert first._read() is None
    second.fail("out of memory", "forward", keeps_state=True)
    first.fail("a later failure")
    expected = Failure(f"{ranks.name(1)}: out of memory", 1, "forward", True)
    assert first.failure == second.failure == first._read() == expected
    disconnected = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")
    assert first.explain(disconnected) == expected.reason
    assert second.explain(ValueError("own problem")) == "ValueError: own problem"


def test_error_of_a_process_is_published_and_a_lost_connection_is_not_its_own(connections, monkeypatch):
    monkeypatch.setattr(ranks, "GRACE", 0.0)
    first, second = connections(0), connections(1)
    reason = first.explain(RuntimeError("Connection reset by peer"))
    assert reason == "another process of this run has ended (RuntimeError: Connection reset by peer)"
    assert second._read() is None
    assert second.explain(ValueError("a damaged image\nand more")) == "ValueError: a damaged image"
    assert first._read() == Failure(f"{ranks.name(1)}: ValueError: a damaged image", 1)


def test_a_restart_does_not_get_the_failure_of_the_start_before(connections):
    connections(1).fail("killed")
    assert connections(0)._read() is not None
    assert connections(0, TORCHELASTIC_RESTART_COUNT="1")._read() is None


def test_restarts_of_several_machines_have_a_store_of_their_own():
    restarted = {"TORCHELASTIC_RESTART_COUNT": "2"}
    assert ranks.attempt({}) == 0
    assert ranks.attempt(restarted) == ranks.attempt({**restarted, "GROUP_WORLD_SIZE": "1"}) == 2
    assert ranks.attempt({**restarted, "GROUP_WORLD_SIZE": "2"}) == 0


def test_processes_share_random_states(connections):
    first, second = connections(0), connections(1)
    second.share("part", [3, {"random": torch.get_rng_state(), "python": (3, (1, 2), None)}])
    step, part = first.fetch("part", 5)
    assert (step, part["python"]) == (3, (3, (1, 2), None))
    assert torch.equal(part["random"], torch.get_rng_state())
    assert first.fetch("missing", 0.1) is None


#: A process whose main thread waits forever, as in a collective operation with NCCL.
WAITS = """
import os, threading
from types import SimpleNamespace
import torch
from kohya_ext.patching import training_loop
from kohya_ext.patching.training_loop import TrainingCallback, TrainingRun
from kohya_ext.run import ranks

class Saver(TrainingCallback):
    def on_peer_failure(self, failure):
        print("saved after", failure.reason, threading.current_thread() is threading.main_thread(), flush=True)

ranks.INTERVAL, ranks.GRACE = 0.05, 0.1
device = torch.device("cpu")
accelerator = SimpleNamespace(process_index=0, is_main_process=True, device=device, num_processes=2)
training_loop._current = TrainingRun(accelerator, callbacks=[Saver()])
ranks.FailureWatch(accelerator, ranks.store(os.environ)).listen()
print("waiting", flush=True)
threading.Event().wait()
"""


def test_process_that_waits_for_a_failed_process_saves_its_part_and_ends(connections):
    other = connections(1)
    port = other.connection.underlying_store.port
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == "waiting\n"
    other.fail("killed")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output == f"saved after {ranks.name(1)}: killed False\n"
    assert errors == f"kohya_ext: error: {ranks.name(1)}: killed; this process ends\n"
