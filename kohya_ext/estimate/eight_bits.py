"""The conversion of a model's layers to an 8-bit base, on fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kohya_ext.estimate.events import Kind
from kohya_ext.estimate.tracker import Tracker
from kohya_ext.quantization.linear import KINDS, Linear, convert, quantized
from kohya_ext.quantization.selection import layers, text_layers


def convert_layers(model: Any, precision: str) -> None:
    """Convert a model's layers as ``--base_precision`` does on a GPU that has the kernels."""
    for _, layer in layers(model):
        convert(layer, KINDS[precision], "kernels", layer.weight.device)


def convert_text_encoders(encoders: Sequence[Any], precision: str, tracker: Tracker) -> None:
    """Convert text encoders whose tensors are logged, one layer after another in GPU memory, and log that."""
    for encoder in encoders:
        for _, layer in text_layers(encoder):
            convert(layer, KINDS[precision], "kernels", layer.weight.device)
            tracker.mark([layer.weight, layer.scale_bits], Kind.TEXT_ENCODER)


def log_conversion(model: Any, dtype: torch.dtype, tracker: Tracker) -> None:
    """Log the conversion of a model's layers, which are on the host in ``dtype``: one after another, on the GPU."""
    for layer in model.modules():
        if isinstance(layer, Linear):
            with tracker.paused():
                weight = torch.empty(layer.weight.shape, dtype=dtype)
            tracker.leave_out([weight])
            quantized(weight, layer.kind, weight.device)
