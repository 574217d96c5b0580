"""The options of several processes reach accelerate, and mistakes in them are errors before processes start."""

import os
from pathlib import Path

import pytest

from kohya_ext.config.settings import Settings
from kohya_ext.errors import UserError
from kohya_ext.launch import accelerate_signals, processes
from kohya_ext.sdscripts.checkouts import Checkout

SEVERAL = {"num_machines": 2, "machine_rank": 0, "main_process_ip": "10.0.0.1", "main_process_port": 29500}

WRONG = [
    ({"num_processes": 4}, 2, "4 processes need 4 GPUs, but this machine has 2 visible; use --num_processes 2"),
    ({"num_processes": 8, **SEVERAL}, 2, "4 processes need 4 GPUs, but this machine has 2 visible; use --num_processes 4"),
    ({"num_processes": 3, **SEVERAL}, 0, "for 2 on each machine use --num_processes 4"),
    ({"num_processes": 4, **SEVERAL, "machine_rank": 2}, 0, "--machine_rank 2 is too large for 2 machines; use 0 to 1"),
    ({"num_processes": 2, "machine_rank": 1}, 0, "--machine_rank 1 is too large for 1 machine; add --num_machines"),
    ({"num_processes": 4, **SEVERAL, "machine_rank": None}, 0, "up to --machine_rank 1 on the last"),
    ({"num_processes": 4, **SEVERAL, "main_process_ip": None}, 0, "add --main_process_ip 192.168.1.10"),
    ({"num_processes": 4, **SEVERAL, "main_process_port": None}, 0, "add --main_process_port 29500"),
]


@pytest.mark.parametrize(("options", "gpus", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_processes_that_would_not_start_are_an_error(options, gpus, message):
    with pytest.raises(UserError) as error:
        processes.check(Settings(**options), {}, gpus)
    assert message in str(error.value)


def test_processes_that_start_are_accepted():
    processes.check(Settings(num_processes=2), {}, 2)
    processes.check(Settings(num_processes=2), {}, 0)  # on CPUs
    processes.check(Settings(num_processes=4, **SEVERAL), {}, 2)
    config = {"num_processes": 4, "num_machines": 2, "machine_rank": 0, "main_process_ip": "a", "main_process_port": 1}
    processes.check(Settings(), config, 2)
    with pytest.raises(UserError, match="too large"):
        processes.check(Settings(machine_rank=2), config, 2)  # options precede the configuration


@pytest.fixture
def started(monkeypatch, tmp_path):
    """(options) -> the words and the environment of the program that replaces this process."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(processes, "visible_gpus", lambda: 2)
    replaced = []
    monkeypatch.setattr(os, "execve", lambda program, words, environment: replaced.append((words, environment)))
    monkeypatch.setattr(processes.subprocess, "Popen", None)

    def start(**options):
        checkout = Checkout(tmp_path, None, "v0.11", "test")
        with pytest.raises(TypeError):  # the replaced process would not get here
            processes.launch(Settings(**options), checkout, tmp_path / "sdxl_train.py", ["--seed", "1"])
        words, environment = replaced.pop()
        launch = words.index("launch") + 1
        script = words.index("-m", launch)
        return words[launch:script], words[script + 1 :], environment

    return start


@pytest.mark.linux("on Windows the launcher waits for accelerate")
def test_options_reach_accelerate_and_are_repeated_in_each_process(started, monkeypatch, tmp_path):
    theirs, own, environment = started(num_processes=4, **SEVERAL)
    given = ["--num_processes", "4", "--num_machines", "2", "--machine_rank", "0"]
    given += ["--main_process_ip", "10.0.0.1", "--main_process_port", "29500"]
    assert theirs == [*given, "--multi_gpu"]
    assert own == ["kohya_ext", *given, str(tmp_path / "sdxl_train.py"), "--seed", "1"]
    assert not processes.are_wanted(Settings())
    assert processes.are_wanted(Settings(num_processes=4))
    monkeypatch.setattr(os, "environ", environment)
    assert not processes.are_wanted(Settings(num_processes=4))


@pytest.mark.linux("on Windows the launcher waits for accelerate")
def test_a_configuration_decides_how_processes_are_started(started, tmp_path):
    assert started(num_processes=1)[0] == ["--num_processes", "1"]
    default = tmp_path / "accelerate" / "default_config.yaml"
    default.parent.mkdir()
    default.write_text("distributed_type: 'NO'\nnum_processes: 1\n")
    assert started(num_processes=2)[0] == ["--num_processes", "2", "--multi_gpu"]
    default.write_text("distributed_type: DEEPSPEED\nnum_processes: 2\n")
    assert started(num_processes=2)[0] == ["--num_processes", "2"]
    theirs, own, _ = started(accelerate_config=default)
    assert theirs == ["--config_file", str(default)]
    assert own[1:3] == ["--accelerate_config", str(default)]
    default.write_text("a: [")
    with pytest.raises(UserError, match="is not a configuration of accelerate"):
        processes.launch(Settings(accelerate_config=default), None, Path("x"), [])
    with pytest.raises(UserError, match="no such file; write one with `accelerate config"):
        processes.launch(Settings(accelerate_config=tmp_path / "missing.yaml"), None, Path("x"), [])


def test_windows_needs_a_store_without_libuv(monkeypatch):
    """Torch's wheels for Windows have no libuv: the launcher's store is created without, and the processes get a variable."""
    assert accelerate_signals._variables("nt") == {"USE_LIBUV": "0"}
    assert accelerate_signals._variables("posix") == {}
    created = []
    for target in accelerate_signals._ON_WINDOWS:
        module = pytest.importorskip(target.module)
        monkeypatch.setattr(module, "TCPStore", lambda *args, **kwargs: created.append((args, kwargs)))
        monkeypatch.setattr(module, "TCPStore", target.replace(module.TCPStore, Settings()))
    static = pytest.importorskip("torch.distributed.elastic.rendezvous.static_tcp_rendezvous")
    static.TCPStore("127.0.0.1", 29500, 1, True)
    assert created == [(("127.0.0.1", 29500, 1, True), {"use_libuv": False})]


@pytest.mark.parametrize(
    ("variable", "config", "outcome"),
    [
        ("", {}, pytest.raises(UserError, match="2 processes need as many GPUs, and PyTorch finds none here")),
        ("1", {}, pytest.raises(TypeError)),  # it starts, and the replaced process would not get here
        ("", {"use_cpu": True}, pytest.raises(TypeError)),
    ],
)
def test_several_processes_without_gpus_are_an_error_unless_they_train_on_cpus(monkeypatch, variable, config, outcome):
    pytest.importorskip("accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", variable)
    monkeypatch.setattr(processes, "visible_gpus", lambda: 0)
    monkeypatch.setattr(processes, "has_gpu", lambda: False)
    monkeypatch.setattr(processes, "_configuration", lambda file: config)
    monkeypatch.setattr(os, "execve", lambda *command: None)
    monkeypatch.setattr(processes.subprocess, "Popen", None)
    checkout = Checkout(Path("sd-scripts"), "0.11.1", "v0.11", "for this test")
    with outcome:
        processes.launch(Settings(num_processes=2), checkout, Path("sdxl_train.py"), [])
