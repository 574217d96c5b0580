"""Notice changes of the Python values that modules read in forward, which are constants of a recording."""

from __future__ import annotations

import enum
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch

#: What every module has.
_OF_TORCH = frozenset(vars(torch.nn.Module()))

_REGISTERED = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

#: Types whose values are compared. All other objects are compared by identity.
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, enum.Enum)

_replaced_forward = operator.methodcaller("get", "forward")


@dataclass(frozen=True)
class _Container:
    """A module's attributes, or the elements of one of them."""

    part: torch.nn.Module
    attribute: str
    """Empty for the attributes themselves."""
    elements: Any
    keys: tuple[Any, ...]
    length: int

    def label(self, key: Any) -> str:
        """Return ``Class.attribute`` of an element."""
        return f"{type(self.part).__name__}.{key if self.attribute in ('', *_REGISTERED) else self.attribute}"

    @property
    def is_table(self) -> bool:
        """Whether a new element changes no earlier forward pass, as in a table with an entry for each size."""
        return isinstance(self.elements, dict) and self.attribute not in ("", *_REGISTERED, *_HOOKS)


class ModuleValues:
    """The attributes, parameters, buffers, submodules and hooks of modules, and the elements of their lists and dicts.

    torch's own layers keep what they were built with: only trained parameters and a replaced ``forward`` count. While nothing
    changes, the comparison runs in C: 2 to 5 ms for a LoRA of SDXL.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self.replaced = 0
        """How often an object, such as a tensor, was replaced by another one or by None."""
        self.last_replaced = ""
        """``Class.attribute`` of the last one."""
        self._last_changed: int | None = None
        self._roots = modules
        self._read()

    def state(self) -> Hashable:
        """Return the present state, equal for states with equal numbers, words and flags and the same other objects."""
        if self._count() != self._length:
            self._compare_lengths()
        try:
            if not all(map(operator.is_, self._present(), self._values)):
                self._compare()
        except KeyError as deleted:
            self._start_over(f"attribute {deleted}")
        return self.replaced, frozenset(self._changes.items()) if self._changes else None

    @property
    def last_changed(self) -> str:
        """Return ``Class.attribute`` of the number, word or flag that changed last."""
        return "" if self._last_changed is None else self._label(self._last_changed)

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors among the values, each once."""
        return list(dict.fromkeys(value for value in self._values if isinstance(value, torch.Tensor)))

    def _read(self) -> None:
        """Take the present values as those that later ones are compared with."""
        parts = list(dict.fromkeys(part for root in self._roots for part in root.modules()))
        self._containers = [container for part in parts for container in _containers(part)]
        self._containers.sort(key=lambda each: repr(each.keys))
        self._getters = [
            (operator.itemgetter(*_read_keys(keys)), [each.elements for each in containers])
            for keys, containers in groupby(self._containers, lambda each: each.keys)
            if keys
        ]
        self._elements = [each.elements for each in self._containers]
        self._layers = [vars(part) for part in parts if _is_torchs(part)]
        self._length = self._count()
        self._values = self._first = [*self._present()]
        self._changes: dict[int, Any] = {}
        """The number of a value -> the plain value that it has now, where that differs from the first one."""

    def _count(self) -> int:
        return sum(map(len, self._elements))

    def _present(self) -> Iterator[Any]:
        read = (chain.from_iterable(map(getter, elements)) for getter, elements in self._getters)
        return chain(chain.from_iterable(read), map(_replaced_forward, self._layers))

    def _compare_lengths(self) -> None:
        other = next((each for each in self._containers if len(each.elements) != each.length and not each.is_table), None)
        if other is None:
            self._length = self._count()
        else:
            new = next((key for key in [*other.elements][other.length :] if isinstance(other.elements, dict)), other.attribute)
            self._start_over(other.label(new))

    def _compare(self) -> None:
        values = [*self._present()]
        changed = [index for index, (now, before) in enumerate(zip(values, self._values, strict=True)) if now is not before]
        replaced = next((i for i in changed if not (_is_plain(values[i]) and _is_plain(self._values[i]))), None)
        if replaced is not None:
            self._start_over(self._label(replaced))
            return
        for index in changed:
            self._last_changed = index
            value, first = values[index], self._first[index]
            if type(value) is type(first) and value == first:
                self._changes.pop(index, None)
            else:
                self._changes[index] = type(value), value
        self._values = values

    def _start_over(self, replaced: str) -> None:
        self.replaced += 1
        self.last_replaced = replaced
        self._read()

    def _label(self, index: int) -> str:
        labels = (each.label(key) for each in self._containers for key in _read_keys(each.keys))
        return next((label for place, label in enumerate(labels) if place == index), "forward of a layer")


def _containers(part: torch.nn.Module) -> Iterator[_Container]:
    attributes = vars(part)
    if not _is_torchs(part):
        names = ("training", *sorted(attributes.keys() - _OF_TORCH))
        yield _Container(part, "", attributes, names, len(attributes))
    for name, value in attributes.items():
        if _has_trained(value) if _is_torchs(part) and name == "_parameters" else _is_watched(part, name, value):
            keys = tuple(value) if isinstance(value, dict) else tuple(range(len(value)))
            yield _Container(part, name, value, keys, len(value))


def _is_torchs(part: torch.nn.Module) -> bool:
    return type(part).__module__.startswith("torch.nn.")


def _has_trained(parameters: Mapping[str, Any]) -> bool:
    return any(parameter is not None and parameter.requires_grad for parameter in parameters.values())


def _is_watched(part: torch.nn.Module, name: str, value: Any) -> bool:
    if name in _OF_TORCH:
        return not _is_torchs(part) and name in (*_REGISTERED, *_HOOKS)
    return not _is_torchs(part) and isinstance(value, (list, tuple, dict))


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN)


def _read_keys(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the keys that a getter reads: of one alone it would return no tuple."""
    return keys * 2 if len(keys) == 1 else keys
