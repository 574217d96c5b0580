"""The model families that sd-scripts trains: one row each, the only place that lists them.

A row holds facts about upstream that several parts of the extension read: scripts, classes, file formats, limits. Facts that
one module alone needs stay in that module, keyed by a family's name; tests/unit/test_families.py names the places that lack a
family. Standard library only, and no other module of the extension is imported.

To add a family: a row here, its models in vram/models.py (``BUILDERS``), a tiny model in tiny/, and its folders in presets/.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Checkpoint:
    """One kind of checkpoint that a family's scripts load."""

    title: str
    """For messages: ``SD 1.5``."""
    tensors: tuple[str, ...]
    """Parts of tensor names. A checkpoint with any of them is of this kind, unless it is of an earlier row."""
    option: tuple[str, object] | None = None
    """The argument with which the scripts load this kind; None for the kind that they load without it."""

    def is_asked_for(self, values: Mapping[str, object]) -> bool:
        """Whether arguments have the option of this kind."""
        return self.option is not None and values.get(self.option[0]) == self.option[1]


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of a model."""

    module: str
    classes: tuple[str, ...]
    method: str
    """The method that is recomputed where a block is checkpointed: the inner one where ``forward`` checkpoints it."""


@dataclass(frozen=True)
class Sampler:
    """How the training scripts make sample images."""

    guided_together: bool = False
    """Whether the prompt and the empty prompt are one batch."""
    decodes_under_autocast: bool = False
    side: int = 512
    """Width and height of an image whose prompt sets none, in pixels."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family, as sd-scripts trains it."""

    name: str
    """The one name that the extension uses: ``sdxl``, ``hunyuan-image``."""
    checkpoints: tuple[Checkpoint, ...]
    """The usual kind first."""

    lora: str
    """The script that trains a LoRA or another network on a frozen base. Its trainer also runs the step of an estimate."""
    finetune: tuple[str, ...] = ()
    """The scripts of a full fine-tune, the usual one first."""
    others: tuple[str, ...] = ()
    """Other training scripts: ControlNet, LLLite, textual inversion, LECO. They have no presets and no estimates."""
    files: tuple[str, ...] = ()
    """Options that name the files that the scripts need beside the model."""
    networks: tuple[str, ...]
    """``--network_module`` of upstream's own LoRA, the usual one first."""

    module: str
    """Module of the U-Net or DiT."""
    model: str
    """Its class there."""
    first_input: str
    """The first parameter of its forward."""
    blocks: Blocks

    unet: bool = False
    """A U-Net. Its scripts choose the attention (--sdpa, --xformers, --mem_eff_attn), load models onto the GPU with --lowram,
    and train text encoders in a full fine-tune."""
    attn_mode: bool = False
    """Whether the LoRA script has --attn_mode, for which --xformers is another spelling."""
    side: int = 1024
    """Width and height of the images that the model was made for, in pixels."""
    bucket_steps: tuple[int, int]
    """What --bucket_reso_steps must be a multiple of, in pixels: in the LoRA script, and in the others."""
    most_swapped: int = 0
    """The most that the scripts take for --blocks_to_swap; 0 where none or not all of them move blocks to host memory."""
    fp8: str = "fp8_base"
    """The option that has the LoRA script load the model in 8 bits; empty where there is none."""
    offloads_checkpoints: bool = True
    """Whether the model's enable_gradient_checkpointing takes ``cpu_offload``."""
    finetune_in_16_bits: bool = False
    """Whether the fine-tuning script loads the model in 16 bits without --full_bf16."""

    trains_text_encoders: bool = True
    """Whether the LoRA script can train text encoders."""
    caches_t5_alone: bool = False
    """Whether CLIP can be trained while the outputs of T5 are cached. In other families caching covers all text encoders."""
    caches_empty_caption: bool = False
    """Whether cached text encoder outputs include the empty caption, so that captions can be dropped."""
    t5_tokens: int = 0
    """Tokens of a caption that T5 reads without --t5xxl_max_token_length; 0 without T5."""
    assumed: str = ""
    """What an estimate assumes about the user's captions, for messages."""
    sampler: Sampler = Sampler()

    @property
    def scripts(self) -> tuple[str, ...]:
        """Every training script of the family."""
        return (self.lora, *self.finetune, *self.others)

    @property
    def is_chosen_by_option(self) -> bool:
        """Whether its scripts are another family's, and train this one with an option."""
        return self.checkpoints[0].option is not None

    def presets(self, script: str) -> str | None:
        """Return the folder of presets for one of its scripts: ``sdxl-finetune``; None for a script without presets."""
        return f"{self.name}-lora" if script == self.lora else f"{self.name}-finetune" if script in self.finetune else None


FAMILIES: tuple[Family, ...] = (
    Family(
        name="sdxl",
        checkpoints=(Checkpoint("SDXL", ("conditioner.embedders.1.",)),),
        lora="sdxl_train_network.py",
        finetune=("sdxl_train.py",),
        others=(
            *("sdxl_train_textual_inversion.py", "sdxl_train_control_net.py", "sdxl_train_control_net_lllite.py"),
            *("sdxl_train_control_net_lllite_old.py", "sdxl_train_leco.py"),
        ),
        networks=("networks.lora", "networks.lora_fa"),
        module="library.sdxl_original_unet",
        model="SdxlUNet2DConditionModel",
        first_input="x",
        blocks=Blocks("library.sdxl_original_unet", ("BasicTransformerBlock", "ResnetBlock2D"), "forward_body"),
        unet=True,
        bucket_steps=(32, 32),
        offloads_checkpoints=False,
        sampler=Sampler(guided_together=True),
    ),
    Family(
        name="sd15",
        checkpoints=(
            Checkpoint("SD 1.5", ("cond_stage_model.transformer.",)),
            Checkpoint("SD 2", ("cond_stage_model.model.",), ("v2", True)),
        ),
        lora="train_network.py",
        finetune=("fine_tune.py", "train_db.py"),
        others=("train_textual_inversion.py", "train_control_net.py", "train_controlnet.py", "train_leco.py"),
        networks=("networks.lora", "networks.lora_fa"),
        module="library.original_unet",
        model="UNet2DConditionModel",
        first_input="sample",
        blocks=Blocks("library.original_unet", ("BasicTransformerBlock", "ResnetBlock2D"), "forward"),
        unet=True,
        side=512,
        bucket_steps=(64, 64),
        offloads_checkpoints=False,
        sampler=Sampler(guided_together=True),
    ),
    # Before FLUX, whose tensors a Chroma checkpoint has too.
    Family(
        name="chroma",
        checkpoints=(Checkpoint("Chroma", ("distilled_guidance_layer.",), ("model_type", "chroma")),),
        lora="flux_train_network.py",
        files=("t5xxl", "ae"),
        networks=("networks.lora_flux",),
        module="library.chroma_models",
        model="Chroma",
        first_input="img",
        blocks=Blocks("library.chroma_models", ("DoubleStreamBlock", "SingleStreamBlock"), "_forward"),
        bucket_steps=(32, 16),
        most_swapped=34,
        caches_t5_alone=True,
        t5_tokens=512,
        sampler=Sampler(decodes_under_autocast=True),
    ),
    Family(
        name="flux",
        checkpoints=(Checkpoint("FLUX", ("double_blocks.0.img_attn.",)),),
        lora="flux_train_network.py",
        finetune=("flux_train.py",),
        others=("flux_train_control_net.py",),
        files=("clip_l", "t5xxl", "ae"),
        networks=("networks.lora_flux",),
        module="library.flux_models",
        model="Flux",
        first_input="img",
        blocks=Blocks("library.flux_models", ("DoubleStreamBlock", "SingleStreamBlock"), "_forward"),
        bucket_steps=(32, 16),
        # 19 double and 38 single blocks, of which two each stay on the GPU; two single blocks are moved for one double block.
        most_swapped=34,
        finetune_in_16_bits=True,
        caches_t5_alone=True,
        t5_tokens=512,
        sampler=Sampler(decodes_under_autocast=True),
    ),
    Family(
        name="sd3",
        checkpoints=(Checkpoint("SD3", ("joint_blocks.0.",)),),
        lora="sd3_train_network.py",
        finetune=("sd3_train.py",),
        files=("clip_l", "clip_g", "t5xxl"),
        networks=("networks.lora_sd3",),
        module="library.sd3_models",
        model="MMDiT",
        first_input="x",
        blocks=Blocks("library.sd3_models", ("MMDiTBlock",), "_forward"),
        bucket_steps=(32, 8),
        most_swapped=22,  # 24 blocks of the medium models, of which two stay on the GPU
        offloads_checkpoints=False,
        finetune_in_16_bits=True,
        caches_t5_alone=True,
        t5_tokens=256,
        sampler=Sampler(guided_together=True),
    ),
    Family(
        name="lumina",
        checkpoints=(Checkpoint("Lumina", ("cap_embedder.", "noise_refiner.")),),
        lora="lumina_train_network.py",
        finetune=("lumina_train.py",),
        files=("gemma2", "ae"),
        networks=("networks.lora_lumina",),
        module="library.lumina_models",
        model="NextDiT",
        first_input="x",
        blocks=Blocks("library.lumina_models", ("JointTransformerBlock",), "_forward"),
        bucket_steps=(16, 16),
        most_swapped=0,  # lumina_train.py takes --blocks_to_swap and moves no block
        finetune_in_16_bits=True,
        assumed="captions as long as --gemma2_max_token_length allows",
        sampler=Sampler(decodes_under_autocast=True, side=1024),
    ),
    Family(
        name="anima",
        checkpoints=(Checkpoint("Anima", ("llm_adapter.",)),),
        lora="anima_train_network.py",
        finetune=("anima_train.py",),
        others=("anima_train_control_net_lllite.py",),
        files=("qwen3", "vae"),
        networks=("networks.lora_anima",),
        module="library.anima_models",
        model="Anima",
        first_input="x",
        blocks=Blocks("library.anima_models", ("Block",), "_forward"),
        attn_mode=True,
        bucket_steps=(16, 16),
        most_swapped=26,  # 28 blocks, of which two stay on the GPU
        fp8="",
        caches_empty_caption=True,
    ),
    Family(
        name="hunyuan-image",
        checkpoints=(Checkpoint("HunyuanImage", ("byt5_in.",)),),
        lora="hunyuan_image_train_network.py",
        files=("text_encoder", "byt5", "vae"),
        networks=("networks.lora_hunyuan_image",),
        module="library.hunyuan_image_models",
        model="HYImageDiffusionTransformer",
        first_input="hidden_states",
        blocks=Blocks("library.hunyuan_image_modules", ("MMDoubleStreamBlock", "MMSingleStreamBlock"), "_forward"),
        attn_mode=True,
        bucket_steps=(32, 32),
        most_swapped=36,  # 20 double and 40 single blocks, counted as FLUX's
        fp8="fp8_scaled",
        trains_text_encoders=False,
        assumed="captions of 256 tokens and 128 bytes of quoted text",
    ),
)

BY_NAME: Mapping[str, Family] = {family.name: family for family in FAMILIES}

#: Tensor names of a LoRA, in a file that was given as the model.
LORA_TENSORS = ("lora_down.", "lora_A.", "lora_unet_", "lora_te")


def of(script: str, values: Mapping[str, Any]) -> Family | None:
    """Return the family that a script (its file name) trains with these arguments; None for an unknown script."""
    trained = [family for family in FAMILIES if script in family.scripts]
    asked_for = [family for family in trained if family.checkpoints[0].is_asked_for(values)]
    return next(iter(asked_for or [family for family in trained if not family.is_chosen_by_option]), None)


def checkpoint_of(script: str, values: Mapping[str, Any]) -> Checkpoint | None:
    """Return the kind of checkpoint that a script loads with these arguments; None for an unknown script."""
    family = of(script, values)
    if family is None:
        return None
    return next((kind for kind in family.checkpoints if kind.is_asked_for(values)), family.checkpoints[0])


def recognize(names: Collection[str]) -> tuple[Family, Checkpoint] | None:
    """Return the family and kind of a checkpoint with these tensor names; None where they are of none."""
    for family in FAMILIES:
        for kind in family.checkpoints:
            if any(part in name for name in names for part in kind.tensors):
                return family, kind
    return None


def with_presets() -> Iterator[tuple[Family, str, str]]:
    """Yield (family, script, folder of presets) for every script that has presets and estimates."""
    for family in FAMILIES:
        for script in (family.lora, *family.finetune):
            yield family, script, str(family.presets(script))
