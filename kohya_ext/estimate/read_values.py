"""Record which attributes of an object a computation reads: what its result depends on, and so the key to keep it by."""

from __future__ import annotations

from typing import Any

_MISSING = object()


class Recorded:
    """Stands for an object, whose attributes it returns and records; attributes that are set stay here."""

    def __init__(self, source: Any) -> None:
        self._source, self._read = source, dict[str, Any]()

    def __getattr__(self, name: str) -> Any:
        self._read[name] = getattr(self._source, name, _MISSING)
        return getattr(self._source, name)


def same_for(recorded: Recorded, other: Any) -> bool:
    """Return whether everything that was read has the same value in another object."""
    return all(getattr(other, name, _MISSING) == value for name, value in recorded._read.items())
