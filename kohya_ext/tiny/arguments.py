"""The command line of a tiny run of each training script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kohya_ext.tiny import dataset
from kohya_ext.tiny.checkpoints import Models

OUTPUT_NAME = "tiny"


@dataclass(frozen=True)
class _Script:
    families: tuple[str, ...]
    options: tuple[str, ...]


def _lora(module: str) -> tuple[str, ...]:
    return ("--network_module", module, "--network_dim", "4", "--network_alpha", "1")


_FP32_VAE = ("--no_half_vae",)
_FLOW = ("--model_prediction_type", "raw", "--timestep_sampling", "sigmoid")
_T5_TOKENS = ("--t5xxl_max_token_length", "64")
_GEMMA_TOKENS = ("--gemma2_max_token_length", "64")
_QWEN_TOKENS = ("--qwen3_max_token_length", "64", "--t5_max_token_length", "64")
_TEXTUAL_INVERSION = ("--token_string", "sks", "--init_word", "a", "--num_vectors_per_token", "2")
_LLLITE = ("--cond_emb_dim", "8", "--network_dim", "4")

_SCRIPTS = {
    "train_network.py": _Script(("sd15",), _lora("networks.lora")),
    "train_db.py": _Script(("sd15",), ()),
    "fine_tune.py": _Script(("sd15",), ("--train_text_encoder",)),
    "train_textual_inversion.py": _Script(("sd15",), _TEXTUAL_INVERSION),
    "sdxl_train_network.py": _Script(("sdxl",), (*_lora("networks.lora"), *_FP32_VAE)),
    "sdxl_train.py": _Script(("sdxl",), _FP32_VAE),
    "sdxl_train_textual_inversion.py": _Script(("sdxl",), (*_TEXTUAL_INVERSION, *_FP32_VAE)),
    "sdxl_train_control_net.py": _Script(("sdxl",), _FP32_VAE),
    "sdxl_train_control_net_lllite.py": _Script(("sdxl",), (*_LLLITE, *_FP32_VAE)),
    "flux_train_network.py": _Script(("flux", "chroma"), (*_lora("networks.lora_flux"), *_FLOW, *_T5_TOKENS)),
    "flux_train.py": _Script(("flux",), (*_FLOW, *_T5_TOKENS)),
    "flux_train_control_net.py": _Script(("flux",), (*_FLOW, *_T5_TOKENS)),
    "lumina_train_network.py": _Script(("lumina",), (*_lora("networks.lora_lumina"), *_FLOW, *_GEMMA_TOKENS)),
    "lumina_train.py": _Script(("lumina",), (*_FLOW, *_GEMMA_TOKENS)),
    "sd3_train_network.py": _Script(("sd3",), (*_lora("networks.lora_sd3"), *_T5_TOKENS)),
    "hunyuan_image_train_network.py": _Script(
        # Its text encoders are bf16, which do without autocast from a cache only; for one in memory see hunyuan_cached_texts.
        ("hunyuan",),
        (*_lora("networks.lora_hunyuan_image"), *_FLOW, "--network_train_unet_only", "--cache_text_encoder_outputs_to_disk"),
    ),
    "anima_train_network.py": _Script(("anima",), (*_lora("networks.lora_anima"), *_QWEN_TOKENS, "--network_train_unet_only")),
    "anima_train.py": _Script(("anima",), (*_QWEN_TOKENS, "--attn_mode", "torch")),  # v0.11 does not infer it there
    "sd3_train.py": _Script(("sd3",), _T5_TOKENS),
}

SCRIPTS = {name: script.families for name, script in _SCRIPTS.items()}
"""Training script -> the families of models it trains, the usual one first."""

_FAMILY_OPTIONS = {
    "chroma": ("--model_type", "chroma", "--guidance_scale", "0", "--apply_t5_attn_mask"),
    "flux": ("--guidance_scale", "1"),
}


def training_arguments(script: str, models: Models, data: Path, output: Path) -> list[str]:
    """What follows the script's name on the command line: four steps in float32, saved to `output`/tiny.safetensors.

    `data` is a folder written by `dataset.write`. Raises KeyError for a script that is not in `SCRIPTS`, and ValueError
    for models that it does not train.
    """
    chosen = _SCRIPTS[script]
    if models.family not in chosen.families:
        raise ValueError(f"{script} trains {' or '.join(chosen.families)} models, not {models.family}")
    return [
        *(part for option, path in models.files.items() for part in (f"--{option}", str(path))),
        *("--tokenizer_cache_dir", str(models.tokenizers)),
        *_pictures(script, data),
        *("--caption_extension", ".txt", "--cache_latents"),
        # Without upscaling, the buckets are the pictures' own sizes, rounded down.
        *("--resolution", "128,128", "--enable_bucket", "--bucket_no_upscale"),
        *("--min_bucket_reso", "64", "--max_bucket_reso", "256", "--bucket_reso_steps", "64"),
        *("--output_dir", str(output), "--output_name", OUTPUT_NAME, "--save_model_as", "safetensors"),
        *("--train_batch_size", "1", "--max_train_steps", "4", "--learning_rate", "1e-4", "--optimizer_type", "AdamW"),
        *("--mixed_precision", "no", "--gradient_checkpointing", "--sdpa", "--seed", "1"),
        *("--max_data_loader_n_workers", "0"),
        *chosen.options,
        *_FAMILY_OPTIONS.get(models.family, ()),
    ]


def _pictures(script: str, data: Path) -> tuple[str, ...]:
    pictures = str(data / dataset.CLASS)
    if script == "fine_tune.py":
        return ("--train_data_dir", pictures, "--in_json", str(data / dataset.METADATA))
    if "control_net" in script:
        return ("--train_data_dir", pictures, "--conditioning_data_dir", pictures)
    return ("--train_data_dir", str(data))
