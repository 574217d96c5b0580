"""One training step of sd-scripts on fake tensors, with its own network, optimizer and loss, prepared as in its scripts.

The forward is the script's own ``process_batch``. A fine-tune's script inlines it in one long function, so its step runs the
same family's network trainer without a network: models, inputs and loss are the same.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import math
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_iter

from kohya_ext.compiling.graphs import simulated
from kohya_ext.errors import UserError
from kohya_ext.estimate import eight_bits, finetune, gradient_buckets, zero
from kohya_ext.estimate.autocast import cuda_rules
from kohya_ext.estimate.compiled import logging_to, traceable
from kohya_ext.estimate.events import Event, Kind
from kohya_ext.estimate.gathered_weights import GatheredWeights
from kohya_ext.estimate.linear import bias_in_place
from kohya_ext.estimate.memory_config import FP8, MemoryConfig, size
from kohya_ext.estimate.models import Models, build, cast
from kohya_ext.estimate.recording import RecordedPasses, Recording
from kohya_ext.estimate.seconds import Work
from kohya_ext.estimate.tensor_values import Assumptions
from kohya_ext.estimate.tracker import BACKWARD, STEP, Tracker
from kohya_ext.estimate.triton_kernels import counted_kernels
from kohya_ext.estimate.work import Counter
from kohya_ext.patching import text_lengths
from kohya_ext.patching.attributes import replaced
from kohya_ext.patching.types import Accelerator, Batch, NetworkTrainer
from kohya_ext.quantization.selection import includes_text_encoders
from kohya_ext.sdscripts.families import rotates

CACHING, LOADING, SAMPLING = "caching", "loading", "sampling"

#: Fewest elements of a parameter whose state a paged optimizer pages.
PAGED_ELEMENTS = 100_000

#: Layers of a text encoder in 8 bits that stay in 16 (``prepare_text_encoder_fp8`` of the scripts).
KEPT_IN_16_BITS = ("CLIPTextEmbeddings", "Embedding", "T5LayerNorm")


@dataclass(frozen=True)
class Log:
    """The allocations of a step. ``events[:start]`` are in GPU memory before it."""

    events: Sequence[Event]
    kinds: Sequence[Kind]
    start: int
    flops: int
    """FLOPs of one optimizer step, with every micro-step of gradient accumulation."""
    work: Work | None = None
    """The step's kernels; None for caching and sampling."""
    trainable_parameters: int = 0
    trained_tensors: int = 0
    between: Mapping[str, Log] = field(default_factory=dict)
    """Logs of work between steps, by phase."""
    recording: Recording | None = None
    """The passes that CUDA graphs record; None without them."""
    replaces: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """A storage of a step -> those that it replaces, which the step before has left: those of its last micro-step."""
    host: Mapping[str, int] = field(default_factory=dict)
    """Bytes of DeepSpeed's state in host memory, by purpose."""
    leaves_late: bool = False
    """Whether the models of caching leave GPU memory only after the trained model is loaded."""


@dataclass
class Training:
    """A run that is ready for its first step."""

    config: MemoryConfig
    arguments: Namespace
    trainer: NetworkTrainer
    accelerator: Accelerator
    models: Models
    network: Any
    trained: list[Any]
    """Parameters in the optimizer."""
    optimizer: Any
    train_text_encoder: bool
    weight_dtype: torch.dtype
    vae_dtype: torch.dtype
    resident: list[tuple[Any, Kind]]
    """Modules in GPU memory during the step."""
    averages: dict[Any, torch.Tensor] = field(default_factory=dict)
    """Trained weight -> its average, if that is in GPU memory (--ema)."""
    batch: Batch | None = None
    """The last step's batch. Like its loss, it is in GPU memory until the next step's."""
    loaded: Sequence[int] = ()
    """The storages of that batch before its step, which replaces the cached outputs of a trained text encoder."""
    loss: torch.Tensor | None = None
    variables: finetune.Variables = field(default_factory=finetune.Variables)
    """Of the last step of a fine-tune, whose script keeps them, too."""
    buckets: dict[Any, torch.Tensor] = field(default_factory=dict)
    """Trained weight -> its place in DistributedDataParallel's buckets."""
    gathered: GatheredWeights | None = None
    """The weights that DeepSpeed's ZeRO-3 divides."""
    divided: zero.Divided | None = None
    """The state of training with DeepSpeed."""
    earlier: list[Any] = field(default_factory=list)
    """The storages of the batch, the loss and the variables of earlier micro-steps. :func:`_replacing` logs their frees."""


class _Dataset:
    """A stand-in for the datasets in a trainer's checks, with one image size."""

    def __init__(self, config: MemoryConfig) -> None:
        self._size = size(config)

    def verify_bucket_reso_steps(self, steps: int) -> None:
        """Do nothing: an invalid bucket would stop the run, not change its memory."""

    def is_text_encoder_output_cacheable(self, cache_supports_dropout: bool = False) -> bool:
        """Return True."""
        return True

    def get_resolutions(self) -> list[tuple[int, int]]:
        """Return the only image size."""
        return [self._size]


def configure(config: MemoryConfig, arguments: Namespace, trainer: NetworkTrainer) -> None:
    """Let the trainer check and complete its arguments, as it does before it loads a model."""
    trainer.assert_extra_args(arguments, _Dataset(config), None)
    trainer.is_swapping_blocks = False
    importlib.import_module("library.strategy_base").TextEncodingStrategy._strategy = None
    strategy = trainer.get_text_encoding_strategy(arguments)
    importlib.import_module("library.strategy_base").TextEncodingStrategy.set_strategy(strategy)


def measure(
    config: MemoryConfig,
    arguments: Namespace,
    trainer: NetworkTrainer,
    frozen: Iterable[Callable[[Any], Iterator[Any]]] = (),
) -> Log:
    """Run one step and return its log.

    ``config`` is normalized, ``arguments`` the namespace it was read from, ``trainer`` the family's network trainer. ``frozen``
    return the weights of a model that patches freeze unless they are trained.
    Raises UserError for a run that cannot be estimated.
    """
    tracker = Tracker()
    passes = RecordedPasses(tracker)
    with contextlib.ExitStack() as stack:
        assumptions = stack.enter_context(_fake_training(config, tracker))
        # Captions of a batch usually differ, and masks then remain. All of them have the longest length here.
        stack.enter_context(replaced(text_lengths, "are_equal", lambda lengths: len(lengths) == 1))
        tracker.run = assumptions.run
        if config.base_precision or config.fused_operations:
            stack.enter_context(counted_kernels(eight_bits=config.base_precision is not None))
        models = build(config)
        if config.cuda_graphs:
            stack.enter_context(simulated(passes.forward))  # where the patch of a run records the model
        training = prepare(config, arguments, trainer, models)
        for weights in frozen:
            _freeze_untrained(training, weights)
        passes.trained = training.trained
        assumptions.integer = training.models.caption_tokens
        if config.selective_torch_compile:
            _pass_without_log(training)
            tracker.forget()
        if config.deepspeed and config.zero_stage == 3:
            training.gathered = _record_gathering(training, tracker)
        with _garbage_of_the_step_only(), tracker, bitsandbytes_without_kernels(tracker), functions_as_on_cuda():
            start = allocate_resident(training, tracker)
            tracker.work = Counter()
            flops, kept = run_step(training, tracker)
            copied = _copied_bytes(training)
            work = tracker.work.work(copied, copied if _returns_blocks(config) else 0)
            events = [*tracker.events[:start], *_replacing(tracker.events[start:], kept)]
            training.earlier.clear()
            between = {SAMPLING: _log_sampling(training, tracker)} if config.sample_prompts else {}
    trainable = [parameter.numel() for parameter in training.trained if parameter.requires_grad]
    host = {} if training.divided is None else {**training.divided.host.bytes}
    return Log(
        events, tracker.kinds, start, flops, work, sum(trainable), len(trainable), between, passes.recording,
        kept[0].replaces(kept[-1]), host,
    )  # fmt: skip


def measure_caching(config: MemoryConfig, arguments: Namespace, trainer: NetworkTrainer) -> dict[str, Log]:
    """Return the logs of the work before the first step: caching latents and text encoder outputs.

    With ``lowram`` the scripts load all models into GPU memory and cast them there. The first log then begins with it.
    """
    logs: dict[str, Log] = {}
    with fake_tensors() as assumptions:
        models = build(config)
        assumptions.integer = models.caption_tokens
        dtype, vae_dtype = _dtypes(config)
        accelerator = _accelerator(config)
        unet, vae = (models.unet, Kind.WEIGHT), (models.vae, Kind.VAE)
        encoders = [(encoder, Kind.TEXT_ENCODER) for encoder in models.text_encoders]
        loaded = [unet, *encoders, vae]
        if config.lowram and config.family.name == "sdxl":  # a file in 16 bits, which SD 1.5's scripts load on the host
            for module, _ in loaded:
                cast(module, dtype)

        def log(name: str, resident: Sequence[tuple[Any, Kind]], prepare: Callable[[], None], work: Callable[[], Any]) -> None:
            def prepare_and_work(tracker: Tracker) -> None:
                if not logs:
                    _cast_to_float32(config, models)
                    tracker.release_unused()
                prepare()
                work()

            if config.lowram:
                logs[name] = _log_caching(resident if logs else loaded, prepare_and_work)
            else:
                prepare()  # on the host
                logs[name] = _log_caching(resident, lambda tracker: work())

        def prepare_encoders() -> None:
            for encoder in models.text_encoders:
                if trainer.cast_text_encoder(arguments):
                    cast(encoder, dtype)
                encoder.requires_grad_(False).eval()

        def prepare_vae() -> None:
            if trainer.cast_vae(arguments):
                cast(models.vae, vae_dtype)
            models.vae.requires_grad_(False).eval()

        def encode_images() -> Any:
            images = _images(config, max(config.vae_batch_size, 1), next(models.vae.parameters()).dtype)  # cast on the host
            return trainer.encode_images_to_latents(arguments, models.vae, images)

        def encode_captions() -> Any:
            ids = models.token_ids(config.text_encoder_batch_size or config.train_batch_size)
            with accelerator.autocast():
                return trainer.get_text_encoding_strategy(arguments).encode_tokens(models.tokenizers, models.text_encoders, ids)

        def cache_latents() -> None:
            if config.cache_latents:
                log("caching latents", [vae], prepare_vae, encode_images)

        def cache_captions() -> None:
            if config.cache_text_encoder_outputs and not config.text_encoder_cpu:
                # Upstream moves the VAE to the host after caching latents.
                resident = [*encoders, *([unet] if config.lowram else [])]
                log("caching text encoder outputs", resident, prepare_encoders, encode_captions)
                # sdxl_train.py moves the text encoders to the host after it has prepared the U-Net.
                caching = logs["caching text encoder outputs"]
                logs["caching text encoder outputs"] = replace(caching, leaves_late=config.script == "sdxl_train.py")

        captions_first = config.family.finetune_caches_captions_first and not config.trains_network
        for cache in (cache_captions, cache_latents) if captions_first else (cache_latents, cache_captions):
            cache()
        if config.lowram and not logs:
            log("loading", loaded, prepare_encoders, lambda: None)
    return logs


def _cast_to_float32(config: MemoryConfig, models: Models) -> None:
    """Cast models in GPU memory, as the scripts do when they load them.

    With the extension, a LoRA of SDXL keeps the precision of its U-Net.
    """
    keeps = config.family.name == "sdxl" and config.trains_network and config.network_module in config.family.networks
    for module in (*([] if keeps else [models.unet]), *models.text_encoders, models.vae):
        cast(module, torch.float32)


def _log_caching(resident: Sequence[tuple[Any, Kind]], work: Callable[[Tracker], Any]) -> Log:
    with Tracker() as tracker, tracker.during(CACHING), torch.no_grad():
        for module, kind in resident:
            tracker.mark(_tensors(module), kind)
        start = len(tracker.events)
        work(tracker)
        events = [*tracker.events]  # without the models' own frees
    return Log(events, tracker.kinds, start, tracker.flops)


# --- preparation, as in the scripts ----------------------------------------------------------------------------------


def prepare(
    config: MemoryConfig,
    arguments: Namespace,
    trainer: NetworkTrainer,
    models: Models | None = None,
    accelerator: Accelerator | None = None,
) -> Training:
    """Return models, network and optimizer on torch's default device, as the script has them before its first step.

    ``models`` and ``accelerator`` replace those built here: a timed step (benchmarks/) has the script's own accelerator.
    """
    models = build(config) if models is None else models
    accelerator = _accelerator(config) if accelerator is None else accelerator
    weight_dtype, vae_dtype = _dtypes(config)
    prepare_models = _prepare_network if config.trains_network else _prepare_finetune
    network, groups, trained, train_text_encoder = prepare_models(config, arguments, trainer, models, accelerator, weight_dtype)
    if not trained:
        raise UserError("nothing would be trained, since every learning rate is 0; set one above 0")
    optimizer = _optimizers(config, arguments, groups, models.unet)
    unet = (models.unet, Kind.WEIGHT)
    encoders = [(encoder, Kind.TEXT_ENCODER) for encoder in _encoders_in_steps(config, arguments, trainer, models)]
    # Fine-tunes of SDXL and SD 1.5 move the text encoders into GPU memory after the U-Net, all others before their model.
    unet_first = network is None and config.family.unet
    resident = [unet, *encoders] if unet_first else [*encoders, unet]
    if network is not None:
        resident.append((network, Kind.TRAINED_WEIGHT))
    if not config.cache_latents:
        if trainer.cast_vae(arguments):
            cast(models.vae, vae_dtype)
        else:
            vae_dtype = next(models.vae.parameters()).dtype
        models.vae.requires_grad_(False).eval()
        # Fine-tunes move the VAE first, networks last.
        resident.insert(0 if network is None else len(resident), (models.vae, Kind.VAE))
    if network is None:
        weight_dtype = finetune.input_precision(config.family, models.unet, weight_dtype)
    return Training(
        config, arguments, trainer, accelerator, models, network, trained, optimizer, train_text_encoder, weight_dtype,
        vae_dtype, resident,
    )  # fmt: skip


def _encoders_in_steps(config: MemoryConfig, arguments: Namespace, trainer: NetworkTrainer, models: Models) -> list[Any]:
    """Return the text encoders in GPU memory during the steps. FLUX and SD3 train CLIP with cached outputs of T5."""
    if config.text_encoder_cpu:
        return []
    if not config.cache_text_encoder_outputs:
        return models.text_encoders
    flags = trainer.get_text_encoders_train_flags(arguments, models.text_encoders)
    return [encoder for encoder, is_trained in zip(models.text_encoders, flags, strict=True) if is_trained]


def _prepare_network(
    config: MemoryConfig,
    arguments: Namespace,
    trainer: NetworkTrainer,
    models: Models,
    accelerator: Accelerator,
    dtype: torch.dtype,
) -> tuple[Any, Any, list[Any], bool]:
    """Prepare a network as NetworkTrainer.train does, in its order."""
    if config.network_module is None:
        raise UserError("an estimate needs the network; give --network_module (networks.lora for a LoRA) or a preset")
    try:
        module = importlib.import_module(config.network_module)
    except ImportError as error:
        raise UserError(f"--network_module {config.network_module} cannot be imported: {error}") from None
    # load_target_model returns a list, except for SD1.5.
    encoders = models.text_encoders[0] if config.family.name == "sd15" else models.text_encoders
    options: dict[str, Any] = dict(word.split("=", 1) for word in config.network_args or ())
    options.setdefault("dropout", config.network_dropout)
    if config.base_precision:
        eight_bits.convert_layers(models.unet, config.base_precision)
    with _restored_lists(module):
        network = module.create_network(
            1.0, config.network_dim, arguments.network_alpha, models.vae, encoders, models.unet,
            neuron_dropout=config.network_dropout, **options,
        )  # fmt: skip
    train_unet = not config.network_train_text_encoder_only
    train_text_encoder = bool(trainer.is_train_text_encoder(arguments))
    trainer.post_process_network(arguments, accelerator, network, models.text_encoders, models.unet)
    network.apply_to(encoders, models.unet, train_text_encoder, train_unet)
    _leave_constants_on_host(network)
    flags = trainer.get_text_encoders_train_flags(arguments, models.text_encoders)
    if config.cache_text_encoder_outputs and train_text_encoder and not any(flags):  # the batch would have no captions
        title = config.family.checkpoints[0].title
        raise UserError(
            f"{config.script} cannot train a text encoder of {title} whose outputs are cached; add --network_train_unet_only, "
            "or remove --cache_text_encoder_outputs"
        )
    checkpointing = config.gradient_checkpointing
    if checkpointing:
        models.unet.enable_gradient_checkpointing()
        for encoder, flag in zip(models.text_encoders, flags, strict=True):
            if flag and encoder.supports_gradient_checkpointing:
                encoder.gradient_checkpointing_enable()
    if config.full_bf16 or config.deepspeed:
        cast(network, dtype)
    base = torch.float8_e4m3fn if config.fp8_base or config.fp8_base_unet else dtype
    models.unet.requires_grad_(False)
    if trainer.cast_unet(arguments):
        cast(models.unet, base)
    for encoder in models.text_encoders:
        encoder.requires_grad_(False)
        if trainer.cast_text_encoder(arguments):
            cast(encoder, dtype)
            if _casts_text_encoders_to_8_bits(config):
                cast(
                    encoder, torch.float8_e4m3fn, [part for part in encoder.modules() if type(part).__name__ in KEPT_IN_16_BITS]
                )
    for part in (models.unet, *models.text_encoders):
        part.train(checkpointing)
    if checkpointing:
        for index, (encoder, flag) in enumerate(zip(models.text_encoders, flags, strict=True)):
            if flag:
                trainer.prepare_text_encoder_grad_ckpt_workaround(index, encoder)
    models.unet = accelerator.prepare(models.unet)
    if train_text_encoder:
        models.text_encoders = [
            accelerator.prepare(encoder) if flag else encoder for encoder, flag in zip(models.text_encoders, flags, strict=True)
        ]
    groups = _network_groups(network, arguments)
    network.prepare_grad_etc(encoders, models.unet)
    network.on_epoch_start(encoders, models.unet)
    return network, groups, list(network.get_trainable_params()), train_text_encoder


@contextlib.contextmanager
def _restored_lists(module: Any) -> Iterator[None]:
    """Restore the lists of a network's classes after the block.

    With conv_dim, networks.lora adds to a list of its class, so that every later network in this process trains convolutions.
    """
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type)]
    before = [(value, [*value]) for kind in kinds for value in vars(kind).values() if isinstance(value, list)]
    try:
        yield
    finally:
        for value, items in before:
            value[:] = items


def _casts_text_encoders_to_8_bits(config: MemoryConfig) -> bool:
    """Return whether the script of a network casts its text encoders to 8 bits, after it has moved them into GPU memory."""
    return config.trains_network and config.fp8_base and not config.fp8_base_unet and not config.text_encoder_cpu


def _leave_constants_on_host(network: Any) -> None:
    """Put tensors that are neither parameters nor buffers on another device, since ``Module.to`` leaves them there.

    OFT's identity matrices are such tensors. Its first forward pass copies them into GPU memory. Numbers stay, since
    operators of the GPU take them from the host.
    """

    def leave(value: Any) -> Any:
        return value.to("meta") if isinstance(value, torch.Tensor) and value.dim() else value

    for module in network.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                setattr(module, name, leave(value))
            elif isinstance(value, list):
                value[:] = [leave(item) for item in value]


def _network_groups(network: Any, arguments: Namespace) -> Any:
    several = hasattr(network, "prepare_optimizer_params_with_multiple_te_lrs")
    rate = arguments.text_encoder_lr
    if not several and isinstance(rate, (list, tuple)):
        rate = rate[0] if rate else None
    prepare_groups = network.prepare_optimizer_params_with_multiple_te_lrs if several else network.prepare_optimizer_params
    try:
        groups = prepare_groups(rate, arguments.unet_lr, arguments.learning_rate)
    except TypeError:  # networks without a default learning rate
        groups = prepare_groups(rate, arguments.unet_lr)
    return groups[0] if isinstance(groups, tuple) else groups


def _prepare_finetune(
    config: MemoryConfig,
    arguments: Namespace,
    trainer: NetworkTrainer,
    models: Models,
    accelerator: Accelerator,
    dtype: torch.dtype,
) -> tuple[Any, Any, list[Any], bool]:
    """Prepare a fine-tune as sdxl_train.py does, in its order; the transformers' scripts always load their model in 16 bits."""
    encoder_rates = _text_encoder_rates(config, len(models.text_encoders))
    train_text_encoder = any(encoder_rates)
    train_unet = config.learning_rate != 0
    full = dtype if config.full_bf16 or config.deepspeed or config.family.finetune_in_16_bits else torch.float32
    cast(models.unet, full if train_unet else dtype)
    models.unet.requires_grad_(train_unet)
    models.unet.train(train_unet)
    if config.gradient_checkpointing:
        models.unet.enable_gradient_checkpointing()
    trained = [models.unet] if train_unet else []
    for encoder, trains in zip(models.text_encoders, encoder_rates, strict=True):
        if trains and config.gradient_checkpointing:
            encoder.gradient_checkpointing_enable()
        cast(encoder, full if trains else dtype)
        encoder.requires_grad_(trains)
        encoder.train(trains)
        if trains:
            trained.append(encoder)
    if train_text_encoder and config.family.name == "sdxl" and encoder_rates[0]:
        # The model only uses the output of the layer before the last.
        models.text_encoders[0].text_model.encoder.layers[-1].requires_grad_(False)
        models.text_encoders[0].text_model.final_layer_norm.requires_grad_(False)
    groups = finetune.parameter_groups(config.family, arguments, trained)
    parameters = [parameter for group in groups for parameter in group["params"]]
    if train_unet:
        models.unet = accelerator.prepare(models.unet)
    models.text_encoders = [
        accelerator.prepare(encoder) if trains else encoder
        for encoder, trains in zip(models.text_encoders, encoder_rates, strict=True)
    ]
    return None, groups, parameters, train_text_encoder


def _text_encoder_rates(config: MemoryConfig, count: int) -> list[bool]:
    """Return which text encoders are trained: those with a learning rate above 0."""
    if not config.trains_text_encoder:
        return [False] * count
    values = [config.learning_rate_te] if count == 1 else [config.learning_rate_te1, config.learning_rate_te2]
    return [(config.learning_rate if rate is None else rate) != 0 for rate in values]


# --- the optimizer ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MultipleOptimizers:
    """Optimizers for disjoint sets of parameters; each steps once its gradients are complete."""

    parts: Sequence[Any]

    @property
    def state(self) -> dict[Any, Any]:
        """The optimizer state of all parts, by parameter."""
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def step(self) -> None:
        """Step every optimizer."""
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear every gradient."""
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)


def _optimizers(config: MemoryConfig, arguments: Namespace, groups: Any, unet: Any) -> Any:
    """Return the run's optimizer, or upstream's one optimizer per group of parameters with fused ones."""
    if config.fused_optimizer_groups:
        sets = [*_equal_parts(groups, config.fused_optimizer_groups)]
    elif config.blockwise_fused_optimizers:
        sets = [*_by_block(unet)]
    else:
        return _optimizer(config, arguments, groups)
    return MultipleOptimizers([_optimizer(config, arguments, [{"params": part, "lr": 1e-5}]) for part in sets])


def _equal_parts(groups: Sequence[Any], count: int) -> Iterator[list[Any]]:
    """Yield sets of equally many parameters, each of one model only (sdxl_train.py)."""
    size = math.ceil(sum(len(group["params"]) for group in groups) / count)
    for group in groups:
        for first in range(0, len(group["params"]), size):
            yield group["params"][first : first + size]


def _by_block(unet: Any) -> Iterable[list[Any]]:
    """Return the parameters of each block, and all others (flux_train.py, sd3_train.py, lumina_train.py)."""
    blocks: dict[str, list[Any]] = {}
    for name, parameter in unet.named_parameters():
        match = re.match(r"(double_blocks|single_blocks|joint_blocks|layers)\.\d+|(?=(context|noise)_refiner)", name)
        blocks.setdefault("" if match is None else match.group(0) or "refiner", []).append(parameter)
    return blocks.values()


def _optimizer(config: MemoryConfig, arguments: Namespace, groups: Any) -> Any:
    try:
        factory = importlib.import_module("library.optimizer").get_optimizer
    except ImportError:
        factory = importlib.import_module("library.train_util").get_optimizer
    paged = config.optimizer_type.lower().startswith("paged")
    name = config.optimizer_type[len("paged") :] if paged else config.optimizer_type
    values = Namespace(**{**vars(arguments), "optimizer_type": name})
    try:
        with unset_fake_temporarily():  # its constant tables need data
            optimizer = factory(values, groups)[-1]
    except (ImportError, AttributeError, TypeError, ValueError, AssertionError) as error:
        raise UserError(f"--optimizer_type {config.optimizer_type}: {error}") from None
    for group in optimizer.param_groups:
        # foreach is torch's default on a GPU, but not on the CPU.
        if "foreach" in group and not group.get("fused"):
            group["foreach"] = group["foreach"] is not False
    return optimizer


@contextlib.contextmanager
def bitsandbytes_without_kernels(tracker: Tracker) -> Iterator[None]:
    """Count bitsandbytes' kernels and waits instead of running them: they cannot take fake tensors, and allocate nothing."""

    def count(*args: Any, **kwargs: Any) -> None:
        tracker.work.kernel(args, kwargs, launcher=tracker.launcher)

    try:
        functional = importlib.import_module("bitsandbytes.functional")
        optimizers = importlib.import_module("bitsandbytes.optim.optimizer")
    except ImportError:
        yield
        return
    with contextlib.ExitStack() as stack:
        for name in ("optimizer_update_8bit_blockwise", "optimizer_update_32bit"):
            stack.enter_context(replaced(functional, name, count))
        stack.enter_context(replaced(optimizers, "sync_gpu", lambda _: tracker.work.wait()))
        yield


@contextlib.contextmanager
def functions_as_on_cuda() -> Iterator[None]:
    """Clip gradients with kernels over lists of tensors, and drop values with a mask of one byte each, as on a GPU."""
    functional = torch.nn.functional
    drop = functional.dropout

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002
        if not training or inplace or not 0 < p < 1:
            return drop(input, p, training, inplace)
        return torch.native_dropout(input, p, training)[0]

    clipping = importlib.import_module("torch.nn.utils.clip_grad")
    with replaced(clipping, "_has_foreach_support", lambda *_: True), replaced(functional, "dropout", dropout):
        yield


@contextlib.contextmanager
def _garbage_of_the_step_only() -> Iterator[None]:
    """Collect garbage inside the block as usual, but without looking at the objects from before it: modules and models."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# --- one step --------------------------------------------------------------------------------------------------------


def allocate_resident(training: Training, tracker: Tracker) -> int:
    """Allocate everything in GPU memory before a step, including optimizer state; return the number of events."""
    config = training.config
    swapped = training.models.blocks(config.blocks_to_swap or 0)
    lists = _lists_of(swapped, training.models.unet)
    _hook_where_blocks_move(lists, swapped)
    _log_casts_while_loading(training, tracker, lists)
    for module, kind in training.resident:
        _allocate_model(training, tracker, module, kind, lists, swapped)
    if config.deepspeed:
        with tracker.during(LOADING):
            training.divided = zero.divide(zero.division_of(config), training.optimizer, training.gathered, tracker)
    loaded = len(tracker.events)
    tracker.mark(training.trained, Kind.TRAINED_WEIGHT)
    _allocate_training_state(training, tracker)
    _prepare_gradients(training, tracker)
    gc.collect()
    return _expect_uses_of_state(training, tracker, loaded)


def _log_casts_while_loading(training: Training, tracker: Tracker, lists: Sequence[Any]) -> None:
    """Log models that are quantized or cast in GPU memory while they are loaded."""
    config = training.config
    if lists and config.fp8_scaled:
        # Upstream quantizes on the GPU. When it empties the cache, the last weight is still there (fp8_optimization_utils.py).
        quantized = [part for part in training.models.unet.modules() if hasattr(part, "scale_weight")]
        last = torch.empty(quantized[-1].weight.shape, dtype=torch.bfloat16)
        tracker.mark([last], Kind.TEMPORARY)
        tracker.release_unused()
        del last
    if _casts_text_encoders_to_8_bits(config):
        _cast_in_gpu_memory(training, tracker)
    if config.base_precision and includes_text_encoders(config):
        for encoder in training.models.text_encoders:
            tracker.mark(_tensors(encoder), Kind.TEXT_ENCODER)
        eight_bits.convert_text_encoders(training.models.text_encoders, config.base_precision, tracker)


def _allocate_model(
    training: Training, tracker: Tracker, module: Any, kind: Kind, lists: Sequence[Any], swapped: Sequence[Any]
) -> None:
    """Allocate a model's tensors; of ``swapped`` blocks, memory for those that are in GPU memory at a time."""
    config, is_unet = training.config, module is training.models.unet
    if is_unet and config.base_precision:
        eight_bits.log_conversion(module, training.weight_dtype, tracker)
    if training.gathered is not None and module in training.gathered.models:
        tracker.leave_out(module.parameters())
        tracker.mark(module.buffers(), kind)
        return
    tracker.mark(_tensors(module, lists), kind)
    for blocks in lists if is_unet else ():
        first = next(index for index, block in enumerate(blocks) if block in swapped)
        for index, block in enumerate(blocks):
            tracker.mark(_tensors(block), kind)
            if index >= first:
                # Upstream moves the whole block, then its weights back; in a step it gets the memory of another block's
                # weights (custom_offloading_utils.py).
                tracker.offload(_exchanged(block, blocks[index - first]))
        tracker.release_unused()
    if config.num_processes and not config.deepspeed:
        training.buckets |= gradient_buckets.allocate(module, tracker)


def _allocate_training_state(training: Training, tracker: Tracker) -> None:
    """Allocate optimizer state, averaged weights, and the gradients of earlier micro-steps."""
    config, optimizer = training.config, training.optimizer
    if training.divided is None:
        # Keep the optimizer state, drop the gradients that created it.
        _make_gradients(training)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    else:
        training.divided.create_state()
    states = [
        [value for value in state.values() if isinstance(value, torch.Tensor)]
        for state in (optimizer if training.divided is None else training.divided).state.values()
    ]  # of each parameter
    for tensors in states:
        tracker.mark(tensors, Kind.OPTIMIZER_STATE)
    if config.ema:
        training.averages = {weight: torch.empty(weight.shape) for weight in training.trained if weight.requires_grad}
        tracker.mark(training.averages.values(), Kind.AVERAGE)
    if config.gradient_accumulation_steps > 1 and config.cuda_graphs:  # only its last micro-step is logged
        _make_gradients(training)
        tracker.mark((parameter.grad for parameter in training.trained if parameter.grad is not None), Kind.GRADIENT)


def _prepare_gradients(training: Training, tracker: Tracker) -> None:
    """Let the backward pass mark gradients, and step where the optimizer is fused with it."""
    if training.network is None:  # a network's gradients are averaged one by one, without its buckets
        gradient_buckets.use(training.buckets, training.config.ddp_gradient_as_bucket_view)
    for parameter in training.trained if training.divided is None else ():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda weight: tracker.mark([weight.grad], Kind.GRADIENT))
    if training.config.steps_in_backward:
        step_in_backward(training)


def _expect_uses_of_state(training: Training, tracker: Tracker, loaded: int) -> int:
    """Drop the events between loading and the step, which create the state; return the number of events that are left."""
    optimizer = training.optimizer
    parts = optimizer.parts if isinstance(optimizer, MultipleOptimizers) else (optimizer,)
    paged = [*_paged(parts)] if training.config.optimizer_type.lower().startswith("paged") else []
    start = tracker.compact(loaded, paged)
    for part in parts:
        tracker.expect_first_use(part, paged)
    tracker.expect_use(training.averages.values())  # created after the first step
    return start


def _paged(optimizers: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the state that bitsandbytes' paged optimizers keep in memory that moves to the host (``get_state_buffer``)."""
    for weight, state in (row for optimizer in optimizers for row in optimizer.state.items()):
        if weight.numel() >= PAGED_ELEMENTS:
            yield from (state[name] for name in ("state1", "state2") if name in state)


def _cast_in_gpu_memory(training: Training, tracker: Tracker) -> None:
    """Log text encoders that are in GPU memory in 16 bits, are cast to 8 as a whole, and some of their layers back."""
    in_8_bits = training.models.text_encoders[-1:] if training.config.t5xxl == FP8 else []  # T5
    cast_here = [module for module, kind in training.resident if kind is Kind.TEXT_ENCODER and module not in in_8_bits]
    encoders = [[*dict.fromkeys(_tensors(encoder))] for encoder in cast_here]
    wide = [torch.empty(tensor.shape, dtype=training.weight_dtype) for tensors in encoders for tensor in tensors]
    tracker.mark(wide, Kind.TEMPORARY)
    for tensors in encoders:
        narrow = {tensor: torch.empty(tensor.shape, dtype=torch.uint8) for tensor in tensors if tensor.itemsize > 1}
        for tensor in tensors:
            tracker.mark([narrow.get(tensor, tensor)], Kind.TEXT_ENCODER)
            del wide[0]
        for tensor in [*narrow]:
            tracker.mark([tensor], Kind.TEXT_ENCODER)
            del narrow[tensor]


def _copied_bytes(training: Training) -> int:
    """Return the bytes that a micro-step copies to the GPU for swapped blocks.

    One block replaces another, in forward and again in backward (custom_offloading_utils.py).
    """
    blocks = training.models.blocks(training.config.blocks_to_swap or 0)
    return 2 * sum(int(weight.nbytes) for weight in _weights(blocks))


def _returns_blocks(config: MemoryConfig) -> bool:
    """Return whether blocks that leave the GPU are copied to the host: trained ones, and those of upstream's own swap."""
    return not config.trains_network or config.one_way_block_swap is False


def _weights(blocks: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors of blocks that upstream swaps: what their modules have as ``weight``."""
    weights = (getattr(part, "weight", None) for block in blocks for part in block.modules())
    return [weight for weight in weights if isinstance(weight, torch.Tensor)]


def _exchanged(block: Any, leaving: Any) -> list[torch.Tensor]:
    """Return the weights of a block that are exchanged for those of a leaving one: of the same name and shape.

    The others come into GPU memory with the first exchange and stay: in Stable Diffusion 3, blocks differ.
    """
    others = {name: getattr(part, "weight", None) for name, part in leaving.named_modules()}
    pairs = ((getattr(part, "weight", None), others.get(name)) for name, part in block.named_modules())
    return [own for own, other in pairs if own is not None and other is not None and own.shape == other.shape]


def _lists_of(swapped: Sequence[Any], unet: Any) -> list[Any]:
    """Return the lists of blocks that have swapped ones."""
    lists = (module for module in unet.modules() if isinstance(module, torch.nn.ModuleList))
    return [blocks for blocks in lists if any(block in swapped for block in blocks)]


def _hook_where_blocks_move(lists: Iterable[Any], swapped: Sequence[Any]) -> None:
    """Add a hook to each block whose backward pass moves swapped blocks or waits for them (custom_offloading_utils.py).

    Such a block keeps the gradient of its output until its backward pass ends.
    """
    for blocks in lists:
        count = sum(block in swapped for block in blocks)
        moving = range(len(blocks) - 1 - count, len(blocks) - 1)
        for index in {*moving, *range(1, count + 1)} & {*range(len(blocks))}:
            blocks[index].register_full_backward_hook(lambda *_: None)


@dataclass(frozen=True)
class _Kept:
    """The storages that a micro-step leaves to the next one."""

    batch: Sequence[int]
    inputs: Sequence[int]
    """What the variables of a fine-tune's script hold when the model runs: latents, captions, noise."""
    others: Sequence[int]
    """Its other variables, and the loss."""
    captions_last: bool = False
    """Whether the script assigns its captions after all other inputs, not after the first that is computed."""
    loaded: Sequence[int] = ()
    """The storages of the batch when it was complete; empty if the step does not change the batch."""

    def replaces(self, last: _Kept) -> Mapping[int, Sequence[int]]:
        """Return which of them replace those of the ``last`` micro-step (:attr:`Log.replaces`).

        A batch is replaced when the next one is complete, a variable when it is assigned. Cached latents and captions are both:
        as variables, latents are assigned first of all.
        """
        pairs = zip((*self.inputs, *self.others), (*last.inputs, *last.others), strict=True)
        replaced = {new: [old] for new, old in pairs if new not in self.batch}
        if self.batch:  # a run on real tensors logs no batch
            captions = ({*last.inputs} & {*last.batch}) - {*last.inputs[:1]}
            complete = max({*self.batch} & {*(self.loaded or self.batch)})
            replaced[complete] = [*{*last.batch} - captions]
            computed = {*self.inputs} - {*self.batch} or {complete}
            replaced[(max if self.captions_last else min)(computed)] += captions
        return replaced


def _replacing(events: Sequence[Event], kept: Sequence[_Kept]) -> Iterator[Event]:
    """Yield the events of a step, in which each micro-step also frees what it replaces of the one before."""
    freed = {event.storage for event in events if event.bytes < 0}
    sizes = {event.storage: event.bytes for event in events if event.bytes > 0}
    frees: dict[int, list[int]] = {}
    for last, now in itertools.pairwise(kept):
        alive = {*now.batch, *now.inputs, *now.others} | freed
        for storage, old in now.replaces(last).items():
            frees[storage] = [each for each in old if each in sizes and each not in alive]
    for event in events:
        yield event
        if event.bytes > 0:
            yield from (Event(storage, -sizes[storage], event.phase) for storage in frees.get(event.storage, ()))


def run_step(training: Training, tracker: Tracker) -> tuple[int, Sequence[_Kept]]:
    """Run one step; return the FLOPs of all its micro-steps, and what each of them leaves to the next one.

    With gradient accumulation up to three micro-steps are logged: gradients are allocated in the first and added to in the
    others. Work is counted in the last one. CUDA graphs record the passes of a single one.
    """
    micro_steps = 1 if training.config.cuda_graphs else training.config.gradient_accumulation_steps
    kept: list[_Kept] = []
    for _ in range(micro_steps):
        tracker.work = Counter()
        before = tracker.flops
        if kept:
            tensors = (each for each in tree_iter(_left(training)) if isinstance(each, torch.Tensor))
            training.earlier += [tensor.untyped_storage() for tensor in tensors]
        _run_passes(training, tracker)
        batch, inputs, others = map(tracker.numbers, _left(training))
        kept.append(_Kept(batch, inputs, others, finetune.assigns_captions_last(training.config.family), training.loaded))
    network = training.network
    with tracker.during(STEP):
        if network is not None:
            training.trainer.all_reduce_network(training.accelerator, network)
            tracker.mark((weight.grad for weight in training.trained if weight.grad is not None), Kind.GRADIENT)
        if training.divided is not None:
            training.divided.step()
        elif not training.config.steps_in_backward:
            if training.config.max_grad_norm:
                training.accelerator.clip_grad_norm_(training.trained, training.config.max_grad_norm)
            if hasattr(network, "update_grad_norms"):  # of FLUX's LoRA
                network.update_grad_norms()
                network.update_norms()
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=True)
        if training.config.scale_weight_norms and hasattr(network, "apply_max_norm_regularization"):
            network.apply_max_norm_regularization(1.0, training.accelerator.device)
        tracker.log_unused()
        if training.config.ema:
            _update_average(training)
        gc.collect()
    flops = (tracker.flops - before) * training.arguments.gradient_accumulation_steps
    return int(flops), kept


def _left(training: Training) -> tuple[Any, Any, Any]:
    """Return what a micro-step leaves to the next one, as :class:`_Kept` has it."""
    variables = training.variables
    return training.batch, variables.inputs, (variables.images, variables.prediction, training.loss)


def _update_average(training: Training) -> None:
    """Move the averages towards the trained weights (patches' ``--ema_device gpu``)."""
    swapped = {id(weight) for weight in _weights(training.models.blocks(training.config.blocks_to_swap or 0))}
    weights = [weight.detach() for weight in training.averages]
    if not swapped and all(weight.dtype is torch.float32 for weight in weights):
        torch._foreach_lerp_([*training.averages.values()], weights, 0.5)
        return
    for weight, average in training.averages.items():
        average.lerp_(weight.detach().to(torch.float32, copy=id(weight) in swapped), 0.5)


def _record_gathering(training: Training, tracker: Tracker) -> GatheredWeights:
    """Return the weights that ZeRO-3 divides, with the order in which a pass needs them."""
    division = zero.division_of(training.config)
    models = [module for module, kind in training.resident if kind is not Kind.VAE and _is_wrapped(training, module)]
    gathered = GatheredWeights(tracker, models, division.processes, division.offloads_weights)
    gathered.watch()
    gathered.record(lambda: _pass_without_log(training))
    return gathered


def _is_wrapped(training: Training, module: Any) -> bool:
    """Return whether a script gives a model to DeepSpeed: the trained ones, and those that a network changes."""
    return training.network is not None or any(weight.requires_grad for weight in module.parameters())


def _run_passes(training: Training, tracker: Tracker) -> None:
    if training.divided is not None:
        training.divided.begin()
    training.batch = make_batch(training)
    training.loaded = tracker.numbers([*training.batch.values()])
    training.loss = forward(training, training.batch)
    tracker.mark_saved()
    with tracker.during(BACKWARD):
        training.accelerator.backward(training.loss)
        if training.divided is not None:
            training.divided.end_backward(training.config.gradient_accumulation_steps > 1)


def _freeze_untrained(training: Training, weights: Callable[[Any], Iterator[Any]]) -> None:
    trained = {id(weight) for weight in training.trained}
    for model in (training.models.unet, *training.models.text_encoders):
        for weight in weights(training.accelerator.unwrap_model(model)):
            weight.requires_grad_(weight.requires_grad and id(weight) in trained)


def _pass_without_log(training: Training) -> None:
    """Run forward and backward once: tensors of compiling are then not in the log of the step."""
    training.accelerator.backward(forward(training))
    for parameter in training.trained:
        parameter.grad = None


def _log_sampling(training: Training, tracker: Tracker) -> Log:
    """Return the log of sampling the largest image: one forward without gradients, and the VAE's decoding.

    A sampler's other tensors are as small as the latents.
    """
    config, models = training.config, training.models
    start = tracker.compact()
    sampler = config.family.sampler
    batch = 2 if sampler.guided_together else 1
    sampling = replace(config, resolution=config.sample_prompts, train_batch_size=batch)
    channels, scale = models.latents
    width, height = size(sampling)
    autocast = training.accelerator.autocast
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracker.during(SAMPLING))
        stack.enter_context(torch.no_grad())
        if config.cache_latents and training.trainer.cast_vae(training.arguments):
            with tracker.paused():  # upstream casts it before it moves it to the host
                cast(models.vae, training.vae_dtype)
        if sampler.moves_vae_first:
            tracker.mark(_tensors(models.vae), Kind.VAE)
        if sampler.autocast == "whole":
            stack.enter_context(autocast())
        if sampler.empties_cache_first:
            tracker.release_unused()
        returned = _log_denoising(replace(training, config=sampling), tracker)
        tracker.release_unused()
        tracker.mark(_tensors(models.vae), Kind.VAE)
        latents = torch.zeros(1, channels, height // scale, width // scale, dtype=next(models.vae.parameters()).dtype)
        if sampler.autocast == "apart":
            stack.enter_context(autocast())
        getattr(models.vae, "decode_to_pixels", models.vae.decode)(latents)
    log = Log([*tracker.events], tracker.kinds, start, 0)
    del returned  # in GPU memory until the image is decoded
    return log


def _log_denoising(training: Training, tracker: Tracker) -> list[list[torch.Tensor]]:
    """Log a step of denoising; two where the script moves swapped blocks back before and after each.

    It moves each swapped block to the GPU and back. After a step the first blocks are on the host, and return before the last
    ones leave (custom_offloading_utils.py, prepare_block_devices_before_forward). Return the weights that have returned.
    """
    swapped = training.models.blocks(training.config.blocks_to_swap or 0)
    lists = _lists_of(swapped, training.models.unet)
    if not training.config.family.sampler.moves_blocks_back or rotates(len(swapped), sum(map(len, lists))):
        lists = []
    for blocks in lists:
        for block in blocks:
            if block in swapped:
                tracker.mark([torch.empty_like(weight) for weight in _weights([block])], Kind.WEIGHT)
        tracker.release_unused()
    first = [_weights(blocks[: sum(block in swapped for block in blocks)]) for blocks in lists]
    for _ in range(2 if lists else 1):
        forward(training, is_train=False)
        for index, weights in enumerate(first):
            first[index] = [torch.empty_like(weight) for weight in weights]
            tracker.mark(first[index], Kind.WEIGHT)
            tracker.offload(weights)
            tracker.release_unused()
    return first


def _make_gradients(training: Training) -> None:
    for parameter in training.trained:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def step_in_backward(training: Training) -> None:
    """Step each parameter once its gradient is complete, as sdxl_train.py does with --fused_backward_pass.

    With several optimizers, each steps after the last of its gradients. Upstream's clipping is left out: it passes one tensor
    to a function that expects a list, so it clips nothing, and takes time but no memory.
    """
    optimizer = training.optimizer
    if isinstance(optimizer, MultipleOptimizers):
        for part in optimizer.parts:
            _step_on_last_gradient(part)
        return
    importlib.import_module("library.adafactor_fused").patch_adafactor_fused(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:

                def step(tensor: Any, group: Any = group) -> None:
                    optimizer.step_param(tensor, group)
                    tensor.grad = None

                parameter.register_post_accumulate_grad_hook(step)


def _step_on_last_gradient(optimizer: Any) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]
    missing = len(parameters)

    def count(tensor: Any) -> None:
        nonlocal missing
        missing -= 1
        if missing == 0:
            missing = len(parameters)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(count)


def forward(training: Training, batch: Batch | None = None, scheduler: Any = None, is_train: bool = True) -> torch.Tensor:
    """Return the loss of one batch by the script's own ``process_batch``, with gradients if ``is_train``.

    ``batch`` and ``scheduler`` (the trainer's noise scheduler) are created here by default; a timed step passes its own, since
    the script has them ready too.
    """
    config, trainer = training.config, training.trainer
    network = training.network
    arguments = training.arguments
    if network is None:
        # For reentrant checkpointing the network trainer sets requires_grad on its inputs; a fine-tune's script does not, and
        # encodes the images of a batch together.
        arguments = Namespace(**{**vars(arguments), "gradient_checkpointing": False, "vae_batch_size": None})
    if scheduler is None:
        with unset_fake_temporarily():  # deepcopy of its tensors needs data
            scheduler = trainer.get_noise_scheduler(arguments, torch.get_default_device())
    with contextlib.ExitStack() as stack:
        if network is None:
            as_in_script = finetune.as_in_script(
                trainer, config.family, training.models.unet, training.weight_dtype, training.variables
            )
            stack.enter_context(as_in_script)
        return trainer.process_batch(
            make_batch(training) if batch is None else batch,
            training.models.text_encoders,
            training.models.unet,
            network if network is not None else SimpleNamespace(),
            training.models.vae,
            scheduler,
            training.vae_dtype,
            training.weight_dtype,
            training.accelerator,
            arguments,
            trainer.get_text_encoding_strategy(arguments),
            training.models.tokenizers,
            is_train=is_train,
            train_text_encoder=training.train_text_encoder,
            train_unet=network is not None and not config.network_train_text_encoder_only,
        )


def make_batch(training: Training) -> Batch:
    """Return a batch as the dataset would, all zeros."""
    config, models = training.config, training.models
    batch = config.train_batch_size
    channels, scale = models.latents
    width, height = size(config)
    inputs: Batch = {"loss_weights": torch.ones(batch)}  # in the dataset's order, in which they come into GPU memory
    if config.cache_text_encoder_outputs:
        inputs["text_encoder_outputs_list"] = models.conditions(batch)
    if training.train_text_encoder or not config.cache_text_encoder_outputs:
        inputs["input_ids_list"] = models.token_ids(batch)
    if config.cache_latents:
        vae_dtype = training.vae_dtype if training.trainer.cast_vae(training.arguments) else next(models.vae.parameters()).dtype
        inputs["latents"] = torch.zeros(batch, channels, height // scale, width // scale, dtype=vae_dtype)
    else:
        inputs["images"] = _images(config, batch)
    return {**inputs, **models.extras(batch)}


def _images(config: MemoryConfig, batch: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    width, height = size(config)
    return torch.zeros(batch, 3, height, width, dtype=dtype)


# --- fake tensors ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fake_tensors(mode: FakeTensorMode | None = None) -> Iterator[Assumptions]:
    """Create fake tensors inside the block under CUDA's autocast rules and linear layers, in ``mode`` or a new one."""
    fake = mode or FakeTensorMode(allow_non_fake_inputs=True)
    with fake, cuda_rules(), bias_in_place(), Assumptions(fake if mode is None else None) as assumptions:
        yield assumptions


@contextlib.contextmanager
def _fake_training(config: MemoryConfig, tracker: Tracker) -> Iterator[Assumptions]:
    if not config.selective_torch_compile:
        with fake_tensors() as assumptions:
            yield assumptions
        return
    mode = traceable()
    with fake_tensors(mode) as assumptions, logging_to(mode, tracker):
        yield assumptions


def _accelerator(config: MemoryConfig) -> Accelerator:
    accelerate = importlib.import_module("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    on_cpu = torch.get_default_device().type == "cpu"
    # On a CPU, accelerate knows no fp16. Its autocast reads the precision from this state.
    fp16_on_cpu = on_cpu and config.mixed_precision == "fp16"
    precision = "bf16" if fp16_on_cpu else config.mixed_precision
    accelerator: Accelerator = accelerate.Accelerator(cpu=on_cpu, mixed_precision=precision, device_placement=False)
    if fp16_on_cpu:
        accelerate.state.AcceleratorState()._mixed_precision = "fp16"
    return accelerator


def _dtypes(config: MemoryConfig) -> tuple[torch.dtype, torch.dtype]:
    dtype = {"no": torch.float32, "fp16": torch.float16}.get(config.mixed_precision, torch.bfloat16)
    return dtype, torch.float32 if config.no_half_vae else dtype


def _tensors(module: Any, skip: Sequence[Any] = ()) -> Iterator[torch.Tensor]:
    """Yield a module's tensors, without those of some modules in it, in the order in which ``.to(device)`` moves them."""
    for child in module.children():
        if child not in skip:
            yield from _tensors(child, skip)
    yield from (tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None)
