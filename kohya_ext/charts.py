"""Charts as image files. matplotlib is optional and imported only to draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kohya_ext.errors import UserError


def figure(width: float, height: float) -> Any:
    """Return an empty figure, its size in inches. Raises UserError when matplotlib cannot be imported."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"drawing needs matplotlib ({error}); run `pip install matplotlib`") from None
    return Figure(figsize=(width, height), layout="constrained")


def save(chart: Any, file: Path) -> None:
    """Write a figure in the format of the file's suffix. Raises UserError when that fails."""
    if file.is_dir():
        raise UserError(f"{file} is a folder; name a file")
    try:
        chart.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be written: {error}") from None
