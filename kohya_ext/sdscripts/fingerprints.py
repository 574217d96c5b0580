"""What a replacement needs to know about the code that it stands in for, and whether that code is what runs here.

A replacement that runs the original, with everything that it was given, keeps whatever a user or a fork has changed there.
One that does the work in another way would discard such a change silently. So each target of a patch states which it is:
``"runs"``, or the :class:`Known` bodies that the replacement was written for. Any other body is left alone, with a reason.

A body is known by a fingerprint of its syntax tree. Unlike bytecode, that is the same on every Python, and comments,
docstrings, annotations and layout do not change it. Functions of torch and accelerate follow the same rule. Only a few of
them are replaced and they change rarely; a release that changes one has not been tested with the replacement, so it keeps
torch's own code, which is slower but correct, until its fingerprint is added.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, Literal

from kohya_ext.sdscripts.checkouts import KNOWN_REFS

#: The releases that fingerprints are of, unless a patch names others.
SD_SCRIPTS = f"sd-scripts {' and '.join(sorted(KNOWN_REFS))}"

#: Fields of a syntax tree that do not change what code does, or differ between versions of Python.
_SILENT = frozenset({"annotation", "returns", "type_comment", "type_params", "kind", "ctx", "simple"})
_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

#: Replacement -> original, of every replacement that was applied. It is not read from ``__wrapped__``: somebody else's
#: wrapper has that too, and its own work would be discarded.
_beneath: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Known:
    """The bodies that a replacement was written for, as :func:`fingerprint` returns them."""

    fingerprints: frozenset[str]
    """Of the function or class that is replaced, one for each body among the releases."""
    helpers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Of others in the same module, by dotted name: those whose work the replacement does too, or relies on."""
    releases: str = SD_SCRIPTS
    """The releases that have these bodies, for messages."""

    def surprise(self, module: ModuleType, attribute: str) -> str | None:
        """Return why ``attribute`` of ``module`` or a helper is not one of these bodies; None when all are."""
        for name, fingerprints in {attribute: self.fingerprints, **self.helpers}.items():
            function = _look_up(module, name)
            found = fingerprint(function)
            file = f"{getattr(function, '__module__', module.__name__).replace('.', '/')}.py"
            if found is None:
                return f"the source code of {name} in {file} cannot be read"
            if found not in fingerprints:
                return f"{name} in {file} differs from {self.releases} (edited, a fork or another release)"
        return None


Body = Known | Literal["runs"]
"""``"runs"``: the replacement runs the original with what it was given, whatever its code is. It may write to another path
first, and may leave the call out, for example in a step that is skipped. Also for a constant, whose value ``expect`` knows."""


def known(*fingerprints: str, helpers: Mapping[str, tuple[str, ...]] | None = None, releases: str = SD_SCRIPTS) -> Known:
    """Return the bodies with these fingerprints."""
    return Known(frozenset(fingerprints), {name: frozenset(its) for name, its in (helpers or {}).items()}, releases)


def remember(replacement: Any, original: Any) -> None:
    """Note what a replacement of ours stands in for, so that the next patch of the same target sees the code beneath."""
    if isinstance(replacement, (FunctionType, type)):
        _beneath[replacement] = original


def fingerprint(original: Any) -> str | None:
    """Return the fingerprint of a function, or of all functions of a class; None when the source code cannot be read.

    Of a replacement of ours, it is that of the original. A wrapper of anybody else's counts with what it wraps: its own work
    would be discarded as well.
    """
    trees = [_tree(function) for function in _functions(original)]
    if not trees or None in trees:
        return None
    return hashlib.sha256("\n".join(map(_written, trees)).encode()).hexdigest()[:12]


def _look_up(module: ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found.fget if isinstance(found, property) else found


def _functions(original: Any) -> Iterator[FunctionType]:
    original = getattr(original, "__func__", original)  # static and class methods have it
    while isinstance(original, (FunctionType, type)) and original in _beneath:
        original = _beneath[original]
    if isinstance(original, type):
        for member in vars(original).values():
            if not isinstance(member, type):
                yield from _functions(member)
        return
    if isinstance(original, FunctionType):
        yield original
    if hasattr(original, "__wrapped__"):
        yield from _functions(original.__wrapped__)


def _tree(function: FunctionType) -> ast.AST | None:
    # inspect.getsource would first look through all modules for the one with this file, and unwrap the function.
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)[code.co_firstlineno - 1 :]
    if not lines:
        return None
    # A method is indented. Dedenting would fail on, or change, a string that spans several lines.
    nesting = "if True:\n" * lines[0][0].isspace()
    try:
        with warnings.catch_warnings():  # what there was to warn of, Python warned of when it compiled the file
            warnings.simplefilter("ignore")
            tree = ast.parse(nesting + "".join(inspect.getblock(lines))).body[0]
    except (SyntaxError, IndexError):  # the file is not the one that was compiled
        return None
    return tree.body[0] if isinstance(tree, ast.If) else tree


def _written(node: Any) -> str:
    """Write a syntax tree as text; ``ast.dump`` writes another text on each version of Python."""
    if isinstance(node, list):
        return f"[{','.join(map(_written, node))}]"
    if not isinstance(node, ast.AST):
        return ascii(node)
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _SILENT and value not in (None, [])}
    if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    elif isinstance(node, ast.JoinedStr):  # some releases of Python 3.12 put an empty string behind a nested format
        fields["values"] = [part for part in node.values if not isinstance(part, ast.Constant) or part.value]
    return f"{type(node).__name__}({','.join(f'{name}={_written(value)}' for name, value in fields.items())})"
