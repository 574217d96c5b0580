"""Read TOML files that begin with a byte order mark, as Windows' Notepad writes them.

The TOML library of upstream parses the mark as part of the first key and fails ("Empty key at line 1").
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes

_MARK = "\ufeff"


def _strip_mark(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def loads(s: Any, *args: Any, **kwargs: Any) -> Any:
        return original(s.removeprefix(_MARK) if isinstance(s, str) else s, *args, **kwargs)

    return loads


PATCH = Patch(
    name="toml_byte_order_mark",
    summary="read TOML files with a byte order mark (Windows' Notepad)",
    # toml.load() looks up this name at each call. toml.loads is bound to the same function.
    targets=(Target("toml.decoder", "loads", _strip_mark, takes("s"), body="runs"),),
    exactness="exact",
    held_to="the same file without the mark",
    idea="https://docs.python.org/3/library/codecs.html#module-encodings.utf_8_sig",
)
