"""The files a real script needs: tiny models when reduced, full-size random ones otherwise; pictures; tokenizers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.plan import Plan
from kohya_ext.errors import UserError
from kohya_ext.tiny import checkpoints, dataset
from kohya_ext.tiny.checkpoints import Models

PICTURES = 4

#: What :mod:`benchmarks.full_size` can write; said here because it imports torch.
FULL_SIZE = ("sdxl",)


def of(plan: Plan) -> Models:
    """Return where the family's models lie."""
    return checkpoints.locate(plan.family.models, plan.bench.scratch / ("tiny" if plan.bench.reduced else "full"))


def pictures(plan: Plan) -> Path:
    """Return where the pictures lie."""
    return plan.bench.scratch / f"pictures-{side(plan)}"


def side(plan: Plan) -> int:
    """Return the pictures' larger side: the resolution that is trained at."""
    return int(plan.said("resolution", "1024").partition(",")[0])


def variables(plan: Plan) -> dict[str, str]:
    """Return the variables that make the tokenizers found."""
    return {"HF_HUB_CACHE": str(of(plan).tokenizers)}


def prepare(plan: Plan) -> None:
    """Write models and pictures unless they are there. Raises CalledProcessError."""
    made = of(plan)
    if not all(file.is_file() for file in made.files.values()):
        if plan.bench.reduced:
            checkpoints.write(plan.family.models, plan.bench.checkout.path, plan.bench.scratch / "tiny", plan.bench.python)
        else:
            if plan.family.models not in FULL_SIZE:
                raise UserError(f"{plan.family_name} at full size is measured by `step`; whole scripts: {', '.join(FULL_SIZE)}")
            command = [sys.executable, "-m", "benchmarks.full_size", plan.family.models]
            where = [str(plan.bench.checkout.path), str(plan.bench.scratch / "full")]
            subprocess.run([*command, *where], check=True, env=plan.bench.environment())
    if not (pictures(plan) / dataset.METADATA).is_file():
        dataset.write(pictures(plan), PICTURES, side(plan))
