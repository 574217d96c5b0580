"""Show GPU memory in the script's progress bar, next to the loss: ``avr_loss=0.0912, memory=11.9/25.8GB``.

The value is the reserved memory in the journal's last line, so nothing is measured for it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, observe
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import journal
from kohya_ext.units import GB

_BAR = "steps"
"""Description of the training's progress bar in all scripts."""


@dataclass
class _Memory(TrainingCallback):
    total: int = 0
    """Bytes of the GPU; 0 on another device."""
    text: str = ""

    def on_line(self, line: Mapping[str, Any]) -> None:
        """Keep the memory of a line."""
        if line["kind"] == "start":
            self.total = (line.get("gpu") or {}).get("memory", 0)
        elif line["kind"] == "step" and self.total and "reserved" in line:
            self.text = f"{line['reserved'] / GB:.1f}/{self.total / GB:.1f}GB"

    def add_to(self, bar: Any, values: dict[str, Any]) -> None:
        """Add the memory to the values of the training's progress bar."""
        if self.text and getattr(bar, "desc", None) == _BAR:
            values.setdefault("memory", self.text)

    def on_end(self) -> None:
        journal.stop_listening(self.on_line)


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Memory | None:
    if not accelerator.is_main_process or accelerator.device.type != "cuda":
        return None
    memory = _Memory()
    journal.listen(memory.on_line)
    return memory


def _set_postfix(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def set_postfix(self: Any, ordered_dict: Any = None, refresh: Any = True, **kwargs: Any) -> Any:
        observe(_Memory, lambda memory: memory.add_to(self, kwargs))
        return original(self, ordered_dict, refresh, **kwargs)

    return set_postfix


PATCH = Patch(
    name="progress_memory",
    summary="show reserved GPU memory in the progress bar",
    targets=(Target("tqdm.std", "tqdm.set_postfix", _set_postfix, takes("self", "ordered_dict", "refresh"), body="runs"),),
    exactness="exact",
    held_to="the same run without the patch",
    idea="https://github.com/tqdm/tqdm",
    stage=Stage.WRITE,
    on_start=_start,
    observes=True,
)
