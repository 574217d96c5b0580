"""What a dry run is asked for, and how its process ends."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

REQUEST, RESULT = "request.json", "result.json"


@dataclass(frozen=True)
class Request:
    """What to run, and how to read its log."""

    sd_scripts: str
    script: str
    words: list[str]
    passes: int
    """Backward passes before the run ends."""
    micro_steps: int
    """Backward passes of a step."""
    processes: int
    """Processes of the run, of which this is the first."""
    deepspeed: bool
    """Whether DeepSpeed divides the state of training among them."""
    integer: int
    """The value of integers that the script reads from the GPU."""
    sampled: bool
    """Whether images are sampled after each step."""
    expandable_segments: bool
    compiled: bool
    """Whether blocks are compiled."""
    recorded: bool
    """Whether passes are recorded."""
    eight_bits: bool
    kernels: bool
    """Whether the extension's own kernels run."""
    budgets: bool
    """Whether the result is the cost of each compiled block by activation memory budget."""

    @classmethod
    def read(cls, folder: Path) -> Request:
        """Read it from a folder."""
        return cls(**json.loads((folder / REQUEST).read_text(encoding="utf-8")))

    def write(self, folder: Path) -> None:
        """Write it to a folder."""
        (folder / REQUEST).write_text(json.dumps(asdict(self)), encoding="utf-8")


def end(code: int) -> None:
    """End the process immediately: fake tensors must not reach exit handlers, which crash torch 2.6."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
