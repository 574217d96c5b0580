"""The pictures that a file of sample prompts asks for, in any of upstream's three formats. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import toml


def largest(file: str, usual: int) -> tuple[int, int]:
    """Return width and height in pixels of the largest picture; one that says nothing, or no readable file, has ``usual``."""
    pictures = [(usual, usual)]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # the run will say what is wrong
        pictures = [(int(prompt.get("width", usual)), int(prompt.get("height", usual))) for prompt in _read(file)]
    return max(pictures, key=lambda sides: sides[0] * sides[1], default=(usual, usual))


def _read(file: str) -> Sequence[Mapping[str, Any]]:
    """Return what is said of each prompt; of a line of text the sizes alone."""
    text = Path(file).read_text(encoding="utf-8")
    if file.endswith(".toml"):
        prompt = toml.loads(text)["prompt"]
        return [{**prompt, **subset} for subset in prompt["subset"]]
    lines = json.loads(text) if file.endswith(".json") else [line for line in text.splitlines() if _is_prompt(line)]
    return [line if isinstance(line, dict) else _sizes(line) for line in lines]


def _is_prompt(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("#")


def _sizes(line: str) -> dict[str, str]:
    found = {name: re.search(rf" --{name[0]} (\d+)", line, re.IGNORECASE) for name in ("width", "height")}
    return {name: match.group(1) for name, match in found.items() if match is not None}
