"""An optimizer that no package has: AdamW with a third average, of the updates."""

from __future__ import annotations

from typing import Any

import torch


class ThreeAverages(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not followed
    """Adam's two averages, and one of the updates that they give."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        """Change the parameters, one after the other."""
        with torch.no_grad():
            self._step()

    def _step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._change(parameter, group["lr"])

    def _change(self, parameter: Any, rate: float) -> None:
        state = self.state[parameter]
        for name in ("mean", "square", "update"):
            if name not in state:
                state[name] = torch.zeros_like(parameter)
        state["mean"].lerp_(parameter.grad, 0.1)
        state["square"].mul_(0.99).addcmul_(parameter.grad, parameter.grad, value=0.01)
        state["update"].lerp_(state["mean"] / (state["square"].sqrt() + 1e-8), 0.1)
        parameter.sub_(state["update"], alpha=rate)
