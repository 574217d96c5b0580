"""Random command lines of every model family, drawn from a seed, for comparing estimates with real runs.

A command line takes its family's base preset, if there is one, and changes the options on which memory depends: size and number
of images, optimizer, network, rank, precision, checkpointing, caches, block swap and the extension's own.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator

from kohya_ext.config import preset_files

#: Kinds with presets -> their scripts.
_WITH_PRESETS = {
    kind: preset_files.scripts(kind)[0]
    for kind in (
        *("sdxl-lora", "sd15-lora", "flux-lora", "sd3-lora", "lumina-lora", "chroma-lora", "anima-lora", "hunyuan-image-lora"),
        *("sdxl-finetune", "flux-finetune"),
    )
}
#: Kinds without presets -> their scripts and options.
_WITHOUT_PRESETS = {
    "sd15-finetune": "train_db.py --sdpa",
    "sd3-finetune": "sd3_train.py --cache_text_encoder_outputs",
    "lumina-finetune": "lumina_train.py --cache_text_encoder_outputs",
    "anima-finetune": "anima_train.py --cache_text_encoder_outputs",
}
KINDS = (*_WITH_PRESETS, *_WITHOUT_PRESETS)

_ADAFACTOR = "Adafactor --optimizer_args scale_parameter=False relative_step=False warmup_init=False"
_LORA_OPTIMIZERS = ("AdamW", "AdamW8bit", "PagedAdamW8bit", "Lion", "Prodigy", "SGDNesterov", _ADAFACTOR)
_FINE_TUNE_OPTIMIZERS = ("AdamW8bit", "Lion8bit", _ADAFACTOR)
#: Precisions of a LoRA: half of them the preset's bf16.
_PRECISIONS: tuple[tuple[str, ...], ...] = ((), (), ("--full_bf16",), ("--mixed_precision", "fp16"))
_SIZES = ("512", "640,960", "768", "832,1216", "896", "1024", "1280,768", "1152,896")

#: Kinds with U-Nets, which have convolutions, and may keep text encoders out of host memory.
_UNETS = ("sdxl-lora", "sd15-lora")
#: Kinds -> networks instead of a LoRA's.
_NETWORKS = {
    "sdxl-lora": ("lora_fa", "dylora", "loha", "lokr"),
    "sd15-lora": ("lora_fa", "dylora"),
    "flux-lora": ("oft_flux",),
    "anima-lora": ("loha", "lokr"),
}
#: Kinds that can swap blocks -> the most blocks. HunyuanImage's script then reads 41 GB of weights into host memory.
_SWAPPED = {
    "flux-lora": 28,
    "sd3-lora": 20,
    "lumina-lora": 20,
    "chroma-lora": 28,
    "anima-lora": 24,
    "flux-finetune": 28,
    "sd3-finetune": 18,
    "anima-finetune": 20,
}
#: Kinds whose base can be loaded in 8 bits.
_FP8 = ("sdxl-lora", "flux-lora", "sd3-lora", "lumina-lora")
#: Kinds whose text encoders run in every step unless their outputs are cached, as the preset does.
_ENCODES = ("sdxl-lora", "flux-lora", "sd3-lora")
#: Kinds whose models CUDA graphs record.
_RECORDED = ("sdxl-lora", "sd15-lora", "flux-lora")


def draw(seed: int, networks: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield scripts and their arguments without end, the kinds in turn, with the ``networks`` of sd-scripts (``loha``)."""
    generator = random.Random(seed)
    while True:
        for kind in generator.sample(KINDS, len(KINDS)):
            if kind in _WITH_PRESETS:
                script, base = _WITH_PRESETS[kind], ["--preset", f"{kind}/base"]
            else:
                script, *base = _WITHOUT_PRESETS[kind].split()
                base += ["--mixed_precision", "bf16", "--cache_latents"]
            options = _lora(kind, generator, networks) if kind.endswith("-lora") else _finetune(kind, generator)
            yield script, [*base, *_common(generator), *options]


def _sometimes(generator: random.Random, *words: str, chance: float = 0.3) -> list[str]:
    return [*words] if generator.random() < chance else []


def _common(generator: random.Random) -> list[str]:
    return [
        *("--resolution", generator.choice(_SIZES), "--train_batch_size", str(generator.randint(1, 4))),
        *_sometimes(generator, "--gradient_accumulation_steps", "3"),
        *_sometimes(generator, "--no-cache_latents"),
        *_sometimes(generator, "--vae_batch_size", "4"),
        *_sometimes(generator, "--max_grad_norm", generator.choice(("0", "1")), chance=0.5),
        *_sometimes(generator, "--min_snr_gamma", "5", "--noise_offset", "0.05", chance=0.1),
        *_sometimes(generator, "--ema", "--ema_device", "gpu"),
    ]


def _finetune(kind: str, generator: random.Random) -> list[str]:
    swapped = str(generator.randint(2, _SWAPPED[kind])) if kind in _SWAPPED and generator.random() < 0.3 else None
    # The optimizer must not find weights of swapped blocks.
    optimizer = _ADAFACTOR if swapped else generator.choice(_FINE_TUNE_OPTIMIZERS)
    words = ["--gradient_checkpointing", "--optimizer_type", *optimizer.split()]
    if swapped:
        words += ["--blocks_to_swap", swapped, "--fused_backward_pass", "--gradient_accumulation_steps", "1"]
    if kind == "sdxl-finetune":
        words += _sometimes(generator, "--no-cache_text_encoder_outputs", "--train_text_encoder")
    return [*words, *_sometimes(generator, "--full_bf16", chance=0.5)]


def _lora(kind: str, generator: random.Random, networks: Collection[str]) -> list[str]:
    checkpoints = generator.random() < 0.6
    words = [
        *("--optimizer_type", *generator.choice(_LORA_OPTIMIZERS).split()),
        "--gradient_checkpointing" if checkpoints else "--no-gradient_checkpointing",
        *("--network_dim", rank := str(generator.choice((4, 8, 24, 48, 128)))),
        *_sometimes(generator, "--fused_operations"),
        *_sometimes(generator, "--network_dropout", "0.1", chance=0.2),
        *generator.choice(_PRECISIONS),
        *_sometimes(generator, "--expandable_segments"),
    ]
    others = [name for name in _NETWORKS.get(kind, ()) if name in networks]
    if others and generator.random() < 0.4:
        words += ["--network_module", f"networks.{generator.choice(others)}"]
    else:
        words += _sometimes(generator, "--scale_weight_norms", "1", chance=0.2)
    if kind in _UNETS:
        convolutions = _sometimes(generator, "--network_args", "conv_dim=8")
        # All layers of a DyLoRA have one rank. It trains a part of it in each step, and the optimizer's state grows until each
        # had its turn, which a few steps do not show; with this unit a step trains all.
        words += ["--network_args", f"unit={rank}"] if "networks.dylora" in words else convolutions
        words += _sometimes(generator, "--lowram", chance=0.2)
    if kind in _ENCODES and generator.random() < 0.4:
        words += ["--no-cache_text_encoder_outputs", *_sometimes(generator, "--no-network_train_unet_only", chance=0.5)]
    if kind in _RECORDED:
        words += _sometimes(generator, "--cuda_graphs", chance=0.2)
    if checkpoints:
        words += _sometimes(generator, "--gradient_checkpointing_ratio", "0.5")
    if kind in _SWAPPED and generator.random() < 0.3:
        return [*words, "--blocks_to_swap", str(generator.randint(2, _SWAPPED[kind]))]
    return [*words, *(_sometimes(generator, "--fp8_base") if kind in _FP8 else [])]
