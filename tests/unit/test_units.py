"""Peaks of a log, the caching allocator's model, and memory sizes on the command line."""

import itertools
import random

import pytest

from kohya_ext.config.preset_files import load
from kohya_ext.dry_run.allocator import LARGE_SEGMENT, SMALL_SEGMENT, CachingAllocator, ExpandableAllocator, minimum_reserved
from kohya_ext.dry_run.events import Event, Kind, peak
from kohya_ext.units import AUTO, gigabytes, label, read_budget, read_card

MIB = 2**20


def test_peak_has_the_most_bytes_and_parts_that_add_up() -> None:
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
    highest = peak(events, kinds)
    assert (highest.bytes, highest.phase) == (180, "backward")
    assert highest.parts == {Kind.WEIGHT: 100, Kind.GRADIENT: 30, Kind.ACTIVATION: 50}
    assert sum(highest.parts.values()) == highest.bytes


def test_small_tensors_share_a_segment_and_large_ones_do_not() -> None:
    allocator = CachingAllocator()
    for storage in range(4):
        allocator.allocate(storage, 300)
    assert allocator.reserved == SMALL_SEGMENT
    allocator.allocate(10, 2 * MIB)
    assert allocator.reserved == SMALL_SEGMENT + LARGE_SEGMENT
    allocator.allocate(11, 33 * MIB)
    assert allocator.reserved == SMALL_SEGMENT + LARGE_SEGMENT + 34 * MIB


def test_freed_neighbours_merge_for_a_larger_tensor() -> None:
    allocator = CachingAllocator()
    for storage in range(4):
        allocator.allocate(storage, 5 * MIB)
    assert allocator.reserved == LARGE_SEGMENT
    for storage in (1, 3, 2):
        allocator.free(storage)
    allocator.allocate(9, 9 * MIB)
    assert allocator.reserved == LARGE_SEGMENT


def test_a_gap_that_is_too_small_needs_a_new_segment() -> None:
    allocator = CachingAllocator()
    for storage in range(4):
        allocator.allocate(storage, 5 * MIB)
    allocator.free(0)
    allocator.free(2)
    allocator.allocate(9, 9 * MIB)
    assert allocator.reserved == 2 * LARGE_SEGMENT


def test_random_allocations_never_overlap_and_add_up() -> None:
    rng = random.Random(1)
    allocator = CachingAllocator()
    live: dict[int, int] = {}
    for storage in range(3000):
        if live and rng.random() < 0.48:
            freed = rng.choice(list(live))
            del live[freed]
            allocator.free(freed)
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
def test_spellings_of_a_gpu_size_are_equal(text: object) -> None:
    assert read_card(text) == 12 * 2**30
    assert label(read_card(text)) == "12 GB GPU (12.88e9 bytes)"


@pytest.mark.parametrize(("text", "size"), [("11.5GiB", 23 * 2**29), ("12282MiB", 12282 * 2**20), ("12000000000", 12 * 10**9)])
def test_gib_mib_and_bytes_are_exact(text: str, size: int) -> None:
    assert read_card(text) == size
    assert "GiB GPU" in label(size)


@pytest.mark.parametrize("text", ["", "big", "16MB", "-4", "0", "0GB", "12288", "2000gb", "12 12", "auto", "inf", "nan"])
def test_an_invalid_gpu_size_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="for example 12 or 12GB"):
        read_card(text)


@pytest.mark.parametrize("spelling", ["12", "12gb", "12GB", "12 GB"])
def test_a_preset_accepts_the_spellings_of_a_gpu_size(spelling: str) -> None:
    assert load([spelling], "sdxl_train.py").label == "sdxl-finetune/12gb"


@pytest.mark.parametrize(
    ("text", "size"),
    [("14GB", 14 * 10**9), ("13 GiB", 13 * 2**30), ("1.5gib", 1536 * MIB), ("800MB", 8 * 10**8), ("auto", AUTO)],
)
def test_a_budget_needs_a_unit(text: str, size: int | str) -> None:
    assert read_budget(text) == size


@pytest.mark.parametrize("text", ["14", "", "big", "-4GB", "0GB", "14 G", "50%"])
def test_an_invalid_budget_is_an_error_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"14GB \(14e9 bytes\) or 13GiB \(13 \* 2\*\*30\), or auto"):
        read_budget(text)


def test_gigabytes_are_decimal() -> None:
    assert gigabytes(2**30) == "1.07"


def test_private_pools_share_no_segments_and_keep_theirs() -> None:
    allocator = CachingAllocator()
    allocator.replay([Event(0, 40 * MIB, "forward"), Event(0, -40 * MIB, "forward")])
    allocator.replay([Event(1, 30 * MIB, "forward", 1)])
    assert allocator.reserved == 70 * MIB
    allocator.free(1)
    allocator.release_unused()
    assert allocator.reserved == 30 * MIB
    allocator.allocate(2, 30 * MIB)
    assert allocator.reserved == 60 * MIB
    allocator.free(2)
    allocator.release_unused(1)
    assert allocator.reserved == 30 * MIB, "the pool has ended"


def test_expandable_segments_grow_in_pages_and_fill_their_gaps() -> None:
    fixed, expandable = CachingAllocator(), ExpandableAllocator()
    for allocator in (fixed, expandable):
        for size in (30, 50, 70):  # images of growing sizes
            allocator.replay([Event(size, size * MIB, "forward"), Event(size, -size * MIB, "forward")])
    assert (fixed.reserved, expandable.reserved) == (150 * MIB, 80 * MIB)  # the 70 in pages of 20
    for number, size in enumerate((25, 45, 25)):
        expandable.allocate(number, size * MIB)
    expandable.free(1)
    expandable.allocate(3, 50 * MIB)  # the gap of 45 is too small, and the segment grows at its end
    assert (expandable.allocated, expandable.reserved) == (100 * MIB, 160 * MIB)
    expandable.release_unused()
    assert expandable.reserved == 140 * MIB  # the gap, from 25 to 70, contains one whole page
    expandable.allocate(4, 45 * MIB)
    assert expandable.reserved == 160 * MIB  # the gap again, with a page


def test_small_tensors_have_expandable_segments_of_their_own() -> None:
    allocator = ExpandableAllocator()
    allocator.allocate(0, MIB)
    allocator.allocate(1, 3 * MIB)
    assert allocator.reserved == SMALL_SEGMENT + LARGE_SEGMENT
    with pytest.raises(MemoryError):
        ExpandableAllocator(limit=SMALL_SEGMENT).allocate(0, 3 * MIB)


@pytest.mark.parametrize("seed", range(5))
def test_expandable_segments_hold_any_log(seed: int) -> None:
    generator = random.Random(seed)
    allocator = ExpandableAllocator()
    used: dict[int, int] = {}
    for number in range(600):
        if used and generator.random() < 0.48:
            storage = generator.choice([*used])
            allocator.free(storage)
            del used[storage]
        else:
            used[number] = generator.choice((512, 2**18, 2**20, 3 * 2**20, 11 * 2**20, 50 * 2**20))
            allocator.allocate(number, used[number])
        if generator.random() < 0.05:
            allocator.release_unused()
        assert allocator.allocated == sum(used.values()) <= allocator.reserved
    blocks = sorted(allocator._used.values(), key=lambda block: (block.pool, block.address))
    assert all(a.pool != b.pool or a.address + a.size <= b.address for a, b in itertools.pairwise(blocks))
    for storage in used:
        allocator.free(storage)
    allocator.release_unused()
    assert allocator.reserved == 0


def test_a_full_gpu_releases_unused_segments_before_failing() -> None:
    events = [
        Event(0, 40 * MIB, "forward"),
        Event(0, -40 * MIB, "forward"),
        Event(1, 60 * MIB, "forward"),
        Event(2, 4 * MIB, "forward"),
    ]
    unlimited = CachingAllocator()
    unlimited.replay(events)
    assert unlimited.reserved == 100 * MIB  # the 4 MiB reuse the segment of the 40
    capped = CachingAllocator(limit=80 * MIB)
    capped.replay(events)
    assert capped.reserved == 80 * MIB
    with pytest.raises(MemoryError):
        CachingAllocator(limit=79 * MIB).replay(events)
    assert 80 * MIB <= minimum_reserved(lambda allocator: allocator.replay(events), 64 * MIB, unlimited.reserved) <= 112 * MIB
