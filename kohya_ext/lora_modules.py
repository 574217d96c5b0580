"""Upstream's LoRA modules: where they are, and what their forward takes into account."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from kohya_ext.sdscripts import KNOWN_LAYOUTS, Layout

#: The networks with a ``LoRAModule`` whose forward is a product, and the layouts that have it as their own.
NETWORKS: Mapping[str, frozenset[Layout]] = {
    "networks.lora": KNOWN_LAYOUTS,
    "networks.lora_fa": KNOWN_LAYOUTS,
    "networks.lora_flux": KNOWN_LAYOUTS,
    "networks.lora_lumina": KNOWN_LAYOUTS,
    "networks.lora_anima": frozenset({"v0.11"}),
}


def asked_for(forward: Any, *names: str) -> tuple[str, ...]:
    """Return those attributes that upstream's ``forward`` asks its module for.

    Not all networks have all of them, and a module is slow to say that it has not: a microsecond a layer.
    """
    asks = inspect.unwrap(forward).__code__.co_names
    return tuple(name for name in names if name in asks)
