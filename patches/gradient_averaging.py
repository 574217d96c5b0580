"""``--ddp_average_once`` and ``--ddp_gradient_compression bf16``: several processes exchange fewer bytes, in fewer operations.

Upstream averages gradients in more operations than a step needs:

- Full fine-tunes give accelerate's ``accumulate`` the models that they had before accelerate wrapped them. So
  DistributedDataParallel averages the gradients of every accumulated micro-batch, and not of the last one only.
- The LoRA scripts average each gradient by itself after backward: some 1,400 operations for SDXL, which wait for the link's
  latency.

``--ddp_average_once`` averages once per optimizer step, and a LoRA's gradients in buckets. The sums are the same except for
their order, so that results differ by rounding. ``--ddp_gradient_compression bf16`` averages bf16 copies of the gradients,
which halves the bytes, and a LoRA's in buckets, too. The gradients stay fp32, and nothing of either is saved.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Option, Settings, boolean, one_of
from kohya_ext.console import stop
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, trained_weights
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import ranks
from kohya_ext.sdscripts.fingerprints import known_bodies

AVERAGE_ONCE = Option(
    "ddp_average_once",
    False,
    boolean,
    "with several processes, average accumulated gradients once per step, and a LoRA's in buckets; equal except for rounding",
    activates=True,
)
COMPRESSION = Option(
    "ddp_gradient_compression",
    None,
    one_of("bf16"),
    "with several processes, average gradients in bf16, which halves the bytes that they exchange",
    metavar="bf16",
    activates=True,
)

_BUCKET = 25 * 2**20
"""Bytes of gradients that are averaged together, as in DistributedDataParallel."""

_operations = 0
"""Number of operations that averaged a LoRA's gradients."""


@dataclass
class _Averaging(TrainingCallback):
    accelerator: Accelerator
    once: bool
    compressed: bool
    wrappers: dict[int, Any] = field(default_factory=dict)
    """``id()`` of each prepared model -> its DistributedDataParallel, which holds it."""
    averaged: set[int] = field(default_factory=set)
    """``id()`` of each gradient that is already averaged in this step."""

    def before_batch(self, accelerator: Accelerator) -> None:
        """Forget the gradients of the step before."""
        self.averaged.clear()

    def average(self, gradient: Any) -> bool:
        """Average all gradients in place, the first time in a step; return whether this one is among them."""
        if not self.averaged:
            weights = trained_weights(self.accelerator._optimizers)
            gradients = [weight.grad for weight in weights if weight.grad is not None]
            for bucket in _buckets(gradients):
                self._average(bucket)
            self.averaged = {id(each) for each in gradients}
        return id(gradient) in self.averaged

    def _average(self, gradients: Sequence[Any]) -> None:
        """Average gradients of one type together: bf16 copies of them, or themselves."""
        global _operations
        import torch

        flat = torch.cat([gradient.flatten() for gradient in gradients])
        flat = flat.to(torch.bfloat16) if self.compressed else flat
        torch.distributed.all_reduce(flat.div_(self.accelerator.num_processes))
        torch._foreach_copy_(list(gradients), [
            part.view_as(gradient)
            for part, gradient in zip(flat.split([each.numel() for each in gradients]), gradients, strict=True)
        ])  # fmt: skip
        _operations += 1


def _buckets(gradients: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield gradients of the same type and device, of some 25 MiB together."""
    by_kind: dict[Any, list[Any]] = {}
    for gradient in gradients:
        by_kind.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for same in by_kind.values():
        bucket: list[Any] = []
        size = 0
        for gradient in same:
            bucket.append(gradient)
            size += gradient.numel() * gradient.element_size()
            if size >= _BUCKET:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Averaging:
    flags = "--ddp_gradient_compression" if settings[COMPRESSION] else "--ddp_average_once"
    if accelerator.num_processes == 1:
        stop(f"{flags} needs several processes, and this run has one; remove it, or add --num_processes")
    if ranks.is_sharded(accelerator):
        stop(f"{flags} is for DistributedDataParallel; remove it, because DeepSpeed and FSDP average gradients themselves")
    return _Averaging(accelerator, settings[AVERAGE_ONCE], settings[COMPRESSION] is not None)


def _prepare_model(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def prepare_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        averaging = current(_Averaging)
        if averaging is None:
            return original(self, model, *args, **kwargs)
        if averaging.compressed:
            from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

            self.ddp_handler = self.ddp_handler or DistributedDataParallelKwargs()
            self.ddp_handler.comm_hook = DDPCommunicationHookType.BF16
        wrapper = averaging.wrappers[id(model)] = original(self, model, *args, **kwargs)
        return wrapper

    return prepare_model


def _accumulate(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def accumulate(self: Any, *models: Any) -> Any:
        averaging = current(_Averaging)
        if averaging is not None and averaging.once:
            models = tuple(averaging.wrappers.get(id(model), model) for model in models)
        return original(self, *models)

    return accumulate


def _reduce(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def reduce(self: Any, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        averaging = current(_Averaging)
        if averaging is not None and reduction == "mean" and scale == 1.0 and averaging.average(tensor):
            return tensor
        return original(self, tensor, reduction, scale)

    return reduce


def _facts() -> Mapping[str, object]:
    return {"bucketed_operations": _operations}


PATCH = Patch(
    name="gradient_averaging",
    summary="average gradients of several processes once per step, or in bf16: --ddp_average_once, --ddp_gradient_compression",
    targets=(
        Target("accelerate.accelerator", "Accelerator.prepare_model", _prepare_model, takes("self", "model"), body="runs"),
        Target("accelerate.accelerator", "Accelerator.accumulate", _accumulate, takes("self"), body="runs"),
        Target(
            "accelerate.accelerator",
            "Accelerator.reduce",
            _reduce,
            takes("self", "tensor", "reduction", "scale", exactly=True),
            body=known_bodies(
                {"0c8ed3a35f73": "1.6 to 1.15"},
                helpers={"reduce": {"40d5917e1d8c": "1.6 to 1.13", "03e71c62759e": "1.14 to 1.15"}},
                package="accelerate",
            ),
        ),
    ),
    options=(AVERAGE_ONCE, COMPRESSION),
    wanted=lambda settings: settings[AVERAGE_ONCE] or settings[COMPRESSION] is not None,
    exactness="close",
    held_to="upstream with the same processes: losses within 1e-4 (once), updates within 1% of their norm (bf16)",
    idea="https://pytorch.org/docs/stable/ddp_comm_hooks.html",
    stage=Stage.FUSE,
    on_start=_start,
    facts=_facts,
)
