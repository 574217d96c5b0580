"""How options, presets and the user's config file reach a script, through the script's own parser.

Upstream's order is: defaults < config file < command line. A preset becomes the parser's *defaults*, so that everything
upstream does after that, reading the config file included, stays upstream's own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, cast

from kohya_ext.config import gui_files, preset_conflicts, preset_files
from kohya_ext.config.command_line import values_of
from kohya_ext.config.preset_files import Overlay
from kohya_ext.config.settings import (
    AUTO,
    Settings,
    add_to,
    boolean,
    flags,
    from_environment,
    from_table,
    negated_flags,
    options,
)
from kohya_ext.config.user_files import read_dataset_config, read_toml, subsets
from kohya_ext.console import note, stop, warn
from kohya_ext.errors import UserError, did_you_mean, one_letter_off


class QuietParser(argparse.ArgumentParser):
    """A parser of our own whose errors are ours: a UserError instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError, with the nearest right spelling of an option that is not known."""
        raise UserError(message + _nearest_option(self, message))


def _nearest_option(parser: argparse.ArgumentParser, message: str) -> str:
    if not message.startswith("unrecognized arguments:"):
        return ""
    unknown = next((word.split("=")[0] for word in message.split() if word.startswith("--")), "")
    training = (flag for name, _ in options("training") for flag in (*flags(name), *negated_flags(name)))
    if unknown in training and any(action.dest == "script" for action in parser._actions):
        return f": write {unknown} after SCRIPT"
    return did_you_mean(unknown, parser._option_string_actions)


# --- the user's config file ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConfigFile:
    """The file behind ``--config_file``, flattened as upstream flattens it."""

    path: Path
    values: Mapping[str, object]
    remarks: tuple[str, ...]
    """Content that upstream would lose without a word: a key set twice, a table in a table."""


def read_config_file(name: str) -> ConfigFile:
    """Read a config file with upstream's own TOML library. Raises UserError when it is not there or is broken."""
    path = Path(name if name.endswith(".toml") else f"{name}.toml")
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


# --- one run's arguments ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunArguments:
    """Everything known of a run's options before the script's own parser exists."""

    settings: Settings
    origins: Mapping[str, str]
    """Option name -> where its value comes from, in words; a name that is not here has its default."""
    presets: Overlay
    config: ConfigFile | None


def read_arguments(
    script: str | None, argv: Sequence[str], environ: Mapping[str, str], auto: Sequence[str] | None = None
) -> RunArguments:
    """Resolve the extension's options: default < preset < config file < environment < command line.

    ``script`` is the file name of a training script whose arguments ``argv`` are; None when there is no command line to
    read (a tool, a test runner, another program that imports sd-scripts), and the environment alone counts. Raises
    UserError for a value that cannot be read, an unknown preset, or one of another family.

    The preset ``auto`` is the tier that fits the card with everything else that is said; with ``auto``, these stand in its
    place, or, where it is not asked for, before all others.
    """
    config: ConfigFile | None = None
    given: dict[str, Any] = {}
    if script is not None:
        parser = QuietParser(add_help=False, allow_abbrev=False)
        add_to(parser)
        parser.add_argument("--config_file", default=None)
        parser.add_argument("--output_config", action="store_true")
        known, _ = parser.parse_known_args(list(argv))
        given = vars(known)
        config_file, writes_it = given.pop("config_file"), given.pop("output_config")
        if config_file and not writes_it:
            config = read_config_file(config_file)
    layers = {
        "command line": {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()},
        "environment": from_environment(environ),
        "config file": from_table(config.values, str(config.path)) if config else {},
    }
    names = next((layer["preset"] for layer in layers.values() if "preset" in layer), ())
    presets = Overlay()
    if script is not None:
        presets = _without_contradictions(_load(names, script, argv, environ, auto, layers), script, argv, config)
    set_by_preset = {key: value.value for key, value in presets.values.items()}
    layers["preset"] = from_table(set_by_preset, f"preset {presets.label}")
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in reversed(layers.items()):
        values.update(layer)
        origins.update(dict.fromkeys(layer, origin))
    return RunArguments(Settings(**values), origins, presets, config)


def _load(
    names: Sequence[str],
    script: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    auto: Sequence[str] | None,
    layers: Mapping[str, Mapping[str, Any]],
) -> Overlay:
    """Load presets, a tier in the place of ``auto``; the label then says so."""
    if AUTO not in names:
        return preset_files.load([*(auto or ()), *names], script)
    note = ""
    if auto is None:
        from kohya_ext import units
        from kohya_ext.planning import plan

        said = next((layer["vram"] for layer in layers.values() if "vram" in layer), None)
        found = ("--vram", said) if said is not None else units.first_gpu()
        if found is None:
            raise UserError("--preset auto: no NVIDIA GPU found: give its size, --vram 16, or name a preset, --preset 16gb")
        auto = (plan.automatic(script, argv, environ, found[1]),)
        note = f" (auto: {found[0]}, {units.label(found[1])})"
    presets = preset_files.load([part for name in names for part in (auto if name == AUTO else (name,))], script)
    return replace(presets, label=presets.label + note)


def _without_contradictions(presets: Overlay, script: str, argv: Sequence[str], config: ConfigFile | None) -> Overlay:
    """Hold back the values that contradict the user's own."""
    if not presets.presets:
        return presets
    typed = values_of(argv)
    given = {**(config.values if config is not None else {}), **typed}
    its_subsets: list[dict[str, Any]] = []
    if isinstance(dataset := given.get("dataset_config"), str) and dataset:
        with contextlib.suppress(UserError):  # reported where the training set is checked
            its_subsets = list(subsets(read_dataset_config(Path(dataset))))
    filled = {key: value.value for key, value in presets.values.items()}
    off_in_gui = gui_files.options_off(config.values) - typed.keys() if config is not None else frozenset[str]()
    return replace(presets, held_back=preset_conflicts.held_back(script, filled, given, its_subsets, off_in_gui))


# --- the script's own parser -----------------------------------------------------------------------------------------


class TrainingParser(argparse.ArgumentParser):
    """A script's own parser, taken over in place by :func:`take_over`.

    When it first reads the command line it gains the extension's options and a ``--no-`` form of every switch, checks the
    preset and the config file against its own actions, and takes the preset's values as its defaults.
    """

    run: RunArguments
    completed: bool
    when_final: Callable[[argparse.Namespace], None]

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; ``when_final`` is told what the script will run with.

        That is the first reading of ``sys.argv``, or, with a config file, the second one, on top of the file's values.
        """
        parsed = super().parse_args(args, namespace)
        if args is None and (namespace is not None or not getattr(parsed, "config_file", None)):
            if self.run.presets.presets:
                note(preset_line(self.run, self, sys.argv[1:]))
            self.when_final(parsed)
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, the first call that reads ``sys.argv`` prepared as the class says."""
        if not self.completed:
            self.completed = True
            complete(self)
        if args is None and namespace is None:
            self._lay_preset_under()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Say one line, with the nearest right spelling, instead of two hundred lines of usage; exit code 2."""
        stop(message + _nearest_option(self, message))

    def _lay_preset_under(self) -> None:
        presets = self.run.presets
        wrong = [
            f"preset {value.preset}: {problem}"
            for key, value in presets.values.items()
            if (problem := find_problem(self, key, value.value)) is not None
        ]
        if wrong:
            stop("\n".join(wrong))
        if self.run.config is not None:
            self._check(self.run.config)
        self.set_defaults(**{key: value.value for key, value in presets.values.items()})

    def _check(self, config: ConfigFile) -> None:
        """Warn about the config file, or stop: at a problem that is certain, under ``--strict`` at any, else at none."""
        problems = find_problems(self, config)
        strict = self.run.settings.strict
        errors = [problem for problem in problems if (problem.certain if strict is None else strict)]
        for problem in problems:
            if problem not in errors:
                warn(f"{config.path}: {problem}")
        if errors:
            way_out = [] if strict else ["correct the file, or use --no-strict to get warnings instead"]
            stop("\n".join([*(f"{config.path}: {problem}" for problem in errors), *way_out]))


def take_over(
    parser: argparse.ArgumentParser,
    run: RunArguments,
    when_final: Callable[[argparse.Namespace], None] = lambda args: None,
) -> bool:
    """Turn a plain parser into a :class:`TrainingParser`; return False for one of another class, which is left as it is."""
    if type(parser) is not argparse.ArgumentParser:
        return False
    parser.__class__ = TrainingParser
    assert isinstance(parser, TrainingParser)
    parser.run, parser.completed, parser.when_final = run, False, when_final
    return True


def complete(parser: argparse.ArgumentParser) -> None:
    """Add the extension's options, where the script has none of that name, and the ``--no-`` form of every switch."""
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
        parser.add_argument_group("kohya_ext", "patches and presets; any switch is turned off by its --no- form"),
        "training",
        free,
    )


# --- checking values against a parser --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A key or value in a TOML file that the script would not take as it was meant."""

    message: str
    """With the right way to write it."""
    certain: bool
    """True when the run would fail or do the opposite of the setting, or when the key is one letter off."""

    def __str__(self) -> str:
        """Return the message."""
        return self.message


#: Values that upstream's parser does not offer, and that mean its default; the GUI writes them.
_MEANS_DEFAULT: Mapping[str, object] = {"dynamo_backend": "no", "max_token_length": 75}


def find_problem(parser: argparse.ArgumentParser, key: str, value: object) -> Problem | None:
    """Return what is wrong with ``key = value`` in a TOML file for this parser, and how to write it; None when right."""
    actions = [action for action in parser._actions if action.dest == key]
    if not actions:
        known = [action.dest for action in parser._actions]
        return Problem(f"unknown key {key}.{did_you_mean(key, known)}", any(one_letter_off(key, name) for name in known))
    action = actions[0]
    if action.nargs == 0:
        return _find_switch_problem(key, value)
    if action.nargs in ("*", "+") or isinstance(action.nargs, int) or isinstance(action, argparse._AppendAction):
        if not isinstance(value, list):
            # Text is taken apart into its letters. Upstream takes a single number in some places.
            return Problem(f"{key} must be a list: {key} = [{_toml(value)}]", isinstance(value, str))
        items: Iterable[object] = value
    elif key in _MEANS_DEFAULT and value == _MEANS_DEFAULT[key]:
        return None
    else:
        items = [value]
    return next((problem for item in items if (problem := _find_item_problem(action, key, item)) is not None), None)


def find_problems(parser: argparse.ArgumentParser, config: ConfigFile) -> list[Problem]:
    """Return the problems of a config file for this parser."""
    checked = dict(config.values)
    for name, _ in options("training"):
        checked.pop(name, None)  # read, and checked, with the other settings
    if gui_files.is_from_gui(config.values):
        # The GUI writes some keys for scripts that do not know them; none of its keys is misspelt.
        known = {action.dest for action in parser._actions}
        checked = {key: value for key, value in checked.items() if key in known}
    found = [find_problem(parser, key, value) for key, value in checked.items()]
    return [Problem(remark, certain=False) for remark in config.remarks] + [problem for problem in found if problem is not None]


def _find_switch_problem(key: str, value: object) -> Problem | None:
    """Any value works that means in Python what it says; ``"false"``, a text that is not empty, turns a switch on."""
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
        whole = number and float(cast(Any, item)).is_integer()  # 4.0 and true are 4 and 1 to Python
        return Problem(f"{key} must be a whole number without quotes, not {item!r}", not whole)
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
    """One argument of a run, its value, its origin and the reason a preset gives."""

    key: str
    value: object
    origin: str
    why: str


def trace(parser: argparse.ArgumentParser, run: RunArguments, argv: Sequence[str]) -> Iterator[Traced]:
    """Yield every key that a preset, the config file, the environment or the command line sets, in the presets' order."""
    said = _said_on_command_line(parser, argv)
    layers = {"command line": said}
    if run.config is not None:
        layers[str(run.config.path)] = dict(run.config.values)
    layers.update({f"preset {preset.name}": _plain(run.presets.values_of(preset)) for preset in reversed(run.presets.presets)})
    own = dict(options("training"))
    keys = dict.fromkeys(key for layer in reversed(layers.values()) for key in layer)
    for key in [*(key for key in keys if key not in own), *(key for key in run.origins if key in own)]:
        if key in own:
            yield Traced(key, run.settings[key], run.origins[key], "")
            continue
        origin, *hidden = [name for name, layer in layers.items() if key in layer]
        over = f", over {hidden[0]}'s {layers[hidden[0]][key]!r}" if hidden else ""
        preset = run.presets.values.get(key)
        why = preset.why if preset is not None and origin.startswith("preset ") else ""
        yield Traced(key, layers[origin][key], origin + over, why)


def preset_line(run: RunArguments, parser: argparse.ArgumentParser, argv: Sequence[str]) -> str:
    """Return one line: the values that the presets filled, and those that they left out because of the user's own."""
    given = {*_said_on_command_line(parser, argv), *(run.config.values if run.config is not None else ())}
    filled = {
        key: run.settings[key] if run.origins.get(key) == "preset" else value.value
        for key, value in run.presets.values.items()
        if key not in given and run.origins.get(key, "preset") == "preset"
    }
    return preset_conflicts.summary(run.presets.label, filled, run.presets.held_back)


def _plain(values: Mapping[str, preset_files.Value]) -> dict[str, object]:
    return {key: value.value for key, value in values.items()}


def _said_on_command_line(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, object]:
    unset = object()
    lists = (argparse._AppendAction, argparse._ExtendAction)
    keys = [action.dest for action in parser._actions if not isinstance(action, lists)]
    space = argparse.Namespace(**dict.fromkeys(keys, unset))
    known, _ = parser.parse_known_args(list(argv), space)
    return {key: value for key, value in vars(known).items() if value is not unset and key in keys}
