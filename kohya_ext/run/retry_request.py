"""The restart that an out-of-memory run requests: a file that the training process writes and the launcher reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

#: Environment variable with the path of the file.
VARIABLE = "KOHYA_EXT_OUT_OF_MEMORY_FILE"


class RetryRequest(TypedDict):
    """The arguments that the next start changes."""

    changes: Mapping[str, Any]
    """Arguments by key."""
    description: str
    state: str | None
    """The saved state to resume from; None to start from the beginning."""


def path() -> Path | None:
    """Return the file to write the request to; None if no launcher waits for it."""
    file = os.environ.get(VARIABLE)
    return Path(file) if file else None


def write(file: Path, request: RetryRequest) -> None:
    """Write a request."""
    file.write_text(json.dumps(request), encoding="utf-8")


def read(file: Path) -> RetryRequest | None:
    """Return the request; None if the run made none."""
    if not file.is_file():
        return None
    request: RetryRequest = json.loads(file.read_text(encoding="utf-8"))
    return request
