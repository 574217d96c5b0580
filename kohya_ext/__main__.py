"""Entry point of ``python -m kohya_ext``: run a command, or a script of sd-scripts with its arguments."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command or a script; return the exit code. A script's SystemExit and errors pass through untouched."""
    try:
        from kohya_ext.console import error, note, replace_unencodable
        from kohya_ext.errors import UserError

        replace_unencodable()
        chosen = _choose(list(sys.argv[1:] if argv is None else argv))
    except ImportError as problem:
        print(f"kohya_ext: error: {problem}. Install the missing package, or reinstall kohya_ext", file=sys.stderr)
        return 2
    try:
        return chosen()
    except UserError as wrong:
        for line in str(wrong).split("\n"):
            error(line)
        return UserError.exit_code
    except KeyboardInterrupt as stop:  # in a script: before it handles signals itself, while it imports and reads captions
        note("interrupted")
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)  # as of a shell


def _choose(words: list[str]) -> Callable[[], int]:
    """Import the command that the words name and return its call; without a command, return the script runner's."""
    from kohya_ext import commands

    first, others = _first_word(words)
    if first == "help":  # `help`, `help estimate`, `help sdxl_train.py`
        return _choose([*others[:1], "--help"])
    if first in (None, commands.SCRIPT_RUNNER) or first not in commands.names():
        run = importlib.import_module("kohya_ext.commands.run")
        return lambda: int(run.main(others if first == commands.SCRIPT_RUNNER else words))
    command = importlib.import_module(f"kohya_ext.commands.{first}")

    def call() -> int:
        from kohya_ext.config.quiet_parser import QuietParser
        from kohya_ext.errors import UserError

        parser = QuietParser(prog=f"python -m kohya_ext {first}", description=command.__doc__)
        command.configure(parser)
        try:
            with _ends_as_by_ctrl_c():
                return int(command.run(parser.parse_args(others, argparse.Namespace(words=others))))
        except OSError as problem:  # a folder without rights or a full disk, where the command has no better message
            if problem.filename is None:
                raise
            raise UserError(f"{problem.filename}: {problem.strerror or problem}") from None

    return call


@contextlib.contextmanager
def _ends_as_by_ctrl_c() -> Iterator[None]:
    """Let SIGTERM, a closed terminal and Ctrl-Break end a command as Ctrl-C does, which removes its temporary files."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt(number)

    numbers = [getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP", "SIGBREAK")]
    is_main = threading.current_thread() is threading.main_thread()
    replaced = [number for number in numbers if is_main and number and signal.getsignal(number) == signal.SIG_DFL]  # no nohup
    for number in replaced:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)


def _first_word(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the first word that is neither an option nor an option's value, or None, and all other words."""
    from kohya_ext.config.quiet_parser import QuietParser
    from kohya_ext.config.settings import add_to
    from kohya_ext.errors import UserError

    parser = QuietParser(add_help=False)
    add_to(parser)
    parser.add_argument("word")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    try:
        known, _ = parser.parse_known_args(words)
    except UserError:  # no word, or a wrong value, which the script runner's own parser reports
        return None, words
    return known.word, [*words[: len(words) - len(known.rest) - 1], *known.rest]


if __name__ == "__main__":
    sys.exit(main())
