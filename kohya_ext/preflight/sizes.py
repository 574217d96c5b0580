"""Predict the sizes of a run's files from the header of the model that it trains."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from math import prod
from pathlib import Path

from kohya_ext.run.safetensors_header import Header, read_header
from kohya_ext.sdscripts import families

#: Parts of tensor names by which networks.lora and its counterparts for other families select modules.
_TEXT_ENCODERS = ("conditioner.embedders.", "cond_stage_model.")
_FROZEN = ("first_stage_model.", *_TEXT_ENCODERS)
_BLOCKS = ("transformer_blocks.", "double_blocks.", "single_blocks.", "joint_blocks.", "layers.", "resblocks.", "blocks.")
_PROJECTIONS = ("proj_in.", "proj_out.")
_OUTSIDE = ("norm", "emb_layers.", "skip_connection.")
"""Layers of a U-Net's residual blocks, outside its transformers."""

_BYTES = {"fp16": 2, "bf16": 2, "float": 4}


@dataclass(frozen=True)
class Size:
    """File sizes in bytes, and the number of trained parameters."""

    model: int
    state: int
    """Lower bound: the trained parameters, and the two moments of AdamW."""
    trained: int


def predict(script: Path, args: Namespace) -> Size | None:
    """Return the sizes, or None when they are unknown (other networks, Diffusers models)."""
    file = Path(getattr(args, "pretrained_model_name_or_path", None) or "")
    if not file.is_file() or "textual_inversion" in script.name or families.trains_control_net(script.name):
        return None
    try:
        header = read_header(file)
    except (OSError, ValueError):
        header = None
    if "network" in script.name:
        module = (getattr(args, "network_module", None) or "").rpartition(".")[2]
        if header is None or not module.startswith("lora"):
            return None
        trained = _of_lora(header, args)
        model = trained * _BYTES.get(getattr(args, "save_precision", None) or "float", 4)
    else:
        if header is None:
            return Size(file.stat().st_size, file.stat().st_size, 0)
        trained = sum(prod(shape) for name, shape in header.shapes.items() if not name.startswith(_FROZEN))
        model = file.stat().st_size
        width = _BYTES.get(getattr(args, "save_precision", None) or "")
        if width is not None:
            model = sum(map(prod, header.shapes.values())) * width
    weight = 2 if getattr(args, "full_bf16", False) or getattr(args, "full_fp16", False) else 4
    moments = 2 * weight if (getattr(args, "optimizer_type", None) or "AdamW").lower() == "adamw" else 0
    return Size(model, trained * (weight + moments), trained)


def _of_lora(header: Header, args: Namespace) -> int:
    """Return the parameters of a LoRA on every linear layer of the blocks: rank x (inputs + outputs) each."""
    rank = getattr(args, "network_dim", None) or 4
    text = not getattr(args, "network_train_unet_only", False)
    model = not getattr(args, "network_train_text_encoder_only", False)
    total = 0
    for name, shape in header.shapes.items():
        if not name.endswith("weight") or name.startswith("first_stage_model.") or len(shape) not in (2, 4):
            continue
        is_trained = text if name.startswith(_TEXT_ENCODERS) else model
        inside = any(block in name for block in _BLOCKS) or any(part in name for part in _PROJECTIONS)
        if any(part in name for part in _OUTSIDE) or shape[2:] not in ((), (1, 1)):
            continue
        if is_trained and inside:
            # OpenCLIP's query, key and value are one matrix in the file, but three modules.
            total += rank * (shape[0] + shape[1] * (3 if "in_proj" in name else 1))
    return total
