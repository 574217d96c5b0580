"""Let a resumed run draw as many random numbers for logged lines as the run that it continues.

rich 14.1, which sd-scripts pins, shows the file and the line of code of each logged line as links, and draws one of Python's
random numbers for each link that it does not remember. A new process remembers none, so the same lines would take more
numbers, and without data loader workers captions would be shuffled differently. A saved random state therefore names the links.
https://github.com/Textualize/rich/blob/v14.1.0/rich/style.py
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cache, wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kohya_ext.config.settings import Settings

_links: dict[str, None] = {}
"""The links of the lines logged so far, as rich's style definitions."""


@cache
def draw_random_numbers() -> bool:
    """Return whether the installed rich draws them for links."""
    try:
        return version("rich").startswith("14.1.")
    except PackageNotFoundError:
        return False


def record(original: Any, settings: Settings) -> Any:
    """Replace rich's ``LogRender.__call__`` by one that records the links of each line."""

    @wraps(original)
    def render(self: Any, console: Any, renderables: Any, *args: Any, **about: Any) -> Any:
        if file := about.get("link_path"):
            _links[f"link file://{file}"] = None
            _links[f"link file://{file}#{about.get('line_no')}"] = None
        return original(self, console, renderables, *args, **about)

    return render


def remembered() -> list[str]:
    """Return the links that rich remembers."""
    return list(_links)


def remember(links: Iterable[str]) -> None:
    """Let rich remember these links and no other ones. Draws random numbers, so restore their state afterwards."""
    wanted = list(links)
    if wanted == remembered():
        return
    from rich.errors import StyleSyntaxError
    from rich.style import Style

    Style.parse.cache_clear()
    _links.clear()
    for link in wanted:
        _links[link] = None
        with suppress(StyleSyntaxError):  # a path with a space, which rich shows without a link and draws nothing for
            Style.parse(link)
