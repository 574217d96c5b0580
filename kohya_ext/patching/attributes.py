"""Attributes of other people's modules, classes and objects: replace one, and put back the identical object.

A method's kind (static, class method, property) belongs to the class and is kept, so that a replacement is a plain function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

ABSENT = object()
"""Stands for an attribute that is not there."""


@dataclass(frozen=True)
class Replacement:
    """An attribute that was replaced."""

    owner: Any
    name: str
    before: Any
    """What the owner's own namespace held; ABSENT when the attribute was inherited."""

    def undo(self) -> None:
        """Put back the identical object, or nothing where there was none."""
        if self.before is ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


def replace_attribute(owner: Any, name: str, value: Any) -> Replacement:
    """Set an attribute, and return what undoes that."""
    replacement = Replacement(owner, name, vars(owner).get(name, ABSENT))
    setattr(owner, name, value)
    return replacement


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Have another value in an attribute inside the block."""
    replacement = replace_attribute(owner, name, value)
    try:
        yield
    finally:
        replacement.undo()


def function_of(owner: Any, name: str) -> tuple[Any, Callable[[Any], Any]]:
    """Return the plain function in an attribute, and what makes the same kind of attribute from another function.

    The function is a static or class method's own, a property's getter, and for anything else the attribute's value; ABSENT
    when it is not there.
    """
    held = inspect.getattr_static(owner, name, ABSENT)
    if isinstance(held, (staticmethod, classmethod)):
        return held.__func__, type(held)
    if isinstance(held, property):
        setter, deleter, documentation = held.fset, held.fdel, held.__doc__
        return held.fget, lambda getter: property(getter, setter, deleter, documentation)
    return getattr(owner, name, ABSENT), lambda value: value
