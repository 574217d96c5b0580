"""Time the linear layers of SDXL and FLUX with 8-bit frozen weights on a GPU, and measure their errors.

    python -m benchmarks.gpu_base_weights [--output FILE] [--limit SECONDS]

The passes are forward and input gradient. Kernels are timed as replays of a CUDA graph over several sets of random inputs and
weights, so that launches do not count and the sets exceed the L2 cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton

from benchmarks import results
from benchmarks.device import describe_device
from kohya_ext.gpu import rates
from kohya_ext.quantization import arithmetic, kernels
from kohya_ext.quantization.arithmetic import ROTATED
from kohya_ext.quantization.linear import convert, rotate

OUTPUT = results.FOLDER / "gpu_base_weights.json"

#: Rows, inner and outer size of linear layers: SDXL's and FLUX's at 1024 x 1024.
SHAPES = (
    *((4096, 640, 640), (1024, 1280, 1280), (4096, 640, 5120), (4096, 2560, 640), (1024, 1280, 10240), (1024, 5120, 1280)),
    *((4608, 3072, 9216), (4608, 3072, 12288), (4608, 12288, 3072), (4608, 3072, 21504), (4608, 15360, 3072)),
)

#: Bytes of all sets of a shape, at least: twice the L2 cache of the largest GPU.
SETS_BYTES = 100_000_000

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
KINDS = {torch.int8: "int8", FP8: "fp8"}


def seconds(work: Callable[[int], Any], sets: int, samples: int = 9) -> float:
    """Return the median seconds of ``work(set)`` on the GPU, over all sets in one CUDA graph."""
    indices = itertools.cycle(range(sets))
    return rates.seconds(lambda: work(next(indices)), sets, samples)


class Sets:
    """Sets of inputs, output gradients and weights of one shape, and their 8-bit forms."""

    def __init__(self, m: int, k: int, n: int) -> None:
        self.count = max(2, min(16, math.ceil(SETS_BYTES / (2 * (m * k + m * n + k * n)))))
        outliers = torch.ones(k, device="cuda")
        outliers[torch.randperm(k, device="cuda")[: max(2, k // 250)]] = 20.0
        self.x = [(torch.randn(m, k, device="cuda") * outliers).to(BF16) for _ in range(self.count)]
        sizes = torch.randn(m, 1, device="cuda").mul(0.5).exp() * 1e-3
        self.g = [(torch.randn(m, n, device="cuda") * sizes).to(BF16) for _ in range(self.count)]
        self.w = [(torch.randn(n, k, device="cuda") / math.sqrt(k)).to(BF16) for _ in range(self.count)]
        self.bias = torch.randn(n, device="cuda").to(BF16)
        self.weights: dict[Any, list[tuple[Any, Any]]] = {}

    def quantized(self, dtype: Any) -> list[tuple[Any, Any]]:
        """Return each set's rotated weight in 8 bits, and its scales."""
        if dtype not in self.weights:
            self.weights[dtype] = [arithmetic.quantize(rotate(w.float(), dtype), dtype) for w in self.w]
        return self.weights[dtype]


def _scaled(a: Any, b: Any, scales_a: Any, scales_b: Any) -> Any:
    return torch._scaled_mm(a, b, scale_a=scales_a[:, None], scale_b=scales_b[None, :], out_dtype=BF16)


def _eager(sets: Sets, dtype: Any) -> dict[str, Callable[[int], Any]]:
    """Return the passes with torch's operations alone."""
    weights = sets.quantized(dtype)

    def product(a: Any, b: Any, scales_a: Any, scales_b: Any) -> Any:
        if dtype is FP8:
            return _scaled(a, b, scales_a, scales_b)
        return (torch._int_mm(a, b).float() * scales_a[:, None] * scales_b).to(BF16)

    def forward(i: int) -> Any:
        a, scales = arithmetic.quantize(rotate(sets.x[i].float(), dtype), dtype)
        return product(a, weights[i][0].t(), scales, weights[i][1]) + sets.bias

    def backward(i: int) -> Any:
        a, scales = arithmetic.quantize(sets.g[i].float() * weights[i][1], dtype)
        ones = torch.ones(weights[i][0].shape[1], device="cuda")
        return rotate(product(a, weights[i][0].t().contiguous().t(), scales, ones), dtype)

    return {"forward": forward, "backward": backward}


def _parts(sets: Sets, dtype: Any) -> dict[str, Callable[[int], Any]]:
    """Return a layer's passes, and their kernels one by one."""
    weights, rotated = sets.quantized(dtype), dtype in ROTATED
    x = [kernels.quantize(x, dtype, BF16, rotated=rotated) for x in sets.x]
    g = [kernels.quantize(g, dtype, BF16, factors=scales) for g, (_, scales) in zip(sets.g, weights, strict=True)]
    turned = [kernels.transpose(q.view(torch.int8)).view(dtype) for q, _ in weights]
    parts: dict[str, Callable[[int], Any]] = {
        "forward": lambda i: kernels.forward(
            kernels.quantized_input(sets.x[i], dtype, BF16), weights[i][0].view(torch.int8), weights[i][1], sets.bias, BF16
        ),
        "backward": lambda i: kernels.backward(sets.g[i], weights[i][0].view(torch.int8), weights[i][1], BF16, dtype),
        "quantize_x": lambda i: kernels.quantize(sets.x[i], dtype, BF16, rotated=rotated),
        "quantize_g": lambda i: kernels.quantize(sets.g[i], dtype, BF16, factors=weights[i][1]),
        "transpose": lambda i: kernels.transpose(weights[i][0].view(torch.int8)),
    }
    for name, tile in (("large", kernels.TILES), ("small", kernels.SMALL_TILES)):
        parts[f"forward_{name}_tiles"] = lambda i, tile=tile: kernels.multiply(  # type: ignore[misc]
            x[i][0], weights[i][0], x[i][1], BF16, tile, scales_b=weights[i][1], bias=sets.bias
        )
        parts[f"backward_{name}_tiles"] = lambda i, tile=tile: kernels.multiply(  # type: ignore[misc]
            g[i][0], turned[i], g[i][1], BF16, tile, rotated=rotated
        )
    if dtype is torch.int8:
        parts["torch_forward"] = lambda i: torch._int_mm(x[i][0], weights[i][0].t())
    else:
        parts["torch_forward"] = lambda i: _scaled(x[i][0], weights[i][0].t(), x[i][1], weights[i][1])
    return parts


def _error(actual: Any, expected: Any) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def errors(sets: Sets) -> dict[str, dict[str, float]]:
    """Return relative errors of output and input gradient against fp32, and of the kernels against torch's operations."""
    x, g, w = sets.x[0], sets.g[0], sets.w[0]
    y, gx = x.float() @ w.float().t() + sets.bias.float(), g.float() @ w.float()
    rows: dict[str, dict[str, float]] = {}
    rows["bf16"] = {
        "output": _error(torch.nn.functional.linear(x, w, sets.bias), y),
        "input_gradient": _error(g @ w, gx),
    }
    for dtype, name in KINDS.items():
        eager, parts = _eager(sets, dtype), _parts(sets, dtype)
        out, back = parts["forward"](0), parts["backward"](0)
        rows[name] = {
            "output": _error(out, y),
            "input_gradient": _error(back, gx),
            "output_from_eager": _error(out, eager["forward"](0)),
            "input_gradient_from_eager": _error(back, eager["backward"](0)),
        }
    return rows


class _Block(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
    """A transformer block of SDXL with LoRA on every linear layer."""

    def __init__(self, width: int, kind: Any) -> None:
        super().__init__()
        sizes = dict.fromkeys(("q", "k", "v", "o", "cross_q", "cross_o"), (width, width))
        sizes |= {"cross_k": (2048, width), "cross_v": (2048, width), "gate": (width, 8 * width), "out": (4 * width, width)}
        self.base = torch.nn.ModuleDict({name: torch.nn.Linear(*size, dtype=BF16) for name, size in sizes.items()})
        self.down = torch.nn.ModuleDict({name: torch.nn.Linear(size[0], 16, bias=False) for name, size in sizes.items()})
        self.up = torch.nn.ModuleDict({name: torch.nn.Linear(16, size[1], bias=False) for name, size in sizes.items()})
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width, dtype=BF16) for _ in range(3))
        self.cuda()
        for layer in self.base.values():
            layer.requires_grad_(False)
            if kind is not None:
                convert(layer, kind, "kernels", "cuda")

    def _layer(self, name: str, x: Any) -> Any:
        return self.base[name](x) + self.up[name](self.down[name](x))

    def _attention(self, x: Any, context: Any, prefix: str) -> Any:
        q, k, v = (
            self._layer(prefix + name, each).unflatten(-1, (-1, 64)).transpose(1, 2)
            for name, each in (("q", x), ("k", context), ("v", context))
        )
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self._layer(prefix + "o", out.transpose(1, 2).flatten(2))

    def forward(self, x: Any, context: Any) -> Any:
        normed = self.norms[0](x)
        x = x + self._attention(normed, normed, "")
        x = x + self._attention(self.norms[1](x), context, "cross_")
        value, gate = self._layer("gate", self.norms[2](x)).chunk(2, dim=-1)
        return x + self._layer("out", value * torch.nn.functional.gelu(gate))


def blocks() -> Iterator[dict[str, Any]]:
    """Yield seconds of a block's forward and backward pass, in a CUDA graph and on the host, by width and format."""
    for tokens, width in ((4096, 640), (1024, 1280)):
        x = torch.randn(1, tokens, width, device="cuda", dtype=BF16, requires_grad=True)
        context, gradient = torch.randn(1, 77, 2048, device="cuda", dtype=BF16), torch.randn_like(x)
        for kind, name in ((None, "bf16"), *KINDS.items()):
            block = _Block(width, kind)

            def step(_: int, block: Any = block, x: Any = x, context: Any = context, gradient: Any = gradient) -> None:
                with torch.autocast("cuda", BF16, cache_enabled=False):
                    y = block(x, context)
                torch.autograd.grad(y, [x, *(weight for weight in block.parameters() if weight.requires_grad)], gradient)

            row: dict[str, Any] = {"tokens": tokens, "width": width, "base": name}
            try:
                step(0)
                row |= {"host_microseconds": _host(partial(step, 0), 5), "seconds": seconds(step, 4)}
            except RuntimeError as error:  # an attention kernel that the GPU lacks
                row["failed"] = str(error).splitlines()[0]
            yield row


def host_microseconds() -> dict[str, float]:
    """Return host microseconds of one call of the small layer: bf16, and the kernels of a forward pass."""
    sets = Sets(1024, 1280, 1280)
    (q, scales), x = sets.quantized(torch.int8)[0], sets.x[0]

    calls = {
        "bf16": lambda: torch.nn.functional.linear(x, sets.w[0], sets.bias),
        "int8": lambda: kernels.forward(kernels.quantized_input(x, torch.int8, BF16), q, scales, sets.bias, BF16),
    }
    return {name: _host(call) for name, call in calls.items()}


def _host(call: Callable[[], Any], count: int = 100) -> float:
    taken = []
    for _ in range(7):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        taken.append(time.perf_counter() - begin)
    return round(median(taken) / count * 1e6, 2)


def measure(deadline: float) -> Iterator[dict[str, Any]]:
    """Yield the seconds and errors of each shape, until the deadline."""
    for shape in SHAPES:
        if time.monotonic() > deadline:
            yield {"shape": shape, "seconds": {}, "failed": {"all": "no time left"}}
            continue
        sets = Sets(*shape)
        row: dict[str, Any] = {"shape": shape, "sets": sets.count, "seconds": {}, "failed": {}}
        works: dict[str, Callable[[], dict[str, Callable[[int], Any]]]] = {
            "bf16": lambda sets=sets: {  # type: ignore[misc]
                "forward": lambda i: torch.nn.functional.linear(sets.x[i], sets.w[i], sets.bias),
                "backward": lambda i: sets.g[i] @ sets.w[i],
            },
            **{name: partial(_parts, sets, dtype) for dtype, name in KINDS.items()},
            **{f"{name} eager": partial(_eager, sets, dtype) for dtype, name in KINDS.items()},
        }
        for name, create in works.items():
            _measure(row, name, create, sets.count)
        try:
            row["errors"] = errors(sets)
        except Exception as error:  # a kernel that a version of Triton cannot compile must not lose the other rows
            row["failed"]["errors"] = repr(error)[-300:]
        yield row


def _measure(row: dict[str, Any], name: str, create: Callable[[], dict[str, Callable[[int], Any]]], sets: int) -> None:
    """Measure each work and add its seconds, or the error, to the row."""
    try:
        works = create()
    except Exception as error:
        row["failed"][name] = repr(error)[-300:]
        return
    times = row["seconds"].setdefault(name, {})
    for part, work in works.items():
        try:
            times[part] = seconds(work, sets)
        except Exception as error:  # a shape or tile that the GPU lacks
            row["failed"][f"{name} {part}"] = repr(error)[-300:]


def _table(document: dict[str, Any]) -> Iterator[str]:
    """Yield lines: microseconds of forward and backward pass, errors of output and input gradient, and failures."""
    for row in document["shapes"]:
        times = {name: parts for name, parts in row["seconds"].items() if {"forward", "backward"} <= parts.keys()}
        passes = (f"{name} {1e6 * parts['forward']:.0f} + {1e6 * parts['backward']:.0f}" for name, parts in times.items())
        yield f"{'x'.join(map(str, row['shape']))}: " + ", ".join(passes)
        rows = row.get("errors", {}).items()
        yield "   errors " + ", ".join(f"{name} {each['output']:.4f} {each['input_gradient']:.4f}" for name, each in rows)
        yield from (f"   {name} failed: {reason[-120:]}" for name, reason in row["failed"].items())
    for row in document["blocks"]:
        result = row.get("failed") or f"{1e6 * row['seconds']:.0f}, on the host {row['host_microseconds']:.0f}"
        yield f"block {row['tokens']}x{row['width']} {row['base']}: {result}"


def main() -> int:
    """Measure all shapes, print a table and write the output file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--limit", type=float, default=80.0, metavar="SECONDS", help="start no measurement after this time")
    given = parser.parse_args()
    begin = time.monotonic()
    torch.manual_seed(0)
    rows = list(measure(begin + given.limit))
    document = {
        "machine": describe_device(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "host_microseconds": host_microseconds(),
        "seconds": round(time.monotonic() - begin, 1),
        "shapes": rows,
        "blocks": list(blocks()),
    }
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print("\n".join(_table(document)))
    print(f"host microseconds {document['host_microseconds']}; {document['seconds']} s in total")
    return 0


if __name__ == "__main__":
    sys.exit(main())
