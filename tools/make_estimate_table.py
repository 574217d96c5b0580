"""Write the package's table of estimates: every shipped preset, what `--speed` may make of it, and the next faster choice.

    python tools/make_estimate_table.py [--layout v0.11] [--minutes 5] [--again fused_operations]

Writes kohya_ext/estimate/table.json, from which `estimate`, `presets list` and `plan` answer without importing torch. Run it
after a change of a preset, of a patch that changes memory, or of the estimator; a test fails until then. A row takes about 40
seconds, and as many run at the same time as the machine allows. Rows are kept but for those that ``--again`` names, so an
interrupted run continues without it. Rows that nothing asks for any more are dropped.

All rows are computed on one generation of sd-scripts. On the others one row of each family is computed, and the table lists the
families whose figures are equal there.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
    parser.add_argument("--again", metavar="PATTERN", help="also the rows whose command lines match this expression")
    given = parser.parse_args()
    checkout = next(checkout for checkout in checkouts.registered() if checkout.layout == given.layout)
    end = time.monotonic() + 60 * given.minutes
    table = cache.read_table(TABLE)
    rows = {cache.text(row["config"]): row for row in table["rows"]}
    alike = {tuple(pair) for pair in table["alike"]}
    missing: dict[str, tuple[CommandLine, tuple[str, str]]] = {}
    compared, asked = set(alike), set()
    for script, argv in questions():
        command = CommandLine(checkout.script(script), argv, {}, has_bf16=True)
        choices = memory_config.normalized(memory_config.read(command)[0])
        name, pair = cache.text(choices.key()), (given.layout, choices.kind)
        asked.add(name)
        is_named = given.again is not None and re.search(given.again, f"{script} {' '.join(argv)}") is not None
        if (name not in rows or is_named) if given.layout == FIRST else (pair not in compared and name in rows):
            compared.add(pair)
            missing[name] = command, pair

    rows = {name: row for name, row in rows.items() if name in asked}

    def measure(name: str) -> tuple[str, dict[str, Any] | None]:
        row = None if time.monotonic() > end else asdict(estimation.estimate(checkout, missing[name][0], fresh=True))
        return name, row

    with estimation.several() as pool:
        done = 0
        for future in as_completed([pool.submit(measure, name) for name in missing]):
            name, row = future.result()
            if row is None:
                continue
            done += 1
            command, pair = missing[name]
            print(
                f"{done} of {len(missing)}: {command.name} {' '.join(command.argv)}: {row['reserved'] / 1e9:.2f} GB", flush=True
            )
            if given.layout == FIRST:
                rows[name] = row
            elif cache.figures(row) == cache.figures(rows[name]):
                alike.add(pair)
            else:
                print(f"{pair} differs: {row}", file=sys.stderr)
            cache.write_table(TABLE, list(rows.values()), sorted(alike))
    cache.write_table(TABLE, list(rows.values()), sorted(alike))
    return int(done < len(missing))


if __name__ == "__main__":
    sys.exit(main())
