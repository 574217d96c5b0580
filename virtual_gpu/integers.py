"""Give the integers on the virtual GPU a value, for models that read lengths or indices from it."""

from __future__ import annotations

from typing import Any


def assume(value: int) -> None:
    """Let every integer on the GPU be ``value`` for the host, two of them be equal, and ``nonzero`` return one index."""
    import torch

    def is_length(tensor: Any) -> bool:
        return bool(tensor.is_cuda and tensor.dtype in (torch.int32, torch.int64))

    item, as_list = torch.Tensor.item, torch.Tensor.tolist
    torch.Tensor.item = lambda self: value if is_length(self) else item(self)

    def read(self: Any) -> Any:
        is_mask = self.is_cuda and self.dim() == 2  # of texts, which sd-scripts' datasets return as numbers of any type
        return torch.full(self.shape, value).tolist() if is_mask or is_length(self) else as_list(self)

    torch.Tensor.tolist = read
    index, equal, truth, every = torch.Tensor.__index__, torch.Tensor.__eq__, torch.Tensor.__bool__, torch.all

    def compare(self: Any, other: Any) -> Any:
        result = equal(self, other)
        if result is not NotImplemented:  # which other types return, with which Dynamo compares
            result.compares_lengths = is_length(self)
        return result

    def all_of(values: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.tensor(True) if getattr(values, "compares_lengths", False) else every(values, *args, **kwargs)

    torch.Tensor.__index__ = lambda self: value if is_length(self) else index(self)
    torch.Tensor.__eq__ = compare
    torch.Tensor.__bool__ = lambda self: getattr(self, "compares_lengths", False) or truth(self)
    torch.all = all_of
    nonzero = torch.Tensor.nonzero
    torch.Tensor.nonzero = lambda self: self.new_zeros(1, self.dim(), dtype=torch.long) if self.is_cuda else nonzero(self)
