"""The losses and the gradient norm of one optimizer step, read from the GPU in a single copy.

Reading a number from the GPU makes the host wait until the GPU has finished all earlier work. Upstream's scripts read each loss
once, after the optimizer's step. A patch that must know the loss or the norm before the step reads them here. The loss is then
moved to the host. The script's own reading does not wait any more, so a step waits as often as upstream's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StepValues:
    """The values of the micro-batches since the last optimizer step."""

    norm: Any = None
    """Norm of the gradients before clipping, a tensor, if the script has clipped them."""
    _losses: list[Any] = field(default_factory=list)
    _last_loss: Any = None
    """The script's own tensor, until its value is on the host."""
    _losses_read: list[float] = field(default_factory=list)
    _norm_read: float | None = None

    def record_loss(self, loss: Any) -> None:
        """Record the loss of a micro-batch before its backward."""
        self._losses.append(loss.detach().float())
        self._last_loss = loss

    def read_losses(self) -> list[float]:
        """Return the loss of each micro-batch."""
        self._read(with_norm=False)
        return self._losses_read

    def read_norm(self, gradients: Sequence[Any]) -> float:
        """Return the norm of ``gradients``, the one before clipping if the script has clipped them."""
        import torch

        if self.norm is None:
            self.norm = torch.nn.utils.get_total_norm(gradients)
        self._read(with_norm=True)
        assert self._norm_read is not None
        return self._norm_read

    def _read(self, with_norm: bool) -> None:
        import torch

        unread = self._losses[len(self._losses_read) :]
        reads_norm = with_norm and self._norm_read is None
        values = [*unread, *([self.norm.detach().float()] if reads_norm else [])]
        if not values:
            return
        read = torch.stack([value.reshape(()).to(values[0].device) for value in values]).tolist()
        self._losses_read += read[: len(unread)]
        if reads_norm:
            self._norm_read = read[-1]

    def move_loss_to_host(self) -> None:
        """Let the script read its last loss without waiting. Call it after backward, which needs the loss on the GPU."""
        import torch

        loss, self._last_loss = self._last_loss, None
        if loss is not None and loss.device.type != "cpu" and len(self._losses_read) == len(self._losses):
            loss.data = torch.tensor(self._losses_read[-1], dtype=loss.dtype).reshape(loss.shape)
