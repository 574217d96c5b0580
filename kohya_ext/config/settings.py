"""The one table of options.

A row is a field of :class:`Settings`. Its name gives the flag (``--activation_memory_budget``, dashes accepted too) and
the key in a TOML file; its type, default, environment variable and meaning stand beside it. The launcher's parser, the
script's ``--help``, ``doctor`` and docs/options.md all read it from here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast

from kohya_ext.errors import UserError
from kohya_ext.sdscripts import checkouts
from kohya_ext.units import read_budget, read_card

#: Switches everything: ``1`` arms the extension in a plain start of a script, ``0`` keeps it out of every start.
MASTER_SWITCH = "KOHYA_EXT"

#: What --preset says for the tier that fits.
AUTO = "auto"

Scope = Literal["training", "launcher"]


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


def one_of(*choices: str) -> Callable[[object], str]:
    """Return a reader of one of ``choices``; it raises ValueError for anything else."""

    def read(value: object) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not {value!r}")
        return str(value)

    return read


def name(value: object) -> str:
    """Read a name. Raises ValueError when it is no text or empty."""
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
class Option:
    """What a row of the table says beside its name, type and default."""

    help: str
    parse: Callable[[object], Any]
    environment: str | None = None
    """The variable that sets it where no command line can be edited (the GUI, an existing script)."""
    metavar: str | None = None
    scope: Scope = "training"
    """``training``: also on the script's own command line and in its TOML file. ``launcher``: before anything is run."""
    activates: bool = False
    """Whether its variable alone arms the extension in a plain start of a script."""
    patch: str | None = None
    """The patch that does what it asks for; where that is off, asking is answered by a line that says so."""

    @property
    def is_switch(self) -> bool:
        """True when the flag takes no value and has a ``--no-`` form."""
        return self.parse is boolean

    @property
    def is_repeatable(self) -> bool:
        """True when the flag may stand several times, or take a comma-separated list."""
        return self.parse is names


def _option(default: Any, help: str, parse: Callable[[object], Any], **rest: Any) -> Any:  # noqa: A002
    return field(default=default, metadata={"option": Option(help=help, parse=parse, **rest)})


@dataclass(frozen=True)
class Settings:
    """The extension's options for one run, after defaults, presets, config file, environment and command line."""

    preset: tuple[str, ...] = _option(
        (),
        "fill what the command line and the config file leave open from a preset: a VRAM tier (8gb, 12gb, 16gb, 24gb), auto "
        "(the one that fits), another name that `presets list` shows, or a TOML file; several are stacked, the later wins",
        names,
        environment="KOHYA_EXT_PRESET",
        metavar="NAME",
        activates=True,
    )
    vram: int | None = _option(
        None,
        "the GPU that --preset auto is for, instead of the one in this machine, by the size it is sold as: 12, 12gb and "
        '"12 GB" are the same; 11.5GiB and a number of bytes are exact',
        read_card,
        environment="KOHYA_EXT_VRAM",
        metavar="SIZE",
    )
    strict: bool | None = _option(
        None,
        "stop at every warning about the config file, the preflight or a patch; --no-strict: only warn where the config file "
        "has a value that is certain to fail, or a key that is one letter off",
        boolean,
        environment="KOHYA_EXT_STRICT",
    )
    disable_patch: tuple[str, ...] = _option(
        (),
        "turn patches off by name (see `doctor`), `*` for all of them",
        names,
        environment="KOHYA_EXT_DISABLE_PATCH",
        metavar="NAME",
    )
    selective_torch_compile: bool = _option(
        False,
        "compile the model's repeated blocks instead of the whole model",
        boolean,
        environment="SDSCRIPTS_SELECTIVE_TORCH_COMPILE",
        activates=True,
        patch="selective_torch_compile",
    )
    compile_backend: str = _option(
        "inductor",
        "torch.compile's backend for the blocks",
        name,
        environment="KOHYA_EXT_COMPILE_BACKEND",
        metavar="NAME",
        patch="selective_torch_compile",
    )
    compile_mode: str = _option(
        "default",
        "torch.compile's mode for the blocks, for the inductor backend: default, or max-autotune-no-cudagraphs",
        one_of("default", "max-autotune-no-cudagraphs"),
        environment="KOHYA_EXT_COMPILE_MODE",
        metavar="MODE",
        patch="selective_torch_compile",
    )
    compile_dynamic: str = _option(
        "auto",
        "whether one graph serves pictures of all sizes: true, false (a graph for each size), or auto (after the second size)",
        one_of("auto", "true", "false"),
        environment="KOHYA_EXT_COMPILE_DYNAMIC",
        metavar="auto|true|false",
        patch="selective_torch_compile",
    )
    compile_fullgraph: bool = _option(
        False,
        "leave a kind of block eager that cannot be compiled in one piece, instead of compiling its parts",
        boolean,
        environment="KOHYA_EXT_COMPILE_FULLGRAPH",
        patch="selective_torch_compile",
    )
    compile_cache_size_limit: int | None = _option(
        None,
        "how many graphs one kind of block may have before further ones run eager (64 if not given)",
        count,
        environment="KOHYA_EXT_COMPILE_CACHE_SIZE_LIMIT",
        metavar="N",
        patch="selective_torch_compile",
    )
    activation_memory_budget: float | None = _option(
        None,
        "share of the activations that compiled blocks may keep for backward, from 0 (recompute all) to 1 (keep all)",
        fraction,
        environment="SDSCRIPTS_TORCH_COMPILE_ACTIVATION_MEMORY_BUDGET",
        metavar="FRACTION",
        activates=True,
        patch="activation_memory_budget",
    )
    fused_operations: bool = _option(
        False,
        "do in few passes over memory what eager blocks do in many: LoRA's sums, gates, norms, rotary embedding; "
        "results differ in the last digits",
        boolean,
        environment="KOHYA_EXT_FUSED_OPERATIONS",
        activates=True,
        patch="fused_operations",
    )
    preflight: bool = _option(
        True,
        "before a model is loaded, check pictures, captions, model files, output folder, and arguments that cannot go together",
        boolean,
        environment="KOHYA_EXT_PREFLIGHT",
    )
    disk_full_timeout: float = _option(
        10.0,
        "when a save finds the disk full, keep the weights in memory and try again for this many minutes before giving up",
        minutes,
        environment="KOHYA_EXT_DISK_FULL_TIMEOUT",
        metavar="MINUTES",
        patch="atomic_saves",
    )
    fallback_dir: Path | None = _option(
        None,
        "a folder, on another disk, that a save goes to when there is no room in --output_dir",
        path,
        environment="KOHYA_EXT_FALLBACK_DIR",
        metavar="FOLDER",
        patch="atomic_saves",
    )
    keep_previous: bool = _option(
        True,
        "keep a model of the same name that was there before the run as NAME.previous, instead of replacing it",
        boolean,
        environment="KOHYA_EXT_KEEP_PREVIOUS",
        patch="atomic_saves",
    )
    stop_file: Path | None = _option(
        None,
        "stop after the current step, model and state saved, when this file appears; default: OUTPUT_NAME.stop in --output_dir",
        path,
        environment="KOHYA_EXT_STOP_FILE",
        metavar="FILE",
        patch="safe_stop",
    )
    save_state_every_n_minutes: float | None = _option(
        None,
        "save the full state every so many minutes, so that a kill or a power cut costs no more; 0: after every step",
        minutes,
        environment="KOHYA_EXT_SAVE_STATE_EVERY_N_MINUTES",
        metavar="MINUTES",
        activates=True,
        patch="rolling_states",
    )
    save_last_n_timed_states: int = _option(
        2,
        "how many states of --save_state_every_n_minutes to keep, the newest",
        count,
        environment="KOHYA_EXT_SAVE_LAST_N_TIMED_STATES",
        metavar="N",
        patch="rolling_states",
    )
    inexact_resume: bool = _option(
        False,
        "resume even from a state whose random numbers cannot be restored; the result then differs from the whole run",
        boolean,
        environment="KOHYA_EXT_INEXACT_RESUME",
        patch="exact_resume",
    )
    nan_patience: int = _option(
        10,
        "end the run, its last finite weights saved, after so many steps in a row whose loss or gradient is not finite",
        count,
        environment="KOHYA_EXT_NAN_PATIENCE",
        metavar="N",
        patch="nan_guard",
    )
    ema: bool = _option(
        False,
        "keep an average of the trained weights over the steps, in float32, and save it beside each model as NAME-ema",
        boolean,
        environment="KOHYA_EXT_EMA",
        activates=True,
        patch="ema",
    )
    ema_decay: float = _option(
        0.999,
        "how much of --ema's average stays at each step, from 0 to 1; less in the first steps",
        fraction,
        environment="KOHYA_EXT_EMA_DECAY",
        metavar="FRACTION",
        patch="ema",
    )
    ema_device: str = _option(
        "cpu",
        "where --ema's average lies: cpu costs a copy of the trained weights at each step, gpu their memory, 4 bytes a weight",
        one_of("cpu", "gpu"),
        environment="KOHYA_EXT_EMA_DEVICE",
        metavar="cpu|gpu",
        patch="ema",
    )
    adaptive_lr: bool = _option(
        False,
        "halve the learning rate when the loss no longer falls, and clip a gradient of an unusual norm to the usual one",
        boolean,
        environment="KOHYA_EXT_ADAPTIVE_LR",
        activates=True,
        patch="adaptive_lr",
    )
    adaptive_lr_patience: int = _option(
        500,
        "of how many steps --adaptive_lr compares the mean loss; few steps' means differ by chance",
        count,
        environment="KOHYA_EXT_ADAPTIVE_LR_PATIENCE",
        metavar="STEPS",
        patch="adaptive_lr",
    )
    gradient_checkpointing_ratio: float | None = _option(
        None,
        "share of the blocks that --gradient_checkpointing covers, from 0 (none) to 1 (all): what memory is left saves "
        "recomputing; `estimate` says what a share costs",
        fraction,
        environment="KOHYA_EXT_GRADIENT_CHECKPOINTING_RATIO",
        metavar="FRACTION",
        activates=True,
        patch="selective_checkpointing",
    )
    vram_budget: int | str | None = _option(
        None,
        "cap the process at this many bytes, unlike --vram, which names a GPU (14GB is 14e9 bytes, 13GiB is 13 * 2**30; a "
        "16 GB GPU has 17.2e9; auto takes the free memory less 5 percent), checkpoint every block, "
        "then free as many from it as the measured peak leaves room for",
        read_budget,
        environment="KOHYA_EXT_VRAM_BUDGET",
        metavar="SIZE|auto",
        activates=True,
        patch="vram_budget",
    )
    on_oom: str = _option(
        "stop",
        "when a run is out of memory: stop, or retry, which starts it anew from its newest state with the cheapest change that "
        "helps (launcher only)",
        one_of("stop", "retry"),
        environment="KOHYA_EXT_ON_OOM",
        metavar="stop|retry",
        patch="out_of_memory",
    )
    oom_max_retries: int = _option(
        3,
        "how often --on_oom retry starts a run anew at most",
        count,
        environment="KOHYA_EXT_OOM_MAX_RETRIES",
        metavar="N",
        patch="out_of_memory",
    )
    report: Path | None = _option(
        None,
        "at the end of the run, write what was applied, seconds and peak memory to this JSON file",
        path,
        environment="KOHYA_EXT_REPORT",
        metavar="FILE",
    )
    allow_unknown_version: bool = _option(
        False,
        "go on with an sd-scripts whose layout is not known (a fork, an older release): each patch still checks its target",
        boolean,
        environment="KOHYA_EXT_ALLOW_UNKNOWN_VERSION",
        scope="launcher",
    )
    sd_scripts: Path | None = _option(
        None,
        "the sd-scripts checkout to use, instead of looking for one",
        path,
        environment=checkouts.VARIABLE,
        metavar="FOLDER",
        scope="launcher",
    )
    num_processes: int | None = _option(
        None,
        "hand over to `accelerate launch` with this many processes",
        count,
        metavar="N",
        scope="launcher",
    )
    multi_gpu: bool = _option(False, "hand over to `accelerate launch --multi_gpu`", boolean, scope="launcher")
    accelerate_config: Path | None = _option(
        None,
        "hand over to `accelerate launch` with this config file",
        path,
        metavar="FILE",
        scope="launcher",
    )


def options(scope: Scope | None = None) -> Iterator[tuple[str, Option]]:
    """Yield (name, option) for every row, or for those of one scope, in the table's order."""
    for row in fields(Settings):
        option: Option = row.metadata["option"]
        if scope is None or option.scope == scope:
            yield row.name, option


def variables() -> list[str]:
    """Return the environment variables that the extension reads."""
    return [MASTER_SWITCH, *(option.environment for _, option in options() if option.environment)]


def flags(name: str) -> list[str]:
    """Return the spellings of an option's flag: sd-scripts writes underscores, fingers write dashes."""
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


def _argument_type(option: Option) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return option.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the options set by variables. Raises UserError for a value that cannot be read."""
    found: dict[str, Any] = {}
    for name, option in options():
        text = environ.get(option.environment) if option.environment else None
        if text is None or (text == "" and not option.is_switch):
            continue
        found[name] = checked(name, option.parse, text, f"the environment variable {option.environment}")
    return found


def from_table(table: Mapping[str, object], where: str) -> dict[str, Any]:
    """Return the extension's training options found in a TOML table. Raises UserError for a value that cannot be read."""
    return {
        name: checked(name, option.parse, table[name], f"{name} in {where}")
        for name, option in options("training")
        if name in table
    }


def checked(name: str, parse: Callable[[object], Any], value: object, label: str) -> Any:
    """Parse a value; a UserError that starts with ``label`` when it cannot be read."""
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
        _is_on(option.parse, environ[option.environment])
        for _, option in options()
        if option.activates and option.environment and environ.get(option.environment)
    )


def _is_on(parse: Callable[[object], Any], text: str) -> bool:
    try:
        value = parse(text)
    except ValueError:
        return True
    return value is not False and value is not None and value != ()
