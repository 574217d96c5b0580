"""Recognize config files of the kohya_ss GUI, and the options that are off in its form.

The GUI omits values that are empty or off (its LoRA form also those that are 0). An option of the form that is missing from
the file is therefore off, not unset. Source: ``config_toml_data`` in lora_gui.py, dreambooth_gui.py, finetune_gui.py and
textual_inversion_gui.py of https://github.com/bmaltais/kohya_ss, 45088f04.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Keys that all four forms always write. No script has ``noise_offset_type``.
_ALWAYS = ("dynamo_backend", "noise_offset_type", "max_data_loader_n_workers")

#: Checkboxes, and numbers that are off at 0, that the forms show and a preset may turn on.
SWITCHES = frozenset(
    {
        *("apply_t5_attn_mask", "blocks_to_swap", "bucket_no_upscale", "cache_latents"),
        *("cache_latents_to_disk", "cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"),
        *("color_aug", "cpu_offload_checkpointing", "debiased_estimation_loss", "enable_bucket", "flip_aug"),
        *("fp8_base", "fp8_scaled", "fp8_vl", "full_bf16", "full_fp16", "fused_backward_pass"),
        *("gradient_checkpointing", "lr_warmup_steps", "masked_loss", "mem_eff_attn", "min_snr_gamma"),
        *("network_train_text_encoder_only", "network_train_unet_only", "no_half_vae"),
        *("persistent_data_loader_workers", "random_crop", "save_state", "save_state_on_train_end", "sdpa"),
        *("shuffle_caption", "text_encoder_cpu", "train_text_encoder", "weighted_captions", "xformers"),
    }
)


def options_off(values: Mapping[str, object]) -> frozenset[str]:
    """Return the options that the form shows as off, given a config file's values; empty if the GUI did not write it."""
    return frozenset(key for key in SWITCHES if not values.get(key)) if is_from_gui(values) else frozenset()


def is_from_gui(values: Mapping[str, object]) -> bool:
    """Return whether the GUI wrote a config file with these values."""
    return all(key in values for key in _ALWAYS)
