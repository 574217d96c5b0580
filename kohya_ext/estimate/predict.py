"""Known estimates of a run: from the package's table, or of an earlier dry run. Nothing here imports torch."""

from __future__ import annotations

from argparse import Namespace

from kohya_ext.config.command_line import CommandLine
from kohya_ext.errors import UserError
from kohya_ext.estimate import cache, memory_config, whole_runs
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.estimate.result import Estimate
from kohya_ext.sdscripts.checkouts import Checkout


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
