"""Define options, and hold the values of all options in one run.

A patch declares its options in its own file (``Patch.options``). The launcher's parser, the script's ``--help``, environment
variables, TOML files, presets, ``doctor`` and the documentation follow from the declarations.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Literal, TypeVar, cast, overload

from kohya_ext.errors import UserError
from kohya_ext.sdscripts import checkouts
from kohya_ext.units import read_card

#: Switches the extension: ``1`` turns it on in plain starts of a script, ``0`` turns it off in every start.
MASTER_SWITCH = "KOHYA_EXT"

#: The preset name for the tier that fits.
AUTO = "auto"

Scope = Literal["training", "launcher"]

T = TypeVar("T")


def boolean(value: object) -> bool:
    """Read a strict boolean: TOML's own, or ``1/0 true/false yes/no on/off``. Raises ValueError for anything else."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"must be 1 or 0 (true/false, yes/no, on/off), not {value!r}")


def names(value: object) -> tuple[str, ...]:
    """Read one or several names: a list, or text with commas. Raises ValueError for anything else."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"must be a name or a list of names, not {value!r}")
    return tuple(part.strip() for part in parts if part.strip())


def fraction(value: object) -> float:
    """Read a number in [0, 1]. Raises ValueError for anything else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = float(cast(Any, value))
    except (TypeError, ValueError):
        raise ValueError(f"must be a number from 0 to 1, not {value!r}") from None
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"must be a number from 0 to 1, not {value}")
    return number


def count(value: object) -> int:
    """Read a positive whole number. Raises ValueError for anything else."""
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"must be a whole number of 1 or more, not {value!r}")
    return number


def whole_number(value: object) -> int:
    """Read a whole number, 0 or more. Raises ValueError for anything else."""
    if isinstance(value, bool) or not str(value).isdecimal():
        raise ValueError(f"must be a whole number, 0 or more, not {value!r}")
    return int(str(value))


def one_of(*choices: str) -> Callable[[object], str]:
    """Return a reader of one of ``choices``; it raises ValueError for anything else."""

    def read(value: object) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not {value!r}")
        return str(value)

    return read


def name(value: object) -> str:
    """Read a name. Raises ValueError when it is empty or not text."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"must be a name, not {value!r}")
    return value.strip()


def minutes(value: object) -> float:
    """Read a number of minutes, 0 or more. Raises ValueError for anything else."""
    try:
        number = float(str(value))
    except ValueError:
        number = -1.0
    if isinstance(value, bool) or not 0.0 <= number < float("inf"):
        raise ValueError(f"must be a number of minutes, 0 or more, not {value!r}")
    return number


def path(value: object) -> Path:
    """Read a path, ``~`` expanded. Raises ValueError when empty."""
    if not isinstance(value, (str, Path)) or not str(value):
        raise ValueError(f"must be a path, not {value!r}")
    return Path(value).expanduser()


@dataclass(frozen=True)
class Option(Generic[T]):
    """One option: a flag, a key in a TOML file, an environment variable and a row of every table of options."""

    name: str
    """Gives the flag (``--ema_decay``, dashes accepted too) and the key in a TOML file."""
    default: T
    parse: Callable[[object], T]
    """Reads a value from any of them. Raises ValueError, whose message follows the option's name."""
    help: str
    metavar: str | None = None
    environment: str | None = ""
    """The variable that sets it where the command line cannot be edited (the GUI, an existing script): by default
    ``KOHYA_EXT_NAME``; None for an option without a variable."""
    activates: bool = False
    """Whether its variable alone arms the extension in a plain start of a script."""
    scope: Scope = "training"
    """``training``: also on the script's own command line and in its TOML file. ``launcher``: only before a script starts."""
    secret: bool = False
    """Whether its value is left out of printed commands, the journal, reports and saved states."""
    in_files: bool = True
    """Whether a TOML file may set it. False for an option that runs a command or names a host, because files are shared."""

    @property
    def variable(self) -> str | None:
        """The environment variable; None when it has none."""
        return f"{MASTER_SWITCH}_{self.name.upper()}" if self.environment == "" else self.environment

    @property
    def is_switch(self) -> bool:
        """True when the flag takes no value and has a ``--no-`` form."""
        return self.parse is boolean

    @property
    def is_repeatable(self) -> bool:
        """True when the flag may be given several times, or take a comma-separated list."""
        return self.parse is names


def _option(default: Any, help: str, parse: Callable[[object], Any], **rest: Any) -> Any:  # noqa: A002
    return field(default=default, metadata={"option": Option("", default, parse, help, **rest)})


@dataclass(frozen=True, init=False)
class Settings:
    """The extension's options for one run, after defaults, presets, config file, environment and command line.

    The engine's options are attributes. A patch reads its own with ``settings[OPTION]``, which has the option's type; the
    engine reads a patch's by name, ``settings["ema"]``.
    """

    preset: tuple[str, ...] = _option(
        (),
        "set what you leave open from a preset: a VRAM tier (8gb, 12gb, 16gb, 24gb), auto (the tier that fits), another name "
        "from `presets list`, or a TOML file; repeat it to combine presets, the later one wins",
        names,
        metavar="NAME",
        activates=True,
    )
    vram: int | None = _option(
        None,
        'GPU size for --preset auto, instead of the size of this machine\'s GPU: 12, 12gb or "12 GB" is the advertised size; '
        "11.5GiB or a number of bytes is exact",
        read_card,
        metavar="SIZE",
    )
    strict: bool | None = _option(
        None,
        "treat warnings about the config file, the preflight or a patch as errors; --no-strict: only warn about values in the "
        "config file that are certain to fail, and about keys that are one letter off",
        boolean,
    )
    disable_patch: tuple[str, ...] = _option(
        (),
        "turn patches off by name (see `doctor`); `*` turns all of them off",
        names,
        metavar="NAME",
    )
    preflight: bool = _option(
        True,
        "check images, captions, model files, output folder and conflicting arguments before a model is loaded",
        boolean,
    )
    report: Path | None = _option(
        None,
        "write the applied patches, the time and the peak memory to this JSON file at the end of the run",
        path,
        metavar="FILE",
    )
    allow_unknown_version: bool = _option(
        False,
        "run sd-scripts with an unknown layout (a fork, a release before v0.9); each patch still checks its target",
        boolean,
        scope="launcher",
    )
    sd_scripts: Path | None = _option(
        None,
        "use this sd-scripts checkout instead of searching for one",
        path,
        environment=checkouts.VARIABLE,
        metavar="FOLDER",
        scope="launcher",
    )
    num_processes: int | None = _option(
        None,
        "run `accelerate launch` with this many processes in all, one for each GPU",
        count,
        metavar="N",
        environment=None,
        scope="launcher",
    )
    multi_gpu: bool = _option(False, "run `accelerate launch --multi_gpu`", boolean, environment=None, scope="launcher")
    num_machines: int | None = _option(
        None,
        "train on this many machines: start the same command on each, with its own --machine_rank",
        count,
        metavar="N",
        environment=None,
        scope="launcher",
    )
    machine_rank: int | None = _option(
        None,
        "number of this machine, from 0; the first one saves",
        whole_number,
        metavar="N",
        environment=None,
        scope="launcher",
    )
    main_process_ip: str | None = _option(
        None,
        "address of the first machine, for --num_machines",
        name,
        metavar="ADDRESS",
        environment=None,
        scope="launcher",
    )
    main_process_port: int | None = _option(
        None,
        "free port of the first machine, for --num_machines",
        count,
        metavar="PORT",
        environment=None,
        scope="launcher",
    )
    accelerate_config: Path | None = _option(
        None,
        "run `accelerate launch` with this config file",
        path,
        metavar="FILE",
        environment=None,
        scope="launcher",
    )

    values_of_patches: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The values of the patches' options that are not their defaults, by name."""

    def __init__(self, **values: Any) -> None:
        """Set options by name; the others get their defaults. Raises TypeError for a name that no option has."""
        of_patches = {name: value for name, value in values.items() if name not in _ENGINE}
        if unknown := of_patches.keys() - {option.name for option in patch_options()} if of_patches else set():
            raise TypeError(f"no option {', '.join(sorted(unknown))}")
        for name, option in _ENGINE.items():
            object.__setattr__(self, name, values.get(name, option.default))
        object.__setattr__(self, "values_of_patches", of_patches)

    @overload
    def __getitem__(self, option: Option[T]) -> T: ...
    @overload
    def __getitem__(self, option: str) -> Any: ...
    def __getitem__(self, option: Option[Any] | str) -> Any:
        """Return an option's value. Raises KeyError for a name that no option has."""
        if isinstance(option, str):
            option = _ENGINE.get(option) or {each.name: each for each in patch_options()}[option]
        if option.name in _ENGINE:
            return getattr(self, option.name)
        return self.values_of_patches.get(option.name, option.default)

    def values(self) -> dict[str, Any]:
        """Return the value of every option by name."""
        return {name: self[option] for name, option in options()}

    def with_(self, **changes: Any) -> Settings:
        """Return settings with some options changed."""
        return Settings(**{**{name: getattr(self, name) for name in _ENGINE}, **self.values_of_patches, **changes})


_ENGINE: Mapping[str, Option[Any]] = {
    row.name: replace(row.metadata["option"], name=row.name) for row in fields(Settings) if row.metadata
}


def patch_modules() -> list[ModuleType]:
    """Import every module in ``patches/`` and return them in the order of their names."""
    package = importlib.import_module("kohya_ext.patches")
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]


@cache
def patch_options() -> tuple[Option[Any], ...]:
    """Return the options that patches declare."""
    return tuple(option for module in patch_modules() for option in module.PATCH.options)


def options(scope: Scope | None = None) -> Iterator[tuple[str, Option[Any]]]:
    """Yield (name, option) for every option, or for those of one scope; those of the launcher come last."""
    for option in sorted((*_ENGINE.values(), *patch_options()), key=lambda option: option.scope == "launcher"):
        if scope is None or option.scope == scope:
            yield option.name, option


#: Printed and written in place of a secret value.
HIDDEN = "***"

#: sd-scripts' secret options -> the environment variables that wandb and huggingface_hub read instead.
_SECRETS = {"wandb_api_key": "WANDB_API_KEY", "huggingface_token": "HF_TOKEN"}

#: Ends of the names of secret options of forks, and the option of that form that is none.
_SECRET_ENDS, _NOT_SECRET = ("_api_key", "_token", "password", "secret"), ("num_vectors_per_token",)

#: sd-scripts' options that send files to a host or load them from there. A user's own config file may set them, a preset not.
_HOSTS = (
    *("huggingface_repo_id", "huggingface_token", "save_state_to_huggingface", "resume_from_huggingface"),
    *("wandb_api_key", "log_tracker_config"),
)


def secrets() -> dict[str, str]:
    """Return the secret options of the extension and of sd-scripts by name, and the variables that set them instead."""
    return {**{name: option.variable or "" for name, option in options() if option.secret}, **_SECRETS}


def is_secret(name: str) -> bool:
    """Return whether an option's value is secret: it is never printed, written or part of a state."""
    return name in secrets() or (name.endswith(_SECRET_ENDS) and name not in _NOT_SECRET)


def reject_in_file(names: Iterable[str], where: str, shared: bool) -> None:
    """Raise UserError for an option that runs a command or names a host.

    ``shared``: the file may come from another person, so the same holds for sd-scripts' options.
    """
    own = {name: option for name, option in options() if not option.in_files}
    for name in names:
        if name in own or (shared and name in _HOSTS):
            variable = own[name].variable if name in own else secrets().get(name)
            other = f" or the environment variable {variable}" if variable else ""
            raise UserError(
                f"{where}: {name} is not allowed in a file, because it runs a command or names a host; "
                f"remove it and use --{name}{other}"
            )


def variables() -> list[str]:
    """Return the environment variables that the extension reads."""
    return [MASTER_SWITCH, *(option.variable for _, option in options() if option.variable)]


def flags(name: str) -> list[str]:
    """Return the spellings of an option's flag: with underscores, as in sd-scripts, and with dashes."""
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def negated_flags(name: str) -> list[str]:
    """Return the spellings that turn a switch off."""
    return list(dict.fromkeys([f"--no-{name}", f"--no-{name.replace('_', '-')}"]))


def add_to(parser: argparse._ActionsContainer, scope: Scope | None = None, only: frozenset[str] | None = None) -> None:
    """Add the options of ``scope`` to a parser, or those of them named in ``only``.

    Values not given on the command line stay out of the namespace.
    """
    for name, option in options(scope):
        if only is not None and name not in only:
            continue
        if option.is_switch:
            parser.add_argument(*flags(name), dest=name, action="store_true", default=argparse.SUPPRESS, help=option.help)
            parser.add_argument(
                *negated_flags(name), dest=name, action="store_false", default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )
        else:
            parser.add_argument(
                *flags(name),
                dest=name,
                type=_argument_type(option),
                action="extend" if option.is_repeatable else "store",
                default=argparse.SUPPRESS,
                metavar=option.metavar,
                help=option.help.replace("%", "%%"),
            )


def _argument_type(option: Option[Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return option.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the options set by variables. Raises UserError for a value that cannot be read."""
    values: dict[str, Any] = {}
    for name, option in options():
        text = environ.get(option.variable) if option.variable else None
        if text is None or (text == "" and not option.is_switch):
            continue
        values[name] = checked(name, option.parse, text, f"the environment variable {option.variable}")
    return values


def from_table(table: Mapping[str, object], where: str) -> dict[str, Any]:
    """Return the extension's training options in a TOML table.

    Raises UserError for a value that cannot be read, and for an option that no file may set.
    """
    reject_in_file(table, where, shared=False)
    return {
        name: checked(name, option.parse, table[name], f"{name} in {where}")
        for name, option in options("training")
        if name in table
    }


def checked(name: str, parse: Callable[[object], Any], value: object, label: str) -> Any:
    """Parse a value. Raises UserError, which starts with ``label``, for an invalid one."""
    try:
        return parse(value)
    except ValueError as error:
        raise UserError(f"{label} {error}") from None


def switched_on(environ: Mapping[str, str]) -> bool:
    """Return whether the environment arms the extension in a plain start of a script.

    ``KOHYA_EXT`` decides when it is set; otherwise any option that activates. A value that cannot be read counts as on,
    so that its error is shown where sd-scripts runs rather than in every Python start.
    """
    master = environ.get(MASTER_SWITCH)
    if master is not None:
        return _is_on(boolean, master)
    return any(
        _is_on(option.parse, environ[option.variable])
        for _, option in options()
        if option.activates and option.variable and environ.get(option.variable)
    )


def _is_on(parse: Callable[[object], Any], text: str) -> bool:
    try:
        value = parse(text)
    except ValueError:
        return True
    return value is not False and value is not None and value != ()
