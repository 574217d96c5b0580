"""The console that commands print their results with."""

from __future__ import annotations

from typing import Any

from rich import console

#: Columns of an output that is not a terminal: more than any line has, so that none is wrapped or cut.
_UNLIMITED = 100_000


class Console(console.Console):
    """rich's console. A file or a pipe has no width."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not self.is_terminal:
            self.width = _UNLIMITED
