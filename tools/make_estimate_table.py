"""Write the package's table of estimates: every shipped preset, what `--speed` may make of it, and the next faster choice.

    python tools/make_estimate_table.py [--layout v0.11] [--minutes 5]

Writes kohya_ext/estimate/table.json, from which `estimate`, `presets list` and `plan` answer without importing torch. Run it
after a change of a preset, of a patch that changes memory, or of the estimator; a test fails until then. A row takes about 40
seconds. Rows that dry runs have made are kept, so an interrupted run continues; delete the file to recompute all of them.

All rows are computed on one generation of sd-scripts. On the others one row of each family is computed, and the table lists the
families whose figures are equal there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from kohya_ext.config import preset_files
from kohya_ext.config.command_line import CommandLine
from kohya_ext.dry_run import estimation
from kohya_ext.estimate import cache, memory_config
from kohya_ext.planning import chosen_speed
from kohya_ext.planning.tiers import faster, tiers, words
from kohya_ext.sdscripts import checkouts, releases

TABLE = Path(cache.__file__).parent / cache.TABLE

#: The generation that all rows are computed on.
FIRST = "v0.11"


def questions() -> Iterator[tuple[str, list[str]]]:
    """Yield (script, arguments) of every tier, with each variant that `--speed` may choose, then of the next faster choices."""
    every = [*tiers(), *tiers(experimental=True)]
    asked = [(preset_files.scripts(tier.family)[0], ["--preset", tier.name]) for tier in every]
    yield from asked
    for script, argv in asked:
        for features in chosen_speed.variants(CommandLine(Path(script), argv, {}, has_bf16=True)):
            yield script, [*argv, *(f"--{name}" for name in features)]
    for tier, (script, argv) in zip(every, asked, strict=True):
        if (choice := faster(tier)) is not None and not tier.config.blocks_to_swap:  # a block's weights are known
            yield script, [*argv, *words(tier.config, choice)]


def main() -> int:
    """Add missing rows until time runs out; return 1 if some are still missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default=FIRST, choices=releases.TESTED, help="a generation of sd-scripts")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no further row after this many")
    given = parser.parse_args()
    checkout = next(checkout for checkout in checkouts.registered() if checkout.layout == given.layout)
    end = time.monotonic() + 60 * given.minutes
    table = cache.read_table(TABLE)
    rows = {cache.text(row["config"]): row for row in table["rows"]}
    alike = {tuple(pair) for pair in table["alike"]}
    compared = set(alike)
    for script, argv in questions():
        command = CommandLine(checkout.script(script), argv, {}, has_bf16=True)
        choices = memory_config.normalized(memory_config.read(command)[0])
        name, pair = cache.text(choices.key()), (given.layout, choices.kind)
        is_dry_run = "missing" in rows.get(name, {})
        if is_dry_run if given.layout == FIRST else (pair in compared or name not in rows):
            continue
        compared.add(pair)
        if time.monotonic() > end:
            return 1
        row = asdict(estimation.estimate(checkout, command, fresh=True))
        print(f"{given.layout} {script} {' '.join(argv)}: {row['reserved'] / 1e9:.2f} GB reserved", file=sys.stderr, flush=True)
        if given.layout == FIRST:
            rows[name] = row
        elif cache.figures(row) == cache.figures(rows[name]):
            alike.add(pair)
        else:
            print(f"{pair} differs: {row}", file=sys.stderr)
        cache.write_table(TABLE, list(rows.values()), sorted(alike))
    return 0


if __name__ == "__main__":
    sys.exit(main())
