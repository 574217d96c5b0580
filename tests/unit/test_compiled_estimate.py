"""The log of compiled code on fake tensors: inductor's decisions for a GPU, and only the logged step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _triton

from kohya_ext.config.settings import Settings
from kohya_ext.errors import UserError
from kohya_ext.estimate import fake_gpu
from kohya_ext.estimate.compiled import BACKEND, logging_to, traceable
from kohya_ext.estimate.events import Event
from kohya_ext.estimate.measurement import tracing
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.estimate.tracker import Tracker

ROWS, WIDTH = 64, 256


def logged(function: Callable[[Any], Any]) -> list[Event]:
    """Compile a function of a bf16 tensor in a first call, and return the events of a second one."""
    mode, tracker = traceable(), Tracker()
    with mode, logging_to(mode, tracker):
        given = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        compiled = torch.compile(function, backend=BACKEND)
        kept = compiled(given)
        tracker.forget()
        del kept
        with tracker:
            result = compiled(given)
        events = [*tracker.events]
        del result
    return events


def rotated(given: Any) -> Any:
    """Return the halves exchanged, as rotary position embeddings do, in float32."""
    first, second = given.chunk(2, dim=-1)
    return torch.cat((-second, first * 2), dim=-1).float()


def test_a_concatenation_is_fused_with_its_reader() -> None:
    """As in the code that inductor generates for a GPU. For a CPU it keeps the concatenation in memory."""
    pytest.importorskip("triton")
    assert [event.bytes for event in logged(rotated)] == [4 * ROWS * WIDTH]


def test_the_call_that_compiles_is_not_in_the_log() -> None:
    pytest.importorskip("triton")
    events = logged(lambda given: (given.sin() @ given.cos().T).float())
    allocated = {event.storage for event in events if event.bytes > 0}
    assert allocated
    assert {event.storage for event in events if event.bytes < 0} <= allocated
    assert min(allocated) == 0


def test_a_block_that_cannot_be_compiled_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo runs it eager, as in a run. Its log would be that of a run without compiled blocks."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(fake_gpu, "move", fail)
    expected = r"compiled blocks cannot be estimated .*no such operator.*--selective_torch_compile"
    with torch._dynamo.config.patch(suppress_errors=True), pytest.raises(UserError, match=expected):
        logged(rotated)


def test_an_estimate_of_compiled_blocks_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "has_triton_package", lambda: False)
    config = MemoryConfig("sdxl_train_network.py", selective_torch_compile=True)
    with pytest.raises(UserError, match=r"Triton is not installed; run: .* -m pip install .*triton"):
        tracing(Settings(selective_torch_compile=True), config)
