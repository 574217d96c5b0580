"""Timing kernels in the first step of a compiled block leaves no memory that later tensors split."""

import pytest

pytestmark = pytest.mark.thorough


def test_the_first_step_reserves_what_a_later_one_does(printed_on_gpu):
    (counted, first, later), own, recorded, full = printed_on_gpu("autotuning_memory.py")
    assert first > later, "what inductor's own timing leaves"
    assert own == [counted, later, later]
    # In torch 2.6, both would end the run.
    assert recorded[0] == full[0] == counted > 0


def test_another_allocator_has_no_pools(printed_on_gpu):
    allocator, timed, obstacle = printed_on_gpu("other_allocator.py", PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    assert (allocator, timed) == ("cudaMallocAsync", "timed")
    assert obstacle.startswith("the allocator cudaMallocAsync has no pool for recordings; remove backend:cudaMallocAsync from ")
