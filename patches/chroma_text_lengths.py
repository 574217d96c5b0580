"""Read Chroma's text lengths from the GPU once per forward pass, not a dozen times in every block.

Each block cuts every sample to its own length. Upstream reads the lengths from the GPU one by one and waits each time: 52 syncs
in five blocks, each also a graph break in a compiled block. This patch passes the lengths as Python integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.sdscripts.fingerprints import known_bodies


class _Maximum:
    """The result of ``torch.max(lengths)``, on the host."""

    def __init__(self, length: int) -> None:
        self.length = length

    def item(self) -> int:
        """Return the length of the longest text in tokens."""
        return self.length


class Lengths:
    """The text lengths of a batch in tokens, as a tensor of shape (batch,) and as integers on the host."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.numbers: tuple[int, ...] = tuple(tensor.tolist())

    def __getitem__(self, sample: int) -> int:
        return self.numbers[sample]

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return ``torch.max(lengths)`` from the integers; pass every other function to the tensor."""
        import torch

        if function is torch.max and len(args) == 1 and not kwargs:
            return _Maximum(max(args[0].numbers))
        return function(*(arg.tensor if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name in ("tensor", "numbers"):  # not yet set, for example during copy.copy
            raise AttributeError(name)
        return getattr(self.tensor, name)


def _with_host_lengths(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "txt_seq_len" in kwargs:
            kwargs["txt_seq_len"] = _read_once(kwargs["txt_seq_len"])
        return original(self, *args, **kwargs)

    return forward


def _read_once(tensor: Any) -> Lengths:
    """Return the lengths, read once and cached on the tensor that all blocks of a forward pass share."""
    if not hasattr(tensor, "_kohya_ext_lengths"):
        tensor._kohya_ext_lengths = Lengths(tensor.detach())  # detached, to avoid a reference cycle
    lengths: Lengths = tensor._kohya_ext_lengths
    return lengths


PATCH = Patch(
    name="chroma_text_lengths",
    summary="read Chroma's text lengths from the GPU once per forward pass instead of several times in every block",
    targets=(
        Target(
            "library.chroma_models",
            "DoubleStreamBlock.forward",
            _with_host_lengths,
            takes("self", "img", "txt", "pe", "distill_vec", "txt_seq_len", exactly=True),
            # The originals run, but Lengths supports only their uses of the tensor.
            body=known_bodies(
                {"f61b8116846d": "since 2025-08"}, helpers={"DoubleStreamBlock._forward": {"f8a1a9da474d": "since 2025-08"}}
            ),
        ),
        Target(
            "library.chroma_models",
            "SingleStreamBlock.forward",
            _with_host_lengths,
            takes("self", "x", "pe", "distill_vec", "txt_seq_len", exactly=True),
            body=known_bodies(
                {"fe51c654c502": "since 2025-08"}, helpers={"SingleStreamBlock._forward": {"9b87c7634a56": "since 2025-08"}}
            ),
        ),
    ),
    exactness="exact",
    held_to="training without it, bit for bit",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/library/chroma_models.py",
)
