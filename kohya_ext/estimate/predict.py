"""Estimates of a command line: from the package's table, from the cache, or measured now."""

from __future__ import annotations

from collections.abc import Sequence

from kohya_ext.config.arguments import RunArguments
from kohya_ext.config.settings import flags, negated_flags, options
from kohya_ext.console import progress
from kohya_ext.estimate import cache, memory_config
from kohya_ext.estimate.result import Estimate
from kohya_ext.sdscripts.checkouts import Checkout


def estimate(checkout: Checkout, script: str, run: RunArguments, argv: Sequence[str], fresh: bool = False) -> Estimate:
    """Return the estimate of a command line: from the package's table, from the cache, or measured now (about 20 s).

    ``script`` is a file name. With ``fresh`` it is always measured. Raises UserError for arguments the script does not take,
    and for a run that cannot be estimated.
    """
    config, flags_left = memory_config.read(script, run, argv)
    normalized = memory_config.normalized(config)
    if not fresh and not _has_unknown_flag(checkout, flags_left):
        known = cache.find(checkout, normalized, run.settings.disable_patch)
        if known is not None:
            return Estimate(**known)
    with progress(f"estimating the memory of {script} (usually 10 to 60 s)"):
        from kohya_ext.estimate import measurement  # slow to import

        result = measurement.measure(checkout, script, run, argv)
    cache.keep(checkout, result, run.settings.disable_patch)
    return result


def _has_unknown_flag(checkout: Checkout, given: Sequence[str]) -> bool:
    """Return whether a flag occurs nowhere in the checkout. The script's own parser, seconds away, then decides."""
    ours = {flag for name, _ in options() for flag in [*flags(name), *negated_flags(name)]}
    theirs = [flag for flag in given if flag not in ours]
    if not theirs:
        return False
    files = [*checkout.path.glob("*.py"), *(checkout.path / "library").glob("*.py")]
    text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    return not all(f'"{flag}"' in text or f'"{flag.replace("--no-", "--", 1)}"' in text for flag in theirs)
