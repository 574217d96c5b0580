"""Write the package's table of upstream's fastest configuration on the GPU of each tier.

    python tools/make_upstream_table.py [--only sdxl-lora] [--minutes 5]

Writes kohya_ext/planning/upstream.json, from which `presets list` and the docs show upstream's seconds. Run it after a change
of the tiers' sizes or of the estimator; a test fails until then. A row takes up to four minutes, but rows of a family share
estimates. Existing rows are kept, so an interrupted run continues; delete the file to search all of them again.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from kohya_ext.console import note
from kohya_ext.planning import upstream
from kohya_ext.planning.tiers import tiers
from kohya_ext.sdscripts.checkouts import find_or_fetch

TABLE = Path(upstream.__file__).parent / upstream.TABLE


def main() -> int:
    """Search the missing rows until time runs out; return 1 if some are still missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="FAMILY", help="a family")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no further row after this many")
    given = parser.parse_args()
    checkout = find_or_fetch(None)
    end = time.monotonic() + 60 * given.minutes
    every = {upstream.key(tier): tier for tier in (*tiers(given.only), *tiers(given.only, experimental=True))}
    rows = upstream.read_table(TABLE)
    for name, tier in every.items():
        if name in rows:
            continue
        if time.monotonic() > end:
            return 1
        best = upstream.search(checkout, tier, note)
        note(f"{name}: {'nothing fits' if best is None else best.options}")
        rows[name] = upstream.row(best)
        upstream.write_table(TABLE, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
