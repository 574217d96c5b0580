"""The table of model families that sd-scripts trains, with one row per family.

A row contains facts about upstream that several modules need: scripts, classes, file formats, limits. Facts that only one
module needs stay in that module, keyed by the family's name. tests/unit/test_families.py reports where a family is missing.
This module uses only the standard library.

To add a family, add a row here, the tensors of its files (tools/make_checkpoint_headers.py), a tiny model in tiny/, and its
presets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Checkpoint:
    """One kind of checkpoint that a family's scripts load."""

    title: str
    """Name for messages: ``SD 1.5``."""
    tensors: tuple[str, ...]
    """Substrings of tensor names. A checkpoint with any of them is of this kind, unless an earlier row matches too."""
    option: tuple[str, object] | None = None
    """The argument that makes the scripts load this kind; None for the default kind."""
    tokenizers: tuple[str, ...] = ()
    """Repositories on the Hugging Face Hub with the tokenizers that the scripts load."""
    reference: str = ""
    """The repository from which --save_model_as diffusers takes what a model's file does not have."""

    def is_selected(self, values: Mapping[str, object]) -> bool:
        """Return whether the arguments select this kind."""
        return self.option is not None and values.get(self.option[0]) == self.option[1]


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of a model."""

    module: str
    classes: tuple[str, ...]
    method: str
    """The method that checkpointing recomputes: the inner forward if ``forward`` checkpoints it."""


def rotates(swapped: int, blocks: int) -> bool:
    """Return whether sampling rotates swapped blocks where upstream would move them back before each step.

    Rotation copies every block once in a step; moving back copies the swapped ones twice.
    """
    return 0 < blocks <= 2 * swapped


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family and how sd-scripts trains it."""

    name: str
    """The family's name in the extension: ``sdxl``, ``hunyuan-image``."""
    checkpoints: tuple[Checkpoint, ...]
    """Kinds of checkpoints, the most common first."""

    lora: str
    """The script that trains a LoRA or another network on a frozen base. Estimates run its training step."""
    finetune: tuple[str, ...] = ()
    """The scripts for full fine-tuning, the most common first."""
    others: tuple[str, ...] = ()
    """Other training scripts: ControlNet, LLLite, textual inversion, LECO. They have no presets; dry runs estimate them."""
    files: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Option for a file that every script needs in addition to the model -> the part in it (parts.py)."""
    vae: str = ""
    """The part in the file of --vae, for scripts that otherwise load the VAE in the model's file; empty if there is none."""
    embedded: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Option of a file that is not needed if the model's file includes it -> the prefix of its tensors there."""
    networks: tuple[str, ...]
    """``--network_module`` values of upstream's LoRA networks, the most common first."""

    detected_by_lycoris: bool = False
    """Whether upstream's networks.loha and networks.lokr know the model."""

    module: str
    """The module of the U-Net or DiT."""
    model: str
    """The class of the U-Net or DiT."""
    first_input: str
    """The first parameter of the model's forward."""
    blocks: Blocks

    unet: bool = False
    """Whether the model is a U-Net. Its scripts have --sdpa, --xformers, --mem_eff_attn and --lowram, and can train text
    encoders in a full fine-tune."""
    attn_mode: bool = False
    """Whether the LoRA script has --attn_mode, to which --xformers is an alias."""
    side: int = 1024
    """The model's native width and height, in pixels."""
    bucket_steps: tuple[int, int]
    """The required divisors of --bucket_reso_steps, in pixels: in the LoRA script, and in the other scripts."""
    swapped: tuple[str, ...] = ()
    """The lists of blocks that --blocks_to_swap swaps, by the names of their tensors."""
    max_blocks_to_swap: int = 0
    """The largest --blocks_to_swap of the scripts; 0 if not all of them support it."""
    usual_blocks: int = 0
    """The number of blocks of the common checkpoint, if the checkpoints differ in it; 0 for other families. Then
    all but two blocks can be swapped."""
    fp8: str = "fp8_base"
    """The LoRA script's option to load the model in 8 bits; empty if there is none."""
    offloads_checkpoints: bool = True
    """Whether the model's enable_gradient_checkpointing has the parameter ``cpu_offload``."""
    finetune_in_16_bits: bool = False
    """Whether the fine-tuning script loads the model in 16 bits without --full_bf16."""
    finetune_ignores: tuple[str, ...] = ()
    """Options that the fine-tuning scripts accept and do not read."""
    trains_text_encoders: bool = True
    """Whether the LoRA script can train text encoders."""
    caches_t5_alone: bool = False
    """Whether CLIP can be trained while the outputs of T5 are cached. In other families caching covers all text encoders."""
    caches_empty_caption: bool = False
    """Whether cached text encoder outputs include the empty caption, which caption dropout needs."""
    t5_tokens: int = 0
    """The default of --t5xxl_max_token_length; 0 without T5."""
    assumed: str = ""
    """The assumptions of estimates about files and captions, for messages, with the fields ``t5`` (the type of T5's weights)
    and ``sd3`` (the model of Stable Diffusion 3)."""
    sample_side: int = 512
    """The default width and height of a sample image, in pixels."""
    samples_need_seed: bool = False
    """Whether a sample prompt without a seed is an error."""

    @property
    def scripts(self) -> tuple[str, ...]:
        """All training scripts of the family."""
        return (self.lora, *self.finetune, *self.others)

    @property
    def is_chosen_by_option(self) -> bool:
        """Whether the family shares another family's scripts and is selected by an option."""
        return self.checkpoints[0].option is not None

    def presets(self, script: str) -> str | None:
        """Return the presets folder of a script: ``sdxl-finetune``; None for a script without presets."""
        return f"{self.name}-lora" if script == self.lora else f"{self.name}-finetune" if script in self.finetune else None

    def ignores(self, script: str) -> tuple[str, ...]:
        """Return the options that a script accepts and does not read."""
        return self.finetune_ignores if script in self.finetune else ()


_CLIP_L = "openai/clip-vit-large-patch14"
_CLIP_G = "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k"
_T5 = "google/t5-v1_1-xxl"

FAMILIES: tuple[Family, ...] = (
    Family(
        name="sdxl",
        checkpoints=(
            Checkpoint(
                "SDXL",
                ("conditioner.embedders.1.",),
                tokenizers=(_CLIP_L, _CLIP_G),
                reference="stabilityai/stable-diffusion-xl-base-1.0",
            ),
        ),
        lora="sdxl_train_network.py",
        finetune=("sdxl_train.py",),
        others=(
            *("sdxl_train_textual_inversion.py", "sdxl_train_control_net.py", "sdxl_train_control_net_lllite.py"),
            *("sdxl_train_control_net_lllite_old.py", "sdxl_train_leco.py"),
        ),
        networks=("networks.lora", "networks.lora_fa"),
        detected_by_lycoris=True,
        module="library.sdxl_original_unet",
        model="SdxlUNet2DConditionModel",
        first_input="x",
        blocks=Blocks("library.sdxl_original_unet", ("BasicTransformerBlock", "ResnetBlock2D"), "forward_body"),
        unet=True,
        vae="sd-vae",
        bucket_steps=(32, 32),
        offloads_checkpoints=False,
    ),
    Family(
        name="sd15",
        checkpoints=(
            Checkpoint(
                "SD 1.5",
                ("cond_stage_model.transformer.",),
                tokenizers=(_CLIP_L,),
                reference="runwayml/stable-diffusion-v1-5",
            ),
            Checkpoint(
                "SD 2",
                ("cond_stage_model.model.",),
                ("v2", True),
                tokenizers=("stabilityai/stable-diffusion-2",),
                reference="stabilityai/stable-diffusion-2-1",
            ),
        ),
        lora="train_network.py",
        finetune=("fine_tune.py", "train_db.py"),
        others=(
            *("train_textual_inversion.py", "train_textual_inversion_XTI.py", "train_control_net.py", "train_controlnet.py"),
            "train_leco.py",
        ),
        networks=("networks.lora", "networks.lora_fa"),
        module="library.original_unet",
        model="UNet2DConditionModel",
        first_input="sample",
        blocks=Blocks("library.original_unet", ("BasicTransformerBlock", "ResnetBlock2D"), "forward"),
        unet=True,
        vae="sd-vae",
        side=512,
        bucket_steps=(64, 64),
        offloads_checkpoints=False,
        finetune_ignores=("full_bf16", "fused_backward_pass"),
    ),
    # Must precede FLUX, because a Chroma checkpoint also has FLUX's tensors.
    Family(
        name="chroma",
        checkpoints=(Checkpoint("Chroma", ("distilled_guidance_layer.",), ("model_type", "chroma"), (_CLIP_L, _T5)),),
        lora="flux_train_network.py",
        files={"t5xxl": "t5", "ae": "flux-ae"},
        networks=("networks.lora_flux",),
        module="library.chroma_models",
        model="Chroma",
        first_input="img",
        blocks=Blocks("library.chroma_models", ("DoubleStreamBlock", "SingleStreamBlock"), "_forward"),
        bucket_steps=(32, 16),
        swapped=("double_blocks", "single_blocks"),
        max_blocks_to_swap=34,
        t5_tokens=512,
        assumed="T5 in {t5}",
    ),
    Family(
        name="flux",
        checkpoints=(Checkpoint("FLUX", ("double_blocks.0.img_attn.",), tokenizers=(_CLIP_L, _T5)),),
        lora="flux_train_network.py",
        finetune=("flux_train.py",),
        others=("flux_train_control_net.py",),
        files={"clip_l": "clip-l", "t5xxl": "t5", "ae": "flux-ae"},
        networks=("networks.lora_flux",),
        module="library.flux_models",
        model="Flux",
        first_input="img",
        blocks=Blocks("library.flux_models", ("DoubleStreamBlock", "SingleStreamBlock"), "_forward"),
        bucket_steps=(32, 16),
        swapped=("double_blocks", "single_blocks"),
        # 19 double and 38 single blocks; two of each stay on the GPU. Two single blocks count as one double block.
        max_blocks_to_swap=34,
        finetune_in_16_bits=True,
        caches_t5_alone=True,
        t5_tokens=512,
        assumed="T5 in {t5}",
    ),
    Family(
        name="sd3",
        checkpoints=(Checkpoint("SD3", ("joint_blocks.0.",), tokenizers=(_CLIP_L, _CLIP_G, _T5)),),
        lora="sd3_train_network.py",
        finetune=("sd3_train.py",),
        files={"clip_l": "clip-l", "clip_g": "clip-g", "t5xxl": "t5"},
        embedded={
            **{option: f"text_encoders.{option}." for option in ("clip_l", "clip_g", "t5xxl")},
            "vae": "first_stage_model.",
        },
        vae="sd3-vae",
        networks=("networks.lora_sd3",),
        module="library.sd3_models",
        model="MMDiT",
        first_input="x",
        blocks=Blocks("library.sd3_models", ("MMDiTBlock",), "_forward"),
        bucket_steps=(32, 8),
        swapped=("joint_blocks",),
        max_blocks_to_swap=22,  # the medium model has 24 blocks; two stay on the GPU
        offloads_checkpoints=False,
        finetune_in_16_bits=True,
        caches_t5_alone=True,
        t5_tokens=256,
        assumed="Stable Diffusion {sd3}, T5 in 16 bits",
    ),
    Family(
        name="lumina",
        checkpoints=(Checkpoint("Lumina", ("cap_embedder.", "noise_refiner."), tokenizers=("google/gemma-2-2b",)),),
        lora="lumina_train_network.py",
        finetune=("lumina_train.py",),
        files={"gemma2": "gemma2", "ae": "lumina-ae"},
        networks=("networks.lora_lumina",),
        module="library.lumina_models",
        model="NextDiT",
        first_input="x",
        blocks=Blocks("library.lumina_models", ("JointTransformerBlock",), "_forward"),
        bucket_steps=(16, 16),
        swapped=("layers",),
        max_blocks_to_swap=0,  # not in lumina_train.py
        finetune_in_16_bits=True,
        finetune_ignores=("blocks_to_swap",),
        assumed="captions as long as --gemma2_max_token_length allows",
        sample_side=1024,
    ),
    Family(
        name="anima",
        checkpoints=(Checkpoint("Anima", ("llm_adapter.",)),),
        lora="anima_train_network.py",
        finetune=("anima_train.py",),
        others=("anima_train_control_net_lllite.py",),
        files={"qwen3": "qwen3", "vae": "qwen-vae"},
        networks=("networks.lora_anima",),
        detected_by_lycoris=True,
        module="library.anima_models",
        model="Anima",
        first_input="x",
        blocks=Blocks("library.anima_models", ("Block",), "_forward"),
        attn_mode=True,
        bucket_steps=(16, 16),
        swapped=("blocks",),
        max_blocks_to_swap=26,  # 28 blocks; two stay on the GPU
        usual_blocks=28,  # Anima-2.9B has 40
        fp8="",
        caches_empty_caption=True,
    ),
    Family(
        name="hunyuan-image",
        checkpoints=(
            Checkpoint("HunyuanImage", ("byt5_in.",), tokenizers=("Qwen/Qwen2.5-VL-7B-Instruct", "google/byt5-small")),
        ),
        lora="hunyuan_image_train_network.py",
        files={"text_encoder": "qwen-vl", "byt5": "byt5", "vae": "hunyuan-vae"},
        networks=("networks.lora_hunyuan_image",),
        module="library.hunyuan_image_models",
        model="HYImageDiffusionTransformer",
        first_input="hidden_states",
        blocks=Blocks("library.hunyuan_image_modules", ("MMDoubleStreamBlock", "MMSingleStreamBlock"), "_forward"),
        attn_mode=True,
        bucket_steps=(32, 32),
        swapped=("double_blocks", "single_blocks"),
        max_blocks_to_swap=36,  # 20 double and 40 single blocks, counted as in FLUX
        fp8="fp8_scaled",
        trains_text_encoders=False,
        assumed="captions of 256 tokens and 128 bytes of quoted text",
        samples_need_seed=True,
    ),
)

BY_NAME: Mapping[str, Family] = {family.name: family for family in FAMILIES}

#: The options that make a script load another kind of checkpoint than its default one.
SELECTORS = frozenset(kind.option[0] for family in FAMILIES for kind in family.checkpoints if kind.option is not None)

#: Substrings of tensor names that identify a LoRA file, to reject it as a model.
LORA_TENSORS = ("lora_down.", "lora_A.", "lora_unet_", "lora_te")


def of(script: str, values: Mapping[str, Any]) -> Family | None:
    """Return the family that a script trains with these arguments; None for an unknown script. ``script`` is a file name."""
    trained = [family for family in FAMILIES if script in family.scripts]
    selected = [family for family in trained if family.checkpoints[0].is_selected(values)]
    return next(iter(selected or [family for family in trained if not family.is_chosen_by_option]), None)


def checkpoint_of(script: str, values: Mapping[str, Any]) -> Checkpoint | None:
    """Return the kind of checkpoint that a script loads with these arguments; None for an unknown script."""
    family = of(script, values)
    if family is None:
        return None
    return next((kind for kind in family.checkpoints if kind.is_selected(values)), family.checkpoints[0])


def recognize(names: Collection[str]) -> tuple[Family, Checkpoint] | None:
    """Return the family and kind of a checkpoint with these tensor names; None if it is unknown."""
    for family in FAMILIES:
        for kind in family.checkpoints:
            if any(part in name for name in names for part in kind.tensors):
                return family, kind
    return None


def with_presets() -> Iterator[tuple[Family, str, str]]:
    """Yield (family, script, presets folder) for every script with presets and estimates."""
    for family in FAMILIES:
        for script in (family.lora, *family.finetune):
            yield family, script, str(family.presets(script))


def trains_control_net(script: str) -> bool:
    """Return whether a script trains a ControlNet or ControlNet-LLLite. v0.10 has ``train_controlnet.py``, too."""
    return "controlnet" in script.replace("_", "")
