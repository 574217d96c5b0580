"""Record the losses of a LoRA script's first batches and its model's errors in 8 bits, without training, then end the process.

Each batch is computed with the same noise and timesteps in every process, because random numbers begin with its number. The
weights do not change: backward passes and optimizer steps are left out, and a new LoRA adds nothing. In 16 bits each batch is
computed twice, the second time with the sums of the frozen layers in the reverse order: that is the noise of rounding.
"""

from __future__ import annotations

import copy
import hashlib
import random
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, program
from kohya_ext.patching.types import Accelerator
from kohya_ext.sdscripts import families
from kohya_ext.sdscripts.families import FAMILIES, Family
from kohya_ext.tuning.step_measurement import failure
from kohya_ext.tuning.task import Task

#: Batches whose losses are compared.
BATCHES = 8

#: The most numbers of a block's output, and rows of a layer's input, that are compared.
_NUMBERS, _ROWS = 16384, 128

#: The file with parts of the blocks' outputs in 16 bits, in the folder of that process.
OUTPUTS = "outputs.pt"


@dataclass
class LossRecord(TrainingCallback):
    """The losses of this process."""

    task: Task
    family: Family
    reference: Path | None
    """The file with the blocks' outputs in 16 bits; None in that process."""
    losses: list[float] = field(default_factory=list)
    reversed_losses: list[float] = field(default_factory=list)
    batches_seen: list[str] = field(default_factory=list)
    """A hash of each batch."""
    model: Any = None
    outputs: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """Block -> parts of its outputs, a tensor for each batch."""
    layers: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Precision -> layer -> squared relative errors."""
    _is_reversed: bool = False

    def batches(self, loader: Any, batches: Callable[[], Iterator[Any]], loop: FrameType | None) -> Iterator[Any]:
        """Yield the first batches, in 16 bits twice."""
        for batch in batches():
            self._is_reversed = False
            self.batches_seen.append(_fingerprint(batch))
            yield copy.deepcopy(batch)
            if self.reference is None:
                self._is_reversed = True
                yield batch
            if len(self.losses) == BATCHES:
                self.task.write(self.result())
                sys.exit(0)

    def before_batch(self, accelerator: Accelerator) -> None:
        """Begin the random numbers of a batch."""
        import torch

        number = len(self.batches_seen)
        random.seed(number)
        torch.manual_seed(number)

    def add(self, loss: Any) -> None:
        """Add the loss of a batch."""
        (self.reversed_losses if self._is_reversed else self.losses).append(float(loss))

    def on_exception(self, problem: BaseException) -> None:
        """Write why the script ended."""
        self.task.write({"failed": failure(problem)})

    def forward(self, forward: Callable[..., Any], model: Any, args: Any, kwargs: Any) -> Any:
        """Return the model's output, and compare its blocks and layers."""
        import torch

        if self.model is None:
            self.model = model
            self._watch(model)
        with torch.no_grad():
            if not self._is_reversed:
                return forward(model, *args, **kwargs)
            with _reversed_sums(self._frozen(model)):
                return forward(model, *args, **kwargs)

    def _watch(self, model: Any) -> None:
        for name, module in model.named_modules():
            if type(module).__name__ in self.family.blocks.classes:
                module.register_forward_hook(partial(self._add_output, name))
        if self.reference is None:
            for name, layer in self._frozen(model).items():
                layer.register_forward_pre_hook(partial(self._add_errors, name))

    @staticmethod
    def _frozen(model: Any) -> dict[str, Any]:
        from kohya_ext.quantization import selection

        return dict(selection.layers(model))

    def _add_output(self, name: str, module: Any, args: Any, output: Any) -> None:
        import torch

        if self._is_reversed:
            return
        tensors = [each for each in (output if isinstance(output, (tuple, list)) else [output]) if torch.is_tensor(each)]
        if tensors:
            flat = torch.cat([each.detach().flatten().float() for each in tensors])
            self.outputs[name].append(flat[:: -(-flat.numel() // _NUMBERS)].cpu())

    def _add_errors(self, name: str, layer: Any, args: Any) -> None:
        """Compare a layer's output in each 8-bit format with that in fp32, on some rows of its input."""
        import torch

        from kohya_ext.quantization.linear import KINDS

        if self._is_reversed or not args:
            return
        rows = args[0].detach().reshape(-1, args[0].shape[-1])
        rows = rows[:: -(-rows.shape[0] // _ROWS)].float()
        with torch.autocast(rows.device.type, enabled=False):
            for precision in self.task.precisions:
                errors = self.layers.setdefault(precision, {}).setdefault(name, [])
                errors.append(_error_in_8_bits(rows, layer.weight.detach(), KINDS[precision]))

    def result(self) -> dict[str, Any]:
        """Return what was recorded, as JSON data."""
        import torch

        row: dict[str, Any] = {"losses": self.losses, "batches": self.batches_seen}
        if self.reference is not None:
            return {**row, "blocks": _differences(self.outputs, torch.load(self.reference, weights_only=True))}
        torch.save(dict(self.outputs), Path(self.task.folder) / OUTPUTS)
        mean = {kind: {name: _root_mean(each) for name, each in layers.items()} for kind, layers in self.layers.items()}
        return {**row, "reversed": self.reversed_losses, "layers": mean}


def _error_in_8_bits(rows: Any, weight: Any, kind: Any) -> float:
    """Return the relative squared error of ``rows weight^T`` in 8 bits."""
    from kohya_ext.quantization.arithmetic import quantize
    from kohya_ext.quantization.linear import quantized, rotate

    exact = rows @ weight.float().t()
    bits, scales = quantized(weight, kind, weight.device)
    small, row_scales = quantize(rotate(rows, kind), kind)
    product = small.float() @ bits.view(kind).float().t() * row_scales[:, None] * scales
    return float((product - exact).square().sum() / exact.square().sum().clamp_min(1e-30))


def _differences(ours: dict[str, list[Any]], theirs: dict[str, list[Any]]) -> dict[str, float]:
    """Return the relative difference of each block's outputs, over all batches."""
    differences = {}
    for name, outputs in ours.items():
        pairs = list(zip(outputs, theirs.get(name, ()), strict=False))
        squares = sum(float((a - b).square().sum()) for a, b in pairs if a.shape == b.shape)
        norm = sum(float(b.square().sum()) for _, b in pairs)
        differences[name] = (squares / norm) ** 0.5 if norm else 0.0
    return differences


def _root_mean(squares: list[float]) -> float:
    return float((sum(squares) / len(squares)) ** 0.5)


@contextmanager
def _reversed_sums(layers: dict[str, Any]) -> Iterator[None]:
    """Let some layers add the products of their inputs and weights from the last to the first inside the block."""
    import torch

    weights = {id(layer.weight) for layer in layers.values()}
    original = torch.nn.functional.linear

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        if id(weight) in weights:
            x, weight = x.flip(-1), weight.flip(-1)
        return original(x, weight, bias)

    torch.nn.functional.linear = linear
    try:
        yield
    finally:
        torch.nn.functional.linear = original


def _fingerprint(batch: Any) -> str:
    """Return a hash of a batch's captions and latents or images."""
    import torch

    values = batch if isinstance(batch, dict) else {}
    tensors: list[Any] = [value for name in ("latents", "images") if torch.is_tensor(value := values.get(name))]
    text = repr((values.get("captions"), [(list(each.shape), float(each.double().sum())) for each in tensors]))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _recorded(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def backward(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        if (record := current(LossRecord)) is None:
            return original(self, loss, *args, **kwargs)
        record.add(loss.detach())
        return None

    return backward


def _left_out(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) if current(LossRecord) is None else None

    return step


def _watched(original: Any, settings: Settings) -> Any:
    import torch

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        record = current(LossRecord)
        if record is None or not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        return record.forward(original, self, args, kwargs)

    return forward


def patch() -> Patch:
    """Return the patch whose replacements the record needs."""
    accelerate = "accelerate.accelerator"
    return Patch(
        name="tune_losses",
        summary="record losses without training",
        targets=(
            Target(accelerate, "Accelerator.backward", _recorded, takes("self", "loss"), body="runs"),
            Target("accelerate.optimizer", "AcceleratedOptimizer.step", _left_out, takes("self"), body="runs"),
            *(
                Target(family.module, f"{family.model}.forward", _watched, takes("self", family.first_input), body="runs")
                for family in FAMILIES
            ),
        ),
        exactness="exact",
        held_to="the script's own loss",
        idea="https://arxiv.org/abs/2404.00456",
        stage=Stage.VALIDATE,
    )


def start(args: Namespace, accelerator: Accelerator, task: Task) -> LossRecord:
    """Return the callback of a process that records losses. Raises ValueError for a script that trains no LoRA."""
    family = families.of(program().command.name, vars(args))
    if family is None:
        raise ValueError("no model family")
    return LossRecord(task, family, Path(task.reference) if task.reference else None)
