"""Skip multiplying a LoRA output by 1, and apply powers of two before ``lora_up``, where the tensor is smaller.

Upstream multiplies the output of every LoRA module by the multiplier, which is 1 in training, and by alpha / rank. These are
two passes over an activation of the layer's width in forward, in recomputation and in backward. Consumer GPUs are often
limited by memory bandwidth.

A factor of 1 is skipped. A power of two only changes exponents, so it commutes with ``lora_up`` and is applied before it, to
a tensor with as many channels as the rank. Other factors, and all factors in fp16, whose exponent range is too small, are
applied where upstream applies them, but in place. Rank dropout, module dropout and GGPO run upstream's code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.lora_modules import FORWARD, NETWORKS, used_attributes
from kohya_ext.patching.patch import Patch, Target, takes

#: Powers of two far within the exponent range of bf16 and fp32.
_POWERS_OF_TWO = frozenset(2.0**exponent for exponent in range(-16, 17))

_UNIT = frozenset({1.0})

_skipped: Counter[str] = Counter()


def _facts() -> Mapping[str, object]:
    return dict(_skipped)


def _scale_before_up(original: Any, settings: Settings) -> Any:
    import torch

    unsupported = used_attributes(original, "rank_dropout", "module_dropout", "ggpo_sigma")
    has_split = used_attributes(original, "split_dims")

    @wraps(original)
    def forward(self: Any, x: Any) -> Any:
        if self.training and any(getattr(self, name) is not None for name in unsupported):
            return original(self, x)
        unchanged = self.org_forward(x)
        split = has_split and self.split_dims is not None
        downs, ups = (self.lora_down, self.lora_up) if split else ((self.lora_down,), (self.lora_up,))
        narrow = [down(x) for down in downs]
        if self.training and self.dropout is not None:
            narrow = [torch.nn.functional.dropout(tensor, p=self.dropout) for tensor in narrow]
        factors = (self.multiplier, self.scale)
        before = _UNIT if narrow[0].dtype is torch.float16 else _POWERS_OF_TWO
        for factor in factors:
            if factor in before and factor != 1.0:
                narrow = [tensor * factor for tensor in narrow]
        wide = [up(tensor) for up, tensor in zip(ups, narrow, strict=True)]
        change = torch.cat(wide, dim=-1) if split else wide[0]
        for factor in factors:
            if factor not in before:
                change *= factor  # in place: backward reads no product, and a copy would be as wide as the layer's output
        if not torch.compiler.is_compiling():
            _skipped["passes"] += sum(factor in before for factor in factors)
        return unchanged + change

    return forward


PATCH = Patch(
    name="skip_unit_scaling",
    summary="skip multiplying LoRA outputs by 1, and apply powers of two before lora_up, where the tensor is smaller",
    targets=tuple(
        Target(
            module,
            "LoRAModule.forward",
            _scale_before_up,
            takes("self", "x", exactly=True),
            body=FORWARD,
        )
        for module in NETWORKS
    ),
    exactness="exact",
    held_to="the weights trained without the patch, bit-identical",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/networks/lora.py",
    facts=_facts,
)
