"""The probe for code that dynamo cannot trace, which runs inside the first step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kohya_ext.compiling.graph_breaks import breaks_the_graph


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """Free only what no reference keeps."""
    gc.disable()
    yield
    gc.enable()


def test_a_function_in_one_graph() -> None:
    assert not breaks_the_graph(lambda: (torch.sin, (torch.zeros(2),)))


@pytest.mark.linux("PyTorch for Windows keeps dynamo's frame, with all frames below it, from C")
def test_a_function_that_breaks_the_graph_keeps_no_tensors_of_its_callers() -> None:
    """Otherwise the first step's batch and activations stay in memory until Python's next full garbage collection."""

    def breaking(x: Any) -> Any:
        torch._dynamo.graph_break()
        return x

    def step() -> weakref.ref[torch.Tensor]:
        activation = torch.zeros(2)
        assert breaks_the_graph(lambda: (breaking, (torch.zeros(2),)))
        return weakref.ref(activation)

    assert step()() is None
