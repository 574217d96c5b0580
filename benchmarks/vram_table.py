"""Make the package's table of estimates: every shipped preset, on every generation of sd-scripts that is found.

    python benchmarks/vram_table.py

Writes kohya_ext/vram/table.json, from which `estimate` answers without importing torch. To be run again whenever a preset,
a patch that changes memory, or the estimator changes; a test says so when it is not. Takes about 20 seconds a preset.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from kohya_ext import overlay, sdscripts
from kohya_ext.arguments import read_arguments
from kohya_ext.sdscripts import Checkout
from kohya_ext.vram import choices as choosing
from kohya_ext.vram import store
from kohya_ext.vram.estimate import Estimate
from kohya_ext.vram.making import make

TABLE = Path(store.__file__).parent / store.TABLE


def questions() -> dict[str, tuple[str, list[str]]]:
    """Return the command line of every tier: label -> (script, arguments). Overlays for stacking have no size of their own."""
    scripts: dict[str, str] = {}
    for script, family in overlay.FAMILIES.items():
        scripts.setdefault(family, script)
    asked = {}
    for family, name, file in overlay.shipped():
        about = overlay.parse(file.read_text(encoding="utf-8"), name, family).about
        if "vram_gb" in about:
            asked[f"{family}/{name}"] = (scripts[family], ["--preset", name])
    return asked


def estimates(checkout: Checkout) -> list[Estimate]:
    """Return the estimates of one generation, one for each question that differs."""
    made: list[Estimate] = []
    for label, (script, argv) in questions().items():
        run = read_arguments(script, argv, {})
        key = choosing.normalized(choosing.read(script, run, argv)[0]).key()
        if all(other.choices != key for other in made):
            made.append(make(checkout, script, run, argv))
            print(f"{checkout.layout} {label}: {made[-1].reserved / 1e9:.2f} GB reserved", file=sys.stderr, flush=True)
    return made


def main() -> int:
    """Make the rows of the layout named on the command line, or of every layout found, each in a process of its own."""
    checkouts = {checkout.layout: checkout for checkout in reversed([*sdscripts.known()])}
    if len(sys.argv) > 1:
        print(json.dumps([asdict(row) for row in estimates(checkouts[sys.argv[1]])]))
        return 0
    layouts = {}
    for layout in sorted(checkouts.keys() & sdscripts.KNOWN_LAYOUTS):
        done = subprocess.run([sys.executable, __file__, layout], stdout=subprocess.PIPE, text=True, check=True)
        layouts[layout] = json.loads(done.stdout)
    table = {"made_by": "python benchmarks/vram_table.py", "method": store.METHOD, "layouts": layouts}
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
