"""The loader's thread takes batches from the workers and pins them."""

import pytest

torch = pytest.importorskip("torch")


def test_batches_are_pinned(printed_on_gpu):
    assert printed_on_gpu("pinned_batches.py") == {"upstream": [False] * 3, "ours": [True] * 3}


@pytest.mark.thorough
@pytest.mark.newest
def test_a_run_has_the_random_numbers_of_a_run_without_pinned_batches(checkout, train_on_gpu):
    options = ("--mixed_precision", "bf16", "--max_data_loader_n_workers", "1", "--persistent_data_loader_workers")
    ours, upstream = (train_on_gpu(checkout, "sdxl_train_network.py", *options, *more) for more in (["--auto_data_loader"], []))
    assert "1 persistent worker, pinned batches" in ours.output
    assert [step.random_state for step in ours.steps] == [step.random_state for step in upstream.steps]
    assert [step.syncs for step in ours.steps] <= [step.syncs for step in upstream.steps]
