"""Run a script of sd-scripts, untouched, in this process, with the patches armed."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kohya_ext import __version__, commands
from kohya_ext.config.command_line import CommandLine, launcher_options, option_words
from kohya_ext.config.quiet_parser import QuietParser
from kohya_ext.config.settings import MASTER_SWITCH, Settings, add_to, boolean, checked, flags, from_environment, options
from kohya_ext.errors import UserError, did_you_mean
from kohya_ext.launch import oom_retry
from kohya_ext.launch.accelerate_signals import pass_signals_on
from kohya_ext.launch.autoload import watch
from kohya_ext.planning import automatic
from kohya_ext.sdscripts import checkouts
from kohya_ext.sdscripts.checkouts import Checkout, find, find_or_fetch, is_training_script

USAGE = """python -m kohya_ext [options] SCRIPT [script arguments]
       python -m kohya_ext COMMAND [--help]
       python -m kohya_ext help COMMAND"""

EPILOG = """commands:
{commands}

The options may be given before SCRIPT or after it. `python -m kohya_ext SCRIPT --help` also shows the script's own."""


def main(argv: Sequence[str]) -> int:
    """Find the script, check what can be checked before anything is imported, then run it or hand it to accelerate."""
    parser = _parser()
    if not argv:
        parser.print_help()
        return 0
    given = parser.parse_args(argv)
    options_before, own = launcher_options(argv[: len(argv) - len(given.arguments) - 1])
    options_after, arguments = launcher_options(given.arguments)
    launcher = {**options_before, **options_after}
    chosen = {**from_environment(os.environ), **launcher}
    settings = Settings(**{name: chosen[name] for name, _ in options("launcher") if name in chosen})
    switched_off = not checked(MASTER_SWITCH, boolean, os.environ.get(MASTER_SWITCH, "1"), f"the variable {MASTER_SWITCH}")

    checkout, script = _find_script(launcher.get("sd_scripts"), given.script)
    if not is_training_script(script) and own:
        raise UserError(f"{own[0]} has no meaning for {script.name}, which is not a training script: leave it out")
    arguments = [*own, *arguments]
    if not switched_off:
        _check_layout(checkout, settings)
        trains = script if is_training_script(script) else None
        command = CommandLine(trains, arguments, os.environ, automatic, ("-m", "kohya_ext", *option_words(launcher)))
        # Resolving it raises what would otherwise be found only after ten seconds of imports.
        if command.settings.on_oom == "retry" and trains is not None and oom_retry.handed_over() is None:
            return oom_retry.supervise(command)
    elif own:
        raise UserError(f"{MASTER_SWITCH}=0 turns the extension off, but {own[0]} is given: leave out one of the two")

    if settings.num_processes is not None or settings.multi_gpu or settings.accelerate_config is not None:
        return _hand_over(settings, checkout, script, arguments)
    _run(checkout, script, arguments, switched_off)
    return 0


class _Parser(QuietParser):
    """The launcher's parser."""

    def format_help(self) -> str:
        """As argparse's, with the commands listed; their files are read for it, so not at every start of a script."""
        self.epilog = EPILOG.format(commands="\n".join(f"  {name:10} {commands.summary(name)}" for name in commands.names()))
        return super().format_help()


def _parser() -> QuietParser:
    parser = _Parser(prog="python -m kohya_ext", usage=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"kohya_ext {__version__}")
    add_to(parser)
    parser.add_argument("script", metavar="SCRIPT", help="a script of sd-scripts: sdxl_train.py, networks/merge_lora.py, ...")
    parser.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's own arguments"
    ).required = False
    return parser


def _find_script(named: Path | None, word: str) -> tuple[Checkout, Path]:
    """Return the checkout and the script; raise UserError for a misspelled command, before anything is fetched."""
    checkout = find(named, word)
    command = "" if Path(word).suffix or Path(word).exists() else did_you_mean(word, commands.names())
    if command and (checkout is None or not checkout.has(word)):
        raise UserError(f"no command or script {word}.{command}")
    checkout = checkout or find_or_fetch(named, word)
    return checkout, checkout.script(word)


def _check_layout(checkout: Checkout, settings: Settings) -> None:
    """Raise UserError for a checkout of an unknown layout, unless the settings allow it."""
    if checkout.layout == "unknown" and not settings.allow_unknown_version:
        raise UserError(
            f"{checkout.path} ({checkout.label}) has a layout that kohya_ext {__version__} does not know: it knows v0.10 and "
            "v0.11. Run `python -m kohya_ext setup` for one it knows and name it with --sd-scripts, or try this one with "
            f"{flags('allow_unknown_version')[1]}"
        )


def _run(checkout: Checkout, script: Path, arguments: Sequence[str], switched_off: bool) -> None:
    if not switched_off:
        os.environ[MASTER_SWITCH] = "1"
        watch()
    sys.argv = [str(script), *arguments]
    # A plain start puts the script's folder first; under `python -m` the working directory stands there instead.
    sys.path[0] = str(script.parent)
    if str(checkout.path) not in sys.path:
        # For scripts in subfolders, upstream counts on its requirements.txt, which installs ``library`` with -e.
        sys.path.append(str(checkout.path))
    runpy.run_path(str(script), run_name="__main__")


def _hand_over(settings: Settings, checkout: Checkout, script: Path, arguments: Sequence[str]) -> int:
    if importlib.util.find_spec("accelerate") is None:
        raise UserError("several processes need accelerate: `pip install accelerate`, or leave out --num_processes")
    # Not accelerate.commands.launch: run as __main__, that module is out of reach for kohya_ext.launch.accelerate_signals.
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    if settings.accelerate_config is not None:
        command += ["--config_file", str(settings.accelerate_config)]
    if settings.num_processes is not None:
        command += ["--num_processes", str(settings.num_processes)]
    if settings.multi_gpu:
        command += ["--multi_gpu"]
    command += ["-m", "kohya_ext", str(script), *arguments]
    environ = {MASTER_SWITCH: "1", **os.environ, checkouts.VARIABLE: str(checkout.path)}
    if os.name == "posix":
        os.execve(sys.executable, command, environ)  # the same process: signals and the exit code need no passing on
    process = subprocess.Popen(command, env=environ)
    with pass_signals_on(process):
        return process.wait()
