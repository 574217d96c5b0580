"""Measure the host memory of a start up to the first step, upstream's and ours.

    python -m benchmarks.host_memory [--only sdxl]

The real script starts at full size on a virtual GPU, from checkpoints that are mapped files. The result is the peak of the
process's own pages (``RssAnon``), at its end and while it loads. Pages of mapped files are not in it: the system drops them
when it needs memory. Weights are zeros. Casts on the host and copies from the GPU are real, so a row takes up to 23 GB and two
minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import full_size, results, sparse_checkpoints
from benchmarks.full_size import Row
from kohya_ext.sdscripts.checkouts import find_or_fetch
from kohya_ext.tiny import environment
from kohya_ext.units import GIB

OUTPUT = results.FOLDER / "host_memory.json"

ROWS = (
    Row("sdxl-lora", "sdxl_train_network.py", ["--preset", "16gb"], 24 * GIB),
    Row("flux-lora", "flux_train_network.py", ["--preset", "32gb"], 48 * GIB),
    Row("flux-lora, --fp8_base", "flux_train_network.py", ["--preset", "16gb"], 16 * GIB),
    Row("lumina-lora", "lumina_train_network.py", ["--preset", "24gb"], 24 * GIB),
    Row("sdxl-lora, --base_precision int8", "sdxl_train_network.py", ["--preset", "8gb-int8"], 8 * GIB),
    Row("flux-lora, --base_precision int8", "flux_train_network.py", ["--preset", "flux-lora/24gb-int8"], 24 * GIB),
    Row("sd15-lora", "train_network.py", ["--preset", "8gb"], 8 * GIB),
)

#: Without patches the launcher runs upstream's script unchanged; a preset completes its arguments.
VARIANTS = {"upstream": ("--disable_patch", "*"), "default": ()}

#: With an 8-bit base also two starts with its cache, the first of which writes it.
_CACHE = ("--base_precision_cache", "{scratch}/kept")
CACHED = {"first start with a cache": _CACHE, "later start with a cache": _CACHE}

#: Rows of families that are often downloaded in fp8 with scales also start from such a file.
SCALED = {"fp8 with scales": ("--pretrained_model_name_or_path", "{scaled}")}


def variants(row: Row) -> Mapping[str, Sequence[str]]:
    """Return the variants of a row: name -> further words of the command."""
    return {**VARIANTS, **(CACHED if "int8" in row.name else {}), **(SCALED if row.name in ("sdxl-lora", "flux-lora") else {})}


def main() -> int:
    """Measure all rows, and write the output file after each; return 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[full_size.launching()]
    )
    parser.add_argument("--only", default="", help="measure only rows whose name begins with this text")
    parser.add_argument("--variant", action="append", help="measure only the variant of this name; may be repeated")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    checkout = find_or_fetch(given.sd_scripts)
    document = json.loads(given.output.read_text(encoding="utf-8")) if given.output.is_file() else {}
    rows = document.setdefault(checkout.version, {})
    with tempfile.TemporaryDirectory(dir=given.scratch) as temporary:
        scratch = Path(temporary)
        for row in ROWS:
            if not row.name.startswith(given.only):
                continue
            arguments, _ = full_size.training_arguments(row, checkout, scratch, 2)
            words = ["--sd-scripts", str(checkout.path), row.script, *arguments]
            variables = environment.variables(scratch / "models" / "tokenizers") | {"VIRTUAL_GPU_HOST_PAGES": "1"}
            measured = rows.setdefault(row.name, {"arguments": " ".join([row.script, *row.arguments])})
            scaled = sparse_checkpoints.write_scaled(Path(arguments[arguments.index("--pretrained_model_name_or_path") + 1]))
            for name, template in variants(row).items():
                if given.variant and name not in given.variant:
                    continue
                options = [word.format(scratch=scratch, scaled=scaled) for word in template]
                worker = ["benchmarks.host_memory_worker"]
                measured[name] = full_size.run_worker(given, scratch, row.card, worker, [*words, *options], variables, 1)
                print(f"{row.name}, {name}: {measured[name]}", file=sys.stderr, flush=True)
            document |= results.kohya_ext_commit()
            given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any("failed" in measured for row in rows.values() for measured in row.values()))


if __name__ == "__main__":
    sys.exit(main())
