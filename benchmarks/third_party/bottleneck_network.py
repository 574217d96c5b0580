"""A network module that no package has: a bottleneck with a nonlinearity after each attention layer of a U-Net."""

from __future__ import annotations

from typing import Any

import torch


class Bottleneck(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
    """Adds a bottleneck to a linear layer's output."""

    def __init__(self, layer: Any, width: int) -> None:
        super().__init__()
        self.down = torch.nn.Linear(layer.out_features, width)
        self.up = torch.nn.Linear(width, layer.out_features)
        self._layer = [layer]

    def apply_to(self) -> None:
        """Replace the layer's forward."""
        layer = self._layer[0]
        self._forward, layer.forward = layer.forward, self.forward

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the layer's output with the bottleneck's added."""
        output = self._forward(values)
        return output + self.up(torch.nn.functional.silu(self.down(output)))


class Network(torch.nn.Module):  # type: ignore[misc]
    """The bottlenecks of a U-Net."""

    def __init__(self, unet: Any, width: int) -> None:
        super().__init__()
        layers = [(name, part) for name, part in unet.named_modules() if name.endswith(("to_q", "to_k", "to_v"))]
        self.parts = torch.nn.ModuleDict({name.replace(".", "_"): Bottleneck(layer, width) for name, layer in layers})

    def apply_to(self, text_encoder: Any, unet: Any, *_: Any) -> None:
        """Change the U-Net."""
        for part in self.parts.values():
            part.apply_to()

    def set_multiplier(self, multiplier: float) -> None:
        """Do nothing: there is none."""

    def is_mergeable(self) -> bool:
        """Return False."""
        return False

    def prepare_optimizer_params(self, text_encoder_lr: Any, unet_lr: Any, *_: Any) -> list[dict[str, Any]]:
        """Return one group."""
        return [{"params": [*self.parameters()], **({"lr": unet_lr} if unet_lr else {})}]

    def enable_gradient_checkpointing(self) -> None:
        """Do nothing."""

    def prepare_grad_etc(self, *_: Any) -> None:
        """Train all parameters."""
        self.requires_grad_(True)

    def on_epoch_start(self, *_: Any) -> None:
        """Train."""
        self.train()

    def on_step_start(self, *_: Any) -> None:
        """Do nothing."""

    def get_trainable_params(self) -> Any:
        """Return all parameters."""
        return self.parameters()


def create_network(
    multiplier: float, network_dim: int | None, network_alpha: Any, vae: Any, text_encoder: Any, unet: Any, **_: Any
) -> Network:
    """Return the network, as upstream's modules do."""
    return Network(unet, network_dim or 16)
