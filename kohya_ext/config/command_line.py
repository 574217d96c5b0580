"""Parse, edit and quote the command line of a training script, and trace the origin of its values."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kohya_ext import installed_gpus, units
from kohya_ext.config import gui_files, preset_conflicts, preset_files
from kohya_ext.config.preset_files import FP16, NotForScriptError, Overlay
from kohya_ext.config.quiet_parser import QuietParser
from kohya_ext.config.settings import (
    AUTO,
    Settings,
    add_to,
    flags,
    from_environment,
    from_table,
    is_secret,
    negated_flags,
    options,
    secrets,
    variables,
)
from kohya_ext.config.user_files import ConfigFile, read_config_file, read_dataset_config, subsets
from kohya_ext.errors import UserError
from kohya_ext.sdscripts import families
from kohya_ext.sdscripts.constraints import Run, newly_broken
from kohya_ext.sdscripts.introspect import option_names

Origin = Literal["command line", "environment", "config file", "preset", "default"]


class _Option(NamedTuple):
    """An option on the command line, with the words up to the next option."""

    flag: str
    """The unabbreviated flag; empty for the words before the first option."""
    words: list[str]
    """All of its words, including the flag."""
    values: list[str]

    @property
    def key(self) -> str:
        return self.flag[2:].removeprefix("no-").replace("-", "_")

    @property
    def value(self) -> Any:
        if not self.values:
            return not self.flag.startswith("--no-")
        numbers = [_number(word) for word in self.values]
        return numbers[0] if len(numbers) == 1 else numbers


@dataclass(frozen=True)
class CommandLine:
    """A script with its arguments and its environment.

    A value comes from: default < preset < config file < environment (the extension's options only) < command line. The
    properties raise UserError for a value that cannot be read, an unknown preset, or a preset of another family.
    """

    script: Path | None
    """The training script; None in another program that imports sd-scripts, where only the environment sets options."""
    argv: Sequence[str]
    """The script's arguments, including the extension's options."""
    environ: Mapping[str, str]
    automatic: Callable[[CommandLine, int], str] | None = None
    """Returns the tier for ``--preset auto`` on a GPU of this many bytes. If None, ``auto`` is an error."""
    launcher: Sequence[str] = ("-m", "kohya_ext")
    """The words between the Python interpreter and the script."""
    has_bf16: bool | None = None
    """Whether the GPU of the run computes in bf16; None for this machine's."""

    @property
    def name(self) -> str:
        """The script's file name; empty without a script."""
        return self.script.name if self.script is not None else ""

    # --- words -------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _options(self) -> list[_Option]:
        parsed = [_Option("", [], [])]
        for word in self.argv:
            flag, equals, value = word.partition("=")
            if not flag.startswith("--") or " " in flag:  # argparse reads text with a space as a value: "--n blurry"
                parsed[-1].words.append(word)
                parsed[-1].values.append(word)
            else:
                flag = self._in_full(flag)
                parsed.append(_Option(flag, [flag + equals + value], [value] if equals else []))
        return parsed

    def _in_full(self, flag: str) -> str:
        """Return the option that a flag abbreviates in the script's own parser; any other flag unchanged."""
        known = _flags(self.script)
        meant = {full for spelling, full in known.items() if spelling.startswith(flag)}
        return meant.pop() if flag not in known and len(meant) == 1 else flag

    @property
    def words(self) -> list[str]:
        """The arguments with every option in full."""
        return [word for option in self._options for word in option.words]

    def with_(self, changes: Mapping[str, object]) -> CommandLine:
        """Return a copy with arguments changed: the words of each key are replaced by its :func:`option_words`."""
        kept = (word for option in self._options if option.key not in changes for word in option.words)
        return replace(self, argv=(*kept, *option_words(changes)))

    def with_tier(self, tier: str | None) -> CommandLine:
        """Return a copy with a tier instead of the preset ``auto``, or else before all presets; None removes ``auto``.

        It is not added before presets of which it is one.
        """
        names: Sequence[str] = self.given.get("preset", ())
        tiers = [] if tier is None else [tier]
        has_place = AUTO in names or tier in names
        names = [new for name in (names if has_place else (AUTO, *names)) for new in (tiers if name == AUTO else [name])]
        # An empty name also overrides presets from the environment and the config file.
        presets = [word for name in names or ([""] if "preset" in self.given else []) for word in ("--preset", name)]
        return replace(self, argv=(*presets, *self.with_({"preset": None}).argv))

    # --- values ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _own(self) -> dict[str, Any]:
        """The extension's options on the command line, and those that name the config file."""
        known, _ = _own_parser().parse_known_args(self.words if self.script is not None else [])
        return {name: tuple(value) if isinstance(value, list) else value for name, value in vars(known).items()}

    @functools.cached_property
    def config(self) -> ConfigFile | None:
        """The file of ``--config_file``; None if the run writes it."""
        name = self._own["config_file"]
        return read_config_file(name) if name and not self._own["output_config"] else None

    @functools.cached_property
    def _layers_of_user(self) -> dict[Origin, dict[str, Any]]:
        if self.script is None:
            return {"environment": from_environment(self.environ)}
        own = dict(options())
        typed = {option.key: option.value for option in self._options if option.flag and option.key not in own}
        config = _layer(self.config.values, str(self.config.path)) if self.config is not None else {}
        return {
            "command line": {**typed, **{key: value for key, value in self._own.items() if key in own}},
            "environment": from_environment(self.environ),
            "config file": config,
        }

    @functools.cached_property
    def given(self) -> Mapping[str, Any]:
        """The user's values by key. Without the script's parser, numeric text becomes a number and several words a list."""
        return {key: value for layer in reversed(self._layers_of_user.values()) for key, value in layer.items()}

    @functools.cached_property
    def presets(self) -> Overlay:
        """The presets, without the values that contradict the user's own."""
        names: Sequence[str] = self.given.get("preset", ())
        if self.script is None or not names:
            return Overlay()
        presets = self._loaded(names)
        values = {key: value.value for key, value in presets.values.items()}
        its_subsets: list[dict[str, Any]] = []
        if isinstance(dataset := self.given.get("dataset_config"), str) and dataset:
            with contextlib.suppress(UserError):  # reported where the training set is checked
                its_subsets = list(subsets(read_dataset_config(Path(dataset))))
        off_in_gui = gui_files.options_off(self.config.values) if self.config is not None else frozenset[str]()
        off_in_gui -= self._layers_of_user["command line"].keys()
        held_back = preset_conflicts.held_back(self.name, values, self.given, its_subsets, off_in_gui)
        return replace(presets, held_back={**self._unknown(presets), **held_back})

    def _loaded(self, names: Sequence[str]) -> Overlay:
        """Load presets, with the one for a GPU without bf16 where it is needed.

        One from the environment, which a user sets for all scripts, is left out where it does not apply.
        """
        origin = next(origin for origin, layer in self._layers_of_user.items() if "preset" in layer)
        label, remarks, applied = "", [], list[str]()
        for name in names:
            try:
                if name == AUTO:
                    name, label = self._automatic()
                preset_files.load([name], self.name)
            except NotForScriptError as error:
                if origin != "environment":
                    raise
                remarks.append(f"KOHYA_EXT_PRESET: {error}; training without it")
            else:
                applied.append(name)
        presets = preset_files.load(applied, self.name)
        presets = replace(presets, label=presets.label + label, remarks=tuple(remarks))
        value = presets.values.get("mixed_precision")
        if value is None or value.value != "bf16" or "mixed_precision" in self.given or self._has_bf16():
            return presets
        half = preset_files.load([FP16], self.name)
        values = {key: value.value for key, value in presets.values.items()}
        changes = {key: value.value for key, value in half.values.items()}
        if newly_broken(Run(self.name, {**values, **self.given}), changes):
            slow = f"the GPU has no bf16, and {self.name} cannot train in fp16 with this preset: steps are slow"
            return replace(presets, remarks=(*presets.remarks, slow))
        label = f"{presets.label} + {half.label} (the GPU has no bf16)"
        return replace(presets, presets=(*presets.presets, *half.presets), label=label)

    def _has_bf16(self) -> bool:
        if self.has_bf16 is not None:
            return self.has_bf16
        gpu = installed_gpus.first_gpu()
        return gpu is None or gpu.has_bf16

    def _automatic(self) -> tuple[str, str]:
        """Return the tier that ``auto`` means, and the GPU that it is for as a part of the presets' label."""
        name, size = "--vram", self.given.get("vram")
        if size is None:
            gpu = installed_gpus.first_gpu()
            if gpu is None:
                raise UserError("--preset auto: no NVIDIA GPU found; add --vram 16, or name a preset: --preset 16gb")
            name, size = gpu.name, gpu.memory
        if self.automatic is None:
            raise UserError("--preset auto is not supported here; name a preset: --preset 16gb")
        return self.automatic(self, size), f" (auto: {name}, {units.label(size)})"

    def _unknown(self, presets: Overlay) -> dict[str, preset_conflicts.Reason]:
        """Return the keys of shipped presets that the script does not have, with the reasons.

        An older release of sd-scripts lacks some, and some scripts lack keys of presets for every script. Raises UserError if
        it lacks the option that selects the preset's model.
        """
        theirs = option_names(self.script) if self.script is not None else frozenset[str]()
        if not theirs:
            return {}  # the script does not exist
        known = {*theirs, *(name for name, _ in options())}
        reasons: dict[str, preset_conflicts.Reason] = {}
        for preset in presets.presets:
            unknown = [key for key in preset.values if key not in known] if preset.is_shipped else []
            for key in unknown:
                if key in families.SELECTORS:
                    raise UserError(f"preset {preset.name}: {self.script} has no --{key}; use a newer release of sd-scripts")
                reasons[key] = preset_conflicts.Reason(f"not an option of {self.name}", preset.family != preset_files.ANY)
        return reasons

    @functools.cached_property
    def _layers(self) -> dict[Origin, dict[str, Any]]:
        presets = {key: value.value for key, value in self.presets.values.items()}
        return {**self._layers_of_user, "preset": _layer(presets, f"preset {self.presets.label}")}

    @functools.cached_property
    def values(self) -> Mapping[str, Any]:
        """The values by key, including those of presets. A missing key has its default."""
        return {**self._layers["preset"], **self.given}

    def origin(self, key: str) -> Origin:
        """Return where a key's value comes from."""
        return next((origin for origin, layer in self._layers.items() if key in layer), "default")

    @functools.cached_property
    def settings(self) -> Settings:
        """The extension's options."""
        return Settings(**{name: self.values[name] for name, _ in options() if name in self.values})

    # --- shell -------------------------------------------------------------------------------------------------------

    def with_environment(self) -> CommandLine:
        """Return a copy to print: with flags for the options that environment variables set, except secret ones."""
        typed = {option.key for option in self._options} | secrets().keys()
        environment: dict[str, object] = {}
        for name, option in options("training"):
            text = self.environ.get(option.variable) if option.variable else None
            if text is not None and name not in typed and (text or option.is_switch):
                environment[name] = bool(option.parse(text)) if option.is_switch else text
        return replace(self, argv=(*option_words(environment), *self.words))

    def shell_line(self) -> str:
        """Return a line that runs it in a fresh shell of this system, in this folder and on these GPUs."""
        command = self.with_environment()
        script = os.path.abspath(self.script or "")
        gpus = self.environ.get("CUDA_VISIBLE_DEVICES")
        line, folder = quoted([sys.executable, *command.launcher, script, *command.argv]), quoted_word(os.getcwd())
        if (kind := shell()) == "powershell":
            chosen = "" if gpus is None else f"$env:CUDA_VISIBLE_DEVICES = {quoted_word(gpus)}; "
            return f"Set-Location -LiteralPath {folder}; {chosen}{line}"
        if kind == "cmd":
            chosen = "" if gpus is None else f'set "CUDA_VISIBLE_DEVICES={gpus}" && '
            return f"cd /d {folder} && {chosen}{line}"
        chosen = "" if gpus is None else f"CUDA_VISIBLE_DEVICES={quoted_word(gpus)} "
        return f"cd {folder} && {chosen}{line}"


LAUNCHED = "KOHYA_EXT_LAUNCHED"
"""The environment variable of processes that the extension has started with accelerate, and whose command lines repeat the
launcher's options."""


@functools.cache
def _own_parser() -> QuietParser:
    """Return a parser for the extension's options, which no caller may change."""
    parser = QuietParser(add_help=False)
    add_to(parser)
    parser.add_argument("--config_file", default=None)
    parser.add_argument("--output_config", action="store_true")
    return parser


@functools.cache
def _flags(script: Path | None) -> dict[str, str]:
    """Return {spelling: full flag} for all options of a script; empty if the script does not exist."""
    theirs = option_names(script) if script is not None else frozenset()
    names = {*theirs, *(name for name, _ in options("training"))} if theirs else set()
    return {
        **{spelling: f"--no-{name}" for name in names for spelling in negated_flags(name)},
        **{spelling: f"--{name}" for name in names for spelling in flags(name)},
    }


def _layer(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    own = dict(options())
    return {**{key: value for key, value in values.items() if key not in own}, **from_table(values, where)}


def _number(word: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(word)
    return word


def launcher_options(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the launcher's options among words by name, and the other words in order."""
    parser = QuietParser(add_help=False)
    add_to(parser, "launcher")
    known, rest = parser.parse_known_args(list(words))
    return vars(known), rest


def of_this_process() -> CommandLine:
    """Return the command line of this process's run, started with or without the launcher."""
    words, script = list(sys.orig_argv), Path(sys.argv[0])
    # The launcher's options are before the script or after it, and the script may be given without its suffix. An embedded
    # interpreter has no command line.
    place = next((index for index, word in enumerate(words) if index and Path(word).name in (script.name, script.stem)), 1)
    before = words[1:place]
    end = next((index for index, word in enumerate(before, 1) if Path(word).stem in ("kohya_ext", "kohya-ext")), None)
    launcher = [*before, "-m", "kohya_ext"]
    if end is not None:
        launcher = [*before[:end], *option_words(launcher_options([*before[end:], *words[place + 1 :]])[0])]
    return CommandLine(script, tuple(sys.argv[1:]), os.environ, launcher=launcher)


def restart_line(changes: Mapping[str, object], command: CommandLine | None = None) -> str:
    """Return a shell line that restarts this process's run through the launcher with arguments changed.

    For one of several processes that the extension has not launched it is a description, because the command line of the
    process does not include the options of accelerate. ``command``: the run's command line to print, if not as it is.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or LAUNCHED in os.environ:
        return (command or of_this_process()).with_(changes).shell_line()
    printed = set(variables()) - set(secrets().values())
    switches = [f"{name}={quoted_word(value)}" for name, value in sorted(os.environ.items()) if name in printed]
    environment = f", with {' '.join(switches)} in the environment" if switches else ""
    return f"the same command with {quoted(option_words(changes))}{environment}"


# --- words -----------------------------------------------------------------------------------------------------------


def option_words(changes: Mapping[str, object]) -> list[str]:
    """Return the words that set arguments by key. False turns a switch off, a list gives several words, None gives none."""
    words: list[str] = []
    for key, value in changes.items():
        if isinstance(value, bool):
            words.append(f"--{key}" if value else f"--no-{key}")
        elif value is not None:
            words += [f"--{key}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return words


def without_secrets(words: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return the words without secret options, and the values of those options by name."""
    kept: list[str] = []
    values: dict[str, str] = {}
    iterator = iter(words)
    for word in iterator:
        given, equals, value = word.partition("=")
        name = _secret(given)
        if name is None:
            kept.append(word)
        else:
            values[name] = value if equals else next(iterator, "")
    return kept, values


def _secret(flag: str) -> str | None:
    """Return the secret option of a flag, which argparse also accepts abbreviated; None for any other word."""
    if not flag.startswith("--"):
        return None
    name = flag[2:].replace("-", "_")
    if is_secret(name):
        return name
    # The start of `wandb_api_key` has to differ from that of `wandb_run_name`.
    return next((known for known in secrets() if known.startswith(name) and len(name) > max(known.find("_") + 1, 2)), None)


Shell = Literal["sh", "cmd", "powershell"]

#: Characters that cmd interprets outside of quotes.
_CMD_SPECIAL = frozenset("&|<>^()!,;=")

#: The same with quotes and variables.
_CMD_INTERPRETED = re.compile(r'[()%!^"<>&|,;=]')

#: A word that needs no quotes in PowerShell, which splits words at commas, and words with a leading dash at dots and colons.
_PLAIN_IN_POWERSHELL = re.compile(r"-[\w=/\\-]*|[\w./:\\][\w./:\\=+-]*", re.ASCII)

#: A word that versions of PowerShell pass differently to programs: quotes, empty, or white space and a backslash at the end.
_DIFFERS_IN_POWERSHELL = re.compile(r'"|^$|\s.*\\$', re.DOTALL)

#: Characters that end a string in single quotes, also typographic ones.
_POWERSHELL_QUOTES = re.compile("['\u2018-\u201b]")


def shell() -> Shell:
    """Return the shell that printed commands are quoted for."""
    return _windows_shell() if os.name == "nt" else "sh"


@functools.cache
def _windows_shell() -> Shell:
    """Return the shell nearest among this process's parents; cmd if there is none."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process().parents():
            name = Path(parent.name()).stem.lower()
            if name in ("cmd", "powershell", "pwsh"):
                return "cmd" if name == "cmd" else "powershell"
    return "cmd"


def quoted(words: Iterable[str]) -> str:
    """Return a command quoted as one line for :func:`shell`, to be printed or written: without secret options."""
    words = without_secrets(words)[0]
    return _quoted_for_powershell(words) if shell() == "powershell" else " ".join(map(quoted_word, words))


def quoted_word(word: str) -> str:
    """Return one word quoted for :func:`shell`."""
    kind = shell()
    if kind == "cmd":
        return _quoted_for_cmd(word)
    if kind == "sh":
        return shlex.quote(word)
    return word if _PLAIN_IN_POWERSHELL.fullmatch(word) else "'" + _POWERSHELL_QUOTES.sub(r"\g<0>\g<0>", word) + "'"


def _quoted_for_powershell(words: Sequence[str]) -> str:
    """Return a command quoted for PowerShell 5 and 7, which differ in what they make of a word for a program.

    Both put a word with white space into double quotes. Version 5 adds nothing else, so that quotes and a last backslash change
    their meaning, and leaves out an empty word. Version 7 passes such words as they are, unless a variable makes it like
    version 5. Then both pass a word unchanged that is in double quotes already. See about_Parsing in its documentation.
    """
    line = " ".join(map(quoted_word, words))
    if all(map(_PLAIN_IN_POWERSHELL.fullmatch, words)):
        return line
    if not any(map(_DIFFERS_IN_POWERSHELL.search, words)):
        return f"& {line}"
    for_programs = (word if _PLAIN_IN_POWERSHELL.fullmatch(word) else _in_double_quotes(word) for word in words[1:])
    line = " ".join(map(quoted_word, (words[0], *for_programs)))
    return f"& {{ $PSNativeCommandArgumentPassing = 'Legacy'; & {line} }}"


def _in_double_quotes(word: str) -> str:
    """Return one word in double quotes, in which programs read it unchanged; list2cmdline adds them only where it has to."""
    return '"' + subprocess.list2cmdline([f" {word}"])[2:]


def _quoted_for_programs(word: str) -> str:
    """Return one word quoted for the programs that receive it, which read quotes themselves on Windows."""
    line = subprocess.list2cmdline([word])
    return f'"{line}"' if line == word and _CMD_SPECIAL.intersection(word) else line


def _quoted_for_cmd(word: str) -> str:
    """Return one word quoted for cmd, too.

    For cmd every quote begins or ends a quoted part, also one that a program takes for a letter, and it replaces
    ``%NAME%`` within quotes. With a caret before each of them, nothing is quoted for cmd, and all of it for the program.
    """
    line = _quoted_for_programs(word)
    return _CMD_INTERPRETED.sub(r"^\g<0>", line) if '"' in word or word.count("%") > 1 else line
