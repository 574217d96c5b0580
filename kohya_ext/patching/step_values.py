"""The losses and the gradient norm of one optimizer step, read from the GPU together.

Reading a number from the GPU makes the host wait until the GPU has finished all earlier work. Upstream's scripts read each loss
once, after the optimizer's step. A patch that must know the loss or the norm before the step reads them here. The loss is then
moved to the host. The script's own reading does not wait any more, so a step waits as often as upstream's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StepValues:
    """The values of the micro-batches since the last optimizer step."""

    _losses: list[float] = field(default_factory=list)
    _norm: float | None = None
    _unread_losses: list[Any] = field(default_factory=list)
    _unread_norm: Any = None
    _last_loss: Any = None
    """The script's own tensor, until its value is on the host."""
    _others: dict[str, list[Any]] = field(default_factory=dict)
    """Name -> copies on the host, complete when the GPU has finished the step."""

    def record_loss(self, loss: Any) -> None:
        """Record the loss of a micro-batch before its backward."""
        self._unread_losses.append(loss.detach())
        self._last_loss = loss

    def record(self, name: str, value: Any) -> None:
        """Record another value of a micro-batch, without waiting for it."""
        self._others.setdefault(name, []).append(value.detach().to("cpu", non_blocking=value.is_cuda))

    def means(self) -> dict[str, float]:
        """Return the means of the other values, by name. Call it after a value of the step has been read."""
        return {name: math.fsum(map(float, values)) / len(values) for name, values in self._others.items()}

    def record_norm(self, norm: Any) -> None:
        """Record the norm of the gradients before clipping."""
        self._unread_norm = norm.detach()

    @property
    def has_norm(self) -> bool:
        """Whether the norm has been recorded or read."""
        return self._norm is not None or self._unread_norm is not None

    def read_losses(self) -> list[float]:
        """Return the loss of each micro-batch."""
        self._read()
        return self._losses

    def read_norm(self, gradients: Sequence[Any]) -> float:
        """Return the recorded norm, or that of ``gradients`` if none was recorded."""
        if not self.has_norm:
            self.record_norm(_total_norm(gradients))
        self._read()
        assert self._norm is not None
        return self._norm

    def _read(self) -> None:
        count = len(self._unread_losses)
        read = _on_host([*self._unread_losses, *([] if self._unread_norm is None else [self._unread_norm])])
        self._losses += read[:count]
        self._norm = next(iter(read[count:]), self._norm)
        self._unread_losses, self._unread_norm = [], None

    def move_loss_to_host(self) -> None:
        """Let the script read its last loss without waiting. Call it after backward, which needs the loss on the GPU."""
        import torch

        loss, self._last_loss = self._last_loss, None
        if loss is not None and loss.device.type != "cpu" and not self._unread_losses:
            loss.data = torch.tensor(self._losses[-1], dtype=loss.dtype).reshape(loss.shape)


def _total_norm(gradients: Sequence[Any]) -> Any:
    import torch

    if hasattr(torch.nn.utils, "get_total_norm"):  # since torch 2.6
        return torch.nn.utils.get_total_norm(gradients)
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))


def _on_host(values: Sequence[Any]) -> list[float]:
    """Return the values of tensors with one element, after waiting once for each GPU."""
    import torch

    copies = [value.to("cpu", non_blocking=value.is_cuda) for value in values]
    for device in {value.device for value in values if value.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return [float(copy) for copy in copies]
