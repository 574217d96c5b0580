"""Random command lines of every model family, drawn from a seed, for comparing estimates with real runs.

A command line takes its family's base preset and changes the options on which memory depends most: size and number of images,
optimizer, rank, precision, checkpointing, caches, block swap and the extension's own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from kohya_ext.config import preset_files

KINDS = (
    *("sdxl-lora", "sd15-lora", "flux-lora", "sd3-lora", "lumina-lora", "chroma-lora", "anima-lora", "hunyuan-image-lora"),
    *("sdxl-finetune", "flux-finetune"),
)

_ADAFACTOR = "Adafactor --optimizer_args scale_parameter=False relative_step=False warmup_init=False"
_LORA_OPTIMIZERS = ("AdamW", "AdamW8bit", "PagedAdamW8bit", "Lion", "Prodigy", "SGDNesterov", _ADAFACTOR)
_FINE_TUNE_OPTIMIZERS = ("AdamW8bit", "Lion8bit", _ADAFACTOR)
_SIZES = ("512", "640,960", "768", "832,1216", "896", "1024", "1280,768", "1152,896")

#: Kinds whose U-Net has convolutions.
_UNETS = ("sdxl-lora", "sd15-lora")
#: Kinds that can swap blocks -> the most blocks.
_SWAPPED = {"flux-lora": 28, "sd3-lora": 20, "lumina-lora": 20, "chroma-lora": 28, "anima-lora": 24, "hunyuan-image-lora": 30}
#: Kinds whose base can be loaded in 8 bits.
_FP8 = ("sdxl-lora", "flux-lora", "sd3-lora", "lumina-lora")
#: Kinds whose text encoders run in every step unless their outputs are cached, as the preset does.
_ENCODES = ("sdxl-lora", "flux-lora", "sd3-lora")


def draw(seed: int) -> Iterator[tuple[str, list[str]]]:
    """Yield scripts and their arguments without end, the kinds in turn."""
    generator = random.Random(seed)
    while True:
        for kind in generator.sample(KINDS, len(KINDS)):
            yield preset_files.scripts(kind)[0], ["--preset", f"{kind}/base", *_options(kind, generator)]


def _options(kind: str, generator: random.Random) -> list[str]:
    def sometimes(*words: str, chance: float = 0.3) -> list[str]:
        return [*words] if generator.random() < chance else []

    lora = kind.endswith("-lora")
    optimizer = generator.choice(_LORA_OPTIMIZERS if lora else _FINE_TUNE_OPTIMIZERS).split()
    checkpointing = "--gradient_checkpointing" if not lora or generator.random() < 0.6 else "--no-gradient_checkpointing"
    words = [
        *("--resolution", generator.choice(_SIZES), "--train_batch_size", str(generator.randint(1, 4))),
        *("--optimizer_type", *optimizer),
        checkpointing,
        *sometimes("--gradient_accumulation_steps", "3"),
        *sometimes("--no-cache_latents"),
        *sometimes("--max_grad_norm", generator.choice(("0", "1")), chance=0.5),
    ]
    if not lora:
        return [*words, *sometimes("--full_bf16", chance=0.5)]
    swaps = kind in _SWAPPED and generator.random() < 0.3
    words += ["--network_dim", str(generator.choice((4, 8, 24, 48, 128))), *sometimes("--fused_operations")]
    if kind in _UNETS:
        words += sometimes("--network_args", "conv_dim=8")
    if kind in _ENCODES and generator.random() < 0.4:
        words += ["--no-cache_text_encoder_outputs", *sometimes("--no-network_train_unet_only", chance=0.5)]
    if checkpointing == "--gradient_checkpointing":
        words += sometimes("--gradient_checkpointing_ratio", "0.5")
    if swaps:
        words += ["--blocks_to_swap", str(generator.randint(2, _SWAPPED[kind]))]
    elif kind in _FP8:
        words += sometimes("--fp8_base")
    words += [*sometimes("--ema", "--ema_device", "gpu"), *sometimes("--mixed_precision", "fp16")]
    return [*words, *sometimes("--expandable_segments")]
