"""Time what compilation adds to the start of a run at full size, with Triton and ptxas, and what upstream's adds.

    python -m benchmarks.cold_compile [--only sdxl-lora] [--variants selective] [--scratch FOLDER]

Each family's LoRA script trains two steps of one image size on a virtual GPU (see benchmarks/full_size.py), with gradient
checkpointing: eager, with ``--selective_torch_compile``, and as upstream with ``--torch_compile``. A compiled variant starts
with empty caches, and again with those of its first start. Seconds are those of the whole command. Variants are added to the
output file.
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
FAMILIES = ("sdxl-lora", "flux-lora", "lumina-lora")
STEPS = 2
CARD = 80 * GIB

#: Variant -> options. Without patches the launcher runs upstream's script unchanged; a preset completes its arguments.
VARIANTS = {
    "eager": [],
    "selective": ["--selective_torch_compile"],
    "upstream": ["--torch_compile", "--disable_patch", "*"],
}


def start(row: Row, options: list[str], given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Return the seconds of a command, and what its last step reserves, launches and compiles."""
    checkout = find_or_fetch(given.sd_scripts)
    arguments, config = full_size.training_arguments(row, checkout, scratch, STEPS + 1)
    tokens = full_size.tokens(config)
    begin = time.perf_counter()
    used = full_size.run(row, checkout, scratch, given, [*arguments, *options], STEPS, tokens)
    seconds = round(time.perf_counter() - begin, 1)
    if "failed" in used:
        return {"seconds": seconds, "failed": used["failed"]}
    compiled = used.get("compiled", {})
    return {"seconds": seconds, "reserved": used["reserved"], "launches": used["steps"][-1]["launches"], **compiled}


def measure(row: Row, variant: str, given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Return a variant's first start, with empty caches, and its second one."""
    caches = scratch / "compiled"
    shutil.rmtree(caches, ignore_errors=True)
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")}
    first = start(row, VARIANTS[variant], given, scratch)
    first["kernels"] = len([*caches.rglob("*.cubin")])
    return {"first": first, "second": start(row, VARIANTS[variant], given, scratch)}


def main() -> int:
    """Time all rows, and write the output file after each variant; return 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[full_size.launching()]
    )
    parser.add_argument("--only", default="", help="time only families whose name begins with this text")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="variants to time")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.set_defaults(patience=7200)
    given = parser.parse_args()
    document = json.loads(given.output.read_text(encoding="utf-8")) if given.output.is_file() else {"rows": {}}
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        scratch = given.scratch or Path(temporary)
        for name in (name for name in FAMILIES if name.startswith(given.only)):
            row = Row(name, preset_files.scripts(name)[0], ["--preset", f"{name}/base", "--gradient_checkpointing"], CARD)
            start(row, [], given, scratch)  # caches of the images and the files' pages
            measured = document["rows"].setdefault(name, {"arguments": " ".join([row.script, *row.arguments])})
            for variant in given.variants.split(","):
                measured[variant] = measure(row, variant, given, scratch)
                failed |= any("failed" in each for each in measured[variant].values())
                print(f"{name} {variant}: {measured[variant]}", file=sys.stderr, flush=True)
                document |= {"sd_scripts": find_or_fetch(given.sd_scripts).version, **results.kohya_ext_commit()}
                given.output.parent.mkdir(parents=True, exist_ok=True)
                given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
