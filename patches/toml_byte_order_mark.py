"""TOML files that begin with a byte order mark, as Windows' Notepad writes them, are read.

Upstream's TOML library takes the mark for a part of the first key and fails ("Empty key at line 1").
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes

_MARK = "\ufeff"


def _without_mark(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def loads(s: Any, *args: Any, **kwargs: Any) -> Any:
        return original(s.removeprefix(_MARK) if isinstance(s, str) else s, *args, **kwargs)

    return loads


PATCH = Patch(
    name="toml_byte_order_mark",
    summary="TOML files with a byte order mark (Windows' Notepad) are read",
    # toml.load() and the package's own toml.loads are bound to the same function: load() looks this name up when called.
    targets=(Target("toml.decoder", "loads", _without_mark, takes("s"), body="runs"),),
    exactness="exact",
    held_to="the same file without the mark",
    idea="https://docs.python.org/3/library/codecs.html#module-encodings.utf_8_sig",
)
