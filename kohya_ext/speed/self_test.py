"""Try on a GPU what each feature needs, against PyTorch's own operators: ``python -m kohya_ext.speed.self_test INDEX``.

Prints one JSON line before and one after each feature, so that the parent knows which one has crashed the process or hung.
`proof` starts it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kohya_ext.config.settings import Settings
from kohya_ext.optimizers.master_weights import joined

#: Largest difference from PyTorch's operators, as a share of the norm: kernels compute in fp32 and round once to 16 bits.
TOLERANCE = 0.01

#: Rows and widths of the layers that the kernels see: SDXL's and SD 1.5's, one that fills no tile, and one of a single row; and
#: shapes of queries: FLUX's, and one that fills no tile. Shapes of weights that an optimizer steps.
_GATES = ((4096, 2560), (1024, 5120), (77, 1280), (1, 320))
_HEADS = ((1, 24, 4608, 128), (2, 3, 77, 64))
_WEIGHTS = ((1280, 640), (77, 130), (1, 320), (320, 40, 3, 3))
_LAYERS = ((4096, 640, 640, 16), (1024, 1280, 1280, 64), (77, 2048, 640, 4))


class WrongResultError(Exception):
    """A result differs from that of PyTorch's operators."""


def cuda_graphs(device: torch.device) -> None:
    """Record and replay both passes of a small model, with a pool, as `cuda_recorder` does."""
    from kohya_ext.compiling.cuda_recorder import CudaRecorder
    from kohya_ext.compiling.graphs import RecordedModel

    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3))).to(device)
    weights = [*layers.parameters()]
    reasons: list[str] = []
    recorded = RecordedModel(CudaRecorder(device), [layers], weights, reasons.append)
    for number in range(4):
        x = torch.randn(64, 256, device=device)
        expected = _gradients(layers(x), weights)
        _compare(_gradients(recorded(layers, (x,), {}), weights), expected, f"pass {number + 1}")
    if reasons or not recorded.counts["replayed"]:
        raise WrongResultError(reasons[0].partition("; ")[0] if reasons else "nothing was replayed")
    recorded.release()


def fused_operations(device: torch.device) -> None:
    """Compare the fused kernels with PyTorch's operators, forward and backward, in the 16-bit types of the GPU."""
    from torch.nn import functional as F  # noqa: N812

    from kohya_ext.kernels import casts, fused, modulation

    for dtype in (torch.float16, *([torch.bfloat16] if torch.cuda.get_device_capability(device) >= (8, 0) else [])):
        for rows, width in _GATES:
            halves = torch.randn(rows, 2 * width, device=device, dtype=dtype, requires_grad=True)
            value, gate = halves.float().chunk(2, dim=-1)
            expected = _gradients(value * F.gelu(gate), [halves])
            _compare(_gradients(fused.geglu(halves), [halves]), expected, f"GEGLU of {rows}x{width} in {dtype}")
            value, gate = halves.chunk(2, dim=-1)
            expected = _gradients(value.float() * F.silu(gate.float()), [halves])
            _compare(_gradients(fused.swiglu(gate, value), [halves]), expected, f"SwiGLU of {rows}x{width} in {dtype}")
        for images, heads, tokens, width in _HEADS:
            x = torch.randn(images, tokens, heads, width, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
            angles = torch.randn(images, 1, tokens, width // 2, device=device)
            turns = torch.polar(torch.ones_like(angles), angles)
            pairs = torch.view_as_complex(x.float().contiguous().unflatten(-1, (-1, 2)))
            expected = _gradients(torch.view_as_real(pairs * turns).flatten(-2), [x])
            _compare(_gradients(fused.rotate(x, turns), [x]), expected, f"a rotary embedding of {width} channels in {dtype}")
            halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
            turned = fused.rotate(halves, turns, halves=True).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
            _compare(_gradients(turned, [x]), expected, f"a rotary embedding of halves of {width} channels in {dtype}")
        x = torch.randn(2, 77, 1280, device=device, dtype=dtype, requires_grad=True)
        scale, shift = (torch.randn(2, 1, 1280, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
        expected = _gradients(F.layer_norm(x.float(), (1280,)) * scale + shift, [x, scale, shift])
        _compare(
            _gradients(modulation.modulated_norm(x, scale, shift, 1e-5), [x, scale, shift]), expected, f"a norm in {dtype}"
        )
        weights = [torch.randn(size, device=device, requires_grad=True) for size in (16, 100, 1280)]
        expected = _gradients(torch.cat([weight.to(dtype) for weight in weights]), weights)
        _compare(_gradients(torch.cat(casts.copies(weights, dtype)), weights), expected, f"copies of weights in {dtype}")
        for shape in _WEIGHTS:
            _adafactor(shape, dtype, device)
            if dtype is torch.bfloat16:
                _adamw(shape, device)
        for rows, inner, outer, rank in _LAYERS:
            x = torch.randn(rows, inner, device=device, dtype=dtype, requires_grad=True)
            weight = torch.randn(outer, inner, device=device, dtype=dtype) / inner**0.5
            down = torch.randn(rank, inner, device=device, dtype=dtype, requires_grad=True)
            up = torch.randn(outer, rank, device=device, dtype=dtype).div_(inner**0.5).requires_grad_()
            change = 0.5 * (x.float() @ down.float().t()) @ up.float().t()
            expected = _gradients(x.float() @ weight.float().t() + change, [x, down, up])
            result = _gradients(fused.linear_with_lora(x, weight, None, down, up, 0.5), [x, down, up])
            _compare(result, expected, f"LoRA of rank {rank} in {dtype}")
            three = torch.stack(fused.linears_with_lora(x, [weight] * 3, [down] * 3, [up] * 3, 0.5)).mean(0)
            _compare(_gradients(three, [x, down, up]), expected, f"three LoRA layers of rank {rank} in {dtype}")


def _adafactor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Compare a step of Adafactor with the same arithmetic of PyTorch's operators, from a weight of zeros."""
    from kohya_ext.kernels import adafactor

    gradient = torch.randn(shape, device=device, dtype=dtype)
    squares = gradient.float().square().add_(1e-3)
    rows, columns = squares.mean(-1), squares.mean(-2)
    factors = (rows / rows.mean(-1, keepdim=True)).rsqrt()[..., None] * columns.rsqrt()[..., None, :]
    update = gradient.float() * factors
    expected = -update / update.square().mean().sqrt().clamp(min=1.0)
    if (kernels := adafactor.kernels_on(device.type, dtype)) is not None:
        results = [torch.zeros_like(each) for each in (gradient, rows, columns)]
        random = adafactor.random_bits if dtype is torch.bfloat16 else None
        options = {"beta": 0.0, "eps": 1e-3, "clip": 1.0, "rate": 1.0, "decay": 0.5}
        kernels.step(results[0], gradient, *results[1:], **options, random=random)
        _compare(results, [expected, rows, columns], f"a step of Adafactor of {tuple(shape)} in {dtype}")
        if dtype is torch.bfloat16:
            weight, lower = (torch.zeros(shape, device=device, dtype=type_) for type_ in (dtype, torch.int16))
            kernels.step(weight, gradient, *results[1:], **options, random=random, lower=lower)
            _compare([joined(weight, lower)], [expected], f"a step of Adafactor of {tuple(shape)} with master weights")


def _adamw(shape: Sequence[int], device: torch.device) -> None:
    """Compare AdamW's first step with the same arithmetic of PyTorch's operators, from a weight of zeros."""
    from kohya_ext.kernels import adamw

    gradient = torch.randn(shape, device=device, dtype=torch.bfloat16)
    if (kernels := adamw.kernels_on(device.type)) is not None:
        results = [torch.zeros_like(gradient) for _ in range(3)]
        seed = torch.ones(1, device=device, dtype=torch.int64)
        options = {"number": 1, "betas": (0.9, 0.99), "eps": 0.1, "rate": 1.0, "decay": 0.5}
        kernels.step(results[0], gradient, *results[1:], seed, **options)
        exact = gradient.float()
        expected = [-exact / (exact.abs() + 0.1), 0.1 * exact, 0.01 * exact.square()]
        _compare(results, expected, f"a step of AdamW of {tuple(shape)}")
        weight, average, of_squares = (torch.zeros_like(gradient) for _ in range(3))
        lower = torch.zeros_like(gradient, dtype=torch.int16)
        kernels.step(weight, gradient, average, of_squares, seed, **options, lower=lower)
        _compare([joined(weight, lower)], expected[:1], f"a step of AdamW of {tuple(shape)} with master weights")


class _Block(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
    """A transformer block's feed-forward part with a LoRA."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.lora_down, self.lora_up = torch.nn.Linear(width, rank, bias=False), torch.nn.Linear(rank, 4 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        hidden = torch.nn.functional.gelu(self.up(hidden) + 0.5 * self.lora_up(self.lora_down(hidden)))
        return x + self.down(hidden)


def selective_torch_compile(device: torch.device) -> None:
    """Compile both passes of a block, as the run does, and compare them with eager ones, in the GPU's usual 16-bit type."""
    from kohya_ext.compiling.blocks import RUN, compile_method

    compiled = compile_method(_Block.forward, f"{__name__}:_Block.forward", "1 of 1", Settings())
    block = _Block(640, 16).to(device)
    weights = [*block.parameters()]
    x = torch.randn(2, 256, 640, device=device, requires_grad=True)
    dtype = torch.bfloat16 if device.type == "cpu" or torch.cuda.is_bf16_supported() else torch.float16
    with torch.autocast(device.type, dtype):
        expected, result = block(x), compiled(block, x)
    expected, result = (_gradients(each, [x, *weights]) for each in (expected, result))
    if (problem := RUN.disabled_because or RUN.blocks[f"{__name__}:_Block.forward"].eager_because) is not None:
        raise WrongResultError(problem)
    _compare(result, expected, f"a compiled block in {dtype}")


def one_way_block_swap(device: torch.device) -> None:
    """Run a stack of layers of which two have memory on the GPU, so that each takes that of the one before the last."""
    from concurrent.futures import ThreadPoolExecutor

    from kohya_ext.patching.page_lock import PageLock
    from kohya_ext.patching.swapped_blocks import OneWaySwap

    blocks = [torch.nn.Linear(2048, 2048, bias=False, device=device).requires_grad_(False) for _ in range(5)]
    # Copies take longer than the product of few rows, and less time than that of many.
    inputs = [torch.randn(rows, 2048, device=device) for rows in (1, 64, 16384)]
    expected = [torch.nn.Sequential(*blocks)(x) for x in inputs]
    with ThreadPoolExecutor(max_workers=1) as executor:
        swap = OneWaySwap(device, torch.cuda.Stream(device), executor, PageLock(2**30))
        for index, block in enumerate(blocks):
            swap.keep(block, on_host=index >= 2)
        arrivals: dict[int, Any] = {}
        for _ in range(10):
            for x, reference in zip(inputs, expected, strict=True):
                for index, block in enumerate(blocks):
                    if index in arrivals:
                        swap.wait(arrivals.pop(index))
                    x = block(x)
                    following = (index + 2) % len(blocks)
                    arrivals[following] = swap.submit(block, blocks[following])
                if not torch.equal(x, reference):
                    raise WrongResultError("a stack of swapped layers differs from the same layers on the GPU")
        swap.drain()


TESTS: Mapping[str, Callable[[torch.device], None]] = {
    "cuda_graphs": cuda_graphs,
    "fused_operations": fused_operations,
    "selective_torch_compile": selective_torch_compile,
    "one_way_block_swap": one_way_block_swap,
}


def _gradients(output: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return an output and the gradients of its sum, weighted so that all magnitudes and both signs occur."""
    factors = torch.arange(output.numel(), device=output.device, dtype=torch.float32).cos().reshape(output.shape)
    output.backward(factors.to(output.dtype))
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    for weight in weights:
        weight.grad = None
    return [output.detach(), *(gradient.clone() for gradient in gradients)]


def _compare(results: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    for result, reference in zip(results, expected, strict=True):
        norm = float(reference.float().norm())
        share = float((result.float() - reference.float()).norm()) / (norm or 1)
        if not share <= TOLERANCE:
            raise WrongResultError(f"{what} differs from PyTorch's by {share:.2g} of the norm")


def run(names: list[str], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield {"begun": name} before each named test, and {"name": name, "problem": text or None} after it."""
    for name in names:
        yield {"begun": name}
        try:
            TESTS[name](device)
            torch.cuda.synchronize(device)
            problem = None
        except Exception as error:  # whatever it is, the feature cannot be used
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            if isinstance(error, WrongResultError):
                problem = str(error)
        yield {"name": name, "problem": problem}


def main() -> None:
    """Run the tests that the command line names, on the device of its first word."""
    index, *names = sys.argv[1:]
    torch.cuda.set_device(int(index))
    for line in run(names, torch.device("cuda", int(index))):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
