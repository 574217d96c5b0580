"""Time what compilation adds to the start of a run at full size, with Triton and ptxas, beside upstream's whole-model compile.

    python -m benchmarks.cold_compile [--only sdxl-lora] [--scratch FOLDER]

Each family's LoRA script trains two steps of one image size on a virtual GPU (see benchmarks/full_size.py) with gradient
checkpointing: eager, with ``--selective_torch_compile``, and as upstream's ``--torch_compile``. Each compiled variant starts
with empty caches, and again with those of its first start. What compilation adds is the difference to the eager run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import full_size, results
from benchmarks.full_size import Row
from kohya_ext.config import preset_files
from kohya_ext.sdscripts.checkouts import find_or_fetch
from kohya_ext.units import GIB

OUTPUT = results.FOLDER / "cold_compile.json"
FAMILIES = ("sdxl-lora", "lumina-lora", "flux-lora")
STEPS = 2
CARD = 80 * GIB

#: Variant -> options. Without patches the launcher runs upstream's script unchanged; a preset completes its arguments.
COMPILED = {
    "selective": ["--selective_torch_compile"],
    "upstream": ["--torch_compile", "--disable_patch", "*"],
}


def start(row: Row, words: list[str], given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Run a command line; return its seconds from start to end, and the graphs that it compiled."""
    checkout = find_or_fetch(given.sd_scripts)
    arguments, config = full_size.training_arguments(row, checkout, scratch, STEPS + 1)
    begin = time.perf_counter()
    tokens = full_size.tokens(checkout, config)
    begin = time.perf_counter()
    used = full_size.run(row, checkout, scratch, given, [*arguments, *words], STEPS, tokens)
    seconds = round(time.perf_counter() - begin, 1)
    return {
        "seconds": seconds,
        "reserved": used.get("reserved"),
        "launches": used["steps"][-1]["launches"] if used.get("steps") else None,
        **used.get("compiled", {}),
        **({"failed": used["failed"]} if "failed" in used else {}),
    }


def main() -> int:
    """Time all rows, and write the output file after each; return 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[full_size.launching()]
    )
    parser.add_argument("--only", default="", help="time only families whose name begins with this text")
    parser.add_argument("--variants", default=",".join(COMPILED), help="variants to time")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.set_defaults(patience=7200)
    given = parser.parse_args()
    document = json.loads(given.output.read_text(encoding="utf-8")) if given.output.is_file() else {"rows": {}}
    with tempfile.TemporaryDirectory() as temporary:
        scratch = given.scratch or Path(temporary)
        for name in FAMILIES:
            if not name.startswith(given.only):
                continue
            row = Row(name, preset_files.scripts(name)[0], ["--preset", f"{name}/base", "--gradient_checkpointing"], CARD)
            measured: dict[str, Any] = document["rows"].setdefault(name, {"arguments": " ".join([row.script, *row.arguments])})
            for variant in given.variants.split(","):
                caches = scratch / "compiled"
                shutil.rmtree(caches, ignore_errors=True)
                os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
                measured[f"{variant}, eager before"] = start(row, COMPILED[variant][1:], given, scratch)
                measured[f"{variant}, first start"] = start(row, COMPILED[variant], given, scratch)
                measured[f"{variant}, first start"]["kernels"] = len(list(caches.rglob("*.cubin")))
                measured[f"{variant}, second start"] = start(row, COMPILED[variant], given, scratch)
                print(f"{name} {variant}: {measured}", file=sys.stderr, flush=True)
                document |= results.kohya_ext_commit()
                given.output.parent.mkdir(parents=True, exist_ok=True)
                given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
