"""Upstream's LoRA modules and the fingerprints of their code."""

from __future__ import annotations

import inspect
from typing import Any

from kohya_ext.sdscripts.fingerprints import KnownBodies, known_bodies

#: Networks with a ``LoRAModule`` that is a plain low-rank product. In some releases one of them imports another one's.
NETWORKS = ("networks.lora", "networks.lora_fa", "networks.lora_flux", "networks.lora_lumina", "networks.lora_anima")

_FORWARD = (
    "1e5172992aab",  # lora, lora_fa
    "8f2718eb8715",  # lora_lumina: adds split_dims
    "2b146c75c4ac",  # lora_flux of v0.10.1: adds GGPO
    "94c4903a7393",  # lora_flux of v0.11.1: changes rank dropout
    "0aebb6beec41",  # lora_anima
)

_INIT = (
    "759d2cd53b69",  # lora
    "2776e79db881",  # lora_fa
    "70e69f4d229b",  # lora_flux
    "5791da8097c8",  # lora_lumina
    "274c382b4c57",  # lora_anima
)

#: Upstream's ``LoRAModule.forward``, for a replacement that calls the module's layers.
FORWARD: KnownBodies = known_bodies(*_FORWARD)

#: Upstream's ``LoRAModule.forward``, for a replacement that uses the layers' weights and relies on layers without bias.
FORWARD_WITHOUT_BIAS: KnownBodies = known_bodies(*_FORWARD, helpers={"LoRAModule.__init__": _INIT})


def used_attributes(forward: Any, *names: str) -> tuple[str, ...]:
    """Return the given attribute names that upstream's ``forward`` reads.

    Some networks lack some of the attributes, and looking up a missing attribute of a module takes a microsecond per layer.
    """
    used = inspect.unwrap(forward).__code__.co_names
    return tuple(name for name in names if name in used)
