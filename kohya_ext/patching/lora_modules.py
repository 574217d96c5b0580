"""Upstream's LoRA modules: where they are, and what their forward takes into account."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from kohya_ext.sdscripts.checkouts import KNOWN_LAYOUTS, Layout
from kohya_ext.sdscripts.fingerprints import Known, known

#: The networks with a ``LoRAModule`` whose forward is a product, and the layouts that have it as their own.
NETWORKS: Mapping[str, frozenset[Layout]] = {
    "networks.lora": KNOWN_LAYOUTS,
    "networks.lora_fa": KNOWN_LAYOUTS,
    "networks.lora_flux": KNOWN_LAYOUTS,
    "networks.lora_lumina": KNOWN_LAYOUTS,
    "networks.lora_anima": frozenset({"v0.11"}),
}

_FORWARD = (
    "1e5172992aab",  # lora, lora_fa
    "8f2718eb8715",  # lora_lumina: with split_dims
    "2b146c75c4ac",  # lora_flux of v0.10.1: and with GGPO
    "94c4903a7393",  # lora_flux of v0.11.1: another rank dropout
    "0aebb6beec41",  # lora_anima
)

_INIT = (
    "759d2cd53b69",  # lora
    "2776e79db881",  # lora_fa
    "70e69f4d229b",  # lora_flux
    "5791da8097c8",  # lora_lumina
    "274c382b4c57",  # lora_anima
)

#: ``LoRAModule.forward`` as upstream has it, for a replacement that calls the module's layers.
FORWARD: Known = known(*_FORWARD)

#: The same, for a replacement that uses the layers' weights in their place: they have no bias.
FORWARD_OF_WEIGHTS: Known = known(*_FORWARD, helpers={"LoRAModule.__init__": _INIT})


def asked_for(forward: Any, *names: str) -> tuple[str, ...]:
    """Return those attributes that upstream's ``forward`` asks its module for.

    Not all networks have all of them, and a module is slow to say that it has not: a microsecond a layer.
    """
    asks = inspect.unwrap(forward).__code__.co_names
    return tuple(name for name in names if name in asks)
