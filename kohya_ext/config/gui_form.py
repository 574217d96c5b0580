"""Presets as files that the kohya_ss GUI loads into its form.

The form shows a value for almost every option, and a run keeps all of them. So a preset that is named in "Additional
parameters" alone sets only what the form lacks. An exported file fills in the form instead: the fields of the preset's options,
and "off" for options that the preset leaves out and that change memory or speed. Fields that the file lacks keep what the user
has entered.

Source: ``open_configuration`` and ``config_toml_data`` in lora_gui.py, dreambooth_gui.py and finetune_gui.py of
https://github.com/bmaltais/kohya_ss, 45088f04.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

#: Option -> its field in the forms, and the field's value if the preset leaves it out; None keeps what the user has entered.
_FIELDS: Mapping[str, tuple[str, object]] = MappingProxyType(
    {
        "apply_t5_attn_mask": ("apply_t5_attn_mask", False),
        "attn_mode": ("attn_mode", "torch"),
        "blocks_to_swap": ("blocks_to_swap", 0),
        "cache_latents": ("cache_latents", False),
        "cache_text_encoder_outputs": ("cache_text_encoder_outputs", False),
        "cpu_offload_checkpointing": ("cpu_offload_checkpointing", False),
        "discrete_flow_shift": ("discrete_flow_shift", None),
        "enable_bucket": ("enable_bucket", False),
        "fp8_base": ("fp8_base", False),
        "fp8_base_unet": ("fp8_base_unet", False),
        "fp8_scaled": ("fp8_scaled", False),
        "fp8_vl": ("fp8_vl", False),
        "full_bf16": ("full_bf16", False),
        "full_fp16": ("full_fp16", False),
        "fused_backward_pass": ("fused_backward_pass", False),
        "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
        "gradient_checkpointing": ("gradient_checkpointing", False),
        "guidance_scale": ("guidance_scale", None),
        "learning_rate": ("learning_rate", None),
        "lr_scheduler": ("lr_scheduler", "constant"),
        "lr_warmup_steps": ("lr_warmup_steps", 0),
        "max_bucket_reso": ("max_bucket_reso", None),
        "max_grad_norm": ("max_grad_norm", 1.0),
        "mem_eff_attn": ("mem_eff_attn", False),
        "min_snr_gamma": ("min_snr_gamma", 0),
        "mixed_precision": ("mixed_precision", "no"),
        "model_prediction_type": ("model_prediction_type", None),
        "model_type": ("model_type", None),
        "network_alpha": ("network_alpha", None),
        "network_dim": ("network_dim", None),
        "optimizer_args": ("optimizer_args", ""),
        "optimizer_type": ("optimizer", "AdamW"),
        "resolution": ("max_resolution", None),
        "sdpa": ("xformers", "none"),
        "split_attn": ("split_attn", False),
        "text_encoder_cpu": ("text_encoder_cpu", False),
        "timestep_sampling": ("timestep_sampling", None),
        "train_batch_size": ("train_batch_size", 1),
        "train_text_encoder": ("train_text_encoder", False),
        "unsloth_offload_checkpointing": ("unsloth_offload_checkpointing", False),
    }
)

#: Options with a field for each of some families, which has the family's prefix.
_OF_FAMILY: Mapping[str, Collection[str]] = MappingProxyType(
    {
        "attn_mode": ("anima", "hunyuan-image"),
        "discrete_flow_shift": ("anima", "hunyuan-image", "lumina"),
        "fp8_scaled": ("hunyuan-image",),
        "fp8_vl": ("hunyuan-image",),
        "model_prediction_type": ("hunyuan-image", "lumina"),
        "split_attn": ("anima", "hunyuan-image"),
        "text_encoder_cpu": ("hunyuan-image",),
        "timestep_sampling": ("anima", "hunyuan-image", "lumina"),
        "unsloth_offload_checkpointing": ("anima",),
    }
)

#: Options that other fields stand for: the LoRA type, and the rates.
_BY_OTHERS = frozenset({"network_module", "network_train_unet_only"})


@dataclass(frozen=True)
class _Model:
    """How the forms select a family of models and name its own fields."""

    checkboxes: Collection[str] = ()
    lora: str = "Standard"
    """Its choice of "LoRA type"."""
    cache: str = ""
    """The prefix of the field that caches text encoder outputs."""
    prefix: str = ""
    """The prefix of :data:`_OF_FAMILY`."""
    fused: str = "fused_backward_pass"
    """The field of the fused backward pass."""


_MODELS = {
    "sd15": _Model(),
    "sdxl": _Model(("sdxl", "sdxl_checkbox"), cache="sdxl_"),
    "sd3": _Model(("sd3_checkbox",), cache="sd3_", fused="sd3_fused_backward_pass"),
    "flux": _Model(("flux1_checkbox",), "Flux1", "flux1_", fused="flux_fused_backward_pass"),
    "chroma": _Model(("flux1_checkbox",), "Flux1", "flux1_"),
    "lumina": _Model(("lumina_checkbox",), "Lumina", "lumina_", "lumina_"),
    "anima": _Model(("anima_checkbox",), "Anima", "anima_", "anima_"),
    "hunyuan-image": _Model(("hunyuan_image_checkbox",), "HunyuanImage-2.1", "hunyuan_image_", "hunyuan_"),
}


def form(values: Mapping[str, object], family: str, presets: Sequence[str], trains_network: bool) -> dict[str, object]:
    """Return the form's fields for a preset's ``values`` of a family's LoRA or fine-tune.

    ``presets`` goes into "Additional parameters", for the options that the form lacks.
    """
    model = _MODELS[family]
    fields: dict[str, object] = {box: box in model.checkboxes for each in _MODELS.values() for box in each.checkboxes}
    fields |= {"additional_parameters": " ".join(f"--preset {name}" for name in presets), "lr_warmup": 0}
    if trains_network:
        fields |= {"LoRA_type": model.lora, **_rates(values)}
    for option, (_, off) in _FIELDS.items():
        value = values.get(option, off if family in _OF_FAMILY.get(option, (family,)) else None)
        if value is not None:
            fields[_field(family, option)] = _value(option, value)
    return dict(sorted(fields.items()))


def lacks(option: str) -> bool:
    """Return whether the forms have no field for an option."""
    return option not in _FIELDS and option not in _BY_OTHERS


def _field(family: str, option: str) -> str:
    model, name = _MODELS[family], _FIELDS[option][0]
    if option == "cache_text_encoder_outputs":
        return model.cache + name
    if option == "fused_backward_pass":
        return model.fused
    return model.prefix + name if family in _OF_FAMILY.get(option, ()) else name


def _value(option: str, value: object) -> object:
    """Return an option's value as its field has it."""
    if option == "sdpa" and value is True:
        return "sdpa"
    if option == "optimizer_args" and isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return value


def _rates(values: Mapping[str, object]) -> dict[str, object]:
    """Return the rates of a LoRA's parts: the form trains those whose rate is not 0."""
    alone: dict[str, object] = {"text_encoder_lr": 0, "t5xxl_lr": 0} if values.get("network_train_unet_only") else {}
    return {"unet_lr": values["learning_rate"], **alone} if "learning_rate" in values else alone
