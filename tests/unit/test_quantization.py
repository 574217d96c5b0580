"""8-bit linear layers: rotation, arithmetic, the layer, and the Triton kernels in Triton's interpreter."""

import copy
import pickle
import re
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.quantization import arithmetic, linear, rotation  # noqa: E402
from tests import interpreted  # noqa: E402

INT8, FP8 = torch.int8, torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


def _relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize(("width", "size"), [(640, 64), (96, 32), (8, 8), (5, 1)])
def test_rotation_is_its_own_inverse(width, size):
    rows = torch.randn(3, 2, width, dtype=torch.float64)
    assert rotation.block_size(width) == size
    torch.testing.assert_close(rotation.rotate(rotation.rotate(rows)), rows)
    torch.testing.assert_close(rotation.rotate(rows).norm(dim=-1), rows.norm(dim=-1))


def test_rotation_distributes_an_outlier():
    row = torch.zeros(1, 128)
    row[0, 3] = 8.0
    assert torch.equal(rotation.rotate(row).abs(), torch.tensor([[1.0] * 64 + [0.0] * 64]))


def test_rows_are_rounded_to_the_nearest_of_255_values():
    rows = torch.randn(7, 50)
    quantized, scales = arithmetic.quantize(rows, INT8)
    assert quantized.abs().amax(-1).tolist() == [127] * 7
    assert ((quantized * scales[:, None] - rows).abs() <= scales[:, None] * 0.5001).all()


@pytest.mark.parametrize("kind", [INT8, FP8])
def test_zero_rows_stay_zero_and_nan_is_not_hidden(kind):
    quantized, scales = arithmetic.quantize(torch.tensor([[0.0, 0.0], [1.0, float("nan")]]), kind)
    assert (quantized[0].float() * scales[0]).tolist() == [0.0, 0.0]
    assert scales[1].isnan()


def test_int8_products_are_exact():
    a, b = (torch.randint(-127, 128, shape, dtype=INT8) for shape in ((33, 3000), (20, 3000)))
    assert torch.equal(arithmetic.multiply(a, b).double(), a.double() @ b.double().t())


def _layers(kind, width=320, products="operations", bias=True):
    usual = torch.nn.Linear(width, 192, bias=bias).requires_grad_(False)
    layer = copy.deepcopy(usual)
    linear.convert(layer, kind, products, "cpu")
    return usual, layer


def _pass(layer, x):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype))
    return y.detach(), x.grad


@pytest.mark.parametrize(("kind", "tolerance"), [(INT8, 0.015), (FP8, 0.05)])
@pytest.mark.parametrize("products", ["operations", "weights"])
@pytest.mark.parametrize("tokens", [3, 40])
def test_output_and_input_gradient_are_close(kind, tolerance, products, tokens):
    usual, layer = _layers(kind, products=products)
    x = torch.randn(2, tokens, 320)
    for actual, expected in zip(_pass(layer, x), _pass(usual, x), strict=True):
        assert actual.shape == expected.shape
        assert 0 < _relative_error(actual, expected) < tolerance


def test_rotation_helps_with_outliers(monkeypatch):
    x = torch.randn(40, 320)
    x[:, 7] *= 50
    usual, rotated = _layers(INT8)
    monkeypatch.setattr(linear, "ROTATED", frozenset())
    plain = copy.deepcopy(usual)
    linear.convert(plain, INT8, "operations", "cpu")
    error = _relative_error(plain(x), usual(x))
    monkeypatch.undo()
    assert _relative_error(rotated(x), usual(x)) < error / 3


@pytest.mark.parametrize("bias", [True, False])
def test_an_fp8_weight_is_scaled_where_that_moves_fewer_bytes(bias):
    """Few rows of a product are scaled instead of the weight. Both ways equal the layer within the format's rounding."""
    usual = torch.nn.Linear(64, 128, bias=bias).requires_grad_(False)
    layer = torch.nn.Linear(64, 128, bias=bias).requires_grad_(False)
    layer.load_state_dict(usual.state_dict())
    linear.convert(layer, torch.float8_e4m3fn, "weights", "cpu")
    for rows in (20, 200):
        x = torch.randn(rows, 64, requires_grad=True)
        with patch.object(linear, "_dequantized", wraps=linear._dequantized) as dequantized:
            y, expected = layer(x), usual(x)
            gradient = torch.randn_like(y)
            actual = torch.autograd.grad(y, x, gradient)[0]
        assert dequantized.call_count == (0 if rows < 32 else 2)
        assert _relative_error(y, expected) < 0.04
        assert _relative_error(actual, torch.autograd.grad(expected, x, gradient)[0]) < 0.04


def _entropy(values):
    counts = torch.unique(values, return_counts=True)[1].double()
    return -(counts / values.numel() * (counts / values.numel()).log2()).sum().item()


def test_entropy_of_rotated_rows_leaves_nothing_to_pack():
    torch.manual_seed(0)
    weight = 0.02 * torch.randn(1024, 3072)
    assert _entropy(arithmetic.quantize(rotation.rotate(weight), torch.int8)[0]) == pytest.approx(7.15, abs=0.05)
    weight[:, ::1000] *= 100  # outliers
    of_tensor = (weight * 127 / weight.abs().max()).round()
    assert _entropy(of_tensor) < 2 < 5 < _entropy(arithmetic.quantize(rotation.rotate(weight), torch.int8)[0])
    exponents = (weight.bfloat16().view(torch.int16).int() >> 7) & 255
    assert _entropy(exponents) == pytest.approx(2.6, abs=0.1)


def test_casts_of_the_model_change_neither_weights_nor_scales():
    for kind in (INT8, FP8):
        _, layer = _layers(kind)
        bits, scales = layer.weight.clone(), layer.scale_bits.clone()
        layer.to(torch.float16).to(torch.bfloat16).half()
        assert torch.equal(layer.weight, bits)
        assert torch.equal(layer.scale_bits, scales)
        assert layer.bias.dtype is torch.float16


def test_layer_is_a_linear_layer_to_lora_and_to_files():
    _, layer = _layers(INT8)
    assert isinstance(layer, torch.nn.Linear)
    assert type(layer).__name__ == "Linear"
    assert set(layer.state_dict()) == {"weight", "bias"}
    x = torch.randn(20, 320)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))


def test_true_weights_come_back():
    usual, layer = _layers(INT8)
    assert _relative_error(linear.dequantized(layer), usual.weight) < 0.01


def test_autocast_decides_the_precision():
    _, layer = _layers(INT8)
    x = torch.randn(20, 320, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.sum().backward()
    assert y.dtype is torch.bfloat16
    assert x.grad.dtype is torch.float32


@pytest.mark.parametrize("bias", [True, False])
def test_fused_lora_equals_two_branches(bias):
    _, layer = _layers(INT8, bias=bias)
    down, up = (torch.nn.Parameter(torch.randn(shape) * 0.1) for shape in ((4, 320), (192, 4)))
    x, gradient = torch.randn(2, 20, 320), torch.randn(2, 20, 192)

    def results(function):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        return y.detach(), *torch.autograd.grad(y, (leaf, down, up), gradient)

    expected = results(lambda x: layer(x) + torch.nn.functional.linear(torch.nn.functional.linear(x, down), up) * 0.25)
    for actual, each in zip(results(lambda x: layer.with_lora(x, down, up, 0.25)), expected, strict=True):
        torch.testing.assert_close(actual, each, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "products"), [(INT8, "operations"), (INT8, "weights"), (FP8, "operations"), (FP8, "weights")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_of_one_input_share_its_quantization_and_equal_those_alone(kind, products, dtype):
    """The LoRAs' sums are of small integers, so that they are exact in any order. Only the parts of x's gradient round."""
    layers = [_layers(kind, products=products, bias=bias)[1] for bias in (False, True, False)]

    def integers(*shape, largest):
        return torch.randint(-largest, largest + 1, shape).to(dtype)

    x, gradients = integers(2, 20, 320, largest=8), [integers(2, 20, 192, largest=2) for _ in layers]
    downs, ups = ([integers(*shape, largest=1).requires_grad_() for _ in layers] for shape in ((4, 320), (192, 4)))

    def results(function):
        leaf = x.clone().requires_grad_()
        with patch.object(linear, "_operand", wraps=linear._operand) as operand:
            outputs = function(leaf)
        return operand.call_count, outputs, torch.autograd.grad(outputs, (leaf, *downs, *ups), gradients)

    alone = results(lambda x: [layer.with_lora(x, *lora, 0.5) for layer, *lora in zip(layers, downs, ups, strict=True)])
    together = results(lambda x: linear.linears_with_lora(x, layers, downs, ups, 0.5))
    assert (alone[0], together[0]) == (3, 1)
    assert all(torch.equal(*pair) for pair in zip(together[1], alone[1], strict=True))
    assert all(torch.equal(*pair) for pair in zip(together[2][1:], alone[2][1:], strict=True))
    assert _relative_error(together[2][0], alone[2][0]) < 2 * torch.finfo(dtype).eps


def test_frozen_weights_and_inputs_of_layers_that_share_get_no_gradients():
    layers = [_layers(INT8, bias=False)[1] for _ in range(2)]
    downs, ups = ([torch.randn(shape, requires_grad=True) for _ in layers] for shape in ((4, 320), (192, 4)))
    for weight in downs:
        weight.requires_grad_(False)
    x = torch.randn(20, 320)
    with patch.object(linear, "_input_gradient", wraps=linear._input_gradient) as input_gradient:
        sum(linear.linears_with_lora(x, layers, downs, ups, 0.5)).sum().backward()
    assert not input_gradient.called
    assert [weight.grad is None for weight in (*downs, *ups)] == [True, True, False, False]


def test_large_weights_are_quantized_in_parts(monkeypatch):
    monkeypatch.setattr(linear, "ELEMENTS", 1000)
    usual, layer = _layers(INT8)
    whole, scales = arithmetic.quantize(rotation.rotate(usual.weight), INT8)
    assert torch.equal(layer.weight, whole)
    assert torch.equal(layer.scales, scales)


def test_narrow_layers_do_not_use_kernels():
    assert _layers(INT8, width=320, products="kernels")[1].products == "kernels"
    assert _layers(INT8, width=48, products="kernels")[1].products == "weights"


@pytest.mark.parametrize(("kind", "products"), [(INT8, "operations"), (INT8, "weights"), (FP8, "weights")])
def test_compiled_layer_is_one_graph_with_the_same_results(kind, products):
    _, layer = _layers(kind, width=64, products=products)
    x = torch.randn(20, 64)
    expected = _pass(layer, x)
    for actual, eager in zip(_pass(torch.compile(layer, backend="aot_eager", fullgraph=True), x), expected, strict=True):
        assert torch.equal(actual, eager)


INTERPRETED = """
import torch
from kohya_ext.quantization import arithmetic, kernels, linear
from kohya_ext.quantization.rotation import rotate

torch.manual_seed(0)
for dtype in (torch.bfloat16, torch.float16):
    x, weight = torch.randn(3, 192).to(dtype), torch.randn(320, 192)  # of uneven tiles
    x[2] = 0
    rows, scales = kernels.quantize(x, torch.int8, dtype, rotated=True)
    for actual, expected in zip((rows, scales), arithmetic.quantize(rotate(x.float()), torch.int8)):
        assert torch.equal(actual, expected)
    weight, weight_scales = arithmetic.quantize(rotate(weight), torch.int8)
    bias = torch.randn(320).to(dtype)
    y = kernels.multiply(rows, weight, scales, dtype, kernels.SMALL_TILES, scales_b=weight_scales, bias=bias)
    expected = arithmetic.multiply(rows, weight) * scales[:, None] * weight_scales + bias
    torch.testing.assert_close(y.float(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    for rank in (4, 40):
        hidden, up = torch.randn(3, 3 * rank).to(dtype)[:, rank : 2 * rank], torch.randn(320, rank).to(dtype)
        y = kernels.multiply(rows, weight, scales, dtype, kernels.SMALL_TILES, scales_b=weight_scales, lora=(hidden, up.t()))
        summed = expected - bias + hidden.float() @ up.float().t()
        torch.testing.assert_close(y.float(), summed, rtol=torch.finfo(dtype).eps, atol=1e-4)

    gradient = torch.randn(3, 320).to(dtype)
    rows, scales = kernels.quantize(gradient, torch.int8, dtype, factors=weight_scales)
    for actual, expected in zip((rows, scales), arithmetic.quantize(gradient.float() * weight_scales, torch.int8)):
        assert torch.equal(actual, expected)
    turned = kernels.transpose(weight)
    assert torch.equal(turned, weight.t())
    if dtype is torch.bfloat16:  # the interpreter truncates to bf16, which the rotation would add up
        continue
    back = kernels.multiply(rows, turned, scales, dtype, kernels.TILES, rotated=True)
    product = (arithmetic.multiply(rows, turned) * scales[:, None]).to(dtype)
    torch.testing.assert_close(back.float(), rotate(product.float()), rtol=torch.finfo(dtype).eps, atol=1e-3)
    hidden, down = torch.randn(3, 40).to(dtype), torch.randn(40, 192).to(dtype)
    back = kernels.multiply(rows, turned, scales, dtype, kernels.TILES, rotated=True, lora=(hidden, down))
    summed = rotate(product.float()) + hidden.float() @ down.float()
    torch.testing.assert_close(back.float(), summed, rtol=torch.finfo(dtype).eps, atol=1e-3)

for dtype in (torch.bfloat16, torch.float16):  # fp8, where torch has no scaled product
    rows, scales = arithmetic.quantize(torch.randn(3, 192), torch.float8_e4m3fn)
    weight, weight_scales = arithmetic.quantize(torch.randn(128, 192), torch.float8_e4m3fn)
    y = kernels.multiply(rows, weight, scales, dtype, kernels.SMALL_TILES, scales_b=weight_scales)
    expected = arithmetic.multiply(rows, weight) * scales[:, None] * weight_scales
    torch.testing.assert_close(y.float(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)

rows, scales = arithmetic.quantize(torch.full((3, 128), 32.0), torch.int8)
one = torch.zeros(64, 128, dtype=torch.int8)
one[0] = 1  # one of 64 elements is 131072, which the rotation distributes
back = kernels.multiply(rows, one, 32 * scales, torch.float16, kernels.TILES, rotated=True)
torch.testing.assert_close(back.float(), torch.full((3, 64), 16384.0), rtol=1e-3, atol=0)

kernels.tiles = lambda *_: kernels.SMALL_TILES  # as on a GPU
layers = [torch.nn.Linear(128, 64, bias=False).requires_grad_(False) for _ in range(3)]
downs, ups = ([torch.randint(-1, 2, shape).half().requires_grad_() for _ in layers] for shape in ((4, 128), (64, 4)))
x = torch.randint(-8, 9, (40, 128)).half().requires_grad_()
gradients = [torch.randint(-2, 3, (40, 64)).half() for _ in layers]
for layer in layers:
    linear.convert(layer, torch.int8, "triton", "cpu")
results = []
for products in ("triton", "operations"):
    for layer in layers:
        layer.products = products
    together = linear.linears_with_lora(x, layers, downs, ups, 0.5)
    alone = [layer.with_lora(x, *lora, 0.5) for layer, *lora in zip(layers, downs, ups)]
    assert all(torch.equal(*pair) for pair in zip(together, alone))
    computed = [torch.autograd.grad(outputs, (x, *downs, *ups), gradients) for outputs in (together, alone)]
    assert all(torch.equal(*pair) for pair in zip(*(each[1:] for each in computed)))
    torch.testing.assert_close(*(each[0] for each in computed), rtol=2e-3, atol=0.02)
    results.append([*together, *computed[0]])
for of_kernels, expected in zip(*results):
    assert (of_kernels - expected).norm() < 1e-3 * expected.norm()

x = torch.zeros(3, 64)
x[0, 1], x[1, 2] = float("nan"), float("inf")
_, scales = kernels.quantize(x, torch.int8, torch.float32, rotated=True)
assert not scales[:2].isfinite().any() and scales[2].isfinite()
print("equal")
"""


def test_kernels_equal_the_arithmetic_in_the_interpreter():
    pytest.importorskip("triton")
    done = interpreted.run(INTERPRETED)
    assert done.stdout == "equal\n", done.stderr[-3000:]


#: The launches of sm_86 that are compiled by default: gates, rotations and optimizer steps, the narrowest and widest rows,
#: products with the fewest and the most conditions, and convolutions with the largest tiles.
COMPILED = re.compile(
    r".*, bf16, ((gate|rotation|Adafactor's|AdamW's) .*|quantize .*, (1024|15360) columns|multiply .*, (even|uneven m LoRA)"
    r"|pixels .*, 2560 channels|convolve .*, 128x128x128)"
)


@pytest.mark.parametrize(
    ("capability", "chosen"),
    [(75, None), (86, COMPILED), *(pytest.param(other, None, marks=pytest.mark.slow) for other in (80, 86, 89, 90, 120))],
)
def test_kernels_fit_without_spills(capability, chosen):
    """Every launch that a run can have: on sm_75 those without 8 bits. By default those, and some of sm_86."""
    pytest.importorskip("triton", minversion="3.4")  # the signature of ASTSource
    from benchmarks import kernel_resources

    launches = dict(kernel_resources.launches(capability))
    assert len(launches) >= (4 if capability == 75 else 10) * len(kernel_resources.PRECISIONS)
    if chosen is not None:
        launches = {name: each for name, each in launches.items() if chosen.fullmatch(name)}
        assert {"multiply", "quantize", "gate", "rotation", "Adafactor's", "AdamW's", "pixels", "convolve"} <= {
            name.split(", ")[2].split()[0] for name in launches
        }
    for name, each in launches.items():
        needs = kernel_resources.resources(each, capability)
        assert needs.stack == 0, name
        assert needs.shared <= kernel_resources.SHARED[capability], name


@pytest.mark.parametrize("products", ["operations", "weights"])
def test_fp16_has_room_for_rotated_values(products):
    """A rotation of 64 equal elements makes one of them eight times as large, which fp16 cannot represent."""
    x, gradient = torch.full((40, 640), 9000.0), torch.full((40, 640), 32.0)
    for weight, scale in ((None, 1.0), (1.0, 1e-4)):  # random weights, and those whose gradient is 20480 before the rotation
        layer = torch.nn.Linear(640, 640, bias=False).requires_grad_(False)
        if weight is not None:
            torch.nn.init.constant_(layer.weight, weight)
        linear.convert(layer, INT8, products, "cpu")
        leaf = (scale * x).half().requires_grad_()
        with torch.autocast("cpu", torch.float16):
            y = layer(leaf)
        (back,) = torch.autograd.grad(y, leaf, gradient.to(y.dtype))
        exact = linear.dequantized(layer)
        assert _relative_error(y, leaf.float() @ exact.t()) < 0.01
        assert _relative_error(back, gradient @ exact) < 0.01


@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_dequantized_weight_is_rounded_once(kind, dtype):
    _, layer = _layers(kind)
    exact = layer.weight.view(kind).float() * layer.scales[:, None]
    assert torch.equal(linear._dequantized(layer.weight, layer.scales, dtype, kind), exact.to(dtype))


def test_fp32_dequantizes_instead_of_using_the_kernels():
    """Kernels that rotate fp32 spill, and need more shared memory than most GPUs have."""
    _, layer = _layers(INT8, width=64, products="kernels")
    x = torch.randn(40, 64)
    assert layer._products(x, torch.float32) == "weights"
    assert layer._products(x, torch.bfloat16) == layer._products(x, torch.float16) == "kernels"
    assert layer._products(x[:8], torch.bfloat16) == "weights"
    assert layer(x).dtype is torch.float32  # and not an error without a GPU
