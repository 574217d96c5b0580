"""Fingerprints of the functions that patches replace, to detect edits, forks and other releases.

A replacement that calls the original with all of its arguments keeps the changes of a user or a fork. A replacement that
reimplements the original would silently discard them. So each target of a patch states its kind: ``"runs"``, or the
:class:`KnownBodies` that the replacement was written for. A function with any other body is not replaced.

A fingerprint is a hash of the syntax tree. Unlike bytecode, it is the same on every version of Python, and it ignores
comments, docstrings, annotations and layout. Functions of torch and accelerate follow the same rule. A release that changes
one of them is untested with the replacement, so it runs its own slower but correct code until the fingerprint is added.
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

#: Fields of a syntax tree that do not affect behaviour, or that differ between versions of Python.
_IGNORED_FIELDS = frozenset({"annotation", "returns", "type_comment", "type_params", "kind", "ctx", "simple"})
_WITH_DOCSTRING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

#: Replacement -> original, for every applied replacement. ``__wrapped__`` is not used, because wrappers of other authors
#: have it too, and their own code would then be discarded.
_originals: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class KnownBodies:
    """The bodies that a replacement was written for, as fingerprints."""

    fingerprints: Mapping[str, str]
    """Fingerprint of the replaced function or class -> the releases with this body: ``since v0.10.1``."""
    helpers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The same of other functions in the module that the replacement reimplements or relies on, by dotted name."""
    package: str = "sd-scripts"
    """The package of the releases, for messages."""

    def surprise(self, module: ModuleType, attribute: str) -> str | None:
        """Return why the body of ``attribute`` or of a helper is unknown; None if all bodies are known."""
        for name, fingerprints in {attribute: self.fingerprints, **self.helpers}.items():
            function = _attribute(module, name)
            actual = fingerprint(function)
            file = f"{getattr(function, '__module__', module.__name__).replace('.', '/')}.py"
            if actual is None:
                return f"the source code of {name} in {file} cannot be read"
            if actual not in fingerprints:
                known = f"{self.package} {', '.join(dict.fromkeys(fingerprints.values()))}"
                return f"{name} in {file} differs from the code of {known} (edited, a fork or another release)"
        return None


Body = KnownBodies | Literal["runs"]
"""``"runs"``: the replacement calls the original with its arguments, whatever its code is. It may change an output path, and
may omit the call, for example to skip a step. Also for a constant, whose value ``expect`` checks."""


def known_bodies(
    fingerprints: Mapping[str, str], *, helpers: Mapping[str, Mapping[str, str]] | None = None, package: str = "sd-scripts"
) -> KnownBodies:
    """Return the bodies with these fingerprints, each with the releases that have it."""
    return KnownBodies(fingerprints, helpers or {}, package)


def remember(replacement: Any, original: Any) -> None:
    """Record the original of a replacement, so that the next patch of the same target checks the original's code."""
    if isinstance(replacement, (FunctionType, type)):
        _originals[replacement] = original


def fingerprint(original: Any) -> str | None:
    """Return the fingerprint of a function, or of all functions of a class; None if the source code cannot be read.

    For a replacement of a patch, return the fingerprint of its original. For another author's wrapper, the fingerprint covers
    both the wrapper and the wrapped function, because a replacement would discard both.
    """
    trees = [_tree(function) for function in _functions(original)]
    if not trees or None in trees:
        return None
    return hashlib.sha256("\n".join(map(_serialize, trees)).encode()).hexdigest()[:12]


def _attribute(module: ModuleType, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
    return value.fget if isinstance(value, property) else value


def _functions(original: Any) -> Iterator[FunctionType]:
    original = getattr(original, "__func__", original)  # static and class methods have it
    while isinstance(original, (FunctionType, type)) and original in _originals:
        original = _originals[original]
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
    # inspect.getsource would search all modules for the file and unwrap the function.
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)[code.co_firstlineno - 1 :]
    if not lines:
        return None
    # A method is indented. Dedenting could change or break a multi-line string.
    nesting = "if True:\n" * lines[0][0].isspace()
    try:
        with warnings.catch_warnings():  # Python has already issued them when it compiled the file
            warnings.simplefilter("ignore")
            tree = ast.parse(nesting + "".join(inspect.getblock(lines))).body[0]
    except (SyntaxError, IndexError):  # the file has changed since it was compiled
        return None
    return tree.body[0] if isinstance(tree, ast.If) else tree


def _serialize(node: Any) -> str:
    """Return a syntax tree as text. The text of ``ast.dump`` differs between versions of Python."""
    if isinstance(node, list):
        return f"[{','.join(map(_serialize, node))}]"
    if not isinstance(node, ast.AST):
        return ascii(node)
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _IGNORED_FIELDS and value not in (None, [])}
    if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    elif isinstance(node, ast.JoinedStr):  # some releases of Python 3.12 add an empty string after a nested format
        fields["values"] = [part for part in node.values if not isinstance(part, ast.Constant) or part.value]
    return f"{type(node).__name__}({','.join(f'{name}={_serialize(value)}' for name, value in fields.items())})"
