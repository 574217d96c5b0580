"""The log of compiled code on fake tensors: inductor's decisions for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _triton

from kohya_ext.config.command_line import CommandLine
from kohya_ext.dry_run import estimation, inductor_gpu
from kohya_ext.dry_run.events import Event
from kohya_ext.dry_run.inductor import BACKEND, logging_to, traceable
from kohya_ext.dry_run.tracker import Tracker
from kohya_ext.errors import UserError

ROWS, WIDTH = 64, 256


def logged(function: Callable[[Any], Any]) -> list[Event]:
    """Compile a function of a bf16 tensor in a first call, and return the events of a second one."""
    mode, tracker = traceable(), Tracker()
    with mode, logging_to(mode, tracker):
        given = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        compiled = torch.compile(function, backend=BACKEND)
        compiled(given)
        start = len(tracker.events)
        with tracker:
            result = compiled(given)
        events = [*tracker.events[start:]]
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


def test_a_block_that_cannot_be_compiled_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo runs it eager, as in a run. Its log would be that of a run without compiled blocks."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(inductor_gpu, "move", fail)
    expected = r"compiled blocks cannot be estimated .*no such operator.*--selective_torch_compile"
    with torch._dynamo.config.patch(suppress_errors=True), pytest.raises(UserError, match=expected):
        logged(rotated)


def test_an_estimate_of_compiled_blocks_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "has_triton_package", lambda: False)
    command = CommandLine(Path("sdxl_train_network.py"), ["--selective_torch_compile"], {})
    with pytest.raises(UserError, match=r"Triton is not installed; run: .* -m pip install .*triton"):
        estimation._check(command, None)
