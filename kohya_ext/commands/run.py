"""Run a script of sd-scripts with the patches applied."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from kohya_ext import __version__, commands
from kohya_ext.config.command_line import CommandLine, launcher_options, option_words
from kohya_ext.config.quiet_parser import QuietParser
from kohya_ext.config.settings import MASTER_SWITCH, Settings, add_to, boolean, checked, flags, from_environment, options
from kohya_ext.errors import UserError, did_you_mean
from kohya_ext.launch import oom_retry, processes
from kohya_ext.launch.autoload import watch
from kohya_ext.planning import automatic
from kohya_ext.run import journal, retry_request
from kohya_ext.sdscripts.checkouts import Checkout, find, find_or_fetch, is_training_script

HELP = """\
usage: python -m kohya_ext [options] SCRIPT [script arguments]
       python -m kohya_ext COMMAND [--help]

Train with kohya-ss/sd-scripts: presets by GPU memory, patches and checks.

examples:
  python -m kohya_ext demo
  python -m kohya_ext train images --model sd_xl_base_1.0.safetensors
  python -m kohya_ext sdxl_train_network.py --preset 16gb --config_file my.toml

commands:
{commands}

options, before SCRIPT or after it:
  presets     --preset, --vram, --strict
  memory      --vram_budget, --gradient_checkpointing_ratio, --on_oom
  speed       --speed, --selective_torch_compile, --activation_memory_budget
  recovery    --save_state_every_n_minutes, --stop_file, --keep_previous
  monitoring  --profile_steps, --notify, --journal_file
  training    --ema, --adaptive_lr, --nan_patience
  start       --sd_scripts, --num_processes, --num_machines, --accelerate_config
  patches     --disable_patch; --report FILE writes what was applied
  general     --help, --version

All options: python -m kohya_ext options; with a script's: SCRIPT --help
"""


def main(argv: Sequence[str]) -> int:
    """Check a script's arguments before any import, then run it or launch it with accelerate; return the exit code."""
    parser = _parser()
    if not argv:
        parser.print_help()
        return 0
    parsed = parser.parse_args(argv)
    options_before, own = launcher_options(argv[: len(argv) - len(parsed.arguments) - 1])
    options_after, arguments = launcher_options(parsed.arguments)
    launcher = {**options_before, **options_after}
    chosen = {**from_environment(os.environ), **launcher}
    settings = Settings(**{name: chosen[name] for name, _ in options("launcher") if name in chosen})
    switched_off = not checked(MASTER_SWITCH, boolean, os.environ.get(MASTER_SWITCH, "1"), f"the variable {MASTER_SWITCH}")

    checkout, script = _find_script(launcher.get("sd_scripts"), parsed.script)
    if not is_training_script(script) and own:
        raise UserError(f"{own[0]} only applies to training scripts, not to {script.name}; remove it")
    arguments = [*own, *arguments]
    if not switched_off:
        _check_layout(checkout, settings)
        trains = script if is_training_script(script) else None
        command = CommandLine(trains, arguments, os.environ, automatic, ("-m", "kohya_ext", *option_words(launcher)))
        # Reports errors that would otherwise appear after ten seconds of imports.
        if command.settings["on_oom"] == "retry" and trains is not None and retry_request.path() is None:
            return oom_retry.supervise(command)
    elif own:
        raise UserError(f"{MASTER_SWITCH}=0 turns the extension off, but {own[0]} is set; remove one of the two")

    if processes.are_wanted(settings):
        return processes.launch(settings, checkout, script, arguments)
    _run(checkout, script, arguments, switched_off)
    return 0


class _Parser(QuietParser):
    """The launcher's parser."""

    def format_help(self) -> str:
        """Return the one-screen help. Only this reads the commands' files, so that scripts start faster."""
        return HELP.format(commands="\n".join(f"  {name:10}  {commands.summary(name)}" for name in commands.names()))


def _parser() -> QuietParser:
    parser = _Parser(prog="python -m kohya_ext")
    parser.add_argument("--version", action="version", version=f"kohya_ext {__version__}")
    add_to(parser)
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER).required = False
    return parser


def _find_script(folder: Path | None, name: str) -> tuple[Checkout, Path]:
    """Return the checkout and the script. Raises UserError for a misspelled command, before a checkout is fetched."""
    checkout = find(folder, name)
    command = "" if Path(name).suffix or Path(name).exists() else did_you_mean(name, commands.names())
    if command and (checkout is None or not checkout.has(name)):
        raise UserError(f"no command or script {name}.{command}")
    checkout = checkout or find_or_fetch(folder, name)
    return checkout, checkout.script(name)


def _check_layout(checkout: Checkout, settings: Settings) -> None:
    """Raise UserError for a checkout of an unknown layout, unless the settings allow it."""
    if not checkout.can_be_patched(settings.allow_unknown_version):
        raise UserError(
            f"{checkout.path} ({checkout.label}) has an unknown layout; kohya_ext {__version__} knows v0.9 and newer. "
            "Run `python -m kohya_ext setup` for a supported one and select it with --sd-scripts, or try this one with "
            f"{flags('allow_unknown_version')[1]}"
        )


def _run(checkout: Checkout, script: Path, arguments: Sequence[str], switched_off: bool) -> None:
    if not switched_off:
        os.environ[MASTER_SWITCH] = "1"
        watch()
    sys.argv = [str(script), *arguments]
    # Python puts a script's folder first on sys.path, but the working directory under `python -m`.
    sys.path[0] = str(script.parent)
    if str(checkout.path) not in sys.path:
        # For scripts in subfolders, upstream relies on its requirements.txt, which installs ``library`` with -e.
        sys.path.append(str(checkout.path))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        journal.set_exit_code(end.code)
        raise
    journal.set_exit_code(0)
