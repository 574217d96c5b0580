"""Fetch sd-scripts or register a copy, and choose the default.

Checkouts are kept next to each other in the user cache, which --clean removes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from kohya_ext import cache
from kohya_ext.config.command_line import quoted
from kohya_ext.errors import UserError
from kohya_ext.launch import host
from kohya_ext.output import Console
from kohya_ext.sdscripts import checkouts, releases
from kohya_ext.sdscripts.checkouts import Checkout


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--repo",
        metavar="URL-OR-PATH",
        help="a git URL, a local repository, or a checkout's folder, used in place without --ref; "
        f"default: {checkouts.UPSTREAM}",
    )
    parser.add_argument(
        "--ref",
        help=f"tag, branch or commit; default: the pinned v{checkouts.PINNED_VERSION}, or {', '.join(releases.TAGS)}",
    )
    parser.add_argument(
        "--default",
        nargs="?",
        const=True,
        metavar="WHICH",
        help="with --repo or --ref: make that checkout the default; alone: make a known checkout the default, by version "
        "(v0.11.1), commit or folder",
    )
    parser.add_argument(
        "--list", action="store_true", help="list the checkouts, and which of them is used in this folder and why"
    )
    parser.add_argument(
        "--clean",
        action="store_true",
        help="remove the cache: fetched checkouts, compiled kernels, estimates and measurements; asks first",
    )
    parser.add_argument(
        "--for",
        dest="host",
        type=Path,
        metavar="FOLDER",
        help="install kohya_ext into the environment of a GUI (the folder of kohya_ss, for example), and switch it on there",
    )
    parser.add_argument("--undo", action="store_true", help="with --for: remove both again")
    parser.add_argument("--yes", action="store_true", help="with --clean: do not ask")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    console = Console(soft_wrap=True)
    if arguments.host is not None:
        return (_undo if arguments.undo else _install)(console, arguments.host.expanduser())
    if arguments.undo:
        raise UserError("--undo needs --for FOLDER: the folder of the GUI")
    if arguments.clean:
        return _clean(console, arguments.yes)
    if arguments.list:
        console.print(_table())
        return 0
    if isinstance(arguments.default, str):
        if arguments.repo or arguments.ref:
            raise UserError(
                "--default takes no value with --repo or --ref, whose checkout it makes the default; remove the value"
            )
        checkout = checkouts.make_default(arguments.default)
    else:
        checkout = _add(console, arguments)
        if arguments.default:
            checkouts.make_default(str(checkout.path))
    for line in _use(checkout):
        console.print(escape(line))
    return 0


def _install(console: Console, folder: Path) -> int:
    """Install the extension into a GUI's environment, switch it on there, and show that a start of sd-scripts has it."""
    target, sd_scripts = host.environment(folder), host.checkout(folder)
    console.print(f"environment: {escape(str(target.python))}")
    host.switch_on(target, host.install(target))
    console.print(f"switched on by {escape(str(target.switch))}; start the program as usual (KOHYA_EXT=0 is off for one start)")
    if sd_scripts is None:
        console.print(f"no sd-scripts in {escape(str(folder))}, so no start was tried")
    elif lines := host.first_lines(target, sd_scripts):
        console.print("tried a start of sd-scripts there. The log of a training begins with:")
        for line in lines:
            console.print(f"  {escape(line)}", highlight=False)
    else:
        raise UserError(
            f"kohya_ext is installed, but not on in {sd_scripts.path}; `{target.python} -m kohya_ext doctor` shows why"
        )
    undo = quoted([sys.executable, "-m", "kohya_ext", "setup", "--for", str(folder), "--undo"])
    console.print(f"to undo it: {escape(undo)}")
    return 0


def _undo(console: Console, folder: Path) -> int:
    target = host.environment(folder)
    added = host.undo(target)
    console.print(f"switched off in {escape(str(target.site_packages))}; removed: {', '.join(added) or 'no packages'}")
    return 0


def _clean(console: Console, agreed: bool) -> int:
    """Print the contents of the cache, ask, and remove them."""
    folders = [(path, what, cache.size(path)) for path, what in cache.parts()]
    if not folders:
        console.print(f"nothing to remove: no cache in {escape(str(cache.folder()))}")
        return 0
    for path, what, size in folders:
        console.print(f"{size / 1e6:10,.1f} MB  {escape(str(path))}: {what}")
    if not agreed and not sys.stdin.isatty():
        raise UserError("nothing was removed; add --yes to remove these folders without a question")
    if not agreed and input("remove these folders? [y/N] ").strip().lower() not in ("y", "yes"):
        console.print("nothing was removed")
        return 1
    try:
        cache.remove()
    except OSError as error:
        raise UserError(
            f"{error.filename or cache.folder()} cannot be removed: {error.strerror or error}; end its runs"
        ) from None
    console.print("removed; the next run fetches and computes again what it needs")
    return 0


def _add(console: Console, arguments: argparse.Namespace) -> Checkout:
    """Fetch or register a checkout, and print its version and folder."""
    folder = Path(arguments.repo).expanduser() if arguments.repo else None
    missing: tuple[str, ...] = ()
    if folder is not None and arguments.ref is None and checkouts.describe(folder, "") is not None:
        checkout = checkouts.register(folder)
        action = "registered"
    else:
        fetched = checkouts.fetch_report(arguments.repo or checkouts.UPSTREAM, arguments.ref or checkouts.PINNED_REF)
        checkout, missing = fetched.checkout, fetched.missing
        action = "fetched and verified"
    console.print(f"{action}: {escape(checkout.label)}, layout {checkout.layout}, commit {checkout.commit or 'unknown'}")
    console.print(f"in {escape(str(checkout.path))}")
    if missing:
        console.print(f"not copied, since the source lacks them: {escape(', '.join(missing))}")
    if not checkout.can_be_patched(allow_unknown_version=False):
        console.print("its layout is unknown, so patches are skipped")
    elif checkout.age:
        console.print(f"it is {checkout.age}: each patch checks its targets (`doctor` shows them)")
    return checkout


def _use(checkout: Checkout) -> list[str]:
    """Return lines about the default checkout, how to change it, and the checkout used in this folder if another."""
    default = checkouts.registered()[0]
    if default.path == checkout.path:
        lines = [f"{checkout.label} in {checkout.path} is the default"]
    else:
        change = f"python -m kohya_ext setup --default {checkout.path}"
        lines = [f"the default is still {default.label} in {default.path}; to change it, run: {change}"]
    used, problem = _used()
    if problem:
        lines.append(f"but no checkout can be used here: {problem}")
    elif used is not None and used.path != default.path:
        lines.append(f"but this folder uses {used.label} in {used.path}, because of {used.source}")
    return lines


def _used() -> tuple[Checkout | None, str]:
    """Return the checkout that a run in this folder would use, or the error in the user's selection."""
    try:
        return checkouts.find(), ""
    except UserError as error:
        return None, str(error)


def _table() -> Table:
    known = checkouts.registered()
    used, problem = _used()
    table = Table("used here", "version", "layout", "commit", "folder", title="sd-scripts checkouts", caption_justify="left")
    table.columns[-1].overflow = "fold"
    unregistered = [used] if used is not None and used.path not in [checkout.path for checkout in known] else []
    for checkout in [*unregistered, *known]:
        why = "the default" if known and checkout.path == known[0].path else ""
        if used is not None and checkout.path == used.path:
            why = f"yes: {why if why and used.source == checkout.source else used.source}"
        commit = (checkout.commit or "?")[:8]
        table.add_row(why, checkout.version or "?", checkout.layout, commit, escape(str(checkout.path)))
    if problem:
        table.caption = escape(problem)
    elif used is None:
        table.caption = "no checkouts yet; run `python -m kohya_ext setup`"
    return table
