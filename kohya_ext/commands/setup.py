"""Fetch sd-scripts into the user cache, beside others that are there, or register a copy you have."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kohya_ext import sdscripts


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--repo",
        metavar="URL-OR-PATH",
        help="any git URL, a local repository, or a folder that already is a checkout (used in place when no --ref is given); "
        f"default: {sdscripts.UPSTREAM}",
    )
    parser.add_argument(
        "--ref",
        help=f"tag, branch or commit; default: the pinned v{sdscripts.PINNED_VERSION}, or {', '.join(sdscripts.KNOWN_REFS)}",
    )
    parser.add_argument("--list", action="store_true", help="show what is there; the first one is used")


def run(arguments: argparse.Namespace) -> int:
    """Do it; return the exit code."""
    console = Console(soft_wrap=True)
    if arguments.list:
        console.print(_table())
        return 0
    folder = Path(arguments.repo).expanduser() if arguments.repo else None
    missing: tuple[str, ...] = ()
    if folder is not None and arguments.ref is None and sdscripts.describe(folder, "") is not None:
        checkout = sdscripts.register(folder)
        done = "registered"
    else:
        fetched = sdscripts.fetch_report(arguments.repo or sdscripts.UPSTREAM, arguments.ref or sdscripts.PINNED_REF)
        checkout, missing = fetched.checkout, fetched.missing
        done = "fetched and verified"
    console.print(f"{done}: {escape(checkout.label)}, layout {checkout.layout}, commit {checkout.commit or 'unknown'}")
    console.print(f"in {escape(str(checkout.path))}")
    if missing:
        console.print(f"left out, for the source does not hold them: {escape(', '.join(missing))}")
    if checkout.layout == "unknown":
        console.print("its layout is not known: patches are skipped there")
    return 0


def _table() -> Table:
    table = Table("version", "layout", "commit", "folder", title="sd-scripts checkouts, the first one is used")
    for checkout in sdscripts.known():
        table.add_row(checkout.version or "?", checkout.layout, (checkout.commit or "?")[:8], str(checkout.path))
    return table
