"""Parse the extension's command lines, with one-line errors and without abbreviated options."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from kohya_ext.config.settings import flags, negated_flags, options
from kohya_ext.errors import UserError, did_you_mean


class QuietParser(argparse.ArgumentParser):
    """A parser that raises UserError and takes options in full only."""

    def __init__(self, **settings: Any) -> None:
        """Accept argparse's settings. Abbreviations are off, because several parsers read the same command line."""
        super().__init__(**{**settings, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        """Raise UserError, with the nearest valid spelling of an unknown option."""
        raise UserError(message + nearest_option(self, message))


def nearest_option(parser: argparse.ArgumentParser, message: str) -> str:
    """Return the hint for argparse's message about an unknown option; nothing for any other message."""
    if not message.startswith("unrecognized arguments:"):
        return ""
    unknown = next((word.split("=")[0] for word in message.split() if word.startswith("--")), "")
    training = (flag for name, _ in options("training") for flag in (*flags(name), *negated_flags(name)))
    if unknown in training and any(action.dest == "script" for action in parser._actions):
        return f": write {unknown} after SCRIPT"
    return did_you_mean(unknown, parser._option_string_actions)
