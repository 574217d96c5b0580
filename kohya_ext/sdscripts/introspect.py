"""Read a script's options, import its modules and build its parser without running it."""

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
    """Make the checkout's modules importable, as for its scripts, and discard what they print."""
    sys.path.insert(0, str(checkout.path))
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
