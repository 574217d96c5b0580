"""Options that DeepSpeed cannot work with, and processes that take part in what the first one does."""

import importlib.util
import os
import random
import threading
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from kohya_ext.patches import deepspeed_setup, nan_guard, out_of_memory

from kohya_ext.preflight import deepspeed
from kohya_ext.run import ranks
from kohya_ext.run.atomic_write import final_path, write_together
from kohya_ext.run.leading import Leader

DEFAULTS = {"deepspeed": True, "zero_stage": 2, "offload_optimizer_device": None, "offload_param_device": None}


def problems(script="sdxl_train.py", **args):
    return list(deepspeed.problems(Path(script), Namespace(**{**DEFAULTS, **args})))


@pytest.fixture(autouse=True)
def install(monkeypatch):
    """``install(False)``: deepspeed is not installed."""
    find = importlib.util.find_spec

    def install(installed):
        spec = object() if installed else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: spec if name == "deepspeed" else find(name, *rest))

    install(True)
    return install


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"optimizer_type": "Prodigy"}, "DeepSpeed gives it parts of them; use AdamW"),
        ({"optimizer_type": "Adafactor", "zero_stage": 3}, "--optimizer_type Adafactor and --zero_stage 3"),
        ({"optimizer_type": "AdamWScheduleFree"}, "use AdamW"),
        ({"optimizer_type": "AdamW8bit", "offload_optimizer_device": "cpu"}, "it needs a GPU; use AdamW"),
        ({"use_8bit_adam": True, "offload_optimizer_device": "cpu"}, "it needs a GPU; use AdamW"),
        ({"blocks_to_swap": 4}, "use --zero_stage 3 and --offload_param_device cpu instead"),
        ({"fused_backward_pass": True}, "--deepspeed and --fused_backward_pass"),
        ({"fp8_base": True}, "--deepspeed and --fp8_base"),
        ({"offload_optimizer_device": "cpu", "zero_stage": 1}, "needs --zero_stage 2 or 3, not 1"),
        ({"offload_param_device": "cpu"}, "needs --zero_stage 3, not 2"),
        ({"zero_stage": 3, "sample_every_n_epochs": 1}, "sample from saved models"),
        ({"zero_stage": 3, "scale_weight_norms": 1.0}, "use --zero_stage 2"),
        ({"script": "sdxl_train_control_net_lllite.py"}, "does not support --deepspeed"),
        ({"script": "train_control_net.py"}, "does not support --deepspeed"),
        ({"script": "train_textual_inversion.py"}, "does not support --deepspeed"),
    ],
)
def test_what_deepspeed_cannot_do_is_one_error_with_the_way_out(args, expected):
    (problem,) = problems(**args)
    assert expected in problem


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"optimizer_type": "torch.optim.AdamW", "offload_optimizer_device": "cpu"},
        {"optimizer_type": "AdamW8bit", "zero_stage": 3},
        {"optimizer_type": "Prodigy", "zero_stage": 0},
        {"optimizer_type": "SGDNesterov", "offload_optimizer_device": "cpu", "offload_param_device": "cpu", "zero_stage": 3},
        {"sample_every_n_epochs": 1, "scale_weight_norms": 1.0},
        {"script": "flux_train_control_net.py"},
        {"deepspeed": False, "optimizer_type": "Prodigy", "blocks_to_swap": 4},
    ],
)
def test_what_deepspeed_can_do_is_accepted(args):
    assert problems(**args) == []


def test_missing_package_is_an_error_with_the_install_command(install):
    install(False)
    (problem,) = problems()
    assert problem.endswith("pip install deepspeed ninja")


@pytest.fixture
def leaders():
    """(tasks) -> the agreements of two processes, which run in threads."""
    pytest.importorskip("torch")
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=os.name != "nt")
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}

    def connect(tasks):
        return [Leader(SimpleNamespace(is_main_process=rank == 0), ranks.store(environment), tasks) for rank in range(2)]

    yield connect
    del server


def in_two_processes(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_others_take_part_in_what_the_first_process_does_before_the_next_batch(leaders):
    done = []
    first, second = leaders({"save": lambda folder: done.append((second.is_together, folder, random.random()))})

    def lead():
        for batch in first.batches(None, lambda: iter("ab"), None):
            first.expect()
            if batch == "a":
                with first.together("save", "one"):
                    first.meet()  # a barrier of the task itself
                with first.together("save", "two"):
                    pass

    def follow():
        for batch in second.batches(None, lambda: iter("ab"), None):
            second.expect()
            done.append(batch)

    in_two_processes(lead, follow)
    assert [entry if isinstance(entry, str) else entry[:2] for entry in done] == ["a", (True, "one"), (True, "two"), "b"]


def test_a_task_that_all_processes_reach_follows_earlier_ones_of_the_first(leaders):
    done = []
    first, second = leaders({"save": done.append})

    def lead():
        first.expect()
        for folder in ("alone", "all"):
            with first.together("save", folder):
                pass
        first.meet()

    def follow():
        second.expect()
        second.join("save", "all")
        done.append("next")
        second.meet()

    in_two_processes(lead, follow)
    assert done == ["alone", "all", "next"]


def test_others_exit_when_the_first_process_does(leaders):
    done = []
    first, second = leaders({"save": done.append})

    def lead():
        first.end()
        with first.together("save", "last"):
            pass
        first.on_end()

    def follow():
        second.end()
        done.append("exit")

    in_two_processes(lead, follow)
    assert done == ["last", "exit"]


def test_a_shared_folder_appears_when_every_process_has_written(tmp_path):
    barrier = threading.Barrier(2, timeout=20)
    final = tmp_path / "state"
    (tmp_path / "state.shared.partial").mkdir()
    (tmp_path / "state.shared.partial" / "left").write_text("by a killed run")

    def write(rank):
        def into(folder):
            assert final_path(folder) == final
            (folder / f"{rank}").write_text("shard")
            barrier.wait()
            assert not final.exists()

        return lambda: write_together(final, into, rank == 0, barrier.wait)

    in_two_processes(write(0), write(1))
    assert sorted(path.name for path in final.iterdir()) == ["0", "1"]
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_steps_that_deepspeed_skips_are_counted_but_not_those_that_lower_the_scale(monkeypatch, capsys):
    kind = "DistributedType.DEEPSPEED"
    accelerator = SimpleNamespace(
        distributed_type=kind, mixed_precision="fp16", sync_gradients=True, optimizer_step_was_skipped=True
    )
    values = SimpleNamespace(read_losses=lambda: [0.5], has_norm=False)
    monkeypatch.setattr(nan_guard, "step_values", lambda: values)
    guard = nan_guard.PATCH.on_start(Namespace(), accelerator, {nan_guard.NAN_PATIENCE: 9, "gradient_release": False})
    guard.after_batch(accelerator)
    assert guard.consecutive == 0
    accelerator.mixed_precision = "bf16"
    guard.after_batch(accelerator)
    assert guard.consecutive == 1
    assert "skipped: loss or gradient is not finite (loss 0.5)" in capsys.readouterr().err


def start_with(**args):
    """Start deepspeed_setup in a run on CUDA; return DeepSpeed's configuration."""
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = {}
    plugin = SimpleNamespace(deepspeed_config=config)
    kind, device = "DistributedType.DEEPSPEED", torch.device("cuda")
    before = torch.get_autocast_dtype("cuda")
    usual = {**DEFAULTS, "mixed_precision": "bf16", "optimizer_type": "", "max_grad_norm": 1.0}
    accelerator = SimpleNamespace(distributed_type=kind, device=device, deepspeed_plugin=plugin)
    try:
        deepspeed_setup.PATCH.on_start(Namespace(**{**usual, **args}), accelerator, {})
        return config, torch.get_autocast_dtype("cuda")
    finally:
        torch.set_autocast_dtype("cuda", before)


def test_autocast_has_the_type_of_mixed_precision():
    torch = pytest.importorskip("torch")
    assert start_with() == ({}, torch.bfloat16)
    assert start_with(mixed_precision="fp16") == ({}, torch.float16)
    assert torch.get_autocast_dtype("cuda") is torch.float16


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, {}),
        ({"optimizer_type": "torch.optim.AdamW"}, {}),
        ({"optimizer_type": "SGDNesterov"}, {"zero_force_ds_cpu_optimizer": False}),
        ({"use_lion_optimizer": True}, {"zero_force_ds_cpu_optimizer": False}),
        ({"max_grad_norm": 0.0}, {"gradient_clipping": 0.0}),
    ],
)
def test_offloading_keeps_the_chosen_optimizer_and_clipping_can_be_off(args, expected):
    assert start_with(offload_optimizer_device="cpu", **args)[0] == expected


def test_a_configuration_of_accelerate_alone_is_an_error(capsys):
    with pytest.raises(SystemExit):
        start_with(deepspeed=False)
    assert "add --deepspeed and --zero_stage" in capsys.readouterr().err


def test_after_an_out_of_memory_error_the_next_option_of_deepspeed_is_named():
    args = Namespace(**DEFAULTS, gradient_checkpointing=True)
    named = []
    for name, value in (("offload_optimizer_device", "cpu"), ("zero_stage", 3), ("offload_param_device", "cpu")):
        named.append(out_of_memory._next_option(args))
        setattr(args, name, value)
    assert named == ["--offload_optimizer_device cpu", "--zero_stage 3", "--offload_param_device cpu"]
    assert out_of_memory._next_option(args) == "a GPU"
