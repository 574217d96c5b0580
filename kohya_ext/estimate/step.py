"""One training step of sd-scripts on fake tensors: its own network, optimizer and loss, prepared as its scripts prepare them.

The forward is the script's own ``process_batch``. A fine-tune's script has it inside one long function, so its step runs the
network trainer's of the same family without a network: the same models, inputs and loss.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from kohya_ext.errors import UserError
from kohya_ext.estimate.autocast import cuda_rules
from kohya_ext.estimate.compiled import traceable, weighing
from kohya_ext.estimate.events import Event, Kind
from kohya_ext.estimate.memory_config import MemoryConfig, size
from kohya_ext.estimate.models import Models, build, cast
from kohya_ext.estimate.tensor_values import Assumptions
from kohya_ext.estimate.tracker import BACKWARD, STEP, Tracker
from kohya_ext.patching.attributes import replaced

CACHING, SAMPLING = "caching", "sampling"


@dataclass(frozen=True)
class Log:
    """What a step allocates. ``events[:start]`` is what lies on the card before it."""

    events: Sequence[Event]
    kinds: Sequence[Kind]
    start: int
    flops: int
    """Of one step: every micro-step of gradient accumulation."""
    trained: int = 0
    """Numbers that are trained."""
    between: Mapping[str, Log] = field(default_factory=dict)
    """What is done between steps, by its name."""


@dataclass
class Training:
    """A run that is ready for its first step."""

    choices: MemoryConfig
    arguments: Namespace
    trainer: Any
    accelerator: Any
    models: Models
    network: Any
    trained: list[Any]
    """Parameters in the optimizer."""
    optimizer: Any
    train_text_encoder: bool
    weight_dtype: torch.dtype
    vae_dtype: torch.dtype
    resident: list[tuple[Any, Kind]]
    """Modules on the card during the step."""
    average: list[torch.Tensor] = field(default_factory=list)
    """Of the trained weights, where it is kept on the card (patches/ema.py)."""


class _Dataset:
    """What a trainer asks of its datasets before training: they have the sizes that were asked for."""

    def __init__(self, choices: MemoryConfig) -> None:
        self._size = size(choices)

    def verify_bucket_reso_steps(self, steps: int) -> None:
        """Do nothing: a bucket that does not fit would stop the run, not cost memory."""

    def is_text_encoder_output_cacheable(self, cache_supports_dropout: bool = False) -> bool:
        """Return True."""
        return True

    def get_resolutions(self) -> list[tuple[int, int]]:
        """Return the one size."""
        return [self._size]


def settle(choices: MemoryConfig, arguments: Namespace, trainer: Any) -> None:
    """Let the trainer check its arguments and draw its conclusions from them, as it does before it loads a model."""
    trainer.assert_extra_args(arguments, _Dataset(choices), None)
    trainer.is_swapping_blocks = False
    importlib.import_module("library.strategy_base").TextEncodingStrategy._strategy = None
    strategy = trainer.get_text_encoding_strategy(arguments)
    importlib.import_module("library.strategy_base").TextEncodingStrategy.set_strategy(strategy)


def measure(choices: MemoryConfig, arguments: Namespace, trainer: Any) -> Log:
    """Run one step and return its log.

    ``choices`` are normalized, ``arguments`` the namespace they were read from, ``trainer`` the family's network trainer.
    Raises UserError for what is not modelled.
    """
    tracker = Tracker()
    with _surroundings(choices, tracker) as assumptions:
        training = prepare(choices, arguments, trainer)
        assumptions.integer = training.models.caption_tokens
        if choices.selective_torch_compile:
            _compile(training)
        with tracker, _bitsandbytes_without_kernels():
            start = lay_out(training, tracker)
            flops = take(training, tracker)
            events = [*tracker.events]
            between = {SAMPLING: _log_sampling(training, tracker)} if choices.sample_prompts else {}
    numbers = sum(parameter.numel() for parameter in training.trained if parameter.requires_grad)
    return Log(events, tracker.kinds, start, flops, numbers, between)


def measure_caching(choices: MemoryConfig, arguments: Namespace, trainer: Any) -> dict[str, Log]:
    """Return the logs of what is done once, before the first step: caching latents and text encoder outputs."""
    logs = {}
    loaded: list[tuple[Any, Kind]]
    with faking() as assumptions:
        models = build(choices)
        assumptions.integer = models.caption_tokens
        dtype, vae_dtype = _dtypes(choices)
        accelerator = _accelerator(choices)
        if choices.lowram:  # everything is loaded onto the card
            for module in (models.unet, *models.text_encoders):
                cast(module, dtype)
        if choices.cache_latents:
            if trainer.cast_vae(arguments):
                cast(models.vae, vae_dtype)
            models.vae.requires_grad_(False).eval()
            batch = max(choices.vae_batch_size, 1)

            def encode_images() -> Any:
                images = _images(choices, batch).to(next(models.vae.parameters()).dtype)
                return trainer.encode_images_to_latents(arguments, models.vae, images)

            loaded = [(models.vae, Kind.VAE)]
            if choices.lowram:
                loaded += [(models.unet, Kind.WEIGHT), *((encoder, Kind.TEXT_ENCODER) for encoder in models.text_encoders)]
            logs["caching latents"] = _log_once(loaded, encode_images)
        if choices.cache_text_encoder_outputs and not choices.text_encoder_cpu:
            for encoder in models.text_encoders:
                if trainer.cast_text_encoder(arguments):
                    cast(encoder, dtype)
                encoder.requires_grad_(False).eval()
            strategy = trainer.get_text_encoding_strategy(arguments)
            ids = models.token_ids(choices.text_encoder_batch_size or choices.train_batch_size)

            def encode_captions() -> Any:
                with accelerator.autocast():
                    return strategy.encode_tokens(models.tokenizers, models.text_encoders, ids)

            loaded = [(encoder, Kind.TEXT_ENCODER) for encoder in models.text_encoders]
            if choices.lowram:
                # Upstream moves the VAE away as soon as its work is done.
                loaded += [(models.unet, Kind.WEIGHT), *([] if choices.cache_latents else [(models.vae, Kind.VAE)])]
            logs["caching text encoder outputs"] = _log_once(loaded, encode_captions)
    return logs


def _log_once(resident: Sequence[tuple[Any, Kind]], work: Callable[[], Any]) -> Log:
    with Tracker() as tracker, tracker.during(CACHING), torch.no_grad():
        for module, kind in resident:
            tracker.mark(_tensors(module), kind)
        start = len(tracker.events)
        work()
    return Log(tracker.events, tracker.kinds, start, tracker.flops)


# --- preparing, as the scripts do ------------------------------------------------------------------------------------


def prepare(
    choices: MemoryConfig, arguments: Namespace, trainer: Any, models: Models | None = None, accelerator: Any = None
) -> Training:
    """Build models, network and optimizer on torch's default device, as the script does before its first step.

    ``models`` and ``accelerator`` may be brought along: a step that is timed (benchmarks/) has the script's own accelerator.
    """
    models = build(choices) if models is None else models
    accelerator = _accelerator(choices) if accelerator is None else accelerator
    weight_dtype, vae_dtype = _dtypes(choices)
    preparing = _prepare_network if choices.trains_network else _prepare_finetune
    network, groups, trained, train_text_encoder = preparing(choices, arguments, trainer, models, accelerator, weight_dtype)
    if not trained:
        raise UserError("nothing is trained with these arguments: every learning rate is 0")
    optimizer = _optimizers(choices, arguments, groups, models.unet)
    resident: list[tuple[Any, Kind]] = [(models.unet, Kind.WEIGHT)]
    if network is not None:
        resident.append((network, Kind.TRAINED_WEIGHT))
    if not choices.cache_text_encoder_outputs and not choices.text_encoder_cpu:
        resident += [(encoder, Kind.TEXT_ENCODER) for encoder in models.text_encoders]
    if not choices.cache_latents:
        if trainer.cast_vae(arguments):
            cast(models.vae, vae_dtype)
        models.vae.requires_grad_(False).eval()
        resident.append((models.vae, Kind.VAE))
    return Training(
        choices, arguments, trainer, accelerator, models, network, trained, optimizer, train_text_encoder, weight_dtype,
        vae_dtype, resident,
    )  # fmt: skip


def _prepare_network(
    choices: MemoryConfig, arguments: Namespace, trainer: Any, models: Models, accelerator: Any, dtype: torch.dtype
) -> tuple[Any, Any, list[Any], bool]:
    """As NetworkTrainer.train does, in its order."""
    if choices.network_module is None:
        raise UserError("the figures depend on the network: give --network_module, networks.lora for a LoRA, or a preset")
    try:
        module = importlib.import_module(choices.network_module)
    except ImportError as error:
        raise UserError(f"--network_module {choices.network_module} cannot be imported: {error}") from None
    # What load_target_model hands out: SD1.5's alone is no list.
    encoders = models.text_encoders[0] if choices.family.name == "sd15" else models.text_encoders
    options: dict[str, Any] = dict(word.split("=", 1) for word in choices.network_args or ())
    options.setdefault("dropout", choices.network_dropout)
    network = module.create_network(
        1.0, choices.network_dim, arguments.network_alpha, models.vae, encoders, models.unet,
        neuron_dropout=choices.network_dropout, **options,
    )  # fmt: skip
    train_unet = not choices.network_train_text_encoder_only
    train_text_encoder = bool(trainer.is_train_text_encoder(arguments))
    trainer.post_process_network(arguments, accelerator, network, models.text_encoders, models.unet)
    network.apply_to(encoders, models.unet, train_text_encoder, train_unet)
    flags = trainer.get_text_encoders_train_flags(arguments, models.text_encoders)
    checkpointing = choices.gradient_checkpointing
    if checkpointing:
        models.unet.enable_gradient_checkpointing()
        for encoder, flag in zip(models.text_encoders, flags, strict=True):
            if flag and encoder.supports_gradient_checkpointing:
                encoder.gradient_checkpointing_enable()
    if choices.full_bf16:
        cast(network, dtype)
    base = torch.float8_e4m3fn if choices.fp8_base or choices.fp8_base_unet else dtype
    models.unet.requires_grad_(False)
    if trainer.cast_unet(arguments):
        cast(models.unet, base)
    for encoder in models.text_encoders:
        encoder.requires_grad_(False)
        if trainer.cast_text_encoder(arguments):
            cast(encoder, dtype)
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


def _network_groups(network: Any, arguments: Namespace) -> Any:
    several = hasattr(network, "prepare_optimizer_params_with_multiple_te_lrs")
    rate = arguments.text_encoder_lr
    if not several and isinstance(rate, (list, tuple)):
        rate = rate[0] if rate else None
    prepare_groups = network.prepare_optimizer_params_with_multiple_te_lrs if several else network.prepare_optimizer_params
    try:
        groups = prepare_groups(rate, arguments.unet_lr, arguments.learning_rate)
    except TypeError:  # networks that know no default learning rate
        groups = prepare_groups(rate, arguments.unet_lr)
    return groups[0] if isinstance(groups, tuple) else groups


def _prepare_finetune(
    choices: MemoryConfig, arguments: Namespace, trainer: Any, models: Models, accelerator: Any, dtype: torch.dtype
) -> tuple[Any, Any, list[Any], bool]:
    """As sdxl_train.py does, in its order; the transformers' scripts load their model in 16 bits whatever is trained."""
    encoder_rates = _text_encoder_rates(choices, len(models.text_encoders))
    train_text_encoder = any(encoder_rates)
    train_unet = choices.learning_rate != 0
    full = dtype if choices.full_bf16 or choices.family.finetune_in_16_bits else torch.float32
    cast(models.unet, full if train_unet else dtype)
    models.unet.requires_grad_(train_unet)
    models.unet.train(train_unet)
    if choices.gradient_checkpointing:
        models.unet.enable_gradient_checkpointing()
    trained = [models.unet] if train_unet else []
    for encoder, trains in zip(models.text_encoders, encoder_rates, strict=True):
        if trains and choices.gradient_checkpointing:
            encoder.gradient_checkpointing_enable()
        cast(encoder, full if trains else dtype)
        encoder.requires_grad_(trains)
        encoder.train(trains)
        if trains:
            trained.append(encoder)
    if train_text_encoder and choices.family.name == "sdxl" and encoder_rates[0]:
        # Only the layer before the last is used.
        models.text_encoders[0].text_model.encoder.layers[-1].requires_grad_(False)
        models.text_encoders[0].text_model.final_layer_norm.requires_grad_(False)
    parameters = [parameter for module in trained for parameter in module.parameters()]
    groups = [{"params": list(module.parameters()), "lr": 1e-5} for module in trained]
    if train_unet:
        models.unet = accelerator.prepare(models.unet)
    models.text_encoders = [
        accelerator.prepare(encoder) if trains else encoder
        for encoder, trains in zip(models.text_encoders, encoder_rates, strict=True)
    ]
    return None, groups, parameters, train_text_encoder


def _text_encoder_rates(choices: MemoryConfig, count: int) -> list[bool]:
    """Which text encoders are trained: a rate of 0 leaves one out."""
    if not choices.trains_text_encoder:
        return [False] * count
    said = [choices.learning_rate_te] if count == 1 else [choices.learning_rate_te1, choices.learning_rate_te2]
    return [(choices.learning_rate if rate is None else rate) != 0 for rate in said]


# --- the optimizer ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Several:
    """Optimizers that each have a part of the parameters, and step as soon as all of its gradients are there."""

    parts: Sequence[Any]

    @property
    def state(self) -> dict[Any, Any]:
        """The states of them all, by parameter."""
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def step(self) -> None:
        """Step them all."""
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget every gradient."""
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)


def _optimizers(choices: MemoryConfig, arguments: Namespace, groups: Any, unet: Any) -> Any:
    """The run's optimizer, or one for each group of parameters that upstream makes for the fused ones."""
    if choices.fused_optimizer_groups:
        divided = [*_in_equal_numbers(groups, choices.fused_optimizer_groups)]
    elif choices.blockwise_fused_optimizers:
        divided = [*_by_block(unet)]
    else:
        return _optimizer(choices, arguments, groups)
    return Several([_optimizer(choices, arguments, [{"params": part, "lr": 1e-5}]) for part in divided])


def _in_equal_numbers(groups: Sequence[Any], count: int) -> Iterator[list[Any]]:
    """Yield the parameters, equally many at a time, none beside those of another model (sdxl_train.py)."""
    size = math.ceil(sum(len(group["params"]) for group in groups) / count)
    for group in groups:
        for first in range(0, len(group["params"]), size):
            yield group["params"][first : first + size]


def _by_block(unet: Any) -> Iterable[list[Any]]:
    """Return the parameters of each block, and the rest's (flux_train.py, sd3_train.py, lumina_train.py)."""
    blocks: dict[str, list[Any]] = {}
    for name, parameter in unet.named_parameters():
        match = re.match(r"(double_blocks|single_blocks|joint_blocks|layers)\.\d+|(?=(context|noise)_refiner)", name)
        blocks.setdefault("" if match is None else match.group(0) or "refiner", []).append(parameter)
    return blocks.values()


def _optimizer(choices: MemoryConfig, arguments: Namespace, groups: Any) -> Any:
    try:
        factory = importlib.import_module("library.optimizer").get_optimizer
    except ImportError:
        factory = importlib.import_module("library.train_util").get_optimizer
    paged = choices.optimizer_type.lower().startswith("paged")
    wanted = choices.optimizer_type[len("paged") :] if paged else choices.optimizer_type
    said = Namespace(**{**vars(arguments), "optimizer_type": wanted})
    try:
        with unset_fake_temporarily():  # its tables of constants are data
            optimizer = factory(said, groups)[-1]
    except (ImportError, AttributeError, TypeError, ValueError, AssertionError) as error:
        raise UserError(f"--optimizer_type {choices.optimizer_type}: {error}") from None
    for group in optimizer.param_groups:
        # torch's default on a GPU; on the CPU it would be a loop.
        if "foreach" in group and not group.get("fused"):
            group["foreach"] = group["foreach"] is not False
    return optimizer


@contextlib.contextmanager
def _bitsandbytes_without_kernels() -> Iterator[None]:
    """Its updates work in place and allocate nothing; its kernels cannot take tensors without data."""
    try:
        functional = importlib.import_module("bitsandbytes.functional")
    except ImportError:
        yield
        return
    with contextlib.ExitStack() as stack:
        for name in ("optimizer_update_8bit_blockwise", "optimizer_update_32bit"):
            stack.enter_context(replaced(functional, name, lambda *args, **kwargs: None))
        yield


# --- one step --------------------------------------------------------------------------------------------------------


def lay_out(training: Training, tracker: Tracker) -> int:
    """Lay on the card what is there before a step, the optimizer's state with it; return the number of its events."""
    choices, optimizer = training.choices, training.optimizer
    if choices.blocks_to_swap:
        # A swapped block uses the place of one that left; only weights travel (custom_offloading_utils.py).
        swapped = [part for block in training.models.blocks(choices.blocks_to_swap) for part in block.modules()]
        tracker.leave_out(part.weight for part in swapped if isinstance(getattr(part, "weight", None), torch.Tensor))
    for module, kind in training.resident:
        tracker.mark(_tensors(module), kind)
    tracker.mark(training.trained, Kind.TRAINED_WEIGHT)
    # The state, which stays, comes from gradients that do not.
    _make_gradients(training)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    tracker.mark(states, Kind.OPTIMIZER_STATE)
    if choices.ema:
        training.average = [torch.empty(one.shape) for one in training.trained if one.requires_grad]
        tracker.mark(training.average, Kind.AVERAGE)
    if choices.gradient_accumulation_steps > 1:
        _make_gradients(training)
        tracker.mark((parameter.grad for parameter in training.trained if parameter.grad is not None), Kind.GRADIENT)
    for parameter in training.trained:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda one: tracker.mark([one.grad], Kind.GRADIENT))
    if choices.steps_in_backward:
        step_in_backward(training)
    gc.collect()
    return tracker.compact(away=states if choices.optimizer_type.lower().startswith("paged") else ())


def take(training: Training, tracker: Tracker) -> int:
    """Take one step; return its FLOPs: with gradient accumulation this is the last micro-step, and they are those of all."""
    before = tracker.flops
    loss = forward(training)
    tracker.mark_saved()
    with tracker.during(BACKWARD):
        training.accelerator.backward(loss)
    with tracker.during(STEP):
        if training.network is not None:
            training.trainer.all_reduce_network(training.accelerator, training.network)
            tracker.mark((one.grad for one in training.trained if one.grad is not None), Kind.GRADIENT)
        if not training.choices.steps_in_backward:
            if training.choices.max_grad_norm:
                training.accelerator.clip_grad_norm_(training.trained, training.choices.max_grad_norm)
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=True)
        del loss
        gc.collect()
    return int((tracker.flops - before) * training.arguments.gradient_accumulation_steps)


def _compile(training: Training) -> None:
    """Take the forward and the backward pass of a step: compiling has tensors of its own, which are no step's."""
    training.accelerator.backward(forward(training))
    for parameter in training.trained:
        parameter.grad = None


def _log_sampling(training: Training, tracker: Tracker) -> Log:
    """Log a picture of the largest size that is sampled: one step of the model without gradients, and the VAE's decoding.

    What a sampler computes beside them is as large as the latents.
    """
    choices, models = training.choices, training.models
    start = tracker.compact()
    sampler = choices.family.sampler
    batch = 2 if sampler.guided_together else 1
    picture = replace(choices, resolution=choices.sample_prompts, train_batch_size=batch)
    channels, scale = models.latents
    width, height = size(picture)
    with tracker.during(SAMPLING), torch.no_grad():
        if choices.cache_latents and training.trainer.cast_vae(training.arguments):
            with tracker.looking_away():  # it was cast before it lay in host memory
                cast(models.vae, training.vae_dtype)
        tracker.mark(_tensors(models.vae), Kind.VAE)
        forward(replace(training, choices=picture), is_train=False)
        latents = torch.zeros(1, channels, height // scale, width // scale, dtype=next(models.vae.parameters()).dtype)
        decode = getattr(models.vae, "decode_to_pixels", models.vae.decode)
        with training.accelerator.autocast() if sampler.decodes_under_autocast else contextlib.nullcontext():
            decode(latents)
    return Log(tracker.events, tracker.kinds, start, 0)


def _make_gradients(training: Training) -> None:
    for parameter in training.trained:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def step_in_backward(training: Training) -> None:
    """Step each parameter as soon as its gradient is whole, as sdxl_train.py does with --fused_backward_pass.

    With several optimizers each steps when the last of its gradients is.

    Upstream's clipping before it is left out: it hands one tensor to a function that wants a list, which then looks for the
    gradients of its rows and finds none. That costs time, and no memory.
    """
    optimizer = training.optimizer
    if isinstance(optimizer, Several):
        for part in optimizer.parts:
            _step_when_whole(part)
        return
    importlib.import_module("library.adafactor_fused").patch_adafactor_fused(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:

                def step(tensor: Any, group: Any = group) -> None:
                    optimizer.step_param(tensor, group)
                    tensor.grad = None

                parameter.register_post_accumulate_grad_hook(step)


def _step_when_whole(optimizer: Any) -> None:
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    missing = len(parameters)

    def arrived(tensor: Any) -> None:
        nonlocal missing
        missing -= 1
        if missing == 0:
            missing = len(parameters)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(arrived)


def forward(training: Training, batch: dict[str, Any] | None = None, scheduler: Any = None, is_train: bool = True) -> Any:
    """Return the loss of one batch, by the script's own ``process_batch``; ``is_train`` says whether with gradients.

    ``batch`` and ``scheduler`` (the trainer's noise scheduler) are made here unless they are given: a step that is timed
    brings its own, as the script has them ready too.
    """
    choices, trainer = training.choices, training.trainer
    network = training.network
    arguments = training.arguments
    if network is None:
        # The network trainer makes its inputs require grad for reentrant checkpointing; a fine-tune's script does not.
        arguments = Namespace(**{**vars(arguments), "gradient_checkpointing": False})
    if scheduler is None:
        with unset_fake_temporarily():  # it copies its tensors deeply, for which they need data
            scheduler = trainer.get_noise_scheduler(arguments, torch.get_default_device())
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
        train_unet=network is not None and not choices.network_train_text_encoder_only,
    )


def make_batch(training: Training) -> dict[str, Any]:
    """Return what the dataset hands out for a step, all zeros."""
    choices, models = training.choices, training.models
    batch = choices.train_batch_size
    channels, scale = models.latents
    width, height = size(choices)
    made: dict[str, Any] = {"loss_weights": torch.ones(batch), **models.extras(batch)}
    if choices.cache_latents:
        made["latents"] = torch.zeros(batch, channels, height // scale, width // scale)
    else:
        made["images"] = _images(choices, batch)
    if choices.cache_text_encoder_outputs:
        made["text_encoder_outputs_list"] = models.conditions(batch)
    else:
        made["input_ids_list"] = models.token_ids(batch)
    return made


def _images(choices: MemoryConfig, batch: int) -> torch.Tensor:
    width, height = size(choices)
    return torch.zeros(batch, 3, height, width)


# --- the surroundings ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def faking(mode: FakeTensorMode | None = None) -> Iterator[Assumptions]:
    """Make tensors without data inside the block, under CUDA's autocast rules; ``mode`` when it must be a certain one."""
    with mode or FakeTensorMode(allow_non_fake_inputs=True), cuda_rules(), Assumptions() as assumptions:
        yield assumptions


@contextlib.contextmanager
def _surroundings(choices: MemoryConfig, tracker: Tracker) -> Iterator[Assumptions]:
    if not choices.selective_torch_compile:
        with faking() as assumptions:
            yield assumptions
        return
    mode = traceable()
    with faking(mode) as assumptions, weighing(mode, tracker):
        yield assumptions


def _accelerator(choices: MemoryConfig) -> Any:
    accelerate = importlib.import_module("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    on_cpu = torch.get_default_device().type == "cpu"
    return accelerate.Accelerator(cpu=on_cpu, mixed_precision=choices.mixed_precision, device_placement=False)


def _dtypes(choices: MemoryConfig) -> tuple[torch.dtype, torch.dtype]:
    dtype = torch.float32 if choices.mixed_precision == "no" else torch.bfloat16
    return dtype, torch.float32 if choices.no_half_vae else dtype


def _tensors(module: Any) -> Iterable[torch.Tensor]:
    return (*module.parameters(), *module.buffers())
