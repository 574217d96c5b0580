"""Plans for several GPUs, with a formula instead of estimates, without torch or sd-scripts."""

# ruff: noqa: F811

import json
from dataclasses import replace

import pytest

from kohya_ext import installed_gpus
from kohya_ext.__main__ import main
from kohya_ext.config.command_line import CommandLine
from kohya_ext.dry_run import estimation
from kohya_ext.errors import UserError
from kohya_ext.estimate import gpus, memory_config
from kohya_ext.estimate.result import COMMUNICATION_BYTES, CONTEXT_BYTES, Estimate
from kohya_ext.estimate.seconds import Kernels, Work
from kohya_ext.planning import several_gpus
from kohya_ext.planning.several_gpus import Machine
from kohya_ext.reporting.several_gpus import read_gpus, words
from kohya_ext.units import GIB
from tests.unit.test_plan import FULL, LORA, checkout  # noqa: F401

GPU = gpus.named("RTX 3090")
WEIGHTS = 2_500_000_000


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """Replace estimates by a formula: the training state and 2 GB for each image; return the configurations."""
    seen = []

    def formula(checkout, command, timed):
        config = memory_config.normalized(memory_config.read(command)[0])
        seen.append(config)
        half = config.full_bf16 or config.deepspeed
        on_gpu = 8.0 - 4 * config.full_bf16
        host = 0.0
        if config.deepspeed:
            processes = config.num_processes or 1
            parts = {2: 2 + 16 / processes, 3: 20 / processes}[config.zero_stage]
            if config.offload_optimizer_device:
                parts, host = {2: 2, 3: 2 / processes}[config.zero_stage], 18 / processes
            if config.offload_param_device:
                parts, host = 0, 20 / processes
            on_gpu = parts
        size = round(on_gpu * WEIGHTS) + config.train_batch_size * 2 * 10**9
        work = Work([Kernels("16 bits", 1000, 25e12 * config.train_batch_size * (1 if half else 1.2), 1e10)], [])
        return Estimate(
            config.key(), size, size, size, "backward", {}, {}, 1, WEIGHTS, {}, checkout.layout, work.as_row(),
            host={"weights": round(host * WEIGHTS)} if host else {},
        )  # fmt: skip

    monkeypatch.setattr(estimation, "estimate", formula)
    return seen


def plan(checkout, argv, size, count=2, host=None, script=FULL):
    command = CommandLine(checkout.script(script), argv, {})
    return several_gpus.plan(checkout, command, Machine(count, size * GIB, GPU, host), lambda line: None)


def test_the_answer_is_the_fastest_that_fits_and_updates_the_weights_in_fp32(checkout):
    result = plan(checkout, [], 24)
    assert result.answer.candidate.name == "DDP"
    assert words(result.answer) == [
        *("python", "-m", "kohya_ext", "--num_processes", "2", FULL, "--preset", "sdxl-finetune/base"),
        "--ddp_gradient_as_bucket_view",
    ]
    times = [option.seconds_per_image for option in result.others if option.is_close]
    assert times == sorted(times)
    assert result.answer.seconds_per_image <= times[0]
    assert not result.others[-1].is_close
    assert result.alone.candidate.name == "one GPU, preset sdxl-finetune/24gb"
    assert result.alone in result.others
    assert result.together is result.answer


def test_one_gpu_is_the_answer_where_it_is_faster(checkout, monkeypatch, capsys):
    """As where the GPUs exchange data over slow slots."""
    slow = several_gpus.communication.Link("slow", 1e8, 1e-3, "for this test")
    monkeypatch.setattr(Machine, "link", property(lambda machine: slow))
    result = plan(checkout, [], 24)
    assert result.answer is result.alone
    assert result.answer.seconds_per_image < result.together.seconds_per_image
    assert words(result.answer) == ["python", "-m", "kohya_ext", FULL, "--preset", "24gb"]
    argv = ["plan", "--sd-scripts", str(checkout.path), "--gpus", "2x RTX 3090", FULL]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert f"One GPU is faster than 2: {result.answer.seconds_per_image:.2f} s per image on one of them" in printed
    assert f"To run it:\n  python -m kohya_ext {FULL} --preset 24gb\n" in printed
    low, high = result.answer.seconds
    assert (f"s per image, {low:.2f} s per step of 2 images\n" in printed) == (f"{low:.2f}" == f"{high:.2f}")
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"] == f"python -m kohya_ext {FULL} --preset 24gb"


def test_a_faster_row_below_the_answer_has_its_reason(checkout, capsys):
    assert plan(checkout, [], 24).others[-1].candidate.name == "DDP, pure bf16"
    argv = ["plan", "--sd-scripts", str(checkout.path), "--gpus", "2x RTX 3090", FULL, "--verbose"]
    assert main(argv) == 0
    assert "faster, but less precise: DDP, pure bf16" in capsys.readouterr().out
    argv[argv.index("2x RTX 3090")] = "2x RTX 4080"
    assert main(argv) == 0
    assert "One GPU is faster, but stores weights only in bf16: " in capsys.readouterr().out


def test_a_smaller_gpu_moves_the_optimizer_to_the_host_before_it_rounds_weights(checkout):
    result = plan(checkout, [], 16)
    assert result.together.candidate.name.endswith("on the host")
    assert result.together.host >= 18 * WEIGHTS
    rounded = [option.candidate.name for option in result.others if not option.is_close]
    assert rounded == ["DDP, pure bf16", result.alone.candidate.name]


def test_what_exceeds_the_host_is_no_answer(checkout):
    assert plan(checkout, [], 16, host=32 * 10**9).answer.candidate.name == "DDP, pure bf16"
    with pytest.raises(UserError, match=r"fits the GPUs, but needs 45\.00 GB of host memory, and the machine has 32\.00 GB"):
        plan(checkout, ["--optimizer_type", "AdamW", "--no-full_bf16"], 16, host=32 * 10**9)


def test_the_effective_batch_stays(checkout, asked):
    result = plan(checkout, ["--train_batch_size", "8", "--gradient_accumulation_steps", "2"], 24)
    assert result.answer.images == result.wanted == 16
    config = memory_config.read(result.answer.candidate.command)[0]
    assert config.train_batch_size * config.gradient_accumulation_steps == 8
    with_ddp = [config.train_batch_size for config in asked if not config.deepspeed and not config.full_bf16]
    assert with_ddp == [8, 4, 2, 1]
    assert plan(checkout, ["--train_batch_size", "8"], 48, count=4).answer.images == 8
    assert plan(checkout, [], 24, count=4).answer.images == 4  # one image on each GPU at least


def test_states_that_cannot_fit_are_not_estimated(checkout, asked):
    plan(checkout, [], 16)
    assert not [config for config in asked if config.deepspeed and not config.offload_optimizer_device]


def test_options_that_no_engine_takes_are_an_error(checkout):
    with pytest.raises(UserError, match="remove --fused_backward_pass"):
        plan(checkout, ["--fused_backward_pass"], 24)


def test_a_network_keeps_its_tier_with_a_process_for_each_gpu(checkout):
    result = plan(checkout, [], 24, script=LORA)
    assert words(result.together)[3:8] == ["--num_processes", "2", LORA, "--preset", "24gb"]
    assert result.together.engine is several_gpus.Engine.LORA


def test_nothing_fits_says_what_the_smallest_needs(checkout):
    with pytest.raises(UserError, match=r"nothing fits 2 times the 2 GB GPU .* needs 3\.00 GB on each"):
        plan(checkout, [], 2)


def test_several_processes_need_memory_for_their_communication():
    estimate = Estimate({"num_processes": 2}, 1, 1, 1, "forward", {}, {}, 1, 1, {}, "v0.11")
    assert estimate.total == 1 + CONTEXT_BYTES + COMMUNICATION_BYTES
    assert replace(estimate, config={}).total == 1 + CONTEXT_BYTES


def test_gpus_are_named_by_size_or_name():
    assert read_gpus("2x24GB")[:2] == (2, 24 * GIB)
    count, size, gpu = read_gpus("4x RTX 4090")
    assert (count, size, gpu.name) == (4, 24 * GIB, "RTX 4090")
    for wrong in ("24GB", "1x24GB", "2x"):
        with pytest.raises(UserError, match="2x24GB"):
            read_gpus(wrong)


@pytest.mark.parametrize(
    ("name", "link"),
    [("RTX 3090", "PCIe 4, host memory"), ("RTX 5090", "PCIe 5"), ("RTX 2060", "PCIe 3, host memory"),
     ("A100 80GB", "NVLink A100"), ("H100", "NVLink H100"), ("A100 PCIe", "PCIe 4")],
)  # fmt: skip
def test_the_link_is_the_usual_one_of_a_gpu(name, link):
    assert Machine(2, 24 * GIB, gpus.named(name)).link.name == link


def test_the_command_prints_the_host_memory_and_a_line_to_paste(checkout, monkeypatch, capsys):
    monkeypatch.setattr(installed_gpus, "visible_gpus", lambda: 0)
    argv = ["plan", "--sd-scripts", str(checkout.path), "--gpus", "2x16GB", FULL]
    monkeypatch.setattr(several_gpus, "known_tiers", lambda *_: [])
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "45.00 GB of host memory, of all processes; the machine's memory: not known" in " ".join(printed.split())
    assert (
        printed.partition("To run it:")[2]
        .strip()
        .startswith("python -m kohya_ext --num_processes 2 sdxl_train.py --preset zero")
    )
    assert main([*argv, "--json", "--host_memory", "32GB"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["answer"]["name"] == "DDP, pure bf16"
    assert document["command"].startswith("python -m kohya_ext --num_processes 2")
