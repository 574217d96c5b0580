"""Command lines for tiny runs of the training scripts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kohya_ext.config.command_line import option_words
from kohya_ext.sdscripts import families
from kohya_ext.tiny import dataset
from kohya_ext.tiny.checkpoints import Models

OUTPUT_NAME = "tiny"


_FLOW = ("--model_prediction_type", "raw", "--timestep_sampling", "sigmoid")
_T5_TOKENS = ("--t5xxl_max_token_length", "64")
_TEXT_INVERSION = ("--token_string", "sks", "--init_word", "a", "--num_vectors_per_token", "2")

_LECO = ("--network_dim", "4", "--network_alpha", "1", "--max_denoising_steps", "4")

#: Family -> options of all its scripts that train on images.
_FAMILY_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "sdxl": ("--no_half_vae",),
    "sd3": _T5_TOKENS,
    "flux": (*_FLOW, *_T5_TOKENS, "--guidance_scale", "1"),
    "chroma": (*_FLOW, *_T5_TOKENS, "--guidance_scale", "0", "--apply_t5_attn_mask"),
    "lumina": (*_FLOW, "--gemma2_max_token_length", "64"),
    "anima": ("--qwen3_max_token_length", "64", "--t5_max_token_length", "64"),
    "hunyuan-image": _FLOW,
}

#: Script -> options that it needs.
SCRIPT_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "fine_tune.py": ("--train_text_encoder",),
    "train_textual_inversion.py": _TEXT_INVERSION,
    "train_textual_inversion_XTI.py": _TEXT_INVERSION,
    "sdxl_train_textual_inversion.py": _TEXT_INVERSION,
    "sdxl_train_control_net_lllite_old.py": ("--cond_emb_dim", "8", "--network_dim", "4"),
    "sdxl_train_control_net_lllite.py": ("--cond_emb_dim", "8", "--network_dim", "4"),
    # Its text encoders are bf16, which without autocast requires cached outputs on disk; a cache in memory needs a patch.
    "hunyuan_image_train_network.py": ("--network_train_unet_only", "--cache_text_encoder_outputs_to_disk"),
    "anima_train_network.py": ("--network_train_unet_only",),
    "anima_train.py": ("--attn_mode", "torch"),  # v0.11 does not infer it there
    "anima_train_control_net_lllite.py": ("--attn_mode", "torch", "--cond_emb_dim", "8", "--lllite_mlp_dim", "4"),
    "train_leco.py": _LECO,
    "sdxl_train_leco.py": _LECO,
}


def _scripts() -> dict[str, tuple[str, ...]]:
    """Return script -> families."""
    scripts: dict[str, tuple[str, ...]] = {}
    # Families that are selected by an option come last.
    for family in sorted(families.FAMILIES, key=lambda family: family.is_chosen_by_option):
        for script in family.scripts:
            scripts[script] = (*scripts.get(script, ()), family.name)
    return scripts


SCRIPTS = _scripts()
"""Training script -> the model families that it trains, the default first."""


def training_arguments(script: str, models: Models, data: Path, output: Path) -> list[str]:
    """Return a script's arguments for four steps in float32, saved to `output`/tiny.safetensors.

    `data` is a folder written by `dataset.write`. Raises KeyError for a script that is not in `SCRIPTS`, and ValueError
    for models of a family that the script does not train.
    """
    if models.family not in SCRIPTS[script]:
        raise ValueError(f"{script} trains {' or '.join(SCRIPTS[script])} models, not {models.family}")
    family = families.BY_NAME[models.family]
    option = family.checkpoints[0].option
    lora = ("--network_module", family.networks[0], "--network_dim", "4", "--network_alpha", "1")
    return [
        *(part for option, path in models.files.items() for part in (f"--{option}", str(path))),
        *("--tokenizer_cache_dir", str(models.tokenizers)),
        *_training_data(script, data),
        *("--output_dir", str(output), "--output_name", OUTPUT_NAME, "--save_model_as", "safetensors"),
        *("--train_batch_size", "1", "--max_train_steps", "4", "--learning_rate", "1e-4", "--optimizer_type", "AdamW"),
        *("--mixed_precision", "no", "--gradient_checkpointing", "--sdpa", "--seed", "1"),
        *("--max_data_loader_n_workers", "0"),
        *(lora if script == family.lora else ()),
        *option_words({} if option is None else dict([option])),
        *(() if _has_no_images(script) else _FAMILY_OPTIONS.get(family.name, ())),
        *SCRIPT_OPTIONS.get(script, ()),
    ]


def _has_no_images(script: str) -> bool:
    return script.endswith("_leco.py")


def _training_data(script: str, data: Path) -> tuple[str, ...]:
    if _has_no_images(script):
        return ("--prompts_file", str(data / dataset.PROMPTS))
    # Without upscaling, buckets have the sizes of the images, rounded down.
    buckets = ("--resolution", "128,128", "--enable_bucket", "--bucket_no_upscale", "--bucket_reso_steps", "64")
    sizes = ("--min_bucket_reso", "64", "--max_bucket_reso", "256")
    return (*_image_folders(script, data), "--caption_extension", ".txt", "--cache_latents", *buckets, *sizes)


def _image_folders(script: str, data: Path) -> tuple[str, ...]:
    images = str(data / dataset.CLASS)
    if script == "fine_tune.py":
        return ("--train_data_dir", images, "--in_json", str(data / dataset.METADATA))
    if families.trains_control_net(script):
        return ("--train_data_dir", images, "--conditioning_data_dir", images)
    return ("--train_data_dir", str(data))
