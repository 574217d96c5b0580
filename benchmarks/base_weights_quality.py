"""Measure the errors of an 8-bit frozen base on a CPU, whose integer products are the GPU's own.

    python -m benchmarks.base_weights_quality [--output FILE] [--blocks-only]

Two measurements, each against fp32:

- one transformer block of SDXL at full width with LoRA: relative errors of its output, its input gradient and its LoRA
  gradients. Its weights imitate trained ones: Student-t tails, and scales that vary by row and column. A few channels of its
  input are outliers, 20 times as large;
- four steps of the real scripts on tiny models with random weights: the relative error of the trained LoRA. Upstream's
  ``--fp8_base`` is missing, because its norms do not run on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.worker import describe_device
from kohya_ext.errors import UserError
from kohya_ext.patching.attributes import replaced
from kohya_ext.quantization import linear
from kohya_ext.sdscripts import checkouts
from kohya_ext.tiny import arguments, checkpoints, dataset, environment

OUTPUT = results.FOLDER / "base_weights_quality.json"

TOKENS, WIDTH, CONTEXT, RANK = 512, 1280, (77, 2048), 16

FP8 = torch.float8_e4m3fn

#: Variants: the 8-bit format or None, and whether rows are rotated. ``fp8_base`` is upstream's.
VARIANTS: dict[str, tuple[Any, bool]] = {
    "bf16": (None, False),
    "fp8_base": (None, False),
    "int8": (torch.int8, True),
    "int8 without rotation": (torch.int8, False),
    "fp8": (FP8, True),
    "fp8 without rotation": (FP8, False),
}

#: Scripts on tiny models, and the arguments of each variant. SGD keeps a step in proportion to its gradient.
SCRIPTS = ("sdxl_train_network.py", "flux_train_network.py")
RUNS = {
    "fp32": ("--mixed_precision", "no"),
    "bf16": ("--mixed_precision", "bf16"),
    "int8": ("--mixed_precision", "bf16", "--base_precision", "int8"),
    "fp8": ("--mixed_precision", "bf16", "--base_precision", "fp8"),
}


def _imitate_training(block: torch.nn.Module) -> None:
    """Set weights with the spread of trained ones."""
    for module in block.modules():
        if isinstance(module, torch.nn.Linear):
            rows, columns = module.weight.shape
            values = torch.distributions.StudentT(6.0).sample((rows, columns)) / math.sqrt(1.5)
            spread = torch.exp(0.25 * torch.randn(rows, 1)) * torch.exp(0.25 * torch.randn(1, columns))
            module.weight.data = values * 0.8 / math.sqrt(columns) * spread
            if module.bias is not None:
                module.bias.data.normal_(std=0.05)
        elif isinstance(module, torch.nn.LayerNorm):
            module.weight.data = torch.exp(0.4 * torch.randn(module.weight.shape))
            module.bias.data.normal_(std=0.1)


def _activations(rows: int, columns: int, share: float, size: float) -> torch.Tensor:
    """Return activations [1, rows, columns], of which a share of the channels is ``size`` times as large."""
    x = torch.randn(1, rows, columns) * torch.exp(0.4 * torch.randn(columns))
    outliers = torch.randperm(columns)[: max(2, int(columns * share))]
    x[..., outliers] = x[..., outliers] * size + size / 2 * torch.sign(torch.randn(len(outliers)))
    return x


def _add_lora(block: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Add LoRA branches to the block's linear layers. Return their weights."""
    weights: dict[str, torch.Tensor] = {}
    for name, layer in block.named_modules():
        if not isinstance(layer, torch.nn.Linear):
            continue
        torch.manual_seed(len(weights))
        down, up = torch.nn.Linear(layer.in_features, RANK, bias=False), torch.nn.Linear(RANK, layer.out_features, bias=False)
        up.weight.data.normal_(std=0.01)
        weights |= {f"{name}.down": down.weight, f"{name}.up": up.weight}
        base = layer.forward
        layer.forward = lambda x, base=base, down=down, up=up: base(x) + up(down(x))
    return weights


def _convert(block: torch.nn.Module, variant: str) -> None:
    """Convert the block's linear layers to a variant."""
    kind, _ = VARIANTS[variant]
    for layer in list(block.modules()):
        if isinstance(layer, torch.nn.Linear):
            if kind is not None:
                linear.convert(layer, kind, "operations", "cpu")
            elif variant == "fp8_base":
                layer.to(FP8)


def _pass(
    block: torch.nn.Module, x: torch.Tensor, context: torch.Tensor, gradient: torch.Tensor, variant: str
) -> dict[str, Any]:
    """Return the change of the residual stream, its gradient and the LoRA's gradients."""
    block = copy.deepcopy(block)
    is_exact = variant == "fp32"
    if not is_exact:
        block.to(torch.bfloat16)
        _convert(block, variant)
    weights = _add_lora(block)
    dtype = torch.float32 if is_exact else torch.bfloat16
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=not is_exact):
        y = block(leaf.to(dtype), context.to(dtype))
    (y.float() * gradient).sum().backward()
    gradients = torch.cat([weight.grad.flatten() for weight in weights.values() if weight.grad is not None])
    assert leaf.grad is not None
    return {"output": y.detach().float() - x, "input_gradient": leaf.grad - gradient, "lora_gradient": gradients}


@contextlib.contextmanager
def _rotation(enabled: bool) -> Iterator[None]:
    with replaced(linear, "ROTATED", frozenset({torch.int8, FP8}) if enabled else frozenset()):
        yield


def block_errors(checkout: Path) -> dict[str, dict[str, float]]:
    """Return relative errors of each variant on an SDXL block: output, input gradient and LoRA gradients."""
    sys.path.insert(0, str(checkout))
    from library.sdxl_original_unet import BasicTransformerBlock

    torch.manual_seed(0)
    block = BasicTransformerBlock(WIDTH, WIDTH // 64, 64, CONTEXT[1])
    block.set_use_sdpa(True)
    _imitate_training(block)
    block.requires_grad_(False)
    x, context = _activations(TOKENS, WIDTH, 0.004, 20.0), _activations(*CONTEXT, 0.002, 15.0)
    gradient = _activations(TOKENS, WIDTH, 0.004, 8.0) * torch.exp(0.5 * torch.randn(1, TOKENS, 1)) * 1e-3
    exact = _pass(block, x, context, gradient, "fp32")
    rows = {}
    for variant, (_, is_rotated) in VARIANTS.items():
        with _rotation(is_rotated):
            actual = _pass(block, x, context, gradient, variant)
        rows[variant] = {name: _error(actual[name], exact[name]) for name in exact}
    return rows


def _error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


def script_errors(checkout: checkouts.Checkout) -> dict[str, dict[str, float]]:
    """Return the relative error of the LoRA that each script trains in four steps, by variant."""
    rows = {}
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        for script in SCRIPTS:
            run = _runner(Path(folder), checkout, script)
            exact = run("fp32")
            rows[script] = {variant: _error(run(variant), exact) for variant in RUNS if variant != "fp32"}
    return rows


def _runner(folder: Path, checkout: checkouts.Checkout, script: str) -> Callable[[str], torch.Tensor]:
    from safetensors.torch import load_file

    models = checkpoints.write(arguments.SCRIPTS[script][0], checkout.path, folder)
    images = folder / "images"
    if not images.is_dir():
        images.mkdir()
        dataset.write(images, 4, 128)

    def run(variant: str) -> torch.Tensor:
        output = Path(tempfile.mkdtemp(dir=folder))
        command = [sys.executable, "-m", "kohya_ext", "--sd-scripts", str(checkout.path), script]
        usual = arguments.training_arguments(script, models, images, output)
        sgd = ("--optimizer_type", "SGDNesterov", "--learning_rate", "0.01")
        environ = environment.variables(models.tokenizers)
        done = subprocess.run(
            [*command, *usual, *sgd, *RUNS[variant]],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise UserError(f"{script} {variant} ended with code {done.returncode}: {done.stderr[-2000:]}")
        tensors = load_file(output / f"{arguments.OUTPUT_NAME}.safetensors")
        return torch.cat([tensor.flatten() for name, tensor in sorted(tensors.items()) if "lora_up" in name])

    return run


def main() -> int:
    """Measure, print a table and write the output file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--blocks-only", action="store_true", help="do not run the scripts")
    given = parser.parse_args()
    checkout = checkouts.find()
    if checkout is None:
        raise UserError("no sd-scripts found; run: python -m kohya_ext setup")
    document: dict[str, Any] = {
        "machine": describe_device(),
        "torch": torch.__version__,
        "sd_scripts": checkout.version,
        "block": {"class": "BasicTransformerBlock", "width": WIDTH, "tokens": TOKENS, "rank": RANK},
        "block_errors": block_errors(checkout.path),
    }
    for name, errors in document["block_errors"].items():
        print(f"{name:24}" + " ".join(f"{measure} {value:.4f}" for measure, value in errors.items()))
    if not given.blocks_only:
        document["script_errors"] = script_errors(checkout)
        for script, variants in document["script_errors"].items():
            print(f"{script:24}" + " ".join(f"{variant} {value:.4f}" for variant, value in variants.items()))
    given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
