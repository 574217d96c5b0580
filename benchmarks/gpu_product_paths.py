"""Compare ways in which linear layers multiply on a GPU: the range of fp16, fp8 by torch and by Triton, dequantized weights.

    python -m benchmarks.gpu_product_paths [--output FILE]

Takes half a minute. Prints a table and writes JSON: which results are finite in fp16, and errors and seconds of fp8 products by
torch's scaled product and by the kernels alone, and of layers that dequantize their weight, in one pass and in two.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import results
from benchmarks.device import describe_device
from benchmarks.gpu_base_weights import BF16, FP8, KINDS, Sets, seconds
from kohya_ext.kernels.fused import linear_with_lora
from kohya_ext.patching.attributes import replaced
from kohya_ext.quantization import arithmetic, kernels, linear
from kohya_ext.quantization.linear import rotate

OUTPUT = results.FOLDER / "gpu_product_paths.json"

FP16 = torch.float16

#: Rows, inner and outer size: layers of SDXL and FLUX, and a modulation of FLUX, which has one row for each image.
SHAPES = ((4096, 640, 640), (1024, 1280, 1280), (1024, 1280, 10240), (4608, 3072, 12288), (1, 3072, 18432))

#: The largest element of the output's gradient in the fp16 cases.
GRADIENTS = (1, 16, 256, 4096)

RANK, ALPHA = 128, 1.0


def _is_finite(values: tuple[Any, ...]) -> bool:
    return all(bool(value.isfinite().all()) for value in values)


def _errors(actual: Iterable[Any], expected: Iterable[Any]) -> list[float]:
    """Return the relative errors of tensors."""
    pairs = ((a.detach().double(), b.detach().double()) for a, b in zip(actual, expected, strict=True))
    return [round(float((a - b).norm() / b.norm()), 5) for a, b in pairs]


def lora_in_fp16() -> Iterator[dict[str, Any]]:
    """Yield whether LoRA's gradients are finite: upstream's, the fused ones, and those of an up weight that is scaled."""
    rows, width, outputs = 4096, 640, 640
    weight, x = torch.randn(outputs, width, device="cuda") * 0.05, torch.randn(rows, width, device="cuda") + 0.5
    factor = ALPHA / RANK

    def two_branches(x: Any, down: Any, up: Any) -> Any:
        hidden = torch.nn.functional.linear(x, down)
        return torch.nn.functional.linear(x, weight) + torch.nn.functional.linear(hidden, up) * factor

    ways: dict[str, Callable[..., Any]] = {
        "upstream": two_branches,
        "fused": lambda x, down, up: linear_with_lora(x, weight, None, down, up, factor),
        "scaled up weight": lambda x, down, up: linear_with_lora(x, weight, None, down, up * factor, 1.0),
    }
    down, up = torch.randn(RANK, width, device="cuda") * 0.05, torch.randn(outputs, RANK, device="cuda") * 0.01
    exact = [each.double().requires_grad_() for each in (x, down, up)]
    product = (exact[0] @ exact[1].t()) @ exact[2].t() * factor + exact[0] @ weight.double().t()
    for size in GRADIENTS:
        gradient = torch.full((rows, outputs), float(size), device="cuda")
        expected = torch.autograd.grad(product, exact, gradient.double(), retain_graph=True)
        row: dict[str, Any] = {"gradient": size}
        for name, way in ways.items():
            leaves = [each.clone().requires_grad_() for each in (x, down, up)]
            with torch.autocast("cuda", FP16):
                y = way(*leaves)
            actual = torch.autograd.grad(y, leaves, gradient.to(y.dtype))
            row[name] = {"finite": _is_finite(actual), "errors": _errors(actual, expected)}
        yield row


def rotation_in_fp16() -> Iterator[dict[str, Any]]:
    """Yield for each way of an int8 layer whether output and input gradient are finite where one rotated element is large."""
    width = 640
    x = torch.full((64, width), 9000.0, device="cuda")  # 72000 when rotated
    gradient = torch.full((64, width), 32.0, device="cuda")  # of x 20480, and 163840 before it is rotated back
    for products in ("kernels", "weights"):
        layers = [torch.nn.Linear(width, width, bias=False, device="cuda").requires_grad_(False) for _ in range(2)]
        torch.nn.init.constant_(layers[1].weight, 1.0)
        actual, expected = [], []
        for layer, values in zip(layers, (x, x / 1e4), strict=True):
            linear.convert(layer, torch.int8, products, "cuda")
            leaf = values.to(FP16).requires_grad_()
            with torch.autocast("cuda", FP16):
                y = layer(leaf)
            actual.append((y, torch.autograd.grad(y, leaf, gradient.to(FP16))[0]))
            exact = linear.dequantized(layer).double()
            expected.append((leaf.double() @ exact.t(), gradient.double() @ exact))
        output, back = actual[0][0], actual[1][1]
        errors = _errors((output, back), (expected[0][0], expected[1][1]))
        yield {"products": products, "finite": [_is_finite((output,)), _is_finite((back,))], "errors": errors}


def fp8_products(sets: Sets) -> dict[str, Any]:
    """Return errors and seconds of fp8 layers, forward and backward, by torch's product and by the kernels alone."""
    weights = sets.quantized(FP8)
    y, back = sets.x[0].float() @ sets.w[0].float().t() + sets.bias.float(), sets.g[0].float() @ sets.w[0].float()
    row: dict[str, Any] = {}
    for name, by_torch in (("torch", True), ("triton", False)):

        def forward(i: int, by_torch: bool = by_torch) -> Any:
            bits, scales = weights[i]
            rows = kernels.quantized_input(sets.x[i], FP8, BF16)
            return kernels.forward(rows, bits.view(torch.int8), scales, sets.bias, BF16, by_torch=by_torch)

        def backward(i: int, by_torch: bool = by_torch) -> Any:
            bits, scales = weights[i]
            return kernels.backward(sets.g[i], bits.view(torch.int8), scales, BF16, FP8, by_torch=by_torch)

        try:
            errors = _errors((forward(0), backward(0)), (y, back))
            row[name] = {"errors": errors, "seconds": [seconds(way, sets.count, 5) for way in (forward, backward)]}
        except RuntimeError as error:  # a build of torch without row-wise scales
            row[name] = {"failed": str(error).splitlines()[0]}
    return row


def _in_two_passes(weight: Any, scales: Any, dtype: Any, kind: Any) -> Any:
    """Dequantize as before: one operator casts, another multiplies what it wrote."""
    return weight.view(kind).to(dtype).mul_(scales[:, None])


def dequantizing_layers(sets: Sets) -> dict[str, Any]:
    """Return errors and seconds of layers that dequantize their weight, forward and backward, now and in two passes."""
    y, back = sets.x[0].float() @ sets.w[0].float().t() + sets.bias.float(), sets.g[0].float() @ sets.w[0].float()
    row: dict[str, Any] = {}
    for kind, kind_name in KINDS.items():
        weights = [arithmetic.quantize(rotate(w.float(), kind), kind) for w in sets.w]

        def forward(i: int, weights: Any = weights, kind: Any = kind) -> Any:
            operand = linear._operand(sets.x[i], BF16, kind, "weights")
            return linear._product(operand, weights[i][0].view(torch.int8), weights[i][1], sets.bias, BF16, kind, "weights")

        def backward(i: int, weights: Any = weights, kind: Any = kind) -> Any:
            return linear._input_gradient(sets.g[i], weights[i][0].view(torch.int8), weights[i][1], BF16, kind, "weights")

        errors = _errors((forward(0), backward(0)), (y, back))
        row[kind_name] = {"errors": errors, "seconds": [seconds(way, sets.count, 5) for way in (forward, backward)]}
        with replaced(linear, "_dequantized", _in_two_passes), replaced(linear, "_scales_rows", lambda *_: False):
            row[kind_name]["in two passes"] = [seconds(way, sets.count, 5) for way in (forward, backward)]
    return row


def _lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield the results as text: times in microseconds, forward + backward."""
    for row in document["lora_in_fp16"]:
        ways = {name: way for name, way in row.items() if name != "gradient"}
        parts = (f"{name} {'finite' if way['finite'] else 'INF'} {max(way['errors']):.4f}" for name, way in ways.items())
        yield f"LoRA in fp16, gradient {row['gradient']}: {', '.join(parts)}"
    for row in document["rotation_in_fp16"]:
        yield f"int8 in fp16, {row['products']}: finite {row['finite']}, errors {row['errors']}"
    for row in document["shapes"]:
        shape = "x".join(map(str, row["shape"]))
        for name, way in row["fp8_products"].items():
            yield f"fp8 {shape}, {name}: " + (way.get("failed") or f"{_microseconds(way['seconds'])}, errors {way['errors']}")
        for name, way in row["dequantizing"].items():
            before = _microseconds(way["in two passes"])
            yield f"dequantized {name} {shape}: {_microseconds(way['seconds'])}, in two passes {before}, errors {way['errors']}"
    yield f"{document['seconds']} s in total"


def _microseconds(pair: list[float]) -> str:
    return " + ".join(f"{1e6 * each:.0f}" for each in pair)


def main() -> int:
    """Run all comparisons, print them and write the output file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    begin = time.monotonic()
    torch.manual_seed(0)
    document: dict[str, Any] = {"machine": describe_device(), "torch": torch.__version__, "triton": triton.__version__}
    document |= {"lora_in_fp16": [*lora_in_fp16()], "rotation_in_fp16": [*rotation_in_fp16()], "shapes": []}
    for shape in SHAPES:
        sets = Sets(*shape)
        parts: dict[str, Callable[[], Any]] = {
            "fp8_products": partial(fp8_products, sets),
            "dequantizing": partial(dequantizing_layers, sets),
        }
        document["shapes"].append({"shape": shape, **{name: part() for name, part in parts.items()}})
    document |= {"seconds": round(time.monotonic() - begin, 1), **results.kohya_ext_commit()}
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print("\n".join(_lines(document)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
