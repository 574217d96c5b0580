"""Make the package's table of estimates: every shipped preset, and for each the next faster choice.

    python benchmarks/vram_table.py [--layout v0.11] [--minutes 5]

Writes kohya_ext/estimate/table.json, from which `estimate`, `presets list` and `plan` answer without importing torch. To be run
again whenever a preset, a patch that changes memory, or the estimator changes; a test says so when it is not. About 15 seconds
a row; rows that are there already are kept (delete the file to begin anew), so that an interrupted run goes on.

Every row is made on one generation of sd-scripts; on the others one row of each family is, and the table notes which families
came out the same there, byte for byte: the models are.
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
from kohya_ext.estimate import cache
from kohya_ext.estimate import memory_config as choosing
from kohya_ext.estimate.measurement import make
from kohya_ext.planning.tiers import faster, tiers, words
from kohya_ext.sdscripts import checkouts

TABLE = Path(cache.__file__).parent / cache.TABLE

#: The generation that every row is made on.
FIRST = "v0.11"


def questions() -> Iterator[tuple[str, list[str]]]:
    """Yield (script, arguments) of every tier, then of the choices that would be faster."""
    asked = [(preset_files.scripts(tier.family)[0], ["--preset", tier.name]) for tier in tiers()]
    yield from asked
    for tier, (script, argv) in zip(tiers(), asked, strict=True):
        if (next_one := faster(tier)) is not None and not tier.choices.blocks_to_swap:  # a block's weights are known
            yield script, [*argv, *words(tier.choices, next_one)]


def main() -> int:
    """Make the rows that are missing, as far as the time goes; return 1 when some are missing still."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default=FIRST, choices=sorted(checkouts.KNOWN_LAYOUTS), help="a generation of sd-scripts")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no row after so many")
    given = parser.parse_args()
    checkout = next(checkout for checkout in checkouts.known() if checkout.layout == given.layout)
    end = time.monotonic() + 60 * given.minutes
    table = cache.read_table(TABLE)
    rows = {cache.text(row["choices"]): row for row in table["rows"]}
    alike = {tuple(pair) for pair in table["alike"]}
    compared = set(alike)
    for script, argv in questions():
        command = CommandLine(checkout.script(script), argv, {})
        choices = choosing.normalized(choosing.read(command)[0])
        name, pair = cache.text(choices.key()), (given.layout, choices.kind)
        if (name in rows) if given.layout == FIRST else (pair in compared or name not in rows):
            continue
        compared.add(pair)
        if time.monotonic() > end:
            return 1
        made = asdict(make(checkout, command))
        print(
            f"{given.layout} {script} {' '.join(argv)}: {made['reserved'] / 1e9:.2f} GB reserved", file=sys.stderr, flush=True
        )
        if given.layout == FIRST:
            rows[name] = made
        elif cache.figures(made) == cache.figures(rows[name]):
            alike.add(pair)
        else:
            print(f"{pair} differs: {made}", file=sys.stderr)
        cache.write_table(TABLE, list(rows.values()), sorted(alike))
    return 0


if __name__ == "__main__":
    sys.exit(main())
