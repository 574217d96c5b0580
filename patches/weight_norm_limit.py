"""Limit the norms of a LoRA's weights (``--scale_weight_norms``) without waiting for the GPU at each module.

Upstream computes the norm of each module's change of the base weights after every step, and waits three times for each. Here
the norms of all modules are read together, and only modules above the limit are scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.sdscripts.fingerprints import known_bodies

_limited = 0
"""Number of steps whose norms were read together."""


def _facts() -> Mapping[str, object]:
    return {"steps": _limited}


def _change(down: Any, up: Any, scale: Any) -> Any:
    """Return the change of a layer's weight, by the operations of upstream, whose bits depend on them."""
    import torch

    if up.shape[2:] == (1, 1) == down.shape[2:]:
        change = (up.flatten(1) @ down.flatten(1))[:, :, None, None]
    elif (3, 3) in (up.shape[2:], down.shape[2:]):
        change = torch.nn.functional.conv2d(down.transpose(0, 1), up).transpose(0, 1)
    else:
        change = up @ down
    return change.mul_(scale)


def _read_together(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def apply_max_norm_regularization(self: Any, max_norm_value: float, device: Any) -> tuple[int, float, float]:
        global _limited
        import torch

        tensors = self.state_dict()
        names = [name.removesuffix("lora_down.weight") for name in tensors if name.endswith("lora_down.weight")]
        pairs = [(tensors[f"{name}lora_down.weight"], tensors[f"{name}lora_up.weight"]) for name in names]
        kinds = {(weight.dtype, weight.device.type) for pair in pairs for weight in pair}
        if len(kinds) != 1 or next(iter(kinds))[1] != torch.device(device).type:
            result: tuple[int, float, float] = original(self, max_norm_value, device)
            return result
        norms = torch.stack(
            [_change(*pair, tensors[f"{name}alpha"] / len(pair[0])).norm() for name, pair in zip(names, pairs, strict=True)]
        ).cpu()
        least = norms.clamp(min=max_norm_value / 2)
        ratios = least.clamp(max=max_norm_value) / least
        above = [(pair, ratio) for pair, ratio, is_above in zip(pairs, ratios, (ratios != 1).tolist(), strict=True) if is_above]
        for pair, ratio in above:
            for weight in pair:
                weight.mul_(ratio**0.5)
        limited = (norms * ratios).tolist()
        _limited += 1
        return len(above), sum(limited) / len(limited), max(limited)

    return apply_max_norm_regularization


PATCH = Patch(
    name="weight_norm_limit",
    summary="--scale_weight_norms: read the norms of all modules together, instead of waiting for the GPU at each",
    targets=tuple(
        Target(
            f"networks.{name}",
            "LoRANetwork.apply_max_norm_regularization",
            _read_together,
            takes("self", "max_norm_value", "device", exactly=True),
            body=known_bodies({"2e2f4d8a4fc7": "since 2024-10"}),
        )
        for name in ("lora", "lora_fa", "lora_flux", "lora_sd3", "lora_lumina", "lora_anima")
    ),
    exactness="exact",
    held_to="the weights trained without the patch, and the norms in the logs, bit-identical",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/networks/lora.py",
    facts=_facts,
)
