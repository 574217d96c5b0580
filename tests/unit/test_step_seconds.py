"""The predicted seconds of a step: counted kernels, GPUs by name, the model and what a machine measured."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kohya_ext.patches import step_times
from torch.utils.checkpoint import checkpoint

from benchmarks import step_seconds
from kohya_ext.config.command_line import CommandLine
from kohya_ext.dry_run.tracker import BACKWARD, STEP, Tracker
from kohya_ext.dry_run.work import multi_tensor_launches
from kohya_ext.errors import UserError
from kohya_ext.estimate import gpus, machine, step_time
from kohya_ext.estimate.gpus import FP8, SIXTEEN_BITS
from kohya_ext.estimate.seconds import (
    ATTENTION,
    CONSTANTS,
    CONVOLUTION,
    MASKED_ATTENTION,
    MEMORY,
    Kernels,
    Work,
    by_kind,
    predict,
)
from kohya_ext.installed_gpus import InstalledGpu
from kohya_ext.units import GIB

H100 = gpus.named("H100")

of_linux = pytest.mark.linux("compared with the time that the host needs under Linux")


# --- counting ---------------------------------------------------------------------------------------------------------


def test_a_product_is_one_kernel_with_its_flops_and_bytes_and_a_view_is_none() -> None:
    a, b = torch.zeros(8, 16, dtype=torch.bfloat16), torch.zeros(16, 4, dtype=torch.bfloat16)
    with Tracker() as tracker:
        (a @ b).view(-1)
    (group,) = tracker.work.work().batch
    assert group == Kernels(SIXTEEN_BITS, 1, 2 * 8 * 16 * 4, 2 * (8 * 16 + 16 * 4 + 8 * 4))


def test_attention_and_elementwise_operators_have_their_own_kinds() -> None:
    q = torch.zeros(1, 2, 32, 8, requires_grad=True)
    with Tracker() as tracker:
        torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    kinds = {group.kind for group in tracker.work.work().batch}
    assert {ATTENTION, MEMORY} <= kinds


def test_attention_with_a_mask_is_slower() -> None:
    q, mask = torch.zeros(1, 2, 32, 8, requires_grad=True), torch.ones(1, 1, 1, 32, dtype=torch.bool)
    with Tracker() as tracker:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, mask).sum().backward()
    groups = tracker.work.work().batch
    assert sum(group.count for group in groups if group.kind == MASKED_ATTENTION) >= 2  # forward and backward
    assert ATTENTION not in {group.kind for group in groups}
    for name in ("RTX 3090", "H100"):
        plain, masked = (Work([Kernels(kind, 1, 1e12, 0)], []) for kind in (ATTENTION, MASKED_ATTENTION))
        assert predict(masked, gpus.named(name)).seconds > 1.5 * predict(plain, gpus.named(name)).seconds


@pytest.mark.parametrize(("heads_first", "copies"), [(True, 2), (False, 0)])
def test_the_copies_of_an_output_and_a_gradient_in_attentions_backward_are_kernels(heads_first: bool, copies: int) -> None:
    shape = (1, 2, 256, 64) if heads_first else (1, 256, 2, 64)
    q, gradient = (torch.zeros(shape, dtype=torch.bfloat16).transpose(1, 1 if heads_first else 2) for _ in range(2))
    q.requires_grad_()
    with Tracker() as tracker:
        output = torch.nn.functional.scaled_dot_product_attention(q, q.detach(), q.detach())
        torch.autograd.grad(output, q, gradient)
    groups = tracker.work.work().batch
    assert sum(group.count for group in groups if group.kind == MEMORY) == copies
    assert sum(group.bytes for group in groups if group.kind == MEMORY) == copies * 2 * 2 * q.numel()


@of_linux
def test_waits_come_on_top_of_the_gpus_seconds() -> None:
    work = Work([Kernels(SIXTEEN_BITS, 1, 1e15, 0)], [Kernels(MEMORY, 1000, 0, 1e6)])
    added = predict(replace(work, waits=1000), H100).seconds - predict(work, H100).seconds
    assert added == pytest.approx(1000 * CONSTANTS.wait)


def test_launches_and_waits_cost_more_under_windows_and_launches_on_colab() -> None:
    work = replace(TINY, waits=1000)
    linux, windows, colab = (predict(work, gpus.on(host, H100)) for host in gpus.HOSTS)
    assert windows.parts["host"] - linux.parts["host"] > 1000 * (CONSTANTS.windows_wait - CONSTANTS.wait)
    waits = 1000 * CONSTANTS.wait
    assert colab.parts["host"] - waits == pytest.approx(gpus.HOSTS[gpus.COLAB] * (linux.parts["host"] - waits))


@pytest.mark.parametrize(("platform", "environ", "host"), [
    ("linux", {}, "linux"), ("win32", {}, "windows"), ("linux", {"COLAB_RELEASE_TAG": "release-colab"}, "colab"),
])  # fmt: skip
def test_the_kind_of_this_computer(monkeypatch: pytest.MonkeyPatch, platform: str, environ: dict[str, str], host: str) -> None:
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("os.environ", environ)
    assert gpus.this_host() == host


def test_arithmetic_reaches_more_of_an_ada_gpus_rate_than_of_an_ampere_gpus() -> None:
    fast, slow = (
        gpu.rates[SIXTEEN_BITS] * by_kind(ARITHMETIC, gpu)[SIXTEEN_BITS] for gpu in map(gpus.named, ("RTX 4090", "RTX 3090"))
    )
    assert slow / fast == pytest.approx(CONSTANTS.recent, rel=0.01)


def test_python_launches_forward_and_recomputation_and_the_engine_the_rest() -> None:
    def passes(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    x, gradient = torch.zeros(8, requires_grad=True), torch.ones(8)
    counts = []
    for function in (passes, partial(checkpoint, passes, use_reentrant=False)):
        with Tracker() as tracker:
            y = function(x)
            with tracker.during(BACKWARD):
                y.backward(gradient)
        work = tracker.work.work()
        counts.append((work.from_python, sum(group.count for group in work.batch)))
    (once, kernels), (recomputed, more) = counts
    assert once == 2 < kernels < more
    assert recomputed == 3  # recomputation ends with the last tensor that backward needs: the result of sin


def test_an_optimizers_kernels_are_separate_and_take_many_tensors_each() -> None:
    weights = [torch.zeros(10, requires_grad=True) for _ in range(100)]
    for weight in weights:
        weight.grad = torch.ones(10)
    optimizer = torch.optim.SGD(weights, lr=0.1, foreach=True)
    with Tracker() as tracker, tracker.during(STEP):
        optimizer.step()
    work = tracker.work.work()
    assert not work.batch
    assert sum(group.count for group in work.optimizer) == 2  # 64 of two lists in one launch


@pytest.mark.parametrize(("tensors", "elements", "lists", "launches"), [(110, 1, 1, 1), (111, 1, 1, 2), (1, 65536 * 321, 1, 2)])
def test_launches_over_lists_are_limited_by_tensors_and_by_chunks(
    tensors: int, elements: int, lists: int, launches: int
) -> None:
    values = [torch.empty(elements, device="meta") for _ in range(tensors)]
    assert multi_tensor_launches([values] * lists) == launches


def test_work_is_the_same_after_json() -> None:
    work = Work([Kernels(SIXTEEN_BITS, 3, 4e12, 5e9)], [Kernels(MEMORY, 7, 0, 6e6)], from_python=2, copied=8e9)
    assert Work.from_row(work.as_row()) == work


# --- GPUs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "memory", "card"),
    [
        ("NVIDIA GeForce RTX 4090", None, "RTX 4090"),
        ("4070 ti super", None, "RTX 4070 Ti Super"),
        ("rtx3060", None, "RTX 3060"),
        ("NVIDIA H100 80GB HBM3", None, "H100 SXM"),
        ("NVIDIA H100 PCIe", None, "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", None, "A100 SXM"),
        ("NVIDIA RTX 6000 Ada Generation", None, "RTX 6000 Ada"),
        ("Tesla T4", None, "Tesla T4"),
        ("NVIDIA L4", None, "L4"),
    ],
)
def test_a_gpu_is_found_by_its_name(name: str, memory: int | None, card: str) -> None:
    assert gpus.named(name).name == card


def test_the_size_chooses_between_cards_of_one_name() -> None:
    assert gpus.named("RTX 3080 12GB").memory == 12 * GIB
    card = gpus.find("NVIDIA GeForce RTX 4060 Ti", 16 * GIB - 500_000_000)
    assert card is not None
    assert card.memory == 16 * GIB


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "GTX 1080", "RTX 4071", ""])
def test_an_unknown_gpu_is_no_other_one(name: str) -> None:
    assert gpus.find(name) is None
    with pytest.raises(UserError, match="no rates are known"):
        gpus.named(name)


def test_geforce_cards_multiply_16_bit_numbers_twice_as_fast_as_fp32() -> None:
    for card in gpus.cards():
        if card.is_geforce and card.architecture != "Turing":
            assert card.rates[SIXTEEN_BITS] == pytest.approx(2 * card.rates["fp32"], rel=0.03), card.name


# --- the model --------------------------------------------------------------------------------------------------------

ARITHMETIC = Work([Kernels(SIXTEEN_BITS, 100, 1e14, 1e9)], [])
TINY = Work([Kernels(MEMORY, 100_000, 0, 1e6)], [], from_python=60_000)


def test_a_step_is_limited_by_what_takes_longest() -> None:
    assert predict(ARITHMETIC, H100).limit == "arithmetic"
    assert predict(Work([Kernels(MEMORY, 10, 0, 1e12)], []), H100).limit == "memory"
    assert predict(TINY, H100).limit == "host"
    assert predict(replace(ARITHMETIC, copied=1e12), H100).limit == "bus"


def test_a_step_takes_at_least_as_long_as_its_slowest_part() -> None:
    time = predict(replace(ARITHMETIC, copied=1e9), H100)
    assert max(time.parts.values()) <= time.seconds <= sum(time.parts.values())


def test_copies_in_one_direction_use_the_whole_bus_and_upstreams_pageable_memory() -> None:
    one_way, both = (predict(replace(ARITHMETIC, copied=54e9, returned=size), H100).parts["bus"] for size in (0, 54e9))
    assert one_way == pytest.approx(54e9 / H100.bus)
    assert both == pytest.approx(54 / 7.3 + 54 / 12.5)


@of_linux
def test_graphs_replace_the_hosts_launches_of_the_batch_but_not_of_the_optimizer() -> None:
    work = replace(TINY, optimizer=[Kernels(MEMORY, 1000, 0, 1e6)])
    launched, replayed = predict(work, H100).parts["host"], predict(work, H100, graphs=True).parts["host"]
    launches = CONSTANTS.launch * (60_000 + CONSTANTS.engine_launch * 40_000)
    assert launched - replayed == pytest.approx(launches - CONSTANTS.replay)


def test_accumulation_repeats_the_batch_only() -> None:
    work = replace(ARITHMETIC, optimizer=[Kernels(MEMORY, 1000, 0, 1e9)])
    once, thrice = (predict(work, H100, times).parts for times in (1, 3))
    assert thrice["arithmetic"] == pytest.approx(3 * once["arithmetic"])
    assert thrice["memory"] == pytest.approx(once["memory"])


def test_a_range_is_wider_where_the_host_limits_and_narrower_after_calibrating() -> None:
    host, measured = predict(TINY, H100), predict(TINY, replace(H100, measured=True))
    assert host.factor > predict(ARITHMETIC, H100).factor
    assert host.factor > measured.factor


def test_an_fp8_base_is_slower_where_torch_has_no_product_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's product runs under Windows, and with an old torch on Ada."""
    work = Work([Kernels(FP8, 100, 1e14, 1e9)], [])
    card = gpus.on(gpus.LINUX, gpus.named("RTX 4090"))
    by_torch, under_windows = (predict(work, each).parts["arithmetic"] for each in (card, gpus.on(gpus.WINDOWS, card)))
    assert under_windows > 1.1 * by_torch
    monkeypatch.setattr(gpus, "_is_older_than_2_7", lambda: True)
    assert predict(work, card).parts["arithmetic"] == pytest.approx(under_windows)
    assert not gpus.on(gpus.LINUX, H100).multiplies_fp8_with_triton


@pytest.mark.parametrize("architecture", ["Turing", "7.5", "7.0"])
def test_gpus_before_ampere_have_no_int8_kernels(architecture: str) -> None:
    """Also a measured one, which has its compute capability instead of the architecture's name."""
    assert H100.reason_without_kernels("int8") is None
    assert "has no kernels for an int8 base" in str(replace(H100, architecture=architecture).reason_without_kernels("int8"))


@of_linux
def test_the_gpus_busy_seconds_are_those_measured_on_an_h100() -> None:
    """The rows of benchmarks/results/gpu_time.json: the worst is 14 % off, and with compiled blocks 20 %."""
    rows = [figure for figure in step_seconds.figures() if figure.busy is not None]
    shipped = step_seconds.Fit(CONSTANTS, {})
    assert len(rows) >= 18
    for figure in rows:
        error = 0.21 if "--selective_torch_compile" in figure.arguments else 0.15
        assert shipped.busy(figure) == pytest.approx(figure.busy, rel=error), figure.comment


# --- held-out figures ---------------------------------------------------------------------------------------------------


def test_held_out_figures_share_no_page_with_the_figures_of_the_fit() -> None:
    fitted, held_out = step_seconds.figures(), step_seconds.figures(step_seconds.HELD_OUT)
    assert len(held_out) >= 9
    assert not {figure.source for figure in fitted} & {figure.source for figure in held_out}
    assert {figure.trainer for figure in held_out} == {"sd-scripts"}


def test_held_out_figures_are_predicted_with_the_constants_of_kohya_ext(capsys: pytest.CaptureFixture[str]) -> None:
    held_out = step_seconds.figures(step_seconds.HELD_OUT)
    shipped = step_seconds.Fit(CONSTANTS, gpus.HOSTS)
    for figure in held_out:
        if figure.source in step_seconds.OURS:
            continue
        first = figure.comment.split(",")[0].split()[0].lower()
        host = first if first in gpus.HOSTS else gpus.LINUX
        assert shipped.predict(figure) == predict(figure.work, gpus.on(host, figure.gpu), figure.micro_batches)
    step_seconds.report("held out", [(figure, shipped.predict(figure)) for figure in held_out])
    assert f"held out: {len(held_out)} figures, median error" in capsys.readouterr().out


def test_recorded_steps_of_an_h200_take_the_predicted_seconds() -> None:
    """The rows of benchmarks/results/gpu_time_h200.json, which no fit uses. Lumina 2 ran eager and is 11 and 16% off."""
    shipped = step_seconds.Fit(CONSTANTS, {})
    rows = [figure for figure in step_seconds.figures(step_seconds.HELD_OUT) if figure.source == "gpu_time_h200.json"]
    assert sum(figure.graphs for figure in rows) == 5
    for figure in rows:
        assert shipped.busy(figure) == pytest.approx(figure.busy, rel=0.17), figure.comment
        if figure.graphs:
            assert shipped.predict(figure).seconds == pytest.approx(figure.seconds, rel=0.07), figure.comment


def test_kernels_are_counted_for_both_files_and_once_for_a_command_that_both_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counted = []

    def estimate(_checkout: object, command: CommandLine, **_options: object) -> SimpleNamespace:
        counted.append(command.argv)
        return SimpleNamespace(work={})

    files = {"FIGURES": ("--network_dim 4", "--network_dim 8", "--seed 1"), "HELD_OUT": ("--network_dim 8", "--network_dim 16")}
    for name, commands in files.items():
        rows = "".join(f"train_network.py\t{arguments}\n" for arguments in commands)
        (tmp_path / name).write_text(f"script\targuments\n{rows}", encoding="utf-8")
        monkeypatch.setattr(step_seconds, name, tmp_path / name)
    monkeypatch.setattr(step_seconds, "OUTPUT", tmp_path / "counted.json")
    step_seconds.OUTPUT.write_text("{}", encoding="utf-8")
    checkout = SimpleNamespace(layout=step_seconds.LAYOUT, script=Path)
    monkeypatch.setattr("benchmarks.step_seconds.checkouts.registered", lambda: [checkout])
    monkeypatch.setattr("benchmarks.step_seconds.estimation.estimate", estimate)
    step_seconds.count("--network_dim")
    assert counted == [["--network_dim", "4"], ["--network_dim", "8"], ["--network_dim", "16"]]
    assert len(json.loads(step_seconds.OUTPUT.read_text(encoding="utf-8"))) == 3


# --- this machine -----------------------------------------------------------------------------------------------------

MEASURED = {
    "products": {SIXTEEN_BITS: 7e13}, "bandwidth": 9e11, "bus": 2.5e10, "cache": 6e6, "memory": 24 * GIB,
    "launch_microseconds": 2 * machine.REFERENCE_LAUNCH, "architecture": "8.6",
}  # fmt: skip


@pytest.fixture
def rtx_3090(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A machine with this GPU and an empty cache."""
    name = "NVIDIA GeForce RTX 3090"
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "first_gpu", lambda: InstalledGpu(name, 24 * GIB, 8.6, "GPU-1"))
    return name


def test_calibrated_rates_replace_those_of_the_table(rtx_3090: str) -> None:
    before = machine.gpu()
    assert before is not None
    assert before.bandwidth == gpus.named("RTX 3090").bandwidth
    machine.keep_measured(rtx_3090, MEASURED)
    after = machine.named("RTX 3090")
    assert (after.measured, after.launch, after.bus) == (True, 2.0, 2.5e10)
    assert CONSTANTS.product * after.rates[SIXTEEN_BITS] == pytest.approx(7e13)
    assert machine.named("RTX 4090") == gpus.named("RTX 4090")  # another GPU's rates stay those of the table


def test_a_gpu_outside_the_table_is_known_once_it_was_measured(rtx_3090: str) -> None:
    name = "NVIDIA GeForce RTX 4090 Laptop GPU"
    assert machine.of(name) is None
    machine.keep_measured(name, MEASURED)
    card = machine.of(name)
    assert card is not None
    assert predict(ARITHMETIC, card).seconds == pytest.approx(1e14 / 7e13, rel=0.05)


@pytest.mark.parametrize("kind", [SIXTEEN_BITS, CONVOLUTION, ATTENTION, MASKED_ATTENTION])
@pytest.mark.parametrize("name", ["RTX 3090", "RTX 4090", "RTX 2080 Ti", "H100"])
def test_a_gpu_that_reaches_what_is_assumed_takes_as_long_once_it_was_measured(name: str, kind: str) -> None:
    work, table = Work([Kernels(kind, 1, 1e14, 0)], []), gpus.named(name)
    products = by_kind(Work([Kernels(SIXTEEN_BITS, 1, 1e14, 0)], []), table)[SIXTEEN_BITS]
    rates = {SIXTEEN_BITS: 1e14 / products / CONSTANTS.product}
    measured = replace(table, rates={**table.rates, **rates}, measured=True)
    assert predict(work, measured).seconds == pytest.approx(predict(work, table).seconds, rel=0.01)


def test_a_gpu_in_another_kind_of_computer_is_not_this_machines(rtx_3090: str) -> None:
    machine.keep_measured(rtx_3090, MEASURED)
    chosen = machine.chosen({"gpu": "RTX 3090", "gpu_host": "colab"})
    assert chosen == gpus.on("colab", gpus.named("RTX 3090"))
    assert "on the RTX 3090 on Google Colab" in step_time.lines(predict(TINY, chosen), chosen)[0]
    assert machine.chosen({"gpu": "RTX 3090"}) == machine.gpu()
    assert machine.chosen({}) is None
    with pytest.raises(UserError, match="give its name"):
        machine.chosen({"gpu_host": "windows"})


def test_real_runs_correct_the_prediction_until_the_next_calibration(rtx_3090: str) -> None:
    assert machine.correction(rtx_3090) == 1.0
    for ratio in (1.1, 1.3, 1.2):
        machine.keep_ratio(rtx_3090, ratio)
    assert machine.correction(rtx_3090) == 1.2
    machine.keep_measured(rtx_3090, MEASURED)
    assert machine.correction(rtx_3090) == 1.0


@pytest.mark.parametrize("end", ["on_exit", "on_end"])
def test_a_run_keeps_the_ratio_of_its_steps_once_it_ends(rtx_3090: str, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    clock = step_times._Clock("key", rtx_3090, predicted=2.0)
    now = iter(range(0, 1000, 3))
    monkeypatch.setattr(step_times.time, "monotonic", lambda: next(now))
    for _ in range(12):
        clock.after_batch(SimpleNamespace(sync_gradients=True))
    getattr(clock, end)()
    assert machine.correction(rtx_3090) == 1.5
