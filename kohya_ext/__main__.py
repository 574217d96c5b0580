"""``python -m kohya_ext``: a command, or a script of sd-scripts with its arguments."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command or a script; return the exit code. A script's SystemExit and exceptions pass through untouched."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        from kohya_ext import commands
        from kohya_ext.arguments import QuietParser
        from kohya_ext.console import error
        from kohya_ext.errors import UserError

        named = arguments[0] if arguments and arguments[0] in commands.names() else None
        command = importlib.import_module(f"kohya_ext.commands.{named or 'run'}")
    except ImportError as problem:
        print(f"kohya_ext: error: {problem}. Install what is missing, or reinstall kohya_ext", file=sys.stderr)
        return 2
    try:
        if named is None:
            code: int = command.main(arguments)
            return code
        parser = QuietParser(prog=f"python -m kohya_ext {named}", description=command.__doc__)
        command.configure(parser)
        return int(command.run(parser.parse_args(arguments[1:])))
    except UserError as wrong:
        for line in str(wrong).splitlines():
            error(line)
        return UserError.exit_code


if __name__ == "__main__":
    sys.exit(main())
