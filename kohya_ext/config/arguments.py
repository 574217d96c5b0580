"""Apply options, presets and the user's config file through the script's own parser.

Upstream's order is: defaults < config file < command line. A preset changes the parser's *defaults*, so upstream's own code
still reads the config file and the command line.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from kohya_ext.config import gui_files, preset_conflicts
from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.quiet_parser import nearest_option
from kohya_ext.config.settings import HIDDEN, add_to, boolean, flags, is_secret, negated_flags, options
from kohya_ext.config.user_files import ConfigFile
from kohya_ext.console import note, stop, warn
from kohya_ext.errors import did_you_mean, one_letter_off

# --- the script's own parser -----------------------------------------------------------------------------------------


_GROUP = "kohya_ext"
"""The title of the extension's options."""


class TrainingParser(argparse.ArgumentParser):
    """A script's own parser, taken over in place by :func:`take_over`.

    When it first reads the command line it gains the extension's options and a ``--no-`` form of every switch, checks the
    preset and the config file against its own actions, and takes the preset's values as its defaults.
    """

    command: CommandLine
    completed: bool
    when_final: Callable[[argparse.Namespace], None]

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and call ``when_final`` with the arguments of the run.

        These come from the first parse of ``sys.argv`` or, with a config file, from the second, which includes its values.
        """
        parsed = super().parse_args(args, namespace)
        if args is None and (namespace is not None or not getattr(parsed, "config_file", None)):
            for remark in self.command.presets.remarks:
                warn(remark)
            if self.command.presets.presets:
                note(preset_line(self.command))
            self.when_final(parsed)
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, after adding the extension's options and the preset's values."""
        if not self.completed:
            self.completed = True
            complete(self)
        if args is None and namespace is None:
            self._apply_presets()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print one line with the nearest valid option instead of two hundred lines of usage; exit with code 2."""
        stop(message + nearest_option(self, message))

    def _apply_presets(self) -> None:
        presets = self.command.presets
        wrong = [
            f"preset {value.preset}: {problem}"
            for key, value in presets.values.items()
            if (problem := find_problem(self, key, value.value)) is not None
        ]
        if wrong:
            stop("\n".join(wrong))
        if self.command.config is not None:
            self._check(self.command.config)
        self.set_defaults(**{key: value.value for key, value in presets.values.items()})

    def _check(self, config: ConfigFile) -> None:
        """Warn about the config file, or stop at certain problems; with ``--strict`` at any, with ``--no-strict`` at none."""
        problems = find_problems(self, config)
        strict = self.command.settings.strict
        errors = [problem for problem in problems if (problem.certain if strict is None else strict)]
        for problem in problems:
            if problem not in errors:
                warn(f"{config.path}: {problem}")
        if errors:
            advice = [] if strict else ["correct the file, or use --no-strict to get warnings instead"]
            stop("\n".join([*(f"{config.path}: {problem}" for problem in errors), *advice]))


def take_over(
    parser: argparse.ArgumentParser,
    command: CommandLine,
    when_final: Callable[[argparse.Namespace], None] = lambda args: None,
) -> bool:
    """Turn a plain parser into a :class:`TrainingParser`; leave one of another class unchanged and return False."""
    if type(parser) is not argparse.ArgumentParser:
        return False
    parser.__class__ = TrainingParser
    assert isinstance(parser, TrainingParser)
    parser.command, parser.completed, parser.when_final = command, False, when_final
    return True


def complete(parser: argparse.ArgumentParser) -> None:
    """Add the extension's options that the script does not define, and the ``--no-`` form of every switch."""
    switches = [action for action in parser._actions if isinstance(action, argparse._StoreTrueAction)]
    for action in switches:
        for name in (option[2:] for option in action.option_strings if option.startswith("--")):
            parser.add_argument(
                *(flag for flag in negated_flags(name) if flag not in parser._option_string_actions),
                dest=action.dest,
                action="store_false",
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )
    taken = parser._option_string_actions
    free = frozenset(name for name, _ in options("training") if not any(flag in taken for flag in flags(name)))
    add_to(
        parser.add_argument_group(_GROUP, "patches and presets; every switch has a --no- form"),
        "training",
        free,
    )


# --- checking values against a parser --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A key or value in a TOML file that the script would reject or misread."""

    message: str
    """Includes the correct form."""
    certain: bool
    """True when the run would fail or do the opposite of the setting, or when the key is one letter off."""

    def __str__(self) -> str:
        """Return the message."""
        return self.message


#: Values that the GUI writes for upstream's default, although upstream's parser does not list them.
_MEANS_DEFAULT: Mapping[str, object] = {"dynamo_backend": "no", "max_token_length": 75}


def find_problem(parser: argparse.ArgumentParser, key: str, value: object) -> Problem | None:
    """Return the problem with ``key = value`` in a TOML file for this parser, or None."""
    actions = [action for action in parser._actions if action.dest == key]
    if not actions:
        known = [action.dest for action in parser._actions]
        return Problem(f"unknown key {key}.{did_you_mean(key, known)}", any(one_letter_off(key, name) for name in known))
    action = actions[0]
    if action.nargs == 0:
        return _find_switch_problem(key, value)
    if action.nargs in ("*", "+") or isinstance(action.nargs, int) or isinstance(action, argparse._AppendAction):
        if not isinstance(value, list):
            # A script would iterate over the letters of text. Upstream accepts a single number in some places.
            return Problem(f"{key} must be a list: {key} = [{_toml(value)}]", isinstance(value, str))
        items: Iterable[object] = value
    elif key in _MEANS_DEFAULT and value == _MEANS_DEFAULT[key]:
        return None
    else:
        items = [value]
    return next((problem for item in items if (problem := _find_item_problem(action, key, item)) is not None), None)


def find_problems(parser: argparse.ArgumentParser, config: ConfigFile) -> list[Problem]:
    """Return the problems of a config file for this parser."""
    # Those that the script defines itself, too, are read as its own.
    added = {action.dest for group in parser._action_groups if group.title == _GROUP for action in group._group_actions}
    checked = {key: value for key, value in config.values.items() if key not in added}  # with the extension's settings
    if gui_files.is_from_gui(config.values):
        # The GUI writes some keys for scripts that do not know them; none of its keys is misspelt.
        known = {action.dest for action in parser._actions}
        checked = {key: value for key, value in checked.items() if key in known}
    problems = [find_problem(parser, key, value) for key, value in checked.items()]
    return [*(Problem(remark, certain=False) for remark in config.remarks), *filter(None, problems)]


def _find_switch_problem(key: str, value: object) -> Problem | None:
    """Return the problem with a switch's value. The text ``"false"`` is not empty, so it would turn the switch on."""
    if value in (True, False, 0, 1):
        return None
    try:
        opposite = boolean(value) is not bool(value)
    except ValueError:
        opposite = False
    return Problem(f"{key} must be true or false without quotes, not {value!r}", opposite)


def _find_item_problem(action: argparse.Action, key: str, item: object) -> Problem | None:
    if action.choices is not None and item not in list(action.choices):
        choices = [str(choice) for choice in action.choices if choice is not None]
        hint = did_you_mean(str(item), choices)
        return Problem(f"{key} must be one of {', '.join(choices)}, not {item!r}.{hint}", certain=True)
    kind = action.type or str
    if kind is str:
        return None if isinstance(item, str) else Problem(f'{key} must be text: {key} = "{item}"', certain=True)
    number = isinstance(item, (int, float))
    if kind is int:
        if number and isinstance(item, int) and not isinstance(item, bool):
            return None
        # Python treats true as 1, but ends with a TypeError where it counts to 4.0.
        return Problem(f"{key} must be a whole number without quotes, not {item!r}", not isinstance(item, bool))
    if kind is float:
        right = number and not isinstance(item, bool)
        return None if right else Problem(f"{key} must be a number without quotes, not {item!r}", not number)
    if callable(kind):
        try:
            kind(str(item))
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            return Problem(f"{key} cannot be {item!r}: {error}", certain=True)
    return None


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


# --- where a value comes from ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traced:
    """One argument of a run, its value (:data:`HIDDEN` if it is secret), its origin and the reason a preset gives."""

    key: str
    value: object
    origin: str
    why: str


def trace(parser: argparse.ArgumentParser, command: CommandLine) -> Iterator[Traced]:
    """Yield every key that a preset, the config file, the environment or the command line sets, in the presets' order.

    ``parser`` is the script's own after :func:`complete`. It gives the types of the command line's values.
    """
    typed = vars(parser.parse_known_args(command.words)[0])
    layers = {"command line": {key: typed[key] for key in typed if command.origin(key) == "command line"}}
    if command.config is not None:
        layers[str(command.config.path)] = dict(command.config.values)
    for preset in reversed(command.presets.presets):
        layers[f"preset {preset.name}"] = {key: value.value for key, value in command.presets.values_of(preset).items()}
    own = [name for name, _ in options("training")]
    for key in dict.fromkeys(key for layer in reversed(layers.values()) for key in layer if key not in own):
        origin, *hidden = [name for name, layer in layers.items() if key in layer]
        over = f", over {hidden[0]}'s {_shown(key, layers[hidden[0]][key])!r}" if hidden else ""
        why = command.presets.values[key].why if origin.startswith("preset ") else ""
        yield Traced(key, _shown(key, layers[origin][key]), origin + over, why)
    for key in own:
        origin = str(command.origin(key))
        filled = command.presets.values[key] if origin == "preset" else None
        if filled is not None:
            yield Traced(key, _shown(key, command.settings[key]), f"preset {filled.preset}", filled.why)
        elif origin != "default":
            yield Traced(key, _shown(key, command.settings[key]), origin, "")


def _shown(key: str, value: object) -> object:
    return HIDDEN if is_secret(key) else value


def preset_line(command: CommandLine) -> str:
    """Return one line with the values that the presets set, and those left out because of the user's own."""
    values = {key: command.values[key] for key in command.presets.values if command.origin(key) == "preset"}
    return preset_conflicts.summary(command.presets.label, values, command.presets.held_back)
