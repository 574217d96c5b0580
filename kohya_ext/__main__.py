"""``python -m kohya_ext``: a command, or a script of sd-scripts with its arguments."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from kohya_ext import commands
from kohya_ext.arguments import QuietParser
from kohya_ext.console import error
from kohya_ext.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command or a script; return the exit code. A script's SystemExit and exceptions pass through untouched."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] in commands.names():
            command = importlib.import_module(f"kohya_ext.commands.{arguments[0]}")
            parser = QuietParser(prog=f"python -m kohya_ext {arguments[0]}", description=command.__doc__)
            command.configure(parser)
            code: int = command.run(parser.parse_args(arguments[1:]))
            return code
        from kohya_ext.commands import run

        return run.main(arguments)
    except UserError as problem:
        for line in str(problem).splitlines():
            error(line)
        return UserError.exit_code


if __name__ == "__main__":
    sys.exit(main())
