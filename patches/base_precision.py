"""Keep the frozen linear layers of a U-Net or DiT in 8 bits under a LoRA (``--base_precision``).

The layers' weights take one byte instead of two, and their forward pass and input gradient are 8-bit products
(:mod:`kohya_ext.quantization`). Layers are converted when the script creates its network: after upstream's ``--base_weights``
are merged and before LoRA modules take the layers' forward methods. They are the linear layers in transformer blocks, with
modulations. Convolutions, norms, embeddings, time embeddings and the layers around the blocks stay as they are.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Option, Settings, one_of
from kohya_ext.console import note, stop, warn
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, program
from kohya_ext.patching.types import Accelerator
from kohya_ext.quantization.selection import NETWORKS, layers, reason_to_refuse
from kohya_ext.units import format_size

BASE_PRECISION = Option[str | None](
    "base_precision",
    None,
    one_of("int8", "fp8"),
    "keep the frozen linear layers of the U-Net or DiT in 8 bits, rotated against outliers, and multiply in 8 bits; int8 needs "
    "compute capability 8.0 (below it saves memory only), fp8 8.9 and rounds more coarsely",
    metavar="int8|fp8",
)


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
        for layer in layers(model):
            before += layer.weight.nbytes
            convert(layer, self.kind, self.products, self.device)
            after += layer.weight.nbytes + layer.scale_bits.nbytes
            count += 1
        self.facts = {"layers": count, "bytes_before": before, "bytes": after, "products": self.products}
        if not count:
            warn(f"--base_precision: {type(model).__name__} has no linear layers to convert; the base stays as it is")
            return
        note(f"base precision: {count} frozen linear layers in 8 bits, {format_size(before)} -> {format_size(after)}")


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Base:
    wanted = settings[BASE_PRECISION]
    reason = reason_to_refuse(args, program().command.name)
    if reason is not None:
        stop(f"--base_precision {wanted}: {reason}")
    import torch

    from kohya_ext.quantization.linear import KINDS

    kind = KINDS[str(wanted)]
    if accelerator.device.type != "cuda":
        return _Base(accelerator.device, kind, "operations")
    from kohya_ext.quantization.support import OLDEST, kernels_obstacle

    if wanted == "fp8" and torch.cuda.get_device_capability(accelerator.device) < OLDEST[kind]:
        stop("--base_precision fp8: this GPU has no fp8 products; use int8")
    obstacle = kernels_obstacle(accelerator.device, kind)
    if obstacle is not None:
        warn(f"--base_precision {wanted} saves memory but no time: {obstacle}")
    return _Base(accelerator.device, kind, "kernels" if obstacle is None else "weights")


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
            Target(module, name, replace, takes(*first), layouts, body="runs")
            for module, layouts in NETWORKS.items()
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
    options=(BASE_PRECISION,),
    exactness="close",
    held_to="each layer's output and input gradient in float32 within 1.5 percent (int8) or 5 percent (fp8) of its norm",
    idea="https://arxiv.org/abs/2404.00456",
    wanted=lambda settings: settings[BASE_PRECISION] is not None,
    facts=_facts,
    stage=Stage.FUSE,
    on_start=_start,
)
