"""Replace attributes of modules, classes and objects, and restore the identical originals.

A replacement is a plain function. A method's kind (static, class method, property) is kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

ABSENT = object()
"""Marks a missing attribute."""


@dataclass(frozen=True)
class Replacement:
    """An attribute that was replaced."""

    owner: Any
    name: str
    before: Any
    """The value in the owner's own namespace; ABSENT if the attribute was inherited."""

    def undo(self) -> None:
        """Restore the identical object, or delete the attribute if the owner did not have it."""
        if self.before is ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


def replace_attribute(owner: Any, name: str, value: Any) -> Replacement:
    """Set an attribute, and return the replacement, which can be undone."""
    replacement = Replacement(owner, name, vars(owner).get(name, ABSENT))
    setattr(owner, name, value)
    return replacement


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute inside the block."""
    replacement = replace_attribute(owner, name, value)
    try:
        yield
    finally:
        replacement.undo()


def function_of(owner: Any, name: str) -> tuple[Any, Callable[[Any], Any]]:
    """Return the plain function in an attribute, and a converter from a function to the same kind of attribute.

    The function is that of a static or class method, the getter of a property, or else the attribute's value. It is ABSENT
    if the attribute is missing.
    """
    held = inspect.getattr_static(owner, name, ABSENT)
    if isinstance(held, (staticmethod, classmethod)):
        return held.__func__, type(held)
    if isinstance(held, property):
        setter, deleter, documentation = held.fset, held.fdel, held.__doc__
        return held.fget, lambda getter: property(getter, setter, deleter, documentation)
    return getattr(owner, name, ABSENT), lambda value: value
