"""Compare the weights and the metadata of two files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from kohya_ext.errors import UserError
from kohya_ext.weights import deltas, names
from kohya_ext.weights.deltas import Delta
from kohya_ext.weights.names import AdaptedModule
from kohya_ext.weights.tensor_file import TensorFile


@dataclass
class Difference:
    """How a group of modules, or of a checkpoint's tensors, differs from the first file to the second."""

    component: str
    family: str
    """The repeated blocks; empty for all others."""
    count: int = 0
    """The number of modules or tensors that both files have."""
    differing: int = 0
    squares: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The squared norms of the first, the second and the difference."""

    @property
    def relative(self) -> float:
        """The norm of the difference, divided by the norm of the first file's change or weights."""
        first, _, difference = self.squares
        return math.sqrt(difference / first) if first else math.inf if difference else 0.0

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between both, from -1 to 1: 1 for the same direction; None if one of them is zero."""
        first, second, difference = self.squares
        return (first + second - difference) / 2 / math.sqrt(first * second) if first and second else None


@dataclass
class Comparison:
    """The differences of two files."""

    groups: list[Difference] = field(default_factory=list)
    only_first: list[str] = field(default_factory=list)
    """Modules or tensors that the second file lacks."""
    only_second: list[str] = field(default_factory=list)
    reshaped: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Module or tensor -> kind, rank and alpha, or shape, in both files, where they differ."""
    unread: list[str] = field(default_factory=list)
    """Modules that cannot be compared: of different shapes, incomplete, or not finite."""
    metadata: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    """Key -> both values, where they differ."""

    @property
    def identical(self) -> bool:
        """Whether both files have the same weights."""
        missing = self.only_first or self.only_second or self.unread
        return not missing and all(group.squares[2] == 0 for group in self.groups)


def compare(first: TensorFile, second: TensorFile) -> Comparison:
    """Compare two LoRAs by what they add to the weights, or two checkpoints by their weights.

    Raises UserError for a LoRA and a checkpoint, ValueError for a damaged file, and OSError.
    """
    adapted = [names.adapted_modules(file.specs)[0] for file in (first, second)]
    if bool(adapted[0]) != bool(adapted[1]):
        network, checkpoint = (first, second) if adapted[0] else (second, first)
        raise UserError(
            f"{network.path.name} is a network and {checkpoint.path.name} is not; compare two files of the same kind"
        )
    result = Comparison()
    keys = dict.fromkeys([*first.metadata, *second.metadata])
    pairs = {key: (first.metadata.get(key), second.metadata.get(key)) for key in keys}
    result.metadata = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    groups: dict[tuple[str, str], Difference] = {}
    both = [by_path(each or file.specs) for each, file in zip(adapted, (first, second), strict=True)]
    result.only_first = [name for key, name in both[0].items() if key not in both[1]]
    result.only_second = [name for key, name in both[1].items() if key not in both[0]]
    for key in [key for key in both[0] if key in both[1]]:
        name, other = both[0][key], both[1][key]
        if adapted[0]:
            squares = _compare_modules(first, second, adapted[0][name], adapted[1][other], result)
        else:
            squares = _compare_tensors(first, second, name, other, result)
        if squares is None:
            result.unread.append(name)
            continue
        group = groups.setdefault(key[:2], Difference(*key[:2]))
        group.count += 1
        group.differing += squares[2] > 0
        group.squares = tuple(a + b for a, b in zip(group.squares, squares, strict=True))  # type: ignore[assignment]
    result.groups = [*groups.values()]
    return result


def by_path(modules: Mapping[str, object]) -> dict[tuple[str, str, str], str]:
    """Return (component, family, path) -> name, which is the same for sd-scripts' and ComfyUI's names of a module."""
    places = sorted(names.places(modules).items(), key=lambda item: item[1].order)
    return {(place.component, place.family, place.path): name for name, place in places}


Squares = tuple[float, float, float]


def _compare_modules(
    first: TensorFile, second: TensorFile, module: AdaptedModule, other: AdaptedModule, result: Comparison
) -> Squares | None:
    try:
        # Both norms and that of the difference come from products, whose rounding errors float32 would show as differences.
        ours, theirs = deltas.delta(first, module, torch.float64), deltas.delta(second, other, torch.float64)
    except ValueError:
        return None
    if (texts := (_text(module, ours), _text(other, theirs)))[0] != texts[1]:
        result.reshaped[module.name] = texts
    if {part: product.shape for part, product in ours.products.items()} != {
        part: product.shape for part, product in theirs.products.items()
    }:
        return None
    same = _same_tensors(first, second, module, other)
    difference = (
        0.0 if same else sum(product.minus(theirs.products[part]).norm() ** 2 for part, product in ours.products.items())
    )
    squares = (ours.norm() ** 2, theirs.norm() ** 2, difference)
    return squares if all(map(math.isfinite, squares)) else None


def _same_tensors(first: TensorFile, second: TensorFile, module: AdaptedModule, other: AdaptedModule) -> bool:
    return module.tensors.keys() == other.tensors.keys() and all(
        torch.equal(first.tensor(name), second.tensor(other.tensors[part])) for part, name in module.tensors.items()
    )


def _text(module: AdaptedModule, delta: Delta) -> str:
    rank = f" rank {delta.rank}" if delta.rank is not None else ""
    alpha = f" alpha {delta.alpha:g}" if delta.alpha is not None else ""
    return f"{module.kind}{rank}{alpha}"


def _compare_tensors(first: TensorFile, second: TensorFile, name: str, other: str, result: Comparison) -> Squares | None:
    shapes = first.specs[name].shape, second.specs[other].shape
    if shapes[0] != shapes[1]:
        result.reshaped[name] = (str(list(shapes[0])), str(list(shapes[1])))
        return None
    squares = [0.0, 0.0, 0.0]
    for ours, theirs in chunk_pairs(first, second, name, other):
        for index, chunk in enumerate((ours, theirs, ours - theirs)):
            squares[index] += float(torch.linalg.vector_norm(chunk)) ** 2
    return (squares[0], squares[1], squares[2]) if all(map(math.isfinite, squares)) else None


def chunk_pairs(first: TensorFile, second: TensorFile, name: str, other: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the values of two tensors of the same size, piece by piece, as float32."""
    yield from zip(first.chunks(name), second.chunks(other), strict=True)
