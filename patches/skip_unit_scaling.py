"""A LoRA's change is not multiplied by one, and by a half or a quarter where it is narrow.

Upstream multiplies what comes out of every LoRA module by the multiplier, which is 1 in training, and by alpha / rank: two
passes over an activation as wide as the layer, again in the recompute, and their mirror images in backward. They are a fifth
of the bytes and a sixth of the kernels of an SDXL LoRA's step at 1024 (``python -m benchmarks.run work``), and a card at
home waits for its memory at least as long as for its arithmetic.

A factor of 1 changes no bit and is left out. A power of two only changes exponents, so it commutes with the product by
``lora_up``, and is applied in front of it, to as many channels as the rank has. fp16 has too few exponents for that: there,
and for every other factor, all is done where upstream does it. Rank dropout, module dropout and GGPO are upstream's own code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.lora_modules import FORWARD, NETWORKS, used_attributes
from kohya_ext.patching.patch import Patch, Target, takes

#: Far inside the exponents of bf16 and fp32.
_POWERS_OF_TWO = frozenset(2.0**exponent for exponent in range(-16, 17))

_ONE = frozenset({1.0})

_spared: Counter[str] = Counter()


def _facts() -> Mapping[str, object]:
    return dict(_spared)


def _scaled_where_it_is_narrow(original: Any, settings: Settings) -> Any:
    import torch

    more_than_a_product = used_attributes(original, "rank_dropout", "module_dropout", "ggpo_sigma")
    can_be_split = used_attributes(original, "split_dims")

    @wraps(original)
    def forward(self: Any, x: Any) -> Any:
        if self.training and any(getattr(self, name) is not None for name in more_than_a_product):
            return original(self, x)
        unchanged = self.org_forward(x)
        split = can_be_split and self.split_dims is not None
        downs, ups = (self.lora_down, self.lora_up) if split else ((self.lora_down,), (self.lora_up,))
        narrow = [down(x) for down in downs]
        if self.training and self.dropout is not None:
            narrow = [torch.nn.functional.dropout(one, p=self.dropout) for one in narrow]
        factors = (self.multiplier, self.scale)
        before = _ONE if narrow[0].dtype is torch.float16 else _POWERS_OF_TWO
        for factor in factors:
            if factor in before and factor != 1.0:
                narrow = [one * factor for one in narrow]
        wide = [up(one) for up, one in zip(ups, narrow, strict=True)]
        change = torch.cat(wide, dim=-1) if split else wide[0]
        for factor in factors:
            if factor not in before:
                change = change * factor
        if not torch.compiler.is_compiling():
            _spared["passes"] += sum(factor in before for factor in factors)
        return unchanged + change

    return forward


PATCH = Patch(
    name="skip_unit_scaling",
    summary="a LoRA's change is not multiplied by 1, and by a power of two where it is as narrow as the rank",
    targets=tuple(
        Target(
            module,
            "LoRAModule.forward",
            _scaled_where_it_is_narrow,
            takes("self", "x", exactly=True),
            layouts,
            body=FORWARD,
        )
        for module, layouts in NETWORKS.items()
    ),
    exactness="exact",
    held_to="the weights that are trained with it off, bit for bit",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/networks/lora.py",
    facts=_facts,
)
