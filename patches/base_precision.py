"""Keep the frozen linear layers of a U-Net or DiT in 8 bits under a LoRA (``--base_precision``).

The layers' weights take one byte instead of two, and their forward pass and input gradient are 8-bit products
(:mod:`kohya_ext.quantization`). Layers are converted when the script creates its network: after upstream's ``--base_weights``
are merged and before LoRA modules take the layers' forward methods. They are the linear layers in transformer blocks, with
modulations. Norms, embeddings, time embeddings and the layers around the blocks stay as they are. Text encoders that stay on
the GPU and are not trained are converted there, too. ``--int8_convolutions`` adds the 3x3 convolutions of a U-Net.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kohya_ext.config.settings import Option, Settings, boolean, one_of, path
from kohya_ext.console import note, stop, warn
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, program
from kohya_ext.patching.types import Accelerator
from kohya_ext.quantization.compilation import are_compiled
from kohya_ext.quantization.selection import (
    NETWORKS,
    convolutions,
    includes_text_encoders,
    layers,
    reason_to_refuse,
    reason_to_refuse_convolutions,
    text_layers,
)
from kohya_ext.units import format_size

if TYPE_CHECKING:
    from kohya_ext.weights.base_cache import BaseCache, Layers, Origin

BASE_PRECISION = Option[str | None](
    "base_precision",
    None,
    one_of("int8", "fp8"),
    "keep the frozen linear layers of the U-Net or DiT in 8 bits, rotated against outliers, and multiply in 8 bits; int8 needs "
    "compute capability 8.0 (below it saves memory only), fp8 8.9 and rounds more coarsely",
    metavar="int8|fp8",
)


BASE_PRECISION_CACHE = Option[Path | None](
    "base_precision_cache",
    None,
    path,
    "keep the weights of --base_precision in this folder; later runs of the checkpoint map them instead of quantizing it",
    metavar="DIR",
)


INT8_CONVOLUTIONS = Option[bool](
    "int8_convolutions",
    False,
    boolean,
    "with --base_precision int8, also keep the 3x3 convolutions of a U-Net (SDXL, SD 1.5) in 8 bits and multiply in 8 bits; "
    "experimental: no GPU has run it yet",
    activates=True,
)


@dataclass
class _Base(TrainingCallback):
    """The converted layers of a run."""

    accelerator: Accelerator
    kind: Any
    products: Any
    cache_file: Path | None = None
    origin: Origin = field(default_factory=dict)
    """What the weights in the cache must be made from, except the layers' own content."""
    text_encoders: bool = False
    """Whether they are converted, too."""
    convolutions: Any = None
    """How 3x3 convolutions multiply; None if they stay as they are."""
    taken: int = 0
    """Layers whose weights are those of an 8-bit checkpoint file, without another rounding."""
    facts: dict[str, object] = field(default_factory=dict)

    def convert_text_encoders(self, encoders: Sequence[Any]) -> None:
        """Convert the layers of text encoders on the GPU, one by one."""
        from kohya_ext.quantization.linear import convert

        converted = [layer for encoder in encoders if encoder is not None for _, layer in text_layers(encoder)]
        before = sum(layer.weight.nbytes for layer in converted)
        for layer in converted:
            convert(layer, self.kind, self.products, self.accelerator.device)
        after = sum(layer.weight.nbytes + layer.scale_bits.nbytes for layer in converted)
        self.facts |= {"text_layers": len(converted), "text_bytes_before": before, "text_bytes": after}
        note(
            f"base precision: {len(converted)} layers of text encoders in 8 bits, {format_size(before)} -> {format_size(after)}"
        )

    def convert(self, model: Any) -> None:
        """Convert the model's layers one by one."""
        converted = list(layers(model))
        if not converted:
            warn(f"--base_precision: {type(model).__name__} has no linear layers to convert; the base stays as it is")
            return
        before = sum(layer.weight.nbytes for _, layer in converted)
        source = self._convert(converted)
        after = sum(layer.weight.nbytes + layer.scale_bits.nbytes for _, layer in converted)
        self.facts |= {"layers": len(converted), "bytes_before": before, "bytes": after, "products": self.products}
        self.facts |= {"source": source, "taken": self.taken}
        taken = f", {self.taken} as they are there" if self.taken else ""
        sizes = f"{format_size(before)} -> {format_size(after)}"
        note(f"base precision: {len(converted)} frozen linear layers in 8 bits, {sizes}, from the {source}{taken}")
        if self.convolutions is not None:
            self._convert_convolutions(model)

    def _convert_convolutions(self, model: Any) -> None:
        """Convert the model's 3x3 convolutions one by one. The cache does not have them."""
        from kohya_ext.quantization.convolution import convert

        converted = [layer for _, layer in convolutions(model)]
        before = sum(layer.weight.nbytes for layer in converted)
        for layer in converted:
            convert(layer, self.convolutions, self.accelerator.device)
        after = sum(layer.weight.nbytes + layer.scale_bits.nbytes for layer in converted)
        self.facts |= {"convolutions": len(converted), "convolution_bytes_before": before, "convolution_bytes": after}
        note(f"base precision: {len(converted)} convolutions in 8 bits, {format_size(before)} -> {format_size(after)}")

    def _convert(self, converted: Layers) -> str:
        """Convert layers, and return where their weights come from: ``cache`` or ``checkpoint``."""
        from kohya_ext.quantization.arithmetic import ROTATED
        from kohya_ext.quantization.linear import convert, install
        from kohya_ext.weights.postponed import stored_rows

        cache = self._cache(converted)
        kept = None if cache is None else _read(cache, converted)
        if kept is not None:
            for (_, layer), (bits, scales) in zip(converted, kept, strict=True):
                install(layer, self.kind, self.products, bits, scales)
            return "cache"
        for _, layer in converted:
            stored = None if self.kind in ROTATED else stored_rows(layer.weight, self.kind)
            if stored is None:
                convert(layer, self.kind, self.products, self.accelerator.device)
            else:
                install(layer, self.kind, self.products, *stored)
                self.taken += 1
        if cache is not None and self.accelerator.is_local_main_process:
            _write(cache, converted)
        return "checkpoint"

    def _cache(self, converted: Layers) -> BaseCache | None:
        if self.cache_file is None:
            return None
        from kohya_ext.weights.base_cache import BaseCache, content

        return BaseCache(self.cache_file, self.kind, {**self.origin, "content": content(converted)})


def _read(cache: BaseCache, converted: Layers) -> Any:
    from kohya_ext.weights.base_cache import UnusableError

    try:
        return cache.read(converted)
    except (UnusableError, OSError) as error:
        note(f"base precision: {cache.path.name} is not used, because {error}; quantizing the checkpoint")
        return None


def _write(cache: BaseCache, converted: Layers) -> None:
    try:
        cache.write(converted)
    except OSError as error:
        warn(f"--base_precision_cache: the weights are not kept: {error}")


def _problems(script: str, args: Namespace, settings: Settings) -> Iterator[str]:
    """Yield why a run cannot use it."""
    wanted = settings[BASE_PRECISION]
    if settings[INT8_CONVOLUTIONS] and (reason := reason_to_refuse_convolutions(wanted, args, script)) is not None:
        yield f"--int8_convolutions: {reason}"
    elif wanted is None:
        yield "--base_precision_cache keeps the weights of --base_precision, which is not set; add --base_precision int8"
    elif (reason := reason_to_refuse(args, script)) is not None:
        yield f"--base_precision {wanted}: {reason}"


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Base:
    wanted = settings[BASE_PRECISION]
    for problem in _problems(program().command.name, args, settings):
        stop(problem)  # preflight, which reports it earlier, may be off
    from kohya_ext.quantization.linear import KINDS

    kind = KINDS[str(wanted)]
    if accelerator.device.type == "cuda" and not are_compiled():
        note("base precision: the first step compiles its kernels, about 15 s; later runs read them from Triton's cache")
    products = _products(kind, str(wanted), accelerator.device)
    base = _Base(accelerator, kind, products, text_encoders=includes_text_encoders(args))
    if settings[INT8_CONVOLUTIONS]:
        base.convolutions = _convolution_products(products, accelerator.device)
    if (folder := settings[BASE_PRECISION_CACHE]) is not None:
        from kohya_ext.weights import base_cache

        base.cache_file = base_cache.file_in(folder, args, str(wanted))
        base.origin = base_cache.origin(args, kind, accelerator.device)
    return base


def _products(kind: Any, wanted: str, device: Any) -> str:
    """Return how layers multiply on the run's device."""
    if device.type != "cuda":
        return "operations"
    import torch

    from kohya_ext.quantization.support import OLDEST, find_products

    if wanted == "fp8" and torch.cuda.get_device_capability(device) < OLDEST[kind]:
        stop("--base_precision fp8: this GPU has no fp8 products; use int8")
    products, obstacle = find_products(device, kind)
    if obstacle is not None:
        warn(f"--base_precision {wanted} saves memory but no time: {obstacle}")
    return products


def _convolution_products(products: Any, device: Any) -> str | None:
    """Return how convolutions multiply on the run's device; None if they stay in 16 bits."""
    from kohya_ext.quantization.support import find_convolution_products

    of_convolutions, obstacle = find_convolution_products(device, products)
    if obstacle is not None:
        note(f"--int8_convolutions has no effect: {obstacle}")
    return of_convolutions


def _convert(text_encoders: Any, model: Any) -> None:
    """Convert the run's models, if it has an 8-bit base. ``text_encoders`` is one or a list."""
    base = current(_Base)
    if base is None:
        return
    if base.text_encoders:
        base.convert_text_encoders(text_encoders if isinstance(text_encoders, list) else [text_encoders])
    base.convert(model)


def _create(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def create_network(*args: Any, **kwargs: Any) -> Any:
        _convert(args[4], args[5])
        return original(*args, **kwargs)

    return create_network


def _create_from_weights(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def create_network_from_weights(*args: Any, **kwargs: Any) -> Any:
        # For inference, the caller merges the network into the model's weights.
        if not kwargs.get("for_inference"):
            _convert(args[3], args[4])
        return original(*args, **kwargs)

    return create_network_from_weights


def _load_on_host(original: Any, settings: Settings) -> Any:
    """Return a loader that leaves the model on the host, where it is converted, so that the GPU never holds it in 16 bits."""

    @wraps(original)
    def load(
        device: Any, dit_path: str, attn_mode: str, split_attn: bool, loading_device: Any, *args: Any, **kwargs: Any
    ) -> Any:
        on_host = "cpu" if current(_Base) is not None else loading_device
        return original(device, dit_path, attn_mode, split_attn, on_host, *args, **kwargs)

    return load


def _facts() -> Mapping[str, object]:
    base = current(_Base)
    return base.facts if base is not None else {}


PATCH = Patch(
    name="base_precision",
    summary="--base_precision: keep the frozen linear layers of the U-Net or DiT in 8 bits and multiply in 8 bits",
    targets=(
        *(
            Target(module, name, replace, takes(*first), body="runs")
            for module in NETWORKS
            for name, first, replace in (
                ("create_network", ("multiplier", "network_dim", "network_alpha"), _create),
                ("create_network_from_weights", ("multiplier", "file"), _create_from_weights),
            )
        ),
        *(
            Target(
                module,
                name,
                _load_on_host,
                takes("device", "dit_path", "attn_mode", "split_attn", "loading_device"),
                body="runs",
            )
            for module, name in (
                ("library.anima_utils", "load_anima_model"),
                ("library.hunyuan_image_models", "load_hunyuan_image_model"),
            )
        ),
    ),
    options=(BASE_PRECISION, BASE_PRECISION_CACHE, INT8_CONVOLUTIONS),
    torch="2.6",
    exactness="close",
    held_to="each layer's output and input gradient in float32 within 1.5 percent (int8) or 5 percent (fp8) of its norm",
    idea="https://arxiv.org/abs/2404.00456",
    wanted=lambda settings: any(
        (settings[BASE_PRECISION] is not None, settings[BASE_PRECISION_CACHE] is not None, settings[INT8_CONVOLUTIONS])
    ),
    problems=_problems,
    facts=_facts,
    stage=Stage.FUSE,
    on_start=_start,
)
