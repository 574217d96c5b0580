"""The Triton kernels as operators of PyTorch, which fake tensors and compiled code can have. They compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kohya_ext.errors import UserError
from kohya_ext.kernels.triton_package import missing_triton
from kohya_ext.patching.attributes import replaced
from kohya_ext.quantization import rotation

_LIBRARY = torch.library.Library("kohya_ext_kernels", "DEF")
_LIBRARY.define("quantize_rows(Tensor x, Tensor? factors, Tensor(a!) out, Tensor(b!) scales, int rotated) -> ()")
_LIBRARY.define("transpose(Tensor x, Tensor(a!) out) -> ()")
_LIBRARY.define(
    "multiply(Tensor a, Tensor b, Tensor(a!) out, Tensor scales_a, Tensor? scales_b, Tensor? bias, Tensor? hidden, Tensor? up, "
    "int rotated) -> ()"
)
_LIBRARY.define("quantize_pixels(Tensor x, Tensor? factors, Tensor(a!) out, Tensor(b!) scales, int rotated) -> ()")
_LIBRARY.define(
    "convolve(Tensor x, Tensor w, Tensor(a!) out, Tensor scales_x, Tensor? scales_w, Tensor? bias, int rotated) -> ()"
)
_LIBRARY.define("geglu(Tensor halves, Tensor(a!) out) -> ()")
_LIBRARY.define("geglu_backward(Tensor gradient, Tensor halves, Tensor(a!) out) -> ()")
_LIBRARY.define("swiglu(Tensor gate, Tensor value, Tensor(a!) out) -> ()")
_LIBRARY.define("swiglu_backward(Tensor gradient, Tensor gate, Tensor value, Tensor(a!) out, Tensor(b!) out2) -> ()")
_LIBRARY.define("rotate(Tensor x, Tensor table, Tensor(a!) out) -> ()")
_LIBRARY.define(
    "squares(Tensor gradient, Tensor weight, Tensor(a!) of_rows, Tensor(b!) of_columns, Tensor(c!) of_weights) -> ()"
)
_LIBRARY.define("squares_of_update(Tensor gradient, Tensor row_factors, Tensor column_factors, Tensor(a!) out) -> ()")
_LIBRARY.define(
    "update(Tensor weight, Tensor? lower, Tensor gradient, Tensor row_factors, Tensor column_factors, Tensor divisor, "
    "Tensor? random, Tensor(a!) out, Tensor(b!)? out2) -> ()"
)
_LIBRARY.define(
    "small_squares(Tensor gradient, Tensor weight, Tensor(a!) rows, Tensor(b!) columns, Tensor(c!) of_updates, "
    "Tensor(d!) of_weights) -> ()"
)
_LIBRARY.define(
    "adamw(Tensor weight, Tensor? lower, Tensor gradient, Tensor average, Tensor average_of_squares, Tensor seed, "
    "Tensor(a!) out, Tensor(b!)? out2, Tensor(c!) out3, Tensor(d!) out4) -> ()"
)
for _name in (
    *("quantize_rows", "transpose", "multiply", "quantize_pixels", "convolve"),
    *("geglu", "geglu_backward", "swiglu", "swiglu_backward", "rotate", "squares", "squares_of_update", "update"),
    *("small_squares", "adamw"),
):
    _LIBRARY.impl(_name, lambda *_: None, "CompositeExplicitAutograd")
_operators = torch.ops.kohya_ext_kernels

MULTIPLY, CONVOLVE = _operators.multiply, _operators.convolve

#: The operators whose last argument is the number of elements that their kernels rotate.
_ROTATING = tuple(
    packet.default
    for packet in (_operators.quantize_rows, _operators.quantize_pixels, _operators.multiply, _operators.convolve)
)


def multiply_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Return the operations of a product of rows in 8 bits, without its rotation and its LoRA."""
    return 2 * int(a.shape[0] * a.shape[1] * b.shape[0])


def convolve_flops(x: Any, w: Any, out: Any, *_: Any, **__: Any) -> int:
    """Return the operations of a 3x3 convolution of pixels in 8 bits, without its rotation."""
    return 2 * 9 * int(x.numel() * out.shape[1])


def rotation_flops(operator: Any, args: Sequence[Any]) -> int:
    """Return the operations of the 16-bit product by which a kernel rotates; 0 if it rotates nothing."""
    elements = args[-1] if operator in _ROTATING else 0
    return 2 * elements * rotation.BLOCK


def lora_flops(operator: Any, args: Sequence[Any]) -> int:
    """Return the operations of a LoRA's second product, in 16 bits, that a kernel adds to its own; 0 if it has none."""
    if operator is not MULTIPLY.default or args[6] is None:
        return 0
    out, hidden = args[2], args[6]
    return 2 * int(out.numel() * hidden.shape[1])


def _quantize_rows(x: Any, factors: Any, out: Any, scales: Any, *_: Any, **options: Any) -> None:
    # A program rotates whole tiles, also those beyond the row's end.
    rotated = options["BLOCKS"] * options["SIZE"] if options["ROTATED"] else 0
    _operators.quantize_rows(x, factors, out, scales, out.shape[0] * rotated)


def _transpose(x: Any, out: Any, *_: Any, **__: Any) -> None:
    _operators.transpose(x, out)


def _multiply(
    a: Any, b: Any, out: Any, scales_a: Any, scales_b: Any, bias: Any, hidden: Any, up: Any, *_: Any, **options: Any
) -> None:
    _operators.multiply(a, b, out, scales_a, scales_b, bias, hidden, up, out.numel() if options["ROTATED"] else 0)


def _quantize_pixels(x: Any, factors: Any, out: Any, scales: Any, *_: Any, **options: Any) -> None:
    passes = 1 if options["IS_KEPT"] else 2
    rotated = -(-out.shape[3] // options["PART"]) * options["PART"] * passes if options["ROTATED"] else 0
    _operators.quantize_pixels(x, factors, out, scales, scales.numel() * rotated)


def _convolve(x: Any, w: Any, out: Any, scales_x: Any, scales_w: Any, bias: Any, *_: Any, **options: Any) -> None:
    _operators.convolve(x, w, out, scales_x, scales_w, bias, out.numel() if options["IS_GRADIENT"] else 0)


def _geglu(halves: Any, out: Any, *_: Any, **__: Any) -> None:
    _operators.geglu(halves, out)


def _geglu_backward(gradient: Any, halves: Any, out: Any, *_: Any, **__: Any) -> None:
    _operators.geglu_backward(gradient, halves, out)


def _swiglu(gate: Any, value: Any, out: Any, *_: Any, **__: Any) -> None:
    _operators.swiglu(gate, value, out)


def _swiglu_backward(gradient: Any, gate: Any, value: Any, grad_gate: Any, grad_value: Any, *_: Any, **__: Any) -> None:
    _operators.swiglu_backward(gradient, gate, value, grad_gate, grad_value)


def _rotate(x: Any, table: Any, out: Any, *_: Any, **__: Any) -> None:
    _operators.rotate(x, table, out)


def _squares(gradient: Any, weight: Any, of_rows: Any, of_columns: Any, of_weights: Any, *_: Any, **__: Any) -> None:
    _operators.squares(gradient, weight, of_rows, of_columns, of_weights)


def _small_squares(*args: Any, **__: Any) -> None:
    _operators.small_squares(*args[:6])


def _squares_of_update(gradient: Any, row_factors: Any, column_factors: Any, out: Any, *_: Any, **__: Any) -> None:
    _operators.squares_of_update(gradient, row_factors, column_factors, out)


def _update(*args: Any, **__: Any) -> None:
    _operators.update(*args[:8], args[1])


def _adamw(*args: Any, **__: Any) -> None:
    weight, lower, gradient, *averages, seed = args[:6]
    _operators.adamw(weight, lower, gradient, *averages, seed, weight, lower, *averages)


@dataclass(frozen=True)
class _Kernel:
    """An operator in place of a Triton kernel, which Dynamo would ask a driver to compile."""

    operator: Callable[..., None]

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.operator


@contextmanager
def counted_kernels(eight_bits: bool) -> Iterator[None]:
    """Run operators in place of the kernels inside the block, as a GPU would run these.

    Without Triton nothing is replaced, and a GPU runs torch's operators, too. Raises UserError then for ``eight_bits``.
    """
    if (missing := missing_triton()) is not None:
        if eight_bits:
            raise UserError(f"an 8-bit base cannot be estimated: {missing}, or remove --base_precision")
        yield
        return
    from kohya_ext.kernels import adafactor, adafactor_kernels, adamw, adamw_kernels, elementwise, fused
    from kohya_ext.quantization import convolution_kernels, kernels

    launched: tuple[tuple[Any, str, Any], ...] = (
        (kernels, "_quantize_rows", _quantize_rows),
        (kernels, "_transpose", _transpose),
        (kernels, "_multiply", _multiply),
        (convolution_kernels, "_quantize_pixels", _quantize_pixels),
        (convolution_kernels, "_convolve", _convolve),
        (elementwise, "_geglu", _geglu),
        (elementwise, "_geglu_backward", _geglu_backward),
        (elementwise, "_swiglu", _swiglu),
        (elementwise, "_swiglu_backward", _swiglu_backward),
        (elementwise, "_rotate", _rotate),
        (adafactor_kernels, "_adafactor_squares", _squares),
        (adafactor_kernels, "_adafactor_squares_of_update", _squares_of_update),
        (adafactor_kernels, "_adafactor_update", _update),
        (adafactor_kernels, "_adafactor_small_squares", _small_squares),
        (adafactor_kernels, "_adafactor_update_small", _update),
        (adamw_kernels, "_adamw", _adamw),
    )
    with ExitStack() as stack:
        stack.enter_context(replaced(fused, "elementwise_kernels", lambda *_: elementwise))
        stack.enter_context(replaced(adafactor, "kernels_on", lambda *_: adafactor_kernels))
        stack.enter_context(replaced(adamw, "kernels_on", lambda *_: adamw_kernels))
        # The matrix of one fake mode is not valid in another.
        stack.enter_context(replaced(rotation, "_matrices", {}))
        stack.enter_context(replaced(kernels, "tiles", lambda *_: kernels.TILES))
        stack.enter_context(replaced(convolution_kernels, "tiles", lambda *_: convolution_kernels.TILES))
        for module, name, operator in launched:
            stack.enter_context(replaced(module, name, _Kernel(operator)))
        yield
