"""Image sizes and seeds in a file of sample prompts, in any of upstream's three formats. Nothing here imports torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import toml

from kohya_ext.errors import UserError


def largest(file: str, default: int) -> tuple[int, int]:
    """Return width and height in pixels of the largest image; a side that a prompt leaves out is ``default``.

    Raises UserError for a file that cannot be read.
    """
    with _errors_of(file):
        sizes = [(int(prompt.get("width", default)), int(prompt.get("height", default))) for prompt in _read(file)]
    return max(sizes, key=lambda size: size[0] * size[1], default=(default, default))


def without_seed(file: str) -> list[int]:
    """Return the positions of the prompts that have no seed, from 1. Raises UserError for a file that cannot be read."""
    with _errors_of(file):
        return [position for position, prompt in enumerate(_read(file), 1) if prompt.get("seed") is None]


@contextmanager
def _errors_of(file: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"--sample_prompts {file}: {error.strerror or error}") from None
    except KeyError as error:
        raise UserError(f"--sample_prompts {file}: the key {error} is missing") from None
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError, OverflowError) as error:  # of another structure
        raise UserError(f"--sample_prompts {file}: {error}") from None


def _read(file: str) -> Sequence[Mapping[str, Any]]:
    """Return the values of each prompt; from a line of text, sizes and seed."""
    if not file.endswith((".txt", ".toml", ".json")):
        raise UserError(f"--sample_prompts {file}: the file name must end in .txt, .toml or .json")
    text = Path(file).read_text(encoding="utf-8")
    if file.endswith(".toml"):
        prompt = toml.loads(text)["prompt"]
        return [{**prompt, **subset} for subset in prompt["subset"]]
    lines = json.loads(text) if file.endswith(".json") else [line for line in text.splitlines() if _is_prompt(line)]
    return [line if isinstance(line, dict) else _numbers(line) for line in lines]


def _is_prompt(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("#")


#: Values of a prompt -> the options that set them in a line of text.
_OPTIONS = {"width": "w", "height": "h", "seed": "d"}


def _numbers(line: str) -> dict[str, str]:
    matches = {name: re.search(rf" --{option} (\d+)", line, re.IGNORECASE) for name, option in _OPTIONS.items()}
    return {name: match.group(1) for name, match in matches.items() if match is not None}
