"""Round float32 values to bf16 at random, so that the mean of many roundings is the value.

A weight of 1.0 in bf16 has neighbours at a distance of 0.004 and 0.008. Rounding to nearest drops an update that is smaller
than half of that, in every step. Stochastic rounding takes the upper neighbour with the probability of the dropped part: bf16
is the upper half of a float32, so 16 uniformly random bits are added to the lower half, and the carry decides.

Formula: S. Gupta et al., Deep Learning with Limited Numerical Precision, https://arxiv.org/abs/1502.02551. For the weights of
bf16 training: P. Zamirai et al., Revisiting BFloat16 Training, https://arxiv.org/abs/2010.06192.
"""

from __future__ import annotations

from typing import Any

_LOWER_BITS = 16
"""Bits of a float32's mantissa that bf16 does not have."""

_UPPER = -(1 << _LOWER_BITS)
"""Mask of a float32's bits that bf16 has."""


class StochasticRounding:
    """Rounding with a generator of its own, so that it leaves all other random numbers as they are."""

    def __init__(self, device: Any, seed: int) -> None:
        """Seed the generator of a device, on which all rounded values must be."""
        import torch

        self._generator = torch.Generator(device=device)
        self._generator.manual_seed(seed)

    def bits(self, like: Any) -> Any:
        """Return the next random bits for a tensor of a shape: int32, of which the lower half is random."""
        import torch

        return torch.empty_like(like, dtype=torch.int32).random_(0, 1 << _LOWER_BITS, generator=self._generator)

    def seed(self) -> Any:
        """Return the next random number, int64 [1] on the device, from which a kernel makes bits of its own."""
        import torch

        return torch.empty(1, dtype=torch.int64, device=self.device).random_(generator=self._generator)

    @property
    def device(self) -> Any:
        """The device of all rounded values."""
        return self._generator.device

    def copy(self, target: Any, value: Any) -> None:
        """Round a float32 tensor into a bf16 tensor of its shape. Needs 4 bytes per element for a moment.

        Infinite and NaN values stay what they are, except that infinite ones may become NaN.
        """
        import torch

        bits = self.bits(value).add_(value.view(torch.int32)).bitwise_and_(_UPPER)
        # A NaN of a GPU has all bits set, to which bits cannot be added. Zero times the value is NaN again.
        torch.add(bits.view(torch.float32), value, alpha=0, out=target)

    def rounded(self, value: Any) -> Any:
        """Return a float32 tensor in bf16."""
        import torch

        result = torch.empty_like(value, dtype=torch.bfloat16)
        self.copy(result, value)
        return result

    def state(self) -> Any:
        """Return the generator's state, a tensor of bytes."""
        return self._generator.get_state()

    def restore(self, state: Any) -> None:
        """Restore a generator's state. Raises RuntimeError for that of another kind of device."""
        self._generator.set_state(state)
