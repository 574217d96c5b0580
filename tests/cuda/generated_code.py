"""Blocks with what models compile, and the code that inductor generates for them on the virtual GPU, as JSON.

Without a GPU the estimate compiles the same blocks (test_generated_code).
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._inductor.compile_fx
from torch._inductor.graph import GraphLowering
from torch.nn import functional

from kohya_ext.patching.attributes import replaced

BATCH, LENGTH, WIDTH, HEADS = 1, 1024, 320, 8

#: A function of some tensors.
Block = Callable[..., torch.Tensor]


def attended(x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the attention of normalized tokens, with its residual."""
    normalized = functional.layer_norm(x.float(), x.shape[-1:]).to(x.dtype)  # as autocast does
    heads = (normalized @ weights).view(BATCH, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
    query, key, value = heads
    output = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return x + output.transpose(1, 2).reshape(x.shape)


def rotated(x: torch.Tensor, weights: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return the gelu of tokens whose halves are rotated, as positions are."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return functional.gelu((x * angles.cos() + turned * angles.sin()).to(x.dtype) @ weights)


def cases() -> Iterator[tuple[str, Block, tuple[Any, ...]]]:
    """Yield a name, a block and its inputs on torch's default device, of which the first and second need gradients."""
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
        weights = torch.zeros(WIDTH, 3 * WIDTH, dtype=dtype, requires_grad=True)
        mask = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)
        yield f"attention in {dtype}", attended, (x, weights, None)
        yield f"masked attention in {dtype}", attended, (x, weights, mask)
        yield f"rotation in {dtype}", rotated, (x, weights, torch.zeros(LENGTH, WIDTH))


def generated(backend: str) -> dict[str, list[list[str]]]:
    """Return the calls in the code of each case's forward and backward pass."""
    rows = {}
    for name, block, inputs in cases():
        codes: list[str] = []
        torch._dynamo.reset()
        with replaced(GraphLowering, "save_output_code", staticmethod(codes.append)):
            torch.compile(block, backend=backend, fullgraph=True)(*inputs).sum().backward()
        rows[name] = [calls(code) for code in codes]
    return rows


def calls(code: str) -> list[str]:
    """Return the buffers that generated code allocates, shares and frees, and the names of what it calls."""
    matches = re.finditer(
        r"= (?P<allocated>empty_strided.*|reinterpret_tensor.*)|(?P<called>[\w.]+)\(|(?P<freed>del buf\d+)",
        code[code.index("def call(") :],
    )
    lines = [match["allocated"] or match["freed"] or match["called"] for match in matches]
    lines = [re.sub(r"_fused_\w+_(\d+)", r"_\1", line) for line in lines]  # kernels are also named after operators
    return [line for line in lines if re.match(r"empty|reinterpret|del|torch\.ops|extern_kernels|triton", line)]


if __name__ == "__main__":
    torch.set_default_device("cuda")
    print(json.dumps(generated("inductor")))
