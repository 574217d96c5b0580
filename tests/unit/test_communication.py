"""Bytes and seconds of collective operations, without real runs; those are in tests/real/test_communication.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kohya_ext.estimate.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    LINKS,
    REDUCE_SCATTER,
    Collective,
    Engine,
    Exchange,
    Link,
    collectives,
    cost,
)

#: A full fine-tune of SDXL's U-Net.
SDXL = Exchange(Engine.DDP, trained=2_567_463_684, tensors=1_680, processes=2, all_weights=2_567_463_684)
#: 1 GB/s without latency.
SLOW = Link("slow", 1e9, 0.0, "")


def sent(run: Exchange) -> dict[str, float]:
    return {part.operation: part.sent(run.processes) for part in collectives(run)}


@pytest.mark.parametrize(("processes", "share"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_a_ring_sends_each_gradient_to_the_other_processes_and_back(processes: int, share: float) -> None:
    assert sent(replace(SDXL, processes=processes)) == {ALL_REDUCE: pytest.approx(4 * SDXL.trained * share)}


def test_one_process_sends_nothing() -> None:
    assert collectives(replace(SDXL, processes=1)) == ()
    assert cost(replace(SDXL, processes=1), SLOW).seconds(1.0) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("engine", "times"),
    [(Engine.LORA, 1), (Engine.DDP, 4), (Engine.ZERO_1, 1), (Engine.ZERO_2, 4)],
)
def test_accumulated_micro_batches_are_averaged_as_the_engine_does(engine: Engine, times: int) -> None:
    run = replace(SDXL, engine=engine, micro_batches=4)
    assert sent(run)[ALL_REDUCE] == times * sent(replace(run, micro_batches=1))[ALL_REDUCE]


def test_averaging_once_spares_the_other_micro_batches() -> None:
    assert sent(replace(SDXL, micro_batches=4, averages_once=True)) == sent(SDXL)


def test_zero_2_sends_the_weights_in_addition_to_the_gradients() -> None:
    run = replace(SDXL, engine=Engine.ZERO_2, gradient_bytes=2)
    assert sent(run) == {ALL_REDUCE: 2 * SDXL.trained, ALL_GATHER: SDXL.trained}


def test_zero_3_gathers_the_weights_again_that_pass_beyond_the_reuse_distance() -> None:
    run = replace(SDXL, engine=Engine.ZERO_3, gradient_bytes=2, all_weights=3_000_000_000, checkpointing=False)
    assert sent(run) == {ALL_GATHER: 3e9 + 2.5e9, REDUCE_SCATTER: SDXL.trained}
    assert sent(replace(run, reuse_distance=6_000_000_000))[ALL_GATHER] == 3e9
    assert sent(replace(run, reuse_distance=0))[ALL_GATHER] == 6e9


def test_only_what_overlaps_hides_behind_two_thirds_of_the_computation() -> None:
    overlapping = cost(replace(SDXL, trained=1_000_000_000), SLOW)
    assert overlapping.seconds(3.0) == (pytest.approx(3 + 4 - 2), pytest.approx(3 + 4))
    assert overlapping.seconds(9.0)[0] == pytest.approx(9)
    exposed = cost(replace(SDXL, trained=1_000_000_000, engine=Engine.LORA, tensors=1), SLOW)
    assert exposed.seconds(9.0) == (pytest.approx(9 + 4), pytest.approx(9 + 4))


def test_each_tensor_of_a_lora_waits_for_the_latency() -> None:
    run = replace(SDXL, engine=Engine.LORA, trained=1_000_000, tensors=1_000)
    assert cost(run, replace(SLOW, latency=1e-3)).exposed == pytest.approx(1.0 + 4e-3)
    assert cost(replace(run, averages_once=True), replace(SLOW, latency=1e-3)).exposed == pytest.approx(1e-3 + 4e-3)


def test_several_machines_are_as_fast_as_their_network_and_two_of_them_send_half() -> None:
    fast = replace(SLOW, bandwidth=100e9)
    run = replace(SDXL, trained=1_000_000_000, processes=16, machines=4)
    assert cost(run, fast, SLOW).overlapping == pytest.approx(4 * 2 * 15 / 16)
    assert cost(replace(run, machines=2), fast, SLOW).overlapping == pytest.approx(4 * 15 / 16)
    with pytest.raises(ValueError, match="link"):
        cost(run, fast)


def test_offloading_copies_a_part_and_steps_it_on_the_host() -> None:
    run = replace(SDXL, engine=Engine.ZERO_2, trained=1_000_000_000, gradient_bytes=2, offloads_optimizer=True)
    offloaded = cost(run, SLOW, bus=10e9, host_bandwidth=30e9)
    assert offloaded.copied == 0.5e9 * (4 + 2)
    assert offloaded.host == pytest.approx(0.3 + 1e9 * 30 / 30e9)
    assert cost(replace(run, micro_batches=2), SLOW).copied == 0.5e9 * (4 + 2 + 3 * 2)
    whole = replace(run, engine=Engine.ZERO_3, all_weights=1_000_000_000, offloads_weights=True, reuse_distance=0)
    assert cost(whole, SLOW).copied == 0.5e9 * (4 + 2) + 2 * 1e9


def test_machines_share_the_steps_on_the_host() -> None:
    run = replace(SDXL, engine=Engine.ZERO_2, processes=4, machines=2, offloads_optimizer=True)
    together = replace(run, machines=1)
    on_host = [cost(each, SLOW, SLOW, bus=float("inf")).host for each in (run, together)]
    assert on_host[1] == pytest.approx(2 * on_host[0])


def test_every_link_has_a_source_and_faster_ones_follow_in_each_kind() -> None:
    assert all(link.source and link.name == name for name, link in LINKS.items())
    for kind in ("PCIe", "NVLink", "network"):
        bandwidths = [link.bandwidth for name, link in LINKS.items() if kind in name]
        assert bandwidths == sorted(bandwidths)


def test_bytes_are_those_of_the_operation() -> None:
    assert Collective(ALL_GATHER, 8.0, 1, overlaps=True).sent(4) == 6.0
    assert Collective(REDUCE_SCATTER, 8.0, 1, overlaps=True).sent(4) == 6.0
    assert Collective(ALL_REDUCE, 8.0, 1, overlaps=True).sent(4) == 12.0
