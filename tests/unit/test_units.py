"""The log of a step and what is read from it: peaks, the allocator's reserve, sizes as people say them."""

import itertools
import random

import pytest

from kohya_ext.config.preset_files import load
from kohya_ext.estimate.allocator import LARGE_SEGMENT, SMALL_SEGMENT, CachingAllocator, least
from kohya_ext.estimate.events import Event, Kind, peak, peak_by_phase
from kohya_ext.units import AUTO, gigabytes, label, read_budget, read_card

MIB = 2**20


def test_a_peak_is_the_moment_with_the_most_bytes_and_its_parts_add_up() -> None:
    kinds = [Kind.WEIGHT, Kind.ACTIVATION, Kind.GRADIENT, Kind.TEMPORARY]
    events = [
        Event(0, 100, "forward"),
        Event(1, 50, "forward"),
        Event(3, 10, "forward"),
        Event(3, -10, "forward"),
        Event(2, 30, "backward"),
        Event(1, -50, "backward"),
        Event(2, -30, "optimizer step"),
    ]
    found = peak(events, kinds)
    assert (found.bytes, found.phase) == (180, "backward")
    assert found.parts == {Kind.WEIGHT: 100, Kind.GRADIENT: 30, Kind.ACTIVATION: 50}
    assert sum(found.parts.values()) == found.bytes
    assert peak_by_phase(events) == {"forward": 160, "backward": 180, "optimizer step": 100}
    assert peak_by_phase(events[1:], 100)["backward"] == 180


def test_small_tensors_share_a_segment_and_large_ones_get_their_own() -> None:
    allocator = CachingAllocator()
    for storage in range(4):
        allocator.allocate(storage, 300)
    assert allocator.reserved == SMALL_SEGMENT
    allocator.allocate(10, 2 * MIB)
    assert allocator.reserved == SMALL_SEGMENT + LARGE_SEGMENT
    allocator.allocate(11, 33 * MIB)
    assert allocator.reserved == SMALL_SEGMENT + LARGE_SEGMENT + 34 * MIB


def test_freed_neighbours_merge_so_that_a_larger_tensor_finds_room() -> None:
    allocator = CachingAllocator()
    for storage in range(4):
        allocator.allocate(storage, 5 * MIB)
    assert allocator.reserved == LARGE_SEGMENT
    for storage in (1, 3, 2):
        allocator.free(storage)
    allocator.allocate(9, 9 * MIB)
    assert allocator.reserved == LARGE_SEGMENT


def test_a_gap_that_is_too_small_costs_a_new_segment() -> None:
    allocator = CachingAllocator()
    for storage in range(4):
        allocator.allocate(storage, 5 * MIB)
    allocator.free(0)
    allocator.free(2)
    allocator.allocate(9, 9 * MIB)
    assert allocator.reserved == 2 * LARGE_SEGMENT


def test_whatever_comes_and_goes_blocks_never_overlap_and_nothing_is_lost() -> None:
    rng = random.Random(1)
    allocator = CachingAllocator()
    live: dict[int, int] = {}
    for storage in range(3000):
        if live and rng.random() < 0.48:
            gone = rng.choice(list(live))
            del live[gone]
            allocator.free(gone)
        else:
            live[storage] = rng.choice((7, 5000, MIB, 3 * MIB, 40 * MIB))
            allocator.allocate(storage, live[storage])
        if storage % 100 == 0:
            spans = sorted((block.address, block.address + block.size) for block in allocator._used.values())
            assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
            free = sum(size for pool in allocator._free.values() for size, _, _ in pool)
            assert free + sum(end - start for start, end in spans) == allocator.reserved
    assert allocator.reserved >= sum(live.values())


@pytest.mark.parametrize("text", ["12", "12g", "12gb", "12GB", "12 GB", "12Gb", "12GiB", "12288MiB", 12, str(12 * 2**30)])
def test_all_spellings_of_a_gpus_size_are_one_gpu(text: object) -> None:
    assert read_card(text) == 12 * 2**30
    assert label(read_card(text)) == "12 GB GPU (12.88e9 bytes)"


@pytest.mark.parametrize(("text", "size"), [("11.5GiB", 23 * 2**29), ("12282MiB", 12282 * 2**20), ("12000000000", 12 * 10**9)])
def test_gib_and_bytes_are_exact(text: str, size: int) -> None:
    assert read_card(text) == size
    assert "GiB GPU" in label(size)


@pytest.mark.parametrize("text", ["", "big", "16MB", "-4", "0", "0GB", "12288", "2000gb", "12 12", "auto", "inf", "nan"])
def test_a_gpus_size_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="for example 12 or 12GB"):
        read_card(text)


@pytest.mark.parametrize("spelling", ["12", "12gb", "12GB", "12 GB"])
def test_a_preset_of_a_size_is_spelt_as_the_gpu_is(spelling: str) -> None:
    assert load([spelling], "sdxl_train.py").label == "sdxl-finetune/12gb"


@pytest.mark.parametrize(
    ("text", "size"),
    [("14GB", 14 * 10**9), ("13 GiB", 13 * 2**30), ("1.5gib", 1536 * MIB), ("800MB", 8 * 10**8), ("auto", AUTO)],
)
def test_a_budget_has_a_unit(text: str, size: int | str) -> None:
    assert read_budget(text) == size


@pytest.mark.parametrize("text", ["14", "", "big", "-4GB", "0GB", "14 G", "50%"])
def test_a_budget_that_cannot_be_read_names_the_right_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"14GB \(14e9 bytes\) or 13GiB \(13 \* 2\*\*30\), or auto"):
        read_budget(text)


def test_gigabytes_are_decimal() -> None:
    assert gigabytes(2**30) == "1.07"


def test_a_full_card_gets_its_empty_segments_back_before_it_gives_up() -> None:
    events = [
        Event(0, 40 * MIB, "forward"),
        Event(0, -40 * MIB, "forward"),
        Event(1, 60 * MIB, "forward"),
        Event(2, 4 * MIB, "forward"),
    ]
    freely = CachingAllocator()
    freely.replay(events)
    assert freely.reserved == 100 * MIB  # the 4 MiB lie in what the 40 left
    capped = CachingAllocator(limit=80 * MIB)
    capped.replay(events)
    assert capped.reserved == 80 * MIB
    with pytest.raises(MemoryError):
        CachingAllocator(limit=79 * MIB).replay(events)
    assert 80 * MIB <= least(events, 64 * MIB, freely.reserved) <= 112 * MIB
