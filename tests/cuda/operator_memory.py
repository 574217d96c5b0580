"""Operators that copy their inputs or add parts of results, and what they allocate and return on the virtual GPU, as JSON.

Without a GPU the same operators run under the estimate's tracker (test_operator_memory).
"""

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from packaging import version

#: Smallest size in bytes that counts: without kernels' small tables and sums.
LEAST = 2**20

BATCH, CHANNELS, SIDE, WIDTH = 2, 64, 128, 512

_aten = torch.ops.aten


def images(layout: str, channels: int = CHANNELS, side: int = SIDE) -> torch.Tensor:
    """Return a tensor of shape (batch, channels, side, side): a part of another one, or with the channels last."""
    if layout == "part":
        return torch.empty(BATCH, 2 * channels, side, side, dtype=torch.bfloat16)[:, :channels]
    if layout == "permuted":
        return torch.empty(BATCH, side, side, channels, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    return torch.empty(BATCH, channels, side, side, dtype=torch.bfloat16)


def tokens(layout: str) -> torch.Tensor:
    """Return a tensor of shape (batch, length, width)."""
    if layout == "part":
        return torch.empty(BATCH, 1024, 2 * WIDTH, dtype=torch.bfloat16)[..., :WIDTH]
    return torch.empty(BATCH, 1024, WIDTH, dtype=torch.bfloat16)


def heads(layout: str, length: int, width: int) -> torch.Tensor:
    """Return a tensor of shape (batch, heads, length, width): whole, or with the tokens before the heads, also as a part."""
    if layout == "whole":
        return torch.empty(BATCH, 8, length, width, dtype=torch.bfloat16, requires_grad=True)
    every = torch.empty(BATCH, length, 3 * 8 if layout == "part" else 8, width, dtype=torch.bfloat16)
    return every[:, :, :8].transpose(1, 2).requires_grad_()


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name of each case and a call of its operator, with inputs on torch's default device."""
    for name, operator, arguments in _operators():
        yield name, partial(operator, *arguments)


def _operators() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    weight = torch.empty(CHANNELS, CHANNELS, 3, 3, dtype=torch.bfloat16)
    scale, vector = torch.empty(CHANNELS, dtype=torch.bfloat16), torch.empty(WIDTH, dtype=torch.bfloat16)
    window = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    sums = torch.empty(BATCH, 1024, 1)
    sizes = ([SIDE, SIDE], [BATCH, CHANNELS, SIDE // 2, SIDE // 2])
    every = [True, True, True]
    # The first matrix product, because it would leave cuBLAS's workspace.
    yield "outer products", torch.bmm, (torch.empty(BATCH, 1024, 1), torch.empty(BATCH, 1, 1024))
    for given in ("whole", "part", "permuted"):
        image = images(given)
        yield f"convolution {given}", _aten.convolution, (image, weight, None, *window)
        for other in ("whole", "part", "permuted"):
            for part, computed in (("input", [True, False, False]), ("weight", [False, True, False])):
                of_part = (image, images(other), weight, [0], *window, computed)
                yield f"convolution_backward {given} {other} {part}", _aten.convolution_backward, of_part
        yield f"upsample_nearest2d {given}", _aten.upsample_nearest2d, (image, None, [2.0, 2.0])
        yield f"upsample_nearest2d_backward {given}", _aten.upsample_nearest2d_backward, (image, *sizes)
        yield f"group_norm {given}", torch.group_norm, (image, 32, scale, scale, 1e-5)
        wide = torch.empty(512, 512, 3, 3, dtype=torch.bfloat16)
        yield f"convolution {given} with a large weight", _aten.convolution, (images(given, 512, 8), wide, None, *window)
    for given in ("whole", "part"):
        token = tokens(given)
        yield f"native_layer_norm {given}", _aten.native_layer_norm, (token, [WIDTH], vector, vector, 1e-5)
        yield f"_softmax {given}", _aten._softmax, (token, -1, False)
        for other in ("whole", "part"):
            arguments = (token, tokens(other), [WIDTH], sums, sums, vector, vector, every)
            yield f"native_layer_norm_backward {given} {other}", _aten.native_layer_norm_backward, arguments
            arguments = (token, tokens(other), -1, torch.bfloat16)
            yield f"_softmax_backward_data {given} {other}", _aten._softmax_backward_data, arguments
    yield from _attention()
    rms_norm = torch.nn.functional.rms_norm
    for given in ("whole", "part") if hasattr(_aten, "_fused_rms_norm") else ():
        token = tokens(given).detach().requires_grad_()
        yield f"rms_norm {given}", rms_norm, (token, (WIDTH,), vector, 1e-6)
        normalized = rms_norm(token, (WIDTH,), vector, 1e-6)
        for other in ("whole", "part"):
            yield f"gradient of rms_norm {given} {other}", torch.autograd.grad, (normalized, token, tokens(other), True)
    image = images("whole").requires_grad_()
    normalized = torch.group_norm(image, 32, scale, scale, 1e-5)
    for given in ("whole", "part", "permuted"):
        yield f"gradient of group_norm {given}", torch.autograd.grad, (normalized, image, images(given), True)


def _attention() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    attention = torch.nn.functional.scaled_dot_product_attention
    # torch 2.6 rounds a width of 160 to itself, later ones to 192.
    widths = () if version.parse(torch.__version__).release < (2, 7) else ((256, 256, 160), (256, 77, 160))
    for length, keys, width in ((4096, 4096, 40), (1024, 77, 80), (256, 4096, 64), (1024, 1024, 512), *widths):
        query, key = (torch.empty(BATCH, count, 8, width, dtype=torch.bfloat16).transpose(1, 2) for count in (length, keys))
        yield f"attention {length} {keys} {width}", attention, (query, key, key)
    for length, keys, width in ((2048, 2048, 64), (1024, 2048, 96), (2048, 1000, 128), (1024, 1024, 160)):
        query, key = heads("whole", length, width), heads("whole", keys, width)
        mask = torch.zeros(BATCH, 1, 1, keys, dtype=torch.bfloat16).expand(-1, 8, length, -1)
        yield f"masked attention {length} {keys} {width}", attention, (query, key, key, mask)
        output = attention(query, key, key, mask)
        yield f"gradient of masked attention {length} {keys} {width}", torch.autograd.grad, (output, query, output, True)
    for kind, mask in (("", None), ("masked ", torch.zeros(BATCH, 8, 1024, 1536, dtype=torch.bfloat16))):
        for layout, of_keys, given in itertools.product(("whole", "part", "permuted"), repeat=3):
            inputs = heads(layout, 1024, 64), heads(of_keys, 1536, 64), heads("part", 1536, 64)
            arguments = (attention(*inputs, mask), inputs, heads(given, 1024, 64), True)
            yield f"gradients of {kind}attention {layout} {of_keys} {given}", torch.autograd.grad, arguments


def run(call: Callable[[], Any]) -> tuple[list[tuple[int, bool]], list[tuple[int, ...]]]:
    """Return the bytes of each large allocation of a call and whether it is a result, and the strides of the results."""
    call()  # libraries allocate in a first call
    torch.cuda.memory._record_memory_history(max_entries=1000, context=None)
    results = call()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    kept = {value.data_ptr() for value in tensors(results)}
    large = [event for event in trace if event["action"] == "alloc" and event["size"] >= LEAST]
    return [(event["size"], event["addr"] in kept) for event in large], strides(results)


def strides(results: Any) -> list[tuple[int, ...]]:
    """Return the strides of an operator's results."""
    return [value.stride() for value in tensors(results)]


def tensors(results: Any) -> list[torch.Tensor]:
    """Return the tensors that an operator returns."""
    return [value for value in (results if isinstance(results, tuple) else (results,)) if value is not None]


if __name__ == "__main__":
    torch.set_default_device("cuda")
    print(json.dumps({name: run(call) for name, call in cases()}))
