"""Find the journals in folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kohya_ext.errors import UserError
from kohya_ext.run.journal import SUFFIX

DEFAULT_FOLDERS = (Path(), Path("output"))


def journals(places: Sequence[Path]) -> Iterator[Path]:
    """Yield the journals in folders, and the given files. Raises UserError for a place that does not exist."""
    for place in places or DEFAULT_FOLDERS:
        if place.is_dir():
            yield from sorted(file for file in place.glob(f"*{SUFFIX}") if file.is_file())  # reading a pipe would block
        elif places and not place.exists():
            raise UserError(f"{place} does not exist; give an output folder or a journal")
        elif places and not place.is_file():
            raise not_a_journal(place)
        elif places:
            yield place


def not_a_journal(file: Path) -> UserError:
    """Return the error for a file without a run."""
    return UserError(f"{file} is not a journal; give an output folder or a file NAME{SUFFIX}")


def no_journal(places: Sequence[Path]) -> UserError:
    """Return the error for places without a journal."""
    searched = " and ".join(str(place.resolve()) for place in places or DEFAULT_FOLDERS)
    return UserError(f"no journal of a run in {searched}; give the --output_dir of a run that was started with kohya_ext")
