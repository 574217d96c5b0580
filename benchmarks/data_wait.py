"""Measure how long a step waits for its data, and the memory of the data loader's workers.

    python -m benchmarks.data_wait [--images 150] [--steps 300] [--step_seconds 0.2]

The real script trains an SDXL LoRA at full size, by default on a virtual GPU, which computes nothing. Each step is extended to
``--step_seconds`` by sleeping, as a host sleeps that waits for a GPU. The waits are those of the run's journal. A worker's
memory is the part that it shares with no other process (unique set size).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import caching, full_size, results
from kohya_ext.run.journal import SUFFIX
from kohya_ext.sdscripts.checkouts import find_or_fetch

OUTPUT = results.FOLDER / "data_wait.json"

#: Name -> options of the caches on disk. Without cached latents the workers decode JPEGs of 1 to 1.5 megapixels.
DATA = {"cached latents and texts": (*caching.LATENTS, *caching.TEXTS), "decoded images, cached texts": caching.TEXTS}

#: Name -> options of the data loader. Upstream starts new workers in each epoch.
LOADERS = {
    "upstream's, 2 workers": ("--max_data_loader_n_workers", "2"),
    "--auto_data_loader, 2 workers": ("--auto_data_loader", "--max_data_loader_n_workers", "2"),
    "--auto_data_loader": ("--auto_data_loader",),
}


def summary(steps: list[dict[str, Any]], first: int, epoch: int) -> dict[str, Any]:
    """Return seconds and shares of a journal's steps from the index ``first`` on, in epochs of ``epoch`` steps."""
    measured = steps[first:]
    waits = [step["data"] for step in measured]
    starts = [step["data"] for index, step in enumerate(steps) if index and index % epoch == 0]
    total = sum(step["seconds"] for step in measured)
    return {
        "steps": len(measured),
        "seconds": round(median(step["seconds"] for step in measured), 4),
        "wait": round(median(waits), 6),
        "wait_percent": round(100 * sum(waits) / total, 3),
        "wait_of_an_epochs_first_step": [round(each, 4) for each in starts],
    }


def main() -> int:
    """Measure all rows, and write the output file after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[full_size.launching()]
    )
    parser.add_argument("--images", type=int, default=150, help="number of JPEGs of 1 to 1.5 megapixels")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step_seconds", type=float, default=0.2)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    checkout = find_or_fetch(given.sd_scripts)
    document = json.loads(given.output.read_text(encoding="utf-8")) if given.output.is_file() else {}
    rows = document.setdefault(checkout.version, {})
    with tempfile.TemporaryDirectory(dir=given.scratch) as temporary:
        scratch = Path(temporary)
        images = scratch / "images"
        caching.write_images(images, given.images, (1.0e6, 1.5e6))
        for data, cached in DATA.items():
            for loader, options in LOADERS.items():
                journal = scratch / f"run{SUFFIX}"
                journal.unlink(missing_ok=True)
                words = ["--max_train_steps", str(given.steps + 1), "--cuda_graphs", "--cuda_graphs_always", *options, *cached]
                words += ["--journal_file", str(journal)]
                worker = ("benchmarks.data_wait_worker", str(given.steps), str(given.step_seconds))
                row = caching.start(given, checkout, scratch, images, words, worker)
                lines = map(json.loads, filter(None, journal.read_text(encoding="utf-8").splitlines()))
                steps = [line for line in lines if line["kind"] == "step"]
                # One image a step; in the first epoch CUDA graphs of each image size are recorded.
                rows.setdefault(data, {})[loader] = summary(steps, given.images, given.images) | row
                print(f"{data}, {loader}: {rows[data][loader]}", file=sys.stderr, flush=True)
                document |= {"step_seconds": given.step_seconds, "images": given.images, **results.kohya_ext_commit()}
                given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
