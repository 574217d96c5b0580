"""Keep the frozen linear layers of a U-Net or DiT in 8 bits under a LoRA (``--base_precision``).

The layers' weights take one byte instead of two, and their forward pass and input gradient are 8-bit products
(:mod:`kohya_ext.quantization`). Layers are converted when the script creates its network: after upstream's ``--base_weights``
are merged and before LoRA modules take the layers' forward methods. They are the linear layers in transformer blocks, with
modulations. Convolutions, norms, embeddings, time embeddings and the layers around the blocks stay as they are.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Option, Settings, one_of
from kohya_ext.console import note, stop, warn
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, program
from kohya_ext.patching.types import Accelerator
from kohya_ext.sdscripts.checkouts import KNOWN_LAYOUTS, Layout
from kohya_ext.sdscripts.families import FAMILIES, of
from kohya_ext.units import format_size

BASE_PRECISION = Option[str | None](
    "base_precision",
    None,
    one_of("int8", "fp8"),
    "keep the frozen linear layers of the U-Net or DiT in 8 bits, rotated against outliers, and multiply in 8 bits; int8 needs "
    "compute capability 8.0 (below it saves memory only), fp8 8.9 and rounds more coarsely",
    metavar="int8|fp8",
)

#: Networks that call their layers' forward methods and do not read their weights, with the layouts that have them.
_NETWORKS: Mapping[str, frozenset[Layout]] = {
    "networks.lora": KNOWN_LAYOUTS,
    "networks.lora_fa": KNOWN_LAYOUTS,
    "networks.lora_flux": KNOWN_LAYOUTS,
    "networks.lora_sd3": KNOWN_LAYOUTS,
    "networks.lora_lumina": KNOWN_LAYOUTS,
    "networks.lora_anima": KNOWN_LAYOUTS,
    "networks.lora_hunyuan_image": KNOWN_LAYOUTS,
    "networks.loha": frozenset({"v0.11"}),
    "networks.lokr": frozenset({"v0.11"}),
}

#: Classes of modules whose linear layers are converted, where these are not the family's blocks. A U-Net's transformer
#: includes its projections; its ResNet blocks have linear layers for time embeddings only, with one row per image.
_CLASSES: Mapping[str, tuple[str, ...]] = {"sdxl": ("Transformer2DModel",), "sd15": ("Transformer2DModel",)}


@dataclass
class _Base(TrainingCallback):
    """The converted layers of a run."""

    device: Any
    kind: Any
    products: Any
    facts: dict[str, object] = field(default_factory=dict)

    def convert(self, model: Any) -> None:
        """Convert the model's layers one by one."""
        from kohya_ext.quantization.linear import convert

        count, before, after = 0, 0, 0
        for layer in _layers(model):
            before += layer.weight.nbytes
            convert(layer, self.kind, self.products, self.device)
            after += layer.weight.nbytes + layer.scale_bits.nbytes
            count += 1
        self.facts = {"layers": count, "bytes_before": before, "bytes": after, "products": self.products}
        if not count:
            warn(f"--base_precision: {type(model).__name__} has no linear layers to convert; the base stays as it is")
            return
        note(f"base precision: {count} frozen linear layers in 8 bits, {format_size(before)} -> {format_size(after)}")


def _layers(model: Any) -> Iterator[Any]:
    """Yield the model's frozen linear layers that are kept in 8 bits."""
    import torch

    family = next((family for family in FAMILIES if family.model == type(model).__name__), None)
    classes = () if family is None else _CLASSES.get(family.name, family.blocks.classes)
    for module in model.modules():
        if type(module).__name__ in classes:
            yield from (layer for layer in module.modules() if type(layer) is torch.nn.Linear)


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Base:
    wanted = settings[BASE_PRECISION]
    reason = _reason_to_refuse(args, program().command.name)
    if reason is not None:
        stop(f"--base_precision {wanted}: {reason}")
    import torch

    kind = torch.int8 if wanted == "int8" else torch.float8_e4m3fn
    if accelerator.device.type != "cuda":
        return _Base(accelerator.device, kind, "operations")
    from kohya_ext.quantization.support import OLDEST, kernels_obstacle

    if wanted == "fp8" and torch.cuda.get_device_capability(accelerator.device) < OLDEST[kind]:
        stop("--base_precision fp8: this GPU has no fp8 products; use int8")
    obstacle = kernels_obstacle(accelerator.device, kind)
    if obstacle is not None:
        warn(f"--base_precision {wanted} saves memory but no time: {obstacle}")
    return _Base(accelerator.device, kind, "kernels" if obstacle is None else "weights")


def _reason_to_refuse(args: Namespace, script: str | None) -> str | None:
    """Return why a run cannot have an 8-bit base, and what to do; None if it can."""
    family = of(script or "", vars(args))
    if family is None or script != family.lora:
        return f"{script} trains the base itself or copies it; remove the option"
    for option in ("fp8_base", "fp8_base_unet", "fp8_scaled"):
        if getattr(args, option, False):
            return f"--{option} changes the base too; remove one of the two"
    if str(getattr(args, "network_module", None)) not in _NETWORKS:
        return f"{args.network_module} may read the base's weights; use one of {', '.join(_NETWORKS)}"
    if any(str(each).startswith("ggpo_") for each in getattr(args, "network_args", None) or ()):
        return "GGPO reads the base's weights; remove the network arguments ggpo_sigma and ggpo_beta"
    if getattr(args, "deepspeed", False):
        return "DeepSpeed moves the base's weights itself; remove one of the two"
    return None


def _create(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def create_network(*args: Any, **kwargs: Any) -> Any:
        if (base := current(_Base)) is not None:
            base.convert(args[5])
        return original(*args, **kwargs)

    return create_network


def _create_from_weights(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def create_network_from_weights(*args: Any, **kwargs: Any) -> Any:
        # For inference, the caller merges the network into the model's weights.
        if not kwargs.get("for_inference") and (base := current(_Base)) is not None:
            base.convert(args[4])
        return original(*args, **kwargs)

    return create_network_from_weights


def _facts() -> Mapping[str, object]:
    base = current(_Base)
    return base.facts if base is not None else {}


PATCH = Patch(
    name="base_precision",
    summary="--base_precision: keep the frozen linear layers of the U-Net or DiT in 8 bits and multiply in 8 bits",
    targets=tuple(
        Target(module, name, replace, takes(*first), layouts, body="runs")
        for module, layouts in _NETWORKS.items()
        for name, first, replace in (
            ("create_network", ("multiplier", "network_dim", "network_alpha"), _create),
            ("create_network_from_weights", ("multiplier", "file"), _create_from_weights),
        )
    ),
    options=(BASE_PRECISION,),
    exactness="close",
    held_to="each layer's output and input gradient in float32 within 1.5 percent (int8) or 5 percent (fp8) of its norm",
    idea="https://arxiv.org/abs/2404.00456",
    wanted=lambda settings: settings[BASE_PRECISION] is not None,
    facts=_facts,
    stage=Stage.FUSE,
    on_start=_start,
)
