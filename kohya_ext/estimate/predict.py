"""Estimates of a command line: from the package's table, from the cache, or measured now."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.settings import flags, negated_flags, options
from kohya_ext.console import progress
from kohya_ext.errors import UserError
from kohya_ext.estimate import cache, memory_config, whole_runs
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.estimate.result import Estimate
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.sdscripts.introspect import option_names


def estimate(checkout: Checkout, command: CommandLine, fresh: bool = False, timed: bool = False) -> Estimate:
    """Return the estimate of a command line: from the package's table, from the cache, or measured now (about 20 s).

    With ``fresh`` it is always measured, with ``timed`` if its kernels are not known. Raises UserError for arguments the script
    does not take, and UnknownRunError for a run that only a dry run can estimate.
    """
    config, flags_left = memory_config.read(command)
    normalized = memory_config.normalized(config)
    if not fresh and not _has_unknown_flag(checkout.script(command.name), flags_left):
        known = cache.find(checkout, normalized, command.settings.disable_patch, timed)
        if known is not None:
            return Estimate(**known)
    with progress(f"estimating the memory of {command.name} (usually 10 to 60 s)"):
        from kohya_ext.estimate import measurement  # slow to import

        result = measurement.measure(checkout, command)
    cache.keep(checkout, result, command.settings.disable_patch)
    return result


def known(checkout: Checkout, args: Namespace, command: CommandLine) -> Estimate | None:
    """Return the estimate of a run's final arguments from the package's table, the cache or a dry run; None without one."""
    config = configuration(args, command)
    for each in (config, memory_config.with_bf16(config)) if config is not None else ():
        row = cache.find(checkout, each, command.settings.disable_patch)
        if row is not None:
            return Estimate(**row)
    return whole_runs.find(checkout, command)


def configuration(args: Namespace, command: CommandLine) -> MemoryConfig | None:
    """Return the normalized configuration of a run's final arguments; None for a script that cannot be estimated."""
    try:
        return memory_config.normalized(memory_config.from_values(vars(args), command))
    except (UserError, KeyError, ValueError, TypeError):
        return None


def _has_unknown_flag(script: Path, given: Sequence[str]) -> bool:
    """Return whether a flag does not occur in the script's text.

    Then the script's own parser decides, which takes seconds to import.
    """
    ours = {flag for name, _ in options() for flag in [*flags(name), *negated_flags(name)]}
    theirs = {flag for name in option_names(script) for flag in [f"--{name}", *negated_flags(name)]}
    return not ours | theirs >= set(given)
