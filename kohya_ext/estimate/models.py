"""The models of each family at full size, and their inputs, built under FakeTensorMode without weights.

Sizes come from sd-scripts' own modules where they are data. The CLIP text encoders' sizes are inside loaders that read a file;
they are repeated here, and a comment names the loader.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from kohya_ext.estimate.memory_config import FP8, HUNYUAN_CAPTION_TOKENS, SD3_LARGE, SD3_MEDIUM, MemoryConfig, size
from kohya_ext.patching.attributes import replaced
from kohya_ext.patching.types import Batch

CLIP_TOKENS = 77


@dataclass
class Models:
    """The models of one family and the inputs of its training step."""

    unet: Any
    """The U-Net or DiT."""
    text_encoders: list[Any]
    vae: Any
    latents: tuple[int, int]
    """Channels, and pixels per latent along one side."""
    token_ids: Callable[[int], list[torch.Tensor]]
    """Batch size -> the dataset's token ids, for captions that are not cached."""
    conditions: Callable[[int], list[torch.Tensor | None]]
    """Batch size -> the dataset's cached text encoder outputs."""
    tokenizers: Any
    """Stand-ins for the encoding strategy's tokenizers: sizes without vocabulary."""
    extras: Callable[[int], Batch] = field(default=lambda batch: Batch())
    """Batch size -> further keys that this family's step reads from a batch."""
    blocks: Callable[[int], list[Any]] = field(default=lambda count: [])
    """``--blocks_to_swap`` -> the blocks in host memory."""
    caption_tokens: int = CLIP_TOKENS
    """The longest caption, assumed wherever a step reads a length."""


def build(config: MemoryConfig) -> Models:
    """Return the models of a run. Raises KeyError for a family that is not in :data:`BUILDERS`."""
    return BUILDERS[config.family.name](config)


def set_attention(unet: Any, config: MemoryConfig) -> None:
    """Set the U-Net's attention. xformers saves the same tensors as PyTorch's own, and need not be installed."""
    if config.mem_eff_attn:
        unet.set_use_memory_efficient_attention(False, True)
    elif config.xformers or config.sdpa:
        unet.set_use_sdpa(True)


def _clip(module: Any, **sizes: Any) -> Any:
    """Return a CLIP configuration, through the module of the family's loader."""
    return module.CLIPTextConfig(
        vocab_size=49408, max_position_embeddings=CLIP_TOKENS, layer_norm_eps=1e-05, pad_token_id=1, bos_token_id=0,
        eos_token_id=2, **sizes,
    )  # fmt: skip


def _clip_text_model(sizes: Any) -> Any:
    """Return a CLIP text encoder as the checkout's loaders build it.

    transformers 5.6 removed its submodule ``text_model``. sd-scripts v0.12 wraps it, so that names and attributes stay.
    """
    model = importlib.import_module("transformers").CLIPTextModel._from_config(sizes)
    if importlib.util.find_spec("library.clip_text_model") is None:
        return model
    return importlib.import_module("library.clip_text_model").wrap_clip_text_model(model)


def _clip_tokenizer() -> Any:
    # Equal ids make SD 2's long captions take SD 1's path, which has the same shapes and reads no token.
    return SimpleNamespace(model_max_length=CLIP_TOKENS, eos_token_id=2, pad_token_id=2)


def _clip_ids(batch: int, config: MemoryConfig) -> torch.Tensor:
    return torch.zeros(batch, (config.max_token_length or 75) // 75, CLIP_TOKENS, dtype=torch.long)


def _clip_length(config: MemoryConfig) -> int:
    """Return the tokens in a caption's embedding: chunks of 77 are joined without their inner start and end tokens."""
    return CLIP_TOKENS if config.max_token_length is None else config.max_token_length + 2


def _sdxl(config: MemoryConfig) -> Models:
    unets = importlib.import_module("library.sdxl_original_unet")
    util = importlib.import_module("library.sdxl_model_util")
    transformers = importlib.import_module("transformers")
    unet = unets.SdxlUNet2DConditionModel()
    set_attention(unet, config)
    # sdxl_model_util.load_models_from_sdxl_checkpoint
    small = _clip(util, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
                  hidden_act="quick_gelu", projection_dim=768)  # fmt: skip
    large = _clip(util, hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20,
                  hidden_act="gelu", projection_dim=1280)  # fmt: skip
    length, widths = _clip_length(config), (small.hidden_size, large.hidden_size)

    return Models(
        unet=unet,
        text_encoders=[_clip_text_model(small), transformers.CLIPTextModelWithProjection(large)],
        vae=_sd_vae(),
        latents=(4, 8),
        token_ids=lambda batch: [_clip_ids(batch, config)] * 2,
        conditions=lambda batch: [
            *(torch.zeros(batch, length, width) for width in widths),
            torch.zeros(batch, large.projection_dim),
        ],
        tokenizers=SimpleNamespace(tokenizer1=_clip_tokenizer(), tokenizer2=_clip_tokenizer()),
        extras=lambda batch: {
            "original_sizes_hw": torch.zeros(batch, 2, dtype=torch.long),
            "crop_top_lefts": torch.zeros(batch, 2, dtype=torch.long),
            "target_sizes_hw": torch.zeros(batch, 2, dtype=torch.long),
        },
    )


def _sd15(config: MemoryConfig) -> Models:
    unets = importlib.import_module("library.original_unet")
    util = importlib.import_module("library.model_util")
    sizes = util.create_unet_diffusers_config(config.v2, True)
    unet = unets.UNet2DConditionModel(**sizes)
    set_attention(unet, config)
    # model_util.load_models_from_stable_diffusion_checkpoint
    clip = (
        _clip(util, hidden_size=1024, intermediate_size=4096, num_hidden_layers=23, num_attention_heads=16,
              hidden_act="gelu", projection_dim=512)
        if config.v2
        else _clip(util, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
                   hidden_act="quick_gelu", projection_dim=768)
    )  # fmt: skip
    length = _clip_length(config)
    return Models(
        unet=unet,
        text_encoders=[_clip_text_model(clip)],
        vae=_sd_vae(),
        latents=(4, 8),
        token_ids=lambda batch: [_clip_ids(batch, config)],
        conditions=lambda batch: [torch.zeros(batch, length, clip.hidden_size)],
        tokenizers=SimpleNamespace(tokenizer=_clip_tokenizer()),
    )


def _sd_vae() -> Any:
    util = importlib.import_module("library.model_util")
    diffusers = importlib.import_module("diffusers")
    return diffusers.AutoencoderKL(**util.create_vae_diffusers_config())


# --- transformers ----------------------------------------------------------------------------------------------------


def _flux(config: MemoryConfig) -> Models:
    """Build FLUX.1 dev, or Chroma."""
    flux, util = importlib.import_module("library.flux_models"), importlib.import_module("library.flux_utils")
    sizes = flux.configs["dev"]
    chroma = config.family.name == "chroma"
    if chroma:
        models = importlib.import_module("library.chroma_models")
        transformer, clip = models.Chroma(models.chroma_params), util.dummy_clip_l()
    else:
        transformer, clip = flux.Flux(sizes.params), _load_on_cpu(util.load_clip_l)
    t5 = _load_on_cpu(util.load_t5xxl)
    if config.t5xxl == FP8:
        # flux_train_network.prepare_text_encoder_fp8
        cast(t5, torch.float8_e4m3fn, [part for part in t5.modules() if type(part).__name__ in ("T5LayerNorm", "Embedding")])
    length = config.t5xxl_max_token_length or config.family.t5_tokens
    return Models(
        unet=transformer,
        text_encoders=[clip, t5],
        vae=flux.AutoEncoder(sizes.ae_params),
        latents=(16, 8),
        token_ids=lambda batch: [_ids(batch, CLIP_TOKENS), _ids(batch, length), _mask(batch, length)],
        conditions=lambda batch: [
            torch.zeros(batch, CLIP_TOKENS, 1) if chroma else torch.zeros(batch, sizes.params.vec_in_dim),
            torch.zeros(batch, length, sizes.params.context_in_dim),
            torch.zeros(batch, length, 3),
            _mask(batch, length),
        ],
        tokenizers=SimpleNamespace(),
        blocks=lambda count: [
            *transformer.double_blocks[len(transformer.double_blocks) - count // 2 :],
            *transformer.single_blocks[len(transformer.single_blocks) - (count - count // 2) * 2 :],
        ],
        caption_tokens=length,
    )


def _lumina(config: MemoryConfig) -> Models:
    """Build Lumina Image 2.0."""
    models, util = importlib.import_module("library.lumina_models"), importlib.import_module("library.lumina_util")
    transformer = models.NextDiT_2B_GQA_patch2_Adaln_Refiner()
    gemma = _load_on_cpu(util.load_gemma2)
    flux = importlib.import_module("library.flux_models")
    length = config.gemma2_max_token_length or 256
    return Models(
        unet=transformer,
        text_encoders=[gemma],
        vae=flux.AutoEncoder(flux.configs["dev"].ae_params),
        latents=(16, 8),
        token_ids=lambda batch: [_ids(batch, length), _mask(batch, length)],
        conditions=lambda batch: [
            torch.zeros(batch, length, gemma.config.hidden_size),
            _ids(batch, length),
            _mask(batch, length),
        ],
        tokenizers=SimpleNamespace(),
        blocks=lambda count: list(transformer.layers[len(transformer.layers) - count :]),
        caption_tokens=length,
    )


def _sd3(config: MemoryConfig) -> Models:
    """Build the checkpoint's Stable Diffusion 3; sizes as sd3_utils.analyze_state_dict_state reads them."""
    models, util = importlib.import_module("library.sd3_models"), importlib.import_module("library.sd3_utils")
    flux_util = importlib.import_module("library.flux_utils")
    side, depth, norm, dual, kind = {
        SD3_LARGE: (192, 38, "rms", 0, "5-large"),
        SD3_MEDIUM: (192, 24, None, 0, "medium"),
    }.get(str(config.pretrained_model_name_or_path), (384, 24, "rms", 13, "5-medium"))
    transformer = models.create_sd3_mmdit(
        models.SD3Params(
            patch_size=2, depth=depth, num_patches=side**2, pos_embed_max_size=side, adm_in_channels=2048, qk_norm=norm,
            x_block_self_attn_layers=list(range(dual)), context_embedder_in_features=4096,
            context_embedder_out_features=64 * depth, model_type=kind,
        )
    )  # fmt: skip
    transformers = importlib.import_module("transformers")
    small = _clip(util, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
                  hidden_act="quick_gelu", projection_dim=768)  # fmt: skip
    large = _clip(util, hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20,
                  hidden_act="gelu", projection_dim=1280)  # fmt: skip
    length = config.t5xxl_max_token_length or config.family.t5_tokens
    widths = small.hidden_size + large.hidden_size
    return Models(
        unet=transformer,
        text_encoders=[
            transformers.CLIPTextModelWithProjection(small),
            transformers.CLIPTextModelWithProjection(large),
            _load_on_cpu(flux_util.load_t5xxl),
        ],
        vae=models.SDVAE(torch.float32, "cpu"),
        latents=(16, 8),
        token_ids=lambda batch: [
            *(_ids(batch, count) for count in (CLIP_TOKENS, CLIP_TOKENS, length)),
            *(_mask(batch, count) for count in (CLIP_TOKENS, CLIP_TOKENS, length)),
        ],
        conditions=lambda batch: [
            torch.zeros(batch, CLIP_TOKENS, widths),
            torch.zeros(batch, length, 4096),
            torch.zeros(batch, widths),
            *(_mask(batch, count) for count in (CLIP_TOKENS, CLIP_TOKENS, length)),
        ],
        tokenizers=SimpleNamespace(),
        blocks=lambda count: list(transformer.joint_blocks[len(transformer.joint_blocks) - count :]),
        caption_tokens=length,
    )


def _anima(config: MemoryConfig) -> Models:
    """Build Anima: its adapter reads T5's token ids, its text encoder is Qwen3 0.6B."""
    util, flat = importlib.import_module("library.anima_utils"), config.qwen_image_vae_2d
    vae = importlib.import_module("library.qwen_image_autoencoder_kl" + ("_2d" if flat else ""))
    transformers = importlib.import_module("transformers")
    transformer = _construct(
        util.anima_models,
        "Anima",
        lambda: util.load_anima_model("cpu", "", "torch", False, "cpu", torch.bfloat16),
        **({"num_blocks": int(config.pretrained_model_name_or_path)} if config.pretrained_model_name_or_path else {}),
    )
    folder = Path(str(util.__file__)).parent.parent / "configs" / "qwen3_06b"
    encoder = transformers.Qwen3Model(transformers.Qwen3Config.from_pretrained(folder, local_files_only=True))
    long, short = config.qwen3_max_token_length, config.t5_max_token_length
    return Models(
        unet=transformer,
        text_encoders=[encoder],
        vae=_construct(
            vae,
            "AutoencoderKLQwenImage" + ("2D" if flat else ""),
            lambda: vae.load_vae("", spatial_chunk_size=config.vae_chunk_size, disable_cache=config.vae_disable_cache),
        ),
        latents=(16, 8),
        token_ids=lambda batch: [_ids(batch, long), _mask(batch, long), _ids(batch, short), _mask(batch, short)],
        conditions=lambda batch: [
            torch.zeros(batch, long, encoder.config.hidden_size),
            _mask(batch, long),
            _ids(batch, short),
            _mask(batch, short),
            None,
        ],
        tokenizers=SimpleNamespace(),
        blocks=lambda count: list(transformer.blocks[len(transformer.blocks) - count :]),
        caption_tokens=long,
    )


def _hunyuan_image(config: MemoryConfig) -> Models:
    """Build HunyuanImage 2.1, for captions with 128 bytes of quoted text."""
    models, util = (
        importlib.import_module("library.hunyuan_image_models"),
        importlib.import_module("library.fp8_optimization_utils"),
    )
    transformers = importlib.import_module("transformers")
    mode = "torch" if config.attn_mode in (None, "sdpa") else config.attn_mode
    transformer = models.HYImageDiffusionTransformer(attn_mode=mode, split_attn=config.split_attn)
    cast(transformer, torch.bfloat16)
    if config.fp8_scaled:
        keys = (models.FP8_OPTIMIZATION_TARGET_KEYS, models.FP8_OPTIMIZATION_EXCLUDE_KEYS)
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
            state = util.optimize_state_dict_with_fp8(transformer.state_dict(), None, *keys)
        util.apply_fp8_monkey_patch(transformer, state)
        transformer.load_state_dict(state, strict=True, assign=True)
    # hunyuan_image_text_encoder.load_qwen2_5_vl and load_byt5
    loader = importlib.import_module("library.hunyuan_image_text_encoder")
    language = _build_on_meta(lambda: loader.load_qwen2_5_vl("", torch.bfloat16, "cpu", state_dict={}))
    _allocate(language, torch.bfloat16)
    if config.fp8_vl:
        # Upstream keeps embeddings and norms in 16 bits.
        cast(language, torch.float8_e4m3fn, [part for part in language.modules() if "Embedding" in type(part).__name__
                                             or "Norm" in type(part).__name__])  # fmt: skip
    letters = transformers.T5EncoderModel(
        transformers.T5Config(d_model=1472, d_ff=3584, d_kv=64, num_heads=6, num_layers=12, vocab_size=1510,
                              feed_forward_proj="gated-gelu")
    ).encoder  # fmt: skip
    cast(letters, torch.bfloat16)  # upstream uses fp16, of the same size, which CPU autocast does not support
    vae = importlib.import_module("library.hunyuan_image_vae").HunyuanVAE2D(chunk_size=config.vae_chunk_size)
    cast(vae, torch.float16)
    caption, quoted, scale = HUNYUAN_CAPTION_TOKENS, loader.BYT5_MAX_LENGTH, vae.ffactor_spatial
    ignored = loader.PROMPT_TEMPLATE_ENCODE_START_IDX
    width, height = size(config)
    return Models(
        unet=transformer,
        text_encoders=[language, letters],
        vae=vae,
        latents=(transformer.in_channels, scale),
        token_ids=lambda batch: [
            *(_ids(batch, ignored + caption), _mask(batch, ignored + caption)),
            *(_ids(batch, quoted), _mask(batch, quoted)),
        ],
        conditions=lambda batch: [
            torch.zeros(batch, caption, 3584),
            _mask(batch, caption),
            torch.zeros(batch, quoted, 1472),
            _mask(batch, quoted),
            torch.ones(batch, dtype=torch.bool),
        ],
        tokenizers=SimpleNamespace(),
        blocks=lambda count: [
            *transformer.double_blocks[len(transformer.double_blocks) - count // 2 :],
            *transformer.single_blocks[len(transformer.single_blocks) - (count - count // 2) * 2 :],
        ],
        # Sequences are not padded, so a block only reads the total length.
        caption_tokens=(width // scale) * (height // scale) + caption + quoted,
    )


class _LoadingStoppedError(Exception):
    """Stops a loader at the model that it builds."""


def _construct(module: Any, name: str, load: Callable[[], Any], **other: int) -> Any:
    """Construct a class with the sizes that its loader passes to it, or with ``other`` ones, and load no weights."""
    kind = getattr(module, name)
    sizes: dict[str, Any] = {}

    def record(**arguments: Any) -> None:
        sizes.update(arguments)
        raise _LoadingStoppedError

    with replaced(module, name, record), contextlib.suppress(_LoadingStoppedError):
        load()
    if sizes:
        return kind(**{**sizes, **other})
    raise RuntimeError(f"the loader did not construct {name}")


def _build_on_meta(load: Callable[[], Any]) -> Any:
    """Run a loader until it would load weights, and return its model on the meta device."""
    models: list[Any] = []

    def record(self: Any, *args: Any, **kwargs: Any) -> None:
        models.append(self)
        raise _LoadingStoppedError

    # accelerate 1.6 cannot create empty weights from fake ones.
    with (
        replaced(torch.nn.Module, "load_state_dict", record),
        contextlib.suppress(_LoadingStoppedError),
        unset_fake_temporarily(),
    ):
        load()
    if models:
        return models[0]
    raise RuntimeError("the loader did not load weights")


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def _mask(batch: int, length: int) -> torch.Tensor:
    return torch.ones(batch, length, dtype=torch.long)


def _load_on_cpu(load: Callable[..., Any]) -> Any:
    """Run a text encoder's loader without weights, and allocate its parameters."""
    with unset_fake_temporarily():  # accelerate 1.6 cannot create empty weights from fake ones
        module = load(None, torch.float32, "cpu", state_dict={})
    _allocate(module)
    return module


def _allocate(module: Any, dtype: torch.dtype | None = None) -> None:
    """Replace a module's parameters on the meta device by empty ones, in ``dtype`` or their own."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(torch.empty(parameter.shape, dtype=dtype or parameter.dtype))


#: Family name -> its builder.
BUILDERS: dict[str, Callable[[MemoryConfig], Models]] = {
    "sdxl": _sdxl,
    "sd15": _sd15,
    "flux": _flux,
    "chroma": _flux,
    "lumina": _lumina,
    "sd3": _sd3,
    "anima": _anima,
    "hunyuan-image": _hunyuan_image,
}


def cast(module: Any, dtype: torch.dtype, skip: Sequence[Any] = ()) -> None:
    """Cast a module's floating-point parameters and buffers, as ``.to(dtype)`` does with real tensors.

    8-bit weights are left as they are.
    """
    for part in module.modules():
        if part in skip:
            continue
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype is not torch.float8_e4m3fn:
                part._parameters[name] = torch.nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)
