"""Read the user's TOML, JSON and text files as sd-scripts does."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import toml

from kohya_ext.errors import UserError

#: Exceptions of upstream's TOML library, and of json, for invalid files.
_NOT_TOML = (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)

#: Control characters -> the escape sequences that mean them in double quotes.
_ESCAPES = {"\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r", "\x1b": r"\e", "\x00": r"\0"}
_CONTROL = re.compile(f"[{''.join(_ESCAPES)}]")

_DRIVE = re.compile(r"[A-Za-z]:[\\/\x00-\x1f]")
_PATH_KEY = re.compile(r"(^|_)(dir|path|paths|file|folder|weights|ae|vae|clip_l|clip_g|t5xxl|qwen3|resume|config|preset)($|_)")
"""Names of options whose value is a path, or several."""

_BACKSLASH = re.compile(r"""=\s*"[^"\n]*\\""")


def read_text(file: Path, label: str) -> str:
    """Return the text of a file without a byte order mark. Raises UserError with a message that starts with ``label``."""
    return _decoded(_content(file, label), label)


def read_toml(file: Path, label: str) -> dict[str, Any]:
    """Read TOML with upstream's library.

    Raises UserError for a file that upstream cannot read, and for a path with an escape sequence.
    """
    document: dict[str, Any] = _parsed(file, label, "TOML", toml.loads)
    reject_escapes(document, label)
    return document


def reject_escapes(document: object, label: str, key: str = "") -> None:
    """Raise UserError for a path that contains a line break, a tab or another control character.

    In double quotes ``C:`` with ``new`` after a backslash has a line break, and a folder of that name would be created.
    """
    if isinstance(document, Mapping):
        for name, value in document.items():
            reject_escapes(value, label, str(name))
    elif isinstance(document, list):
        for item in document:
            reject_escapes(item, label, key)
    elif isinstance(document, str) and (_DRIVE.match(document) or _PATH_KEY.search(key)) and _CONTROL.search(document):
        meant = _CONTROL.sub(lambda match: _ESCAPES[match[0]], document)
        sequences = " and ".join(dict.fromkeys(_ESCAPES[character] for character in _CONTROL.findall(document)))
        raise UserError(
            f"{label}: {key} has the escape sequence {sequences} instead of a folder's name; "
            f"write it with / or in single quotes: {key} = '{meant}'"
        )


@dataclass(frozen=True)
class ConfigFile:
    """The file behind ``--config_file``, flattened as upstream flattens it."""

    path: Path
    values: Mapping[str, object]
    remarks: tuple[str, ...]
    """Content that upstream silently drops: a key set twice, a table in a table."""


def read_config_file(name: str) -> ConfigFile:
    """Read a config file with upstream's own TOML library. Raises UserError when it is missing or invalid."""
    path = Path(name if name.endswith(".toml") else f"{name}.toml")
    if not path.exists() and Path(name).is_file():
        suggested = Path(name).with_suffix(".toml").name
        raise UserError(f"--config_file {name}: sd-scripts reads only TOML files, with names in .toml; save it as {suggested}")
    if not path.exists():
        raise UserError(f"--config_file {name} does not exist" + (f", nor does {path}" if path != Path(name) else ""))
    document = read_toml(path, f"--config_file {path}")
    values: dict[str, object] = {}
    remarks: list[str] = []
    for section, content in document.items():
        for key, value in content.items() if isinstance(content, dict) else [(section, content)]:
            if key in values:
                remarks.append(f"duplicate key {key}; using the last value: {value!r}")
            if isinstance(value, dict):
                remarks.append(f"[{section}.{key}] is a table in a table, which sd-scripts does not read")
            values[key] = value
    return ConfigFile(path, values, tuple(remarks))


def read_dataset_config(file: Path) -> dict[str, Any]:
    """Read a ``--dataset_config``, TOML or JSON by its suffix. Raises UserError for a file that upstream cannot read."""
    label, suffix = f"--dataset_config {file}", file.suffix.lower()
    if suffix not in (".toml", ".json"):
        raise UserError(f"{label}: the file name must end in .toml or .json")
    document = read_toml(file, label) if suffix == ".toml" else _parsed(file, label, "JSON", json.loads)
    tables = isinstance(document, dict) and isinstance(document.get("general", {}), dict)
    if not tables or not _are_tables(document.get("datasets", [])):
        raise UserError(f"{label}: datasets must be a list of tables ([[datasets]]), and general a table ([general])")
    if not all(_are_tables(dataset.get("subsets", [])) for dataset in document.get("datasets", [])):
        raise UserError(f"{label}: the subsets of a dataset must be a list of tables ([[datasets.subsets]])")
    return document


def _are_tables(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def subsets(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the options of each subset of a dataset config. They override its dataset's, and those the general ones."""
    for dataset in document.get("datasets", []):
        for subset in dataset.get("subsets", []):
            yield {**document.get("general", {}), **dataset, **subset}


def _content(file: Path, label: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{label}: {error.strerror or error}") from None


def _decoded(content: bytes, label: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{label} is not UTF-8 text; save it as UTF-8") from None


def _parsed(file: Path, label: str, kind: str, parse: Callable[[str], Any]) -> Any:
    content = _content(file, label)
    if kind == "JSON" and content.startswith(codecs.BOM_UTF8):
        # For TOML, a patch makes upstream accept it.
        raise UserError(f"{label} starts with a byte order mark, which sd-scripts rejects; save it as UTF-8 without BOM")
    text = _decoded(content, label)
    try:
        return parse(text)
    except _NOT_TOML as error:
        raise UserError(f"{label} is not valid {kind}: {error or type(error).__name__}{backslash_advice(text)}") from None


def backslash_advice(text: str) -> str:
    """Return the advice for a file that cannot be read and has a backslash in double quotes; empty for another file."""
    if not _BACKSLASH.search(text):
        return ""
    return "; in double quotes a backslash starts an escape sequence, so write paths with / or in single quotes: 'C:\\folder'"
