"""The releases of sd-scripts that patches were compared with, and the generations of its layout.

A new release is a row of :data:`RELEASES`. If it moves code to other modules, it is also a row of :data:`LAYOUTS`.
``python tools/new_release.py CHECKOUT`` compares every patch with a checkout, and prints the rows to add.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layout:
    """A generation of sd-scripts.

    It does not say which families, scripts or options exist: those are looked up in the checkout.
    """

    name: str
    markers: tuple[tuple[str, str], ...]
    """(file, text in it) of each file that the generation has and that older ones lack."""
    title: str
    """For messages about a checkout without a version."""
    tested: str = ""
    """The release on which the tests run by default; empty in generations whose checkouts may lack targets of patches."""


@dataclass(frozen=True)
class Release:
    """A commit of sd-scripts with which every target of the patches was compared."""

    name: str
    """The tag, or the month or day of an untagged commit."""
    commit: str


_PREPARE_ACCELERATOR = ("library/train_util.py", "def prepare_accelerator")

UNKNOWN = Layout("unknown", (), "of unknown version")

#: The generations, the newest first. A checkout belongs to the first one whose markers it has.
LAYOUTS: tuple[Layout, ...] = (
    Layout("v0.11", (("library/args.py", ""), ("library/accelerator_setup.py", "")), "v0.11", "v0.11.1"),
    Layout("v0.10", (("library/anima_models.py", ""), _PREPARE_ACCELERATOR), "v0.10", "v0.10.1"),
    Layout("sd3", (("library/strategy_base.py", ""), _PREPARE_ACCELERATOR), "of the sd3 branch, 2024-12 to 2026-01"),
    Layout("v0.9", (("library/adafactor_fused.py", ""), _PREPARE_ACCELERATOR), "v0.9"),
)

BY_NAME: Mapping[str, Layout] = {layout.name: layout for layout in (*LAYOUTS, UNKNOWN)}

#: The compared commits, the oldest first.
RELEASES: tuple[Release, ...] = (
    Release("2024-10", "be14c062674973d0e4fee1eb4527e04707bb72b8"),
    Release("2024-12", "e89653975ddf429cdf0c0fd268da0a5a3e8dba1f"),
    Release("v0.9.1", "8f4ee8fc343b047965cd8976fca65c3a35b7593a"),
    Release("2025-04", "5a18a03ffcc2a21c6e884a25d041076911a79a2a"),
    Release("2025-06-05", "61eda7627874f1e0c5e31e710a698c49e8f0e332"),
    Release("2025-06-15", "3e6935a07edcb944407840ef74fcaf6fcad352f7"),
    Release("2025-07", "2e0fcc50cb347323b4374bfd05784587c5fa7f2d"),
    Release("2025-08", "d24d733892a6de393267111b32f4a56e896e1f64"),
    Release("v0.10.0", "966e9d7f6bb4058abbddb815dd40462b35ffb1d2"),
    Release("v0.10.1", "48d368fa557731ad0488c07304dfeba8c07910eb"),
    Release("v0.10.4", "706a95edd00d795c8f7c0f59e93b1ada1f704f3f"),
    Release("v0.10.6", "6e14642f3bc756cd947803eac0e7c9be4acdf964"),
    Release("v0.11.0", "b8d1eb067eba32bb105984678b97f05b11452940"),
    Release("v0.11.1", "6721028c79ee85a78b3a06dfd8954dae310a1cce"),
    Release("2026-06", "c162e9039cc3228057b3fc6ae64ce770b87ab9bf"),
)

#: Tags of the compared commits, because some mirrors lack upstream's tags.
TAGS: Mapping[str, str] = {release.name: release.commit for release in RELEASES if release.name.startswith("v")}

#: The generations whose newest release is tested, the oldest first.
TESTED: tuple[str, ...] = tuple(layout.name for layout in reversed(LAYOUTS) if layout.tested)


def layout_of(folder: Path) -> Layout:
    """Return the generation of a checkout, read from its files."""
    return next((layout for layout in LAYOUTS if _has_all(folder, layout.markers)), UNKNOWN)


def _has_all(folder: Path, markers: tuple[tuple[str, str], ...]) -> bool:
    return all((folder / file).is_file() and (not text or text in _text(folder / file)) for file, text in markers)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
