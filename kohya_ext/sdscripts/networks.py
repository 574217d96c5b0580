"""What ``--network_dim`` means to a network module. This module uses only the standard library."""

from __future__ import annotations

from collections.abc import Mapping

#: Network modules and LyCORIS algorithms whose dimension is not a rank -> its meaning.
_NOT_A_RANK: Mapping[str, str] = {
    "networks.oft": "the number of blocks of each layer",
    "networks.oft_flux": "the number of blocks of each layer",
    "lycoris.kohya algo=diag-oft": "the size of a block",
    "lycoris.kohya algo=boft": "the size of a block",
    "lycoris.kohya algo=ia3": "unused",
    "lycoris.kohya algo=full": "unused",
}


def meaning_of_dim(module: object, arguments: object) -> str | None:
    """Return what ``--network_dim`` means if it is not a rank; None for a rank, and for an unknown module.

    ``arguments``: the words of ``--network_args``.
    """
    words = arguments if isinstance(arguments, (list, tuple)) else [arguments]
    algorithm = next((str(word).lower() for word in words if str(word).lower().startswith("algo=")), "")
    return _NOT_A_RANK.get(f"{module} {algorithm}".strip() if str(module).startswith("lycoris.") else str(module))
