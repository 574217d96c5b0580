"""Measure the quality of an 8-bit frozen base on a CPU, whose integer products are the GPU's own.

    python -m benchmarks.base_weights_quality [--output FILE] [--families NAME ...] [--parts blocks|scripts]

It takes about 25 minutes on one core of a CPU with AMX. Three measurements, each against fp32:

- one block of each kind at full width with LoRA: relative errors and cosines of its output, its input gradient and its LoRA
  gradients; for outliers of several sizes, and for the block applied four times. Weights imitate trained ones: Student-t
  tails, and scales that vary by row and column. Activations imitate real ones: 0.4% of their channels are outliers, which
  are ``size`` times as large and have a constant part, in all tokens. Output gradients have outliers, too;
- the narrowest of these blocks: a LoRA that learns a large and a small change of the block, and is judged on the fp32 base;
- forty steps of the real scripts on tiny models with random weights: the trained LoRA after four steps, losses, and the loss
  of the trained LoRA on the fp32 base. Upstream's ``--fp8_base`` is missing, because its norms do not run on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.device import describe_device
from benchmarks.family_blocks import CASES, IMAGE, TEXT, Case, Shape
from kohya_ext.errors import UserError
from kohya_ext.patching.attributes import replaced
from kohya_ext.quantization import linear
from kohya_ext.run import journal
from kohya_ext.sdscripts import checkouts, families
from kohya_ext.tiny import arguments, checkpoints, dataset, environment

OUTPUT = results.FOLDER / "base_weights_quality.json"

RANK = 16

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Variant:
    """What the linear layers of the base are converted to; without fields, bf16."""

    kind: torch.dtype | None = None
    """The format of ``--base_precision``."""
    rotated: bool = False
    """Whether rows are rotated."""
    upstream: bool = False
    """Whether the weights are those of upstream's 8-bit option for the family."""


#: As the options are, unless the name says otherwise.
VARIANTS = {
    "bf16": Variant(),
    "upstream": Variant(upstream=True),
    "int8": Variant(torch.int8, rotated=True),
    "int8 not rotated": Variant(torch.int8),
    "fp8": Variant(FP8),
    "fp8 rotated": Variant(FP8, rotated=True),
}

#: Sizes of outliers, relative to other channels, and numbers of times that the block is applied.
CONDITIONS: tuple[tuple[float, int], ...] = ((1, 1), (20, 1), (100, 1), (20, 4))

#: Steps and widest block of the LoRA that learns a change of a block, and its learning rate relative to the change.
BLOCK_STEPS, WIDEST, BLOCK_RATE = 30, 640, 0.2
#: Changes to learn, as sizes of the second weights of another LoRA.
CHANGES = (0.02, 0.005)

#: Arguments of the scripts on tiny models by variant. SGD keeps a step in proportion to its gradient.
RUNS = {"bf16": (), "int8": ("--base_precision", "int8"), "fp8": ("--base_precision", "fp8")}
FP32 = ("--mixed_precision", "no")
#: HunyuanImage mixes precisions in bf16, which a CPU refuses.
MIXED_PRECISIONS = {"hunyuan-image": "no"}
STEPS, FIRST_STEPS = 40, 4
TRAINING = ("--max_train_steps", str(STEPS), "--save_every_n_steps", str(FIRST_STEPS))
#: Instead of 1, at which these are unstable.
LEARNING_RATES = {"flux": "0.1", "chroma": "0.1"}
#: Other noise and time steps than in training; the learning rate changes no weight, and scripts refuse to train with 0.
JUDGING = ("--max_train_steps", "16", "--learning_rate", "1e-30", "--seed", "2", *FP32)


def imitate_training(block: torch.nn.Module) -> None:
    """Set weights with the spread of trained ones."""
    for module in block.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name == "bias":
                parameter.data.normal_(std=0.05)
            elif isinstance(module, torch.nn.Linear):
                rows, columns = parameter.shape
                spread = torch.exp(0.25 * torch.randn(rows, 1)) * torch.exp(0.25 * torch.randn(1, columns))
                # A normal value over the root of a chi-square one is Student's t, here of six degrees of freedom.
                chi_square = torch.rand(3, rows, columns).prod(0).clamp_min(1e-30).log().div_(-3)
                t = torch.randn(rows, columns).div_(chi_square.sqrt_())
                parameter.data = t.mul_(spread).mul_(0.8 / math.sqrt(1.5 * columns))
            else:  # a norm
                parameter.data = torch.exp(0.4 * torch.randn(parameter.shape))


def activations(rows: int, columns: int, size: float = 1.0) -> torch.Tensor:
    """Return activations [1, rows, columns], of which 0.4% of the channels are ``size`` times as large."""
    x = torch.randn(1, rows, columns) * torch.exp(0.4 * torch.randn(columns))
    outliers = torch.randperm(columns)[: max(2, int(columns * 0.004))]
    x[..., outliers] = x[..., outliers] * size + (size - 1) / 2 * torch.sign(torch.randn(len(outliers)))
    return x


@dataclass(frozen=True)
class Inputs:
    """Inputs of a block, and the gradients of its outputs."""

    streams: list[torch.Tensor]
    others: list[torch.Tensor]
    gradients: list[torch.Tensor]


def inputs(case: Case, size: float) -> Inputs:
    """Return inputs with outliers of a size, the same in each call."""
    torch.manual_seed(1)

    def gradient(rows: int, columns: int) -> torch.Tensor:
        return activations(rows, columns, 1 + 0.4 * (size - 1)) * torch.exp(0.5 * torch.randn(1, rows, 1)) * 1e-3

    def each(shapes: Sequence[Shape], *size: float) -> list[torch.Tensor]:
        return [activations(*shape, *size) for shape in shapes]

    others = each(case.contexts, size) + each(case.conditions)
    return Inputs(each(case.streams, size), others, [gradient(*shape) for shape in case.streams])


def _cast(block: torch.nn.Module, layers: Sequence[torch.nn.Linear]) -> None:
    for layer in layers:
        layer.to(FP8)


def _scale(block: torch.nn.Module, layers: Sequence[torch.nn.Linear]) -> None:
    # As hunyuan_image_models.load_hunyuan_image_model does.
    util = importlib.import_module("library.fp8_optimization_utils")
    state = util.optimize_state_dict_with_fp8(block.state_dict(), None, exclude_layer_keys=["norm", "_emb"])
    util.apply_fp8_monkey_patch(block, state)
    block.load_state_dict(state, assign=True)
    block.requires_grad_(False)


#: Upstream's option to load a model in 8 bits -> what it does to a block and its linear layers.
UPSTREAM: Mapping[str, Callable[[torch.nn.Module, Sequence[torch.nn.Linear]], None]] = {"fp8_base": _cast, "fp8_scaled": _scale}


class Adapted:
    """A block that is converted to a variant, or fp32, and has a LoRA."""

    def __init__(self, case: Case, base: torch.nn.Module, variant: Variant | None, up: float, seed: int) -> None:
        """Copy the base. ``up`` is the size of the LoRA's second weights, and ``seed`` that of all its weights."""
        torch.manual_seed(seed)
        self.case, self.dtype = case, torch.bfloat16 if variant else torch.float32
        self.block = copy.deepcopy(base).to(self.dtype).requires_grad_(False)
        self.lora: list[torch.nn.Parameter] = []
        layers = [layer for layer in self.block.modules() if isinstance(layer, torch.nn.Linear)]
        for layer in layers:
            if variant and variant.kind:
                linear.convert(layer, variant.kind, "operations", "cpu")
        if variant and variant.upstream:
            UPSTREAM[_family(case).fp8](self.block, layers)
        for layer in layers:
            self._add_lora(layer, up)

    def _add_lora(self, layer: torch.nn.Linear, up: float) -> None:
        first = torch.nn.Linear(layer.in_features, RANK, bias=False)
        second = torch.nn.Linear(RANK, layer.out_features, bias=False)
        second.weight.data.normal_(std=up)
        self.lora += first.weight, second.weight
        base, apply = layer.forward, torch.nn.functional.linear
        # Anima disables autocast for its modulations, whose LoRA upstream leaves out.
        layer.forward = lambda x: base(x) + apply(apply(x, first.weight.to(x.dtype)), second.weight.to(x.dtype))

    def __call__(self, given: Inputs, depth: int = 1) -> list[torch.Tensor]:
        """Return the streams after ``depth`` times the block."""
        states, others = ([x.to(self.dtype) for x in part] for part in (given.streams, given.others))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            for _ in range(depth):
                out = self.case.call(self.block, *states, *others)
                states = [out] if isinstance(out, torch.Tensor) else list(out)
        return states

    def measures(self, given: Inputs, depth: int) -> dict[str, torch.Tensor]:
        """Return the changes of the streams and of their gradients, and the LoRA's gradients."""
        for weight in self.lora:
            weight.grad = None
        leaves = [x.clone().requires_grad_() for x in given.streams]
        outputs = self(Inputs(leaves, given.others, []), depth)
        torch.autograd.backward(outputs, [g.to(y.dtype) for g, y in zip(given.gradients, outputs, strict=True)])
        pairs = zip(leaves, given.gradients, strict=True)
        return {
            "output": _flat(y.detach().float() - x for y, x in zip(outputs, given.streams, strict=True)),
            "input_gradient": _flat(leaf.grad - gradient for leaf, gradient in pairs if leaf.grad is not None),
            "lora_gradient": _flat(weight.grad for weight in self.lora if weight.grad is not None),
        }


def _family(case: Case) -> families.Family:
    return families.BY_NAME[case.family]


def variants(case: Case) -> dict[str, Variant]:
    """Return the variants that the family has."""
    return {name: variant for name, variant in VARIANTS.items() if _family(case).fp8 or not variant.upstream}


def _flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


@contextlib.contextmanager
def _adapted(case: Case, base: torch.nn.Module, variant: Variant | None, up: float = 0.01, seed: int = 2) -> Iterator[Adapted]:
    """Yield a block whose rotation is the variant's while the context is active."""
    rotated = frozenset({variant.kind}) if variant and variant.rotated else frozenset()
    with replaced(linear, "ROTATED", rotated):
        yield Adapted(case, base, variant, up, seed)


def base_of(case: Case) -> torch.nn.Module:
    """Return the case's fp32 block with imitated weights, the same in each call."""
    torch.manual_seed(0)
    base = case.block()
    imitate_training(base)
    return base.eval()


def block_errors(
    case: Case, base: torch.nn.Module, conditions: Sequence[tuple[float, int]] = CONDITIONS
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return, by variant, condition and measure, the relative error against fp32 and the cosine to it."""

    def measure(variant: Variant | None) -> dict[str, dict[str, torch.Tensor]]:
        with _adapted(case, base, variant) as block:
            return {
                f"outliers {size:g}, depth {depth}": block.measures(inputs(case, size), depth) for size, depth in conditions
            }

    exact = measure(None)
    return {
        name: {
            condition: {measure: _compared(value, exact[condition][measure]) for measure, value in values.items()}
            for condition, values in measure(variant).items()
        }
        for name, variant in variants(case).items()
    }


def _compared(actual: torch.Tensor, exact: torch.Tensor) -> list[float]:
    return [_error(actual, exact), float(torch.cosine_similarity(actual.double(), exact.double(), 0))]


def _error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


def learned(case: Case, base: torch.nn.Module, up: float) -> dict[str, Any]:
    """Return the loss on the fp32 base of a LoRA that was trained on each variant, where no LoRA has a loss of 1.

    The LoRA learns what another one of the same rank, whose second weights have the size ``up``, adds to the outputs of the
    fp32 block. ``change`` is the size of that, relative to what the block adds to its streams. Outliers have a size of 20.
    """
    given = inputs(case, 20)
    with torch.no_grad(), _adapted(case, base, None, up=up, seed=3) as teacher:
        targets = teacher(given)
    with _adapted(case, base, None, up=0.0) as judge:

        def loss(block: Adapted) -> torch.Tensor:
            return sum((y.float() - target).square().mean() for y, target in zip(block(given), targets, strict=True))

        initial = judge.lora
        untrained = float(loss(judge).detach())
        with torch.no_grad():
            alone = _flat(judge(given))
        change = float((_flat(targets) - alone).norm() / (alone - _flat(given.streams)).norm())
        losses = {}
        for name, variant in {"fp32": None, **variants(case)}.items():
            with _adapted(case, base, variant, up=0.0) as block:
                optimizer = torch.optim.Adam(block.lora, lr=BLOCK_RATE * up)
                for weight in block.lora:
                    weight.requires_grad_()
                for _ in range(BLOCK_STEPS):
                    optimizer.zero_grad()
                    loss(block).backward()
                    optimizer.step()
            with torch.no_grad():
                for weight, trained in zip(initial, block.lora, strict=True):
                    weight.copy_(trained)
                losses[name] = float(loss(judge)) / untrained
    return {"change": change, "losses": losses}


def script_errors(folder: Path, checkout: checkouts.Checkout, family: families.Family) -> dict[str, dict[str, float]]:
    """Return, by variant, how training a tiny model with the family's LoRA script differs from training in fp32.

    ``lora``: relative error of the LoRA after the first steps. ``losses``: relative error of all losses. ``on_fp32``: mean loss
    of the trained LoRA on the fp32 base, for other noise; also for no LoRA.
    """
    run = _runner(folder, checkout, family)
    rate = ("--learning_rate", LEARNING_RATES.get(family.name, "1"))
    mixed = ("--mixed_precision", MIXED_PRECISIONS.get(family.name, "bf16"))
    words = {"fp32": FP32, **{name: (*mixed, *more) for name, more in RUNS.items()}}
    trained = {name: run(*TRAINING, *rate, *more) for name, more in words.items()}
    early = f"{arguments.OUTPUT_NAME}-step{FIRST_STEPS:08}.safetensors"
    loras = {name: _ups(output / early) for name, output in trained.items()}
    losses = {name: torch.tensor(_losses(output)) for name, output in trained.items()}
    rows = {"no LoRA": {"on_fp32": statistics.fmean(_losses(run(*JUDGING)))}}
    for name in RUNS:
        judged = run(*JUDGING, "--network_weights", str(trained[name] / f"{arguments.OUTPUT_NAME}.safetensors"))
        rows[name] = {
            "lora": _error(loras[name], loras["fp32"]),
            "losses": _error(losses[name], losses["fp32"]),
            "on_fp32": statistics.fmean(_losses(judged)),
        }
    return rows


def _ups(file: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return _flat(tensor for name, tensor in sorted(load_file(file).items()) if "lora_up" in name)


def _losses(output: Path) -> list[float]:
    lines = map(json.loads, (output / f"{arguments.OUTPUT_NAME}{journal.SUFFIX}").read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]


def _runner(folder: Path, checkout: checkouts.Checkout, family: families.Family) -> Callable[..., Path]:
    """Return a function that runs the family's LoRA script on a tiny model, with more arguments, and returns its output."""
    models = checkpoints.write(family.name, checkout.path, folder)
    images = folder / "images"
    if not images.is_dir():
        images.mkdir()
        dataset.write(images, 4, 128)

    def run(*more: str) -> Path:
        output = Path(tempfile.mkdtemp(dir=folder))
        command = [sys.executable, "-m", "kohya_ext", "--sd-scripts", str(checkout.path), family.lora]
        usual = arguments.training_arguments(family.lora, models, images, output)
        environ = {**os.environ, **environment.variables(models.tokenizers)}
        words = [*command, *usual, "--optimizer_type", "SGDNesterov", *more]
        done = subprocess.run(words, env=environ, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{family.lora} {' '.join(more)} ended with code {done.returncode}: {done.stderr[-2000:]}")
        return output

    return run


def main() -> int:
    """Measure, print the results and write each block's and family's into the output file. Other rows stay as they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--families", nargs="+", choices=list(families.BY_NAME), default=list(families.BY_NAME))
    parser.add_argument("--parts", nargs="+", choices=("blocks", "scripts"), default=("blocks", "scripts"))
    given = parser.parse_args()
    checkout = checkouts.find()
    if checkout is None:
        raise UserError("no sd-scripts found; run: python -m kohya_ext setup")
    sys.path.insert(0, str(checkout.path))
    document: dict[str, Any] = json.loads(given.output.read_text(encoding="utf-8")) if given.output.is_file() else {}
    document |= {"machine": describe_device(), "torch": torch.__version__, "sd_scripts": checkout.version}
    document |= {"image_tokens": IMAGE, "text_tokens": TEXT, "rank": RANK}

    def add(part: str, name: str, measured: Any, began: float) -> None:
        document.setdefault(part, {})[name] = measured
        print(f"{part}, {name}, {time.monotonic() - began:.0f} s: {json.dumps(measured)}", flush=True)
        given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    for case in CASES:
        if "blocks" in given.parts and case.family in given.families:
            base, began = base_of(case), time.monotonic()
            add("blocks", case.name, block_errors(case, base), began)
            if case.streams[0][1] <= WIDEST:
                began = time.monotonic()
                add("learned", case.name, [learned(case, base, up) for up in CHANGES], began)
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        for family in (families.BY_NAME[name] for name in given.families if "scripts" in given.parts):
            began = time.monotonic()
            add("scripts", family.name, script_errors(Path(folder), checkout, family), began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
