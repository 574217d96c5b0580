"""Find changes that make a run fit its GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kohya_ext.config.command_line import CommandLine


def automatic(command: CommandLine, card: int) -> str:
    """Return the tier that ``--preset auto`` means on a GPU of ``card`` bytes; only then is the planner imported."""
    from kohya_ext.planning import plan

    return plan.automatic(command, card)
