"""The console that commands print their results with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import console
from rich.segment import Segment

from kohya_ext.console import printable

#: Columns of an output that is not a terminal: more than any line has, so that none is wrapped or cut.
_UNLIMITED = 100_000


class Console(console.Console):
    """rich's console, which prints names, metadata and other text from files without what a terminal interprets in it.

    A file or a pipe has no width, unless one is given. :func:`kohya_ext.console.replace_unencodable` decides what it can hold.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not self.is_terminal and options.get("width") is None:
            self.width = _UNLIMITED

    def render(self, renderable: Any, options: console.ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of a renderable. Tables render their cells here, too, so their columns stay aligned."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text, lines=True), style)
