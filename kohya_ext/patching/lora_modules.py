"""Upstream's LoRA modules and the fingerprints of their code."""

from __future__ import annotations

import inspect
from typing import Any

from kohya_ext.sdscripts.fingerprints import KnownBodies, known_bodies

#: Networks with a ``LoRAModule`` that is a plain low-rank product. In some releases one of them imports another one's.
NETWORKS = ("networks.lora", "networks.lora_fa", "networks.lora_flux", "networks.lora_lumina", "networks.lora_anima")

_FORWARD = {
    "1e5172992aab": "since 2024-10",  # lora, lora_fa
    "b7c14fe84f19": "2024-12",  # lora_flux: adds split_dims
    "2b146c75c4ac": "2025-04 to v0.10.1",  # lora_flux: adds GGPO
    "94c4903a7393": "since v0.10.4",  # lora_flux: changes rank dropout
    "8f2718eb8715": "since 2025-08",  # lora_lumina: has split_dims
    "0aebb6beec41": "since v0.10.4",  # lora_anima
}

_INIT = {
    "759d2cd53b69": "since 2024-10",  # lora
    "2776e79db881": "since 2024-10",  # lora_fa
    "b06396ebc81d": "2024-12",  # lora_flux
    "70e69f4d229b": "since 2025-04",  # lora_flux: adds GGPO
    "5791da8097c8": "since 2025-08",  # lora_lumina
    "274c382b4c57": "since v0.10.4",  # lora_anima
}

#: Upstream's ``LoRAModule.forward``, for a replacement that calls the module's layers.
FORWARD: KnownBodies = known_bodies(_FORWARD)

#: Upstream's ``LoRAModule.forward``, for a replacement that uses the layers' weights and relies on layers without bias.
FORWARD_WITHOUT_BIAS: KnownBodies = known_bodies(_FORWARD, helpers={"LoRAModule.__init__": _INIT})


def used_attributes(forward: Any, *names: str) -> tuple[str, ...]:
    """Return the given attribute names that upstream's ``forward`` reads.

    Some networks lack some of the attributes, and looking up a missing attribute of a module takes a microsecond per layer.
    """
    used = inspect.unwrap(forward).__code__.co_names
    return tuple(name for name in names if name in used)
