"""Compute what an adapted module adds to a weight of the base model.

Formulas: sd-scripts' ``networks/`` and LyCORIS (https://github.com/KohakuBlueleaf/LyCORIS). A LoRA stays a product of two
matrices, whose norm needs only products of the size of its rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from kohya_ext.weights.names import AdaptedModule
from kohya_ext.weights.tensor_file import TensorFile

_FACTORS = {"LoRA": ("up", "down", "mid"), "DoRA": ("up", "down", "mid"), "LLLite": ("lllite_up.0.weight", "lllite_up.weight")}
_REQUIRED = {
    "LoRA": (("up",), ("down",)),
    "DoRA": (("up",), ("down",)),
    "LoHa": tuple((f"hada_w{number}_{letter}",) for number in (1, 2) for letter in "ab"),
    "LoKr": tuple((f"lokr_w{number}", f"lokr_w{number}_{letter}") for number in (1, 2) for letter in "ab"),
    "incomplete": ((),),
}
"""Kind -> groups of parts; a complete module has a part of each group."""


@dataclass(frozen=True)
class Product:
    """A change of a weight: ``up @ down``, of shape (out, in), where ``in`` includes the kernel of a convolution."""

    up: torch.Tensor
    """Shape (out, rank)."""
    down: torch.Tensor | None = None
    """Shape (rank, in). None if ``up`` is the whole change."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the product."""
        return self.up.shape[0], (self.up if self.down is None else self.down).shape[1]

    def norm(self) -> float:
        """Return the Frobenius norm."""
        if self.down is None:
            return float(torch.linalg.vector_norm(self.up))
        # |UD|^2 = trace(D'U'UD) = sum(U'U * DD')
        return math.sqrt(max(float(((self.up.T @ self.up) * (self.down @ self.down.T)).sum()), 0.0))

    def dense(self) -> torch.Tensor:
        """Return the whole matrix."""
        return self.up if self.down is None else self.up @ self.down

    def minus(self, other: Product) -> Product:
        """Return the difference from a product of the same shape."""
        if self.down is None or other.down is None:
            return Product(self.dense() - other.dense())
        return Product(torch.cat([self.up, -other.up], 1), torch.cat([self.down, other.down], 0))


@dataclass(frozen=True)
class Delta:
    """A module's rank, alpha and change."""

    rank: int | None
    """The rank, or the number of blocks of an OFT; None for a change without one."""
    alpha: float | None
    """None if the file has none: the change is not scaled."""
    convolution: bool
    """Whether the kernel has more than 1x1 weights."""
    products: Mapping[str, Product] = field(default_factory=dict)
    """Changed tensor of the module -> its change."""

    def norm(self) -> float:
        """Return the Frobenius norm of all changes."""
        return math.hypot(*(product.norm() for product in self.products.values()))


def factors(module: AdaptedModule) -> list[str]:
    """Return the tensors that are multiplied: if one of them is zero, the module changes nothing."""
    wanted = _FACTORS.get(module.kind)
    if wanted is None:
        prefixes = ("hada", "lokr")
        return [name for part, name in module.tensors.items() if part.startswith(prefixes)]
    return [module.tensors[part] for part in wanted if part in module.tensors]


def summands(module: AdaptedModule) -> list[str]:
    """Return the tensors that are added or rotate: the module changes nothing if all of them are zero."""
    prefixes = ("oft", "boft_R", "diff", "w_norm", "b_norm")
    return [name for part, name in module.tensors.items() if part.startswith(prefixes)]


def missing_part(module: AdaptedModule) -> bool:
    """Return whether a module lacks a tensor that its kind needs."""
    return any(not any(part in module.tensors for part in group) for group in _REQUIRED.get(module.kind, ()))


def rank_of(file: TensorFile, module: AdaptedModule) -> int | None:
    """Return the rank of a module by its shapes; None for a change without one."""
    shapes = {part: file.specs[name].shape for part, name in module.tensors.items()}
    for part in (
        "down",
        "hada_w1_b",
        "lokr_w2_b",
        "lokr_w1_b",
        "oft_blocks",
        "oft_blocks.0",
        "lllite_down.0.weight",
        "lllite_down.weight",
    ):
        if shapes.get(part):
            return shapes[part][0]
    return None


def delta(file: TensorFile, module: AdaptedModule, dtype: torch.dtype = torch.float32) -> Delta:
    """Compute a module's change.

    An OFT, OFTv2 or BOFT rotates the weight: its change is R - I, block after block. The magnitudes of a DoRA and the weights
    of a LLLite other than ``up`` are left out. Raises ValueError for shapes that do not fit together.
    """
    parts = {part: file.tensor(name).to(dtype) for part, name in module.tensors.items() if part not in ("magnitude", "rescale")}
    alpha = float(parts.pop("alpha").flatten()[0]) if "alpha" in parts else None
    rank = rank_of(file, module)
    scale = alpha / rank if alpha and rank else 1.0
    kind = module.kind
    try:
        if kind in ("LoRA", "DoRA"):
            product = _low_rank(parts, scale)
        elif kind == "LoHa":
            product = Product(_flat(_hadamard(parts) * scale))
        elif kind == "LoKr":
            product = Product(_flat(_kronecker(parts) * scale))
        elif kind == "OFT":
            product = Product(_flat(_rotation(parts, alpha)))
        elif kind == "OFTv2":
            product = Product(_flat(_rotation_of_angles(parts["oft_R"])))
        elif kind == "BOFT":
            scale_of_outputs = Product(_flat(parts["boft_s"] - 1))
            return Delta(
                None, None, False, {"weight": Product(_flat(_rotation_of_blocks(parts["boft_R"]))), "scale": scale_of_outputs}
            )
        elif kind == "LLLite":
            product = Product(_flat(next(parts[part] for part in _FACTORS[kind] if part in parts)))
        else:
            return Delta(None, None, False, {part: Product(_flat(values)) for part, values in parts.items()})
    except (RuntimeError, KeyError, IndexError, StopIteration):
        shapes = ", ".join(f"{part} {list(values.shape)}" for part, values in parts.items())
        raise ValueError(f"the tensors of {module.name} do not fit together: {shapes}") from None
    return Delta(rank, alpha, _is_convolution(parts), {"weight": product})


def _is_convolution(parts: Mapping[str, torch.Tensor]) -> bool:
    return any(values.ndim == 4 and values.shape[2:].numel() > 1 for values in parts.values())


def _flat(values: torch.Tensor) -> torch.Tensor:
    """Return a weight as a matrix with a row for each output."""
    return values.reshape(values.shape[0] if values.ndim else 1, -1)


def _low_rank(parts: Mapping[str, torch.Tensor], scale: float) -> Product:
    up, down = parts["up"], parts["down"]
    if "mid" in parts:
        up, down = up.flatten(1), down.flatten(1)
        return Product(_flat(torch.einsum("or,rs...,si->oi...", up, parts["mid"], down) * scale))
    if up.flatten(1).shape[1] != down.shape[0]:
        raise RuntimeError
    return Product(up.flatten(1) * scale, down.flatten(1))


def _hadamard(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    def half(number: int) -> torch.Tensor:
        a, b = parts[f"hada_w{number}_a"], parts[f"hada_w{number}_b"]
        core = parts.get(f"hada_t{number}")
        return a @ b if core is None else torch.einsum("ij...,jr,ip->pr...", core, b, a)

    return half(1) * half(2)


def _kronecker(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    def factor(number: int) -> torch.Tensor:
        if (whole := parts.get(f"lokr_w{number}")) is not None:
            return whole
        a, b = parts[f"lokr_w{number}_a"], parts[f"lokr_w{number}_b"]
        core = parts.get("lokr_t2") if number == 2 else None
        return a @ b if core is None else torch.einsum("ij...,ip,jr->pr...", core, a, b)

    first, second = factor(1), factor(2)
    return torch.kron(first.reshape(*first.shape, *[1] * (second.ndim - first.ndim)), second.contiguous())


def _rotation(parts: Mapping[str, torch.Tensor], alpha: float | None) -> torch.Tensor:
    """Return R - I of each block, one below the other, by Cayley's formula with the norm limited by alpha."""
    rotations = []
    for blocks in parts.values():
        skew = blocks - blocks.transpose(-1, -2)
        limit, norm = (alpha or 0.0) * blocks.shape[0] * blocks.shape[1], float(torch.linalg.vector_norm(skew))
        if 0.0 < limit < norm:
            skew = skew * (limit / norm)
        identity = torch.eye(blocks.shape[-1], dtype=blocks.dtype)
        rotations.append((torch.linalg.solve(identity - skew, identity + skew, left=False) - identity).flatten(0, -2))
    return torch.cat([each.reshape(-1) for each in rotations]).reshape(1, -1)


def _rotation_of_angles(angles: torch.Tensor) -> torch.Tensor:
    """Return R - I of each block of an OFTv2. ``angles``: the values above a block's diagonal, a row for each block.

    Its inverse is a Neumann series of four terms: R = I + 2Q + 2Q^2 + 2Q^3 + Q^4 for a skew-symmetric Q.
    https://github.com/huggingface/peft/blob/main/src/peft/tuners/oft/layer.py
    """
    size = (1 + math.isqrt(1 + 8 * angles.shape[1])) // 2
    skew = angles.new_zeros(angles.shape[0], size, size)
    rows, columns = torch.triu_indices(size, size, 1)
    skew[:, rows, columns] = angles
    skew = skew - skew.transpose(-1, -2)
    square = skew @ skew
    return 2 * (skew + square + square @ skew) + square @ square


def _rotation_of_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """Return R - I of each block of a BOFT by Cayley's formula, butterfly factor after butterfly factor."""
    skew = (blocks - blocks.transpose(-1, -2)).flatten(0, 1) / 2
    identity = torch.eye(blocks.shape[-1], dtype=blocks.dtype)
    return torch.linalg.solve(identity + skew, identity - skew, left=False) - identity
