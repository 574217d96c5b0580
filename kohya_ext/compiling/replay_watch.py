"""Notice a replay that never ends. Drivers have hung in CUDA graphs on some GPUs.

https://github.com/ggml-org/llama.cpp/issues/27330, https://github.com/pytorch/pytorch/issues/196133

Nothing in the process can end the GPU's work, and a copy of the weights would wait for it. So the process ends, and a file in
the user's cache keeps later runs on that GPU from recording.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kohya_ext import cache

#: Seconds between two looks, and looks at the same unfinished replay before it is hung. Time in which a laptop sleeps counts as
#: one look.
INTERVAL, LOOKS = 10.0, 30


class ReplayWatch:
    """Looks at the last replay from another thread, and calls ``on_hang`` once if it does not end.

    ``new_event`` returns an object like ``torch.cuda.Event``: ``record()`` marks the end of the work so far, and ``query()``
    returns whether it is reached.
    """

    def __init__(
        self, new_event: Callable[[], Any], on_hang: Callable[[], None], interval: float = INTERVAL, looks: int = LOOKS
    ) -> None:
        self._event, self._on_hang, self._interval, self._looks = new_event(), on_hang, interval, looks
        self._begun = self._recorded = 0
        """Numbers of the last replay that has begun, and of the last one that was launched."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kohya_ext replay watch", daemon=True)

    def replay(self, replay: Callable[[], None]) -> None:
        """Run a replay under watch."""
        if self._begun == 0:
            self._thread.start()
        self._begun += 1
        replay()
        self._event.record()
        self._recorded = self._begun

    def end(self) -> None:
        """Stop looking."""
        self._ended.set()

    def _run(self) -> None:
        seen, looks = 0, 0
        while not self._ended.wait(self._interval):
            number = self._begun
            looks = looks + 1 if number == seen and not self._is_done(number) else 0
            seen = number
            if looks >= self._looks:
                self._on_hang()
                return

    def _is_done(self, number: int) -> bool:
        if self._recorded != number:
            return False
        try:
            return bool(self._event.query())
        except RuntimeError:  # an error of the GPU, which ends the run by itself
            return True


def _file(gpu: str) -> Path:
    name = re.sub(r"[^\w.+-]+", "_", gpu)
    return cache.folder() / "cuda_graphs" / f"{name}.json"


def forbid(gpu: str, versions: str) -> Path:
    """Keep later runs on a GPU from recording; return the file that says so."""
    file = _file(gpu)
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"gpu": gpu, "with": versions, "time": time.strftime("%Y-%m-%d %H:%M")})
    file.write_text(text + "\n", encoding="utf-8")
    return file


def reason_forbidden(gpu: str) -> str | None:
    """Return why a GPU must not record, and what to do to try again; None if it may."""
    file = _file(gpu)
    if not file.is_file():
        return None
    try:
        seen = json.loads(file.read_text(encoding="utf-8"))
        when = f"on {seen['time']} with {seen['with']}"
    except (OSError, ValueError, KeyError, TypeError):
        when = "earlier"
    return f"a replay did not end on this GPU {when}; after a driver update, delete {file} to try again"
