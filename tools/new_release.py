"""Compare what every patch replaces with a checkout of sd-scripts, without importing it.

    python tools/new_release.py CHECKOUT ... [--keep]

For a new release, an older commit or a fork. Prints each target of a patch that is not the same: whether it moved, changed or
is missing, and the difference from the nearest tested checkout in the user cache. Prints the lines to add for the release, too.
With --keep the result becomes a row of docs/releases.md (run tools/generate.py afterwards).
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import inspect
import json
import linecache
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from kohya_ext.config.settings import Settings
from kohya_ext.patching.attributes import ABSENT, function_of
from kohya_ext.patching.patch import Patch, Patcher, Target, owner_of, registry, unrecognized
from kohya_ext.sdscripts import families, releases
from kohya_ext.sdscripts.checkouts import PACKAGES, Checkout, describe, registered
from kohya_ext.sdscripts.fingerprints import fingerprint
from kohya_ext.sdscripts.releases import RELEASES

#: The results of the releases in :data:`RELEASES`.
RESULTS = Path(__file__).parent.parent / "tests" / "data" / "releases.json"

State = Literal["same", "body", "moved", "changed", "missing"]

MEANINGS: Mapping[State, str] = {
    "same": "the code is that of the tested release, or one that the patch knows",
    "body": "the code differs, and the patch runs it as it is; its parameters are the same",
    "moved": "the code is in another module",
    "changed": "the code or its parameters differ: the patch leaves it alone",
    "missing": "the release does not have it",
}


@dataclass(frozen=True)
class Comparison:
    """One target of one patch in a checkout."""

    patch: str
    target: Target
    state: State
    why: str = ""
    difference: str = ""


# --- reading modules without importing them --------------------------------------------------------------------------


@functools.cache
def skeleton(file: Path) -> ModuleType:
    """Return a module with the functions and classes of a file, in which nothing else of the file has run.

    Their parameters and fingerprints are those of the imported module. Defaults, base classes of other modules, and decorators
    except torch's are left out.
    """
    import torch

    module = ModuleType(file.stem)
    module.__dict__["torch"] = torch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(file.read_text(encoding="utf-8-sig", errors="replace"))
        visitor = _Definitions()
        tree.body = [visitor.visit(node) for node in _definitions(tree.body)]
        exec(compile(tree, str(file), "exec"), module.__dict__)
    return module


def _definitions(body: Iterable[ast.AST]) -> Iterator[Any]:
    """Yield the functions and classes at the top level of a module, including those in its conditions."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node
        elif isinstance(node, (ast.If, ast.Try)):
            handlers = [each for handler in getattr(node, "handlers", []) for each in handler.body]
            yield from _definitions([*node.body, *handlers, *node.orelse])


class _Definitions(ast.NodeTransformer):
    """Removes from definitions what would run when the module is imported."""

    def __init__(self) -> None:
        self.classes: set[str] = set()

    def visit_FunctionDef(self, node: Any) -> Any:
        """Return a function without its defaults, annotations and other decorators."""
        if node.decorator_list:
            node.lineno = min(decorator.lineno for decorator in node.decorator_list)  # where inspect finds the source code
        node.decorator_list = [decorator for decorator in node.decorator_list if _is_kept(decorator)]
        arguments, node.returns = node.args, None
        arguments.defaults = [ast.copy_location(ast.Constant(None), default) for default in arguments.defaults]
        arguments.kw_defaults = [value and ast.copy_location(ast.Constant(None), value) for value in arguments.kw_defaults]
        for argument in ast.walk(arguments):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        return node

    def visit_AsyncFunctionDef(self, node: Any) -> Any:
        """Do the same for a coroutine."""
        return self.visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        """Return a class with its functions only."""
        node.bases = [base for base in node.bases if isinstance(base, ast.Name) and base.id in self.classes]
        node.keywords, node.decorator_list = [], []
        node.body = [self.visit(member) for member in _definitions(node.body)] or [ast.copy_location(ast.Pass(), node)]
        self.classes.add(node.name)
        return node


def _is_kept(decorator: ast.expr) -> bool:
    text = ast.unparse(decorator)
    return text in ("staticmethod", "classmethod", "property") or text.startswith("torch.")


# --- comparing -------------------------------------------------------------------------------------------------------


def compare(checkout: Checkout, nearest: Checkout | None) -> list[Comparison]:
    """Return every target of every patch in a checkout, compared with the nearest tested one.

    Of a target that moved, only the one that applies to the checkout.
    """
    patches = Patcher(registry(), Settings(), checkout).all_patches()
    return [_compare(patch, target, checkout, nearest) for patch in patches for target in _its_targets(patch, checkout)]


def _its_targets(patch: Patch, checkout: Checkout) -> Iterator[Target]:
    older = {(target.moved_to, target.attribute) for target in patch.targets if target.moved_to}
    for target in patch.targets:
        if target.module.partition(".")[0] not in PACKAGES:
            continue
        is_elsewhere = not checkout.lacks(target.moved_to) if target.moved_to else False
        is_later = (target.module, target.attribute) in older and checkout.lacks(target.module)
        if not is_elsewhere and not is_later:
            yield target


def _compare(patch: Patch, target: Target, checkout: Checkout, nearest: Checkout | None) -> Comparison:
    module, original = _find(checkout, target)
    if module is None or original is ABSENT:
        places = () if checkout.is_older_than_tested else tuple(_new_places(checkout, target, nearest))
        why = f"to {', '.join(places)}" if places else "" if module is not None else f"no {target.module}"
        return Comparison(patch.name, target, "moved" if places else "missing", why)
    why = unrecognized(target, module, original) or ""
    theirs = ABSENT if nearest is None else _find(nearest, target)[1]
    is_known = target.body != "runs" or theirs is ABSENT or fingerprint(theirs) == fingerprint(original)
    state: State = "changed" if why else "same" if is_known else "body"
    return Comparison(patch.name, target, state, why, "" if state == "same" else _difference(target, checkout, nearest))


def _file(checkout: Checkout, module: str) -> Path:
    return checkout.path / f"{module.replace('.', '/')}.py"


def _find(checkout: Checkout, target: Target, name: str = "") -> tuple[ModuleType | None, Any]:
    """Return a target's module and function in a checkout: None without the file, ABSENT if that does not have it."""
    if not (file := _file(checkout, target.module)).is_file():
        return None, ABSENT
    module = skeleton(file)
    return module, function_of(*owner_of(module, name or target.attribute))[0]


def _new_places(checkout: Checkout, target: Target, nearest: Checkout | None) -> Iterator[str]:
    """Yield the modules that define what a target replaces, and do not in the nearest tested checkout."""
    for package in PACKAGES:
        for file in sorted((checkout.path / package).glob("*.py")):
            there = replace(target, module=f"{package}.{file.stem}")
            if _find(checkout, there)[1] is not ABSENT and (nearest is None or _find(nearest, there)[1] is ABSENT):
                yield there.module


def _difference(target: Target, checkout: Checkout, nearest: Checkout | None) -> str:
    """Return a diff of a target and its helpers, of those whose code differs from the nearest tested checkout."""
    if nearest is None:
        return ""
    helpers = () if target.body == "runs" else target.body.helpers
    parts: list[str] = []
    for name in (target.attribute, *helpers):
        before, after = (_source(_find(each, target, name)[1]) for each in (nearest, checkout))
        if before != after:
            old, new = (f"{name} in {each.label}" for each in (nearest, checkout))
            parts += difflib.unified_diff(before, after, old, new, lineterm="")
    return "\n".join(parts)


def _source(function: Any) -> list[str]:
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    if code is None:
        return []
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    return textwrap.dedent("".join(inspect.getblock(lines))).splitlines()


def nearest_tested(checkout: Checkout) -> Checkout | None:
    """Return the tested checkout in the user cache whose layout is nearest to that of a checkout, or None."""
    order = [*(layout.name for layout in releases.LAYOUTS), releases.UNKNOWN.name]
    at = order.index(checkout.layout) if not checkout.is_newer_than_tested else 0
    tested = [each for each in registered() if each.label.endswith(releases.BY_NAME[each.layout].tested or "?")]
    return min(tested, key=lambda each: abs(order.index(each.layout) - at), default=None)


# --- bodies ----------------------------------------------------------------------------------------------------------


def bodies(checkout: Checkout) -> set[str]:
    """Return the fingerprint of each function in a checkout that a patch reimplements or relies on."""
    names = [
        (target, name)
        for patch in registry().values()
        for target in patch.targets
        if target.body != "runs" and target.module.partition(".")[0] in PACKAGES
        for name in (target.attribute, *target.body.helpers)
    ]
    functions = (_find(checkout, target, name)[1] for target, name in names)
    return {value for function in functions if function is not ABSENT and (value := fingerprint(function)) is not None}


# --- results ---------------------------------------------------------------------------------------------------------


def result(checkout: Checkout, comparisons: Iterable[Comparison]) -> dict[str, Any]:
    """Return the row of a release, as plain data."""
    rows = list(comparisons)
    counts = Counter(row.state for row in rows)
    return {
        "commit": checkout.commit,
        "layout": checkout.layout,
        "families": [family.name for family in families.FAMILIES if _trains(checkout, family)],
        "targets": {state: counts[state] for state in MEANINGS},
        "changed": sorted({f"{row.patch}: {row.target.label}" for row in rows if row.state in ("changed", "moved")}),
        "bodies": sorted(bodies(checkout)),
    }


def _trains(checkout: Checkout, family: families.Family) -> bool:
    return checkout.has(family.lora) and not checkout.lacks(family.module)


def _keep(checkout: Checkout, comparisons: Iterable[Comparison]) -> None:
    name = next((release.name for release in RELEASES if release.commit == checkout.commit), None)
    if name is None:
        raise SystemExit("add the release to RELEASES first")
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    rows[name] = result(checkout, comparisons)
    order = [release.name for release in RELEASES]
    RESULTS.write_text(json.dumps(dict(sorted(rows.items(), key=lambda item: order.index(item[0]))), indent=1) + "\n", "utf-8")


def _show(checkout: Checkout, nearest: Checkout | None, rows: Iterable[Comparison], write: Callable[[str], object]) -> None:
    rows = list(rows)
    write(f"{checkout.label}, layout {checkout.layout}, compared with {nearest.label if nearest else 'no tested checkout'}")
    for state, meaning in MEANINGS.items():
        its = [row for row in rows if row.state == state]
        write(f"\n{len(its)} {state}: {meaning}")
        if state == "same":
            continue
        for row in its:
            write(f"  {row.patch}, {row.target.label}{f': {row.why}' if row.why else ''}")
            if row.difference:
                write(textwrap.indent(row.difference, "    "))


def _show_lines_to_add(checkout: Checkout, rows: Iterable[Comparison], write: Callable[[str], object]) -> None:
    """Write the row of the release, and the fingerprints of changed bodies, to be added to a patch after a review."""
    if checkout.commit is not None and all(release.commit != checkout.commit for release in RELEASES):
        write(f'\nadd to RELEASES:\n    Release("v{checkout.version or "?"}", "{checkout.commit}"),')
    if checkout.layout == releases.UNKNOWN.name:
        write(f'add to LAYOUTS, with the markers of the new layout:\n    Layout("v{checkout.version or "?"}", (...), ...),')
    for row in rows:
        if row.state != "changed" or row.target.body == "runs":
            continue
        for name in (row.target.attribute, *row.target.body.helpers):
            known = {row.target.attribute: row.target.body.fingerprints, **row.target.body.helpers}[name]
            if (actual := fingerprint(_find(checkout, row.target, name)[1])) not in known:
                write(f'after a review, for {name} in the patch {row.patch}:\n    "{actual}": "since v{checkout.version}",')


def main() -> int:
    """Compare, print, and keep the results if asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("checkout", type=Path, nargs="+", help="a folder with sd-scripts")
    parser.add_argument("--keep", action="store_true", help="keep the result for the table in docs/releases.md")
    given = parser.parse_args()
    for folder in given.checkout:
        checkout = describe(folder, "named")
        if checkout is None:
            raise SystemExit(f"no sd-scripts in {folder}")
        nearest = nearest_tested(checkout)
        rows = compare(checkout, nearest)
        _show(checkout, nearest, rows, print)
        _show_lines_to_add(checkout, rows, print)
        if given.keep:
            _keep(checkout, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
