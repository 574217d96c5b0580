"""A script without running it: the options in its text, its parser, and the modules that patches look at."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kohya_ext.errors import UserError
from kohya_ext.sdscripts.checkouts import Checkout


@functools.cache
def option_names(script: Path) -> frozenset[str]:
    """Return the names of all options in the text of a script, the scripts it imports and ``library``; none without a file.

    These are more than its parser has, which takes seconds to import.
    """
    text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in (script.parent / "library").glob("*.py"))
    waiting, read = [script], set[Path]()
    while waiting:
        if (file := waiting.pop()) in read or not file.is_file():
            continue
        read.add(file)
        own = file.read_text(encoding="utf-8", errors="replace")
        waiting += [script.parent / f"{module}.py" for module in re.findall(r"^(?:import|from) (\w+)", own, re.MULTILINE)]
        text += own
    # A pattern that begins with plain text is searched for ten times as fast.
    return frozenset(re.findall(r"--(\w[\w-]*)[\"']", text))


@contextlib.contextmanager
def importable(checkout: Checkout) -> Iterator[None]:
    """Make the checkout's modules importable, as they are for its scripts; what they print on import is dropped."""
    sys.path.insert(0, str(checkout.path))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        sys.path.remove(str(checkout.path))


def script_names(checkout: Checkout, script: Path) -> dict[str, Any]:
    """Return the names a training script defines, from running it as a module. Takes about ten seconds: its imports.

    Raises UserError when one of them is missing or it is not a training script.
    """
    try:
        with importable(checkout):
            names = runpy.run_path(str(script), run_name="kohya_ext_probe")
    except ImportError as error:
        raise UserError(f"{script.name} cannot be imported here: {error}. See `python -m kohya_ext doctor`") from None
    if "setup_parser" not in names:
        raise UserError(f"{script.name} is not a training script: it has no setup_parser")
    return names


def script_parser(checkout: Checkout, script: Path) -> argparse.ArgumentParser:
    """Return the parser that a training script builds for itself, without what takes it over when a session is on.

    Raises UserError as :func:`script_names` does.
    """
    parser = script_names(checkout, script)["setup_parser"]()
    assert isinstance(parser, argparse.ArgumentParser)
    return parser
