"""Read a script's options, import its modules and build its parser without running it."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import re
import runpy
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kohya_ext.console import hide_notices_of_libraries
from kohya_ext.errors import UserError
from kohya_ext.sdscripts.checkouts import Checkout


@functools.cache
def option_names(script: Path) -> frozenset[str]:
    """Return the names of the options that a script's parser has, read from its text; none without a file.

    They are in ``setup_parser`` and in the functions that it calls: of the scripts it imports, and of ``library``. A few that
    comments or branches name may be among them. The parser itself takes seconds to import.
    """
    shared = _functions((script.parent / "library").glob("*.py"))
    waiting, names = [(script.stem, "setup_parser")], set[str]()
    known = set(waiting)
    while waiting:
        module, name = waiting.pop()
        text = _own_parser(script.with_name(f"{module}.py")) if module else shared[name]
        names |= {*re.findall(r"--(\w[\w-]*)[\"']", text)}
        for of, called in re.findall(r"(?:(\w+)\.)?(\w+)\(", text):
            function = (of if called == "setup_parser" else "", called)
            if function not in known and (called in shared or function[0]):
                known.add(function)
                waiting.append(function)
    return frozenset(names)


def _own_parser(file: Path) -> str:
    """Return the text of a script's ``setup_parser``, or of calls of those that it imports."""
    if not file.is_file():
        return ""
    imported = re.findall(r"^from (\w+) import .*\bsetup_parser\b", file.read_text("utf-8", "replace"), re.MULTILINE)
    return _functions([file]).get("setup_parser", "".join(f"{module}.setup_parser()" for module in imported))


def _functions(files: Iterable[Path]) -> dict[str, str]:
    """Return the text of each function at the top level of some files, by name; those of one name together."""
    functions: dict[str, str] = {}
    for file in files:
        if file.is_file():
            content = "\n" + file.read_text(encoding="utf-8", errors="replace")
            for part in content.split("\ndef ")[1:]:
                name, _, text = part.partition("(")
                functions[name] = functions.get(name, "") + text
    return functions


@contextlib.contextmanager
def importable(checkout: Checkout) -> Iterator[None]:
    """Make the checkout's modules importable, as for its scripts, and discard what they print."""
    sys.path.insert(0, str(checkout.path))
    hide_notices_of_libraries()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        sys.path.remove(str(checkout.path))


def script_names(checkout: Checkout, script: Path) -> dict[str, Any]:
    """Return the names that a training script defines. Its imports take about ten seconds.

    Raises UserError if an import fails or the script is not a training script.
    """
    try:
        with importable(checkout):
            names = runpy.run_path(str(script), run_name="kohya_ext_probe")
    except ImportError as error:
        raise UserError(f"{script.name} cannot be imported: {error}; run `python -m kohya_ext doctor` for details") from None
    if "setup_parser" not in names:
        raise UserError(f"{script.name} is not a training script, because it has no setup_parser")
    return names


def script_parser(checkout: Checkout, script: Path) -> argparse.ArgumentParser:
    """Return the parser of a training script, without the options that a session adds.

    Raises UserError like :func:`script_names`.
    """
    parser = script_names(checkout, script)["setup_parser"]()
    assert isinstance(parser, argparse.ArgumentParser)
    return parser
