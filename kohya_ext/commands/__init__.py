"""The commands of ``python -m kohya_ext``, one module each: a docstring, ``configure(parser)`` and ``run(args) -> exit code``.

Each new module adds a command. If the first word of a command line is a script instead of a command,
:mod:`kohya_ext.commands.run` runs it; ``main(words)`` takes the words unparsed.
"""

from __future__ import annotations

import ast
import pkgutil
from pathlib import Path

#: The command that runs a script; optional on the command line.
SCRIPT_RUNNER = "run"


def names() -> list[str]:
    """Return the commands' names, sorted."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__))


def summary(name: str) -> str:
    """Return the first sentence of a command's docstring, without importing it."""
    text = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").partition(". ")[0].splitlines()[0].rstrip(".:")
