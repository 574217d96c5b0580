"""What ``--network_dim`` means to a network module. This module uses only the standard library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Dimension:
    """The meaning of a network module's dimension, if that is not a rank."""

    meaning: str
    default: int = 4
    """What the module uses without ``--network_dim``."""
    minimum: int = 1
    """The smallest dimension with something to train: a rotation of one channel is none."""
    replaced_by: tuple[str, ...] = ()
    """Keys of ``--network_args`` that replace it."""


_BLOCKS = Dimension("the number of blocks of each layer")
_UNUSED = Dimension("unused")

#: Network modules and LyCORIS algorithms whose dimension is not a rank. sd-scripts' own:
#: https://github.com/kohya-ss/sd-scripts/blob/main/docs/train_network_oft_boft.md
_NOT_A_RANK: Mapping[str, Dimension] = {
    "networks.oft": _BLOCKS,
    "networks.oft_flux": _BLOCKS,
    "networks.oft_v2": Dimension("the size of a block", default=32, minimum=2, replaced_by=("block_size", "oft_block_size")),
    "networks.boft": Dimension(
        "the size of a block", replaced_by=("block_size", "boft_block_size", "block_num", "boft_block_num")
    ),
    "lycoris.kohya algo=diag-oft": Dimension("the size of a block"),
    "lycoris.kohya algo=boft": Dimension("the size of a block"),
    "lycoris.kohya algo=ia3": _UNUSED,
    "lycoris.kohya algo=full": _UNUSED,
}


def dimension(module: object, arguments: object = None) -> Dimension | None:
    """Return what a module's dimension is if it is not a rank; None for a rank, and for an unknown module.

    ``arguments``: the words of ``--network_args``.
    """
    words = arguments if isinstance(arguments, (list, tuple)) else [arguments]
    algorithm = next((str(word).lower() for word in words if str(word).lower().startswith("algo=")), "")
    return _NOT_A_RANK.get(f"{module} {algorithm}".strip() if str(module).startswith("lycoris.") else str(module))


def meaning_of_dim(module: object, arguments: object) -> str | None:
    """Return what ``--network_dim`` means if it is not a rank; None for a rank, and for an unknown module."""
    known = dimension(module, arguments)
    if known is None:
        return None
    return _UNUSED.meaning if _keys(arguments).intersection(known.replaced_by) else known.meaning


def default_dim(module: object) -> int:
    """Return the dimension that a module uses without ``--network_dim``."""
    known = dimension(module)
    return 4 if known is None else known.default


def _keys(arguments: object) -> set[str]:
    return {str(word).partition("=")[0] for word in (arguments if isinstance(arguments, (list, tuple)) else ())}
