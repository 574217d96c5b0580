"""8-bit convolutions: the layer, and the Triton kernels in Triton's interpreter."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.quantization import convolution, selection  # noqa: E402
from tests import interpreted  # noqa: E402


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


def _relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def _layers(inner=128, outer=192, products="operations", bias=True):
    usual = torch.nn.Conv2d(inner, outer, 3, padding=1, bias=bias).requires_grad_(False)
    layer = copy.deepcopy(usual)
    convolution.convert(layer, products, "cpu")
    return usual, layer


def _pass(layer, x):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel()).cos().reshape(y.shape).to(y.dtype))
    return y.detach(), x.grad


@pytest.mark.parametrize("products", ["operations", "weights"])
@pytest.mark.parametrize("shape", [(1, 128, 1, 1), (2, 128, 2, 3), (1, 128, 12, 9), (3, 128, 5, 16)])
@pytest.mark.parametrize("outliers", [False, True])
def test_output_and_input_gradient_are_close(products, shape, outliers):
    """In each pixel too, so that no tap of any is misplaced."""
    usual, layer = _layers(products=products)
    x = torch.randn(shape)
    if outliers:
        x[:, 7] *= 50
        x[-1, :, -1, 0] *= 1000  # a pixel whose scale does not suit its neighbours
    for actual, expected in zip(_pass(layer, x), _pass(usual, x), strict=True):
        assert actual.shape == expected.shape
        assert 0 < _relative_error(actual, expected) < 0.015
        errors = (actual - expected).norm(dim=1) / expected.norm(dim=1)
        assert errors.max() < 0.03


def test_zero_pixels_stay_zero_and_nan_stays_among_its_neighbours():
    _, layer = _layers(bias=False)
    x = torch.zeros(1, 128, 6, 6)
    x[0, 3, 4, 4] = float("nan")
    y, gradient = _pass(layer, x)
    assert torch.equal(y.isnan().all(1)[0], torch.nn.functional.pad(torch.ones(3, 3), (3, 0, 3, 0)).bool())
    assert y[0, :, :3].abs().max() == 0
    assert gradient.isfinite().all()


def test_weights_of_output_channels_have_their_own_scales():
    usual = torch.nn.Conv2d(64, 64, 3, padding=1).requires_grad_(False)
    usual.weight[5] *= 1000
    layer = copy.deepcopy(usual)
    convolution.convert(layer, "operations", "cpu")
    errors = (convolution.dequantized(layer) - usual.weight).flatten(1).norm(dim=1) / usual.weight.flatten(1).norm(dim=1)
    assert 0 < errors.max() < 0.015
    assert layer.weight.dtype is torch.int8
    assert layer.weight.shape == usual.weight.shape
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)


def test_large_weights_are_quantized_in_parts(monkeypatch):
    usual, whole = _layers()
    monkeypatch.setattr(convolution, "ELEMENTS", 5000)
    layer = copy.deepcopy(usual)
    convolution.convert(layer, "operations", "cpu")
    assert torch.equal(layer.weight, whole.weight)
    assert torch.equal(layer.scales, whole.scales)


def test_casts_of_the_model_change_neither_weights_nor_scales():
    _, layer = _layers()
    bits, scales = layer.weight.clone(), layer.scale_bits.clone()
    layer.to(torch.float16).to(torch.bfloat16).half()
    assert torch.equal(layer.weight, bits)
    assert torch.equal(layer.scale_bits, scales)
    assert layer.bias.dtype is torch.float16


def test_layer_is_a_convolution_to_lora_and_to_files():
    _, layer = _layers()
    assert isinstance(layer, torch.nn.Conv2d)
    assert type(layer).__name__ == "Conv2d"
    assert set(layer.state_dict()) == {"weight", "bias"}
    x = torch.randn(1, 128, 4, 5)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_decides_the_precision(dtype):
    usual, layer = _layers()
    x = torch.randn(1, 128, 4, 5, requires_grad=True)
    with torch.autocast("cpu", dtype):
        y = layer(x)
    y.sum().backward()
    assert y.dtype is dtype
    assert x.grad.dtype is torch.float32
    assert _relative_error(y, usual(x)) < 0.015


def test_memory_formats_change_nothing():
    _, layer = _layers()
    x = torch.randn(2, 128, 4, 5)
    for same in (x.contiguous(memory_format=torch.channels_last), x.repeat(1, 1, 1, 2)[..., :5]):
        assert torch.equal(layer(same), layer(x))
    contiguous = copy.deepcopy(layer)
    contiguous.weight.data = layer.weight.data.contiguous()
    assert torch.equal(contiguous(x), layer(x))


def test_no_activation_is_saved():
    _, layer = _layers()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(1, 128, 4, 5, requires_grad=True))
    assert [tensor.data_ptr() for tensor in saved] == [layer.weight.data_ptr(), layer.scale_bits.data_ptr()]


@pytest.mark.parametrize("products", ["operations", "weights"])
def test_compiled_layer_is_one_graph_with_the_same_results(products):
    _, layer = _layers(64, 64, products)
    x = torch.randn(2, 64, 4, 5)
    expected = _pass(layer, x)
    for actual, eager in zip(_pass(torch.compile(layer, backend="aot_eager", fullgraph=True), x), expected, strict=True):
        assert torch.equal(actual, eager)


@pytest.mark.parametrize("products", ["operations", "weights"])
def test_fp16_has_room_for_rotated_values(products):
    """A rotation of 64 equal elements makes one of them eight times as large, which fp16 cannot represent."""
    layer = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False).requires_grad_(False)
    torch.nn.init.constant_(layer.weight, 1.0)
    convolution.convert(layer, products, "cpu")
    leaf = torch.full((1, 64, 3, 3), 9.0, dtype=torch.float16, requires_grad=True)
    (back,) = torch.autograd.grad(layer(leaf), leaf, torch.full((1, 64, 3, 3), 32.0, dtype=torch.float16))
    expected = torch.nn.functional.conv2d(torch.full((1, 64, 3, 3), 32.0), torch.ones(64, 64, 3, 3), padding=1)
    assert _relative_error(back, expected) < 0.01


def test_fp32_dequantizes_instead_of_using_the_kernels():
    usual, layer = _layers(products="kernels")
    assert layer._products(torch.float32) == "weights"
    assert layer._products(torch.bfloat16) == layer._products(torch.float16) == "kernels"
    x = torch.randn(1, 128, 4, 5)
    assert _relative_error(layer(x), usual(x)) < 0.015  # and no error without a GPU


class SdxlUNet2DConditionModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(4, 64, 3, padding=1)
        self.kept = torch.nn.Conv2d(64, 128, 3, padding=1)
        self.others = torch.nn.ModuleList(
            [
                torch.nn.Conv2d(64, 64, 1),
                torch.nn.Conv2d(64, 64, 3, stride=2, padding=1),
                torch.nn.Conv2d(64, 64, 3),
                torch.nn.Conv2d(64, 64, 3, padding=2, dilation=2),
                torch.nn.Conv2d(64, 64, 3, padding=1, groups=2),
                torch.nn.Conv2d(64, 64, 3, padding=1, padding_mode="reflect"),
                torch.nn.Conv2d(64, 100, 3, padding=1),
                torch.nn.Linear(64, 64),
            ]
        )


def test_only_convolutions_for_the_kernels_are_selected():
    model = SdxlUNet2DConditionModel()
    assert [name for name, _ in selection.convolutions(model)] == ["kept"]
    convolution.convert(model.kept, "operations", "cpu")
    assert list(selection.convolutions(model)) == []  # not twice
    assert list(selection.convolutions(torch.nn.Sequential(torch.nn.Conv2d(64, 64, 3, padding=1)))) == []


INTERPRETED = """
import torch
from kohya_ext.quantization import arithmetic, convolution, convolution_kernels as kernels
from kohya_ext.quantization.rotation import rotate
from triton.runtime import interpreter

torch.manual_seed(0)
TILES = (kernels.TILES, kernels.NARROW_TILES, kernels.SMALL_TILES)

def layer_of(inner, outer, bias):
    layer = torch.nn.Conv2d(inner, outer, 3, padding=1, bias=bias).requires_grad_(False)
    convolution.convert(layer, "kernels", "cpu")
    return layer

def passes(layer, products, tile, x, gradient):
    kernels.tiles, layer.products = lambda *_: tile, products
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    with torch.autocast("cpu", gradient.dtype):
        y = layer(leaf)
    return y.detach(), torch.autograd.grad(y, leaf, gradient)[0]

def compare(layer, tile, x, gradient):
    computed = [passes(layer, products, tile, x, gradient) for products in ("kernels", "operations")]
    tolerance = 1e-3 if gradient.dtype is torch.float16 else 1e-2  # the interpreter truncates to bf16
    for of_kernels, expected in zip(*computed):
        assert of_kernels.shape == expected.shape and of_kernels.dtype is expected.dtype
        difference = (of_kernels.double() - expected.double()).norm(dim=1)  # in each pixel
        assert (difference <= 1.5 * tolerance * expected.double().norm(dim=1) + 1e-6).all(), (tile, x.shape, difference.max())

shapes = (1, 128, 64, 5, 7), (2, 64, 192, 9, 8), (1, 320, 128, 4, 5), (2, 192, 64, 3, 22)
for number, (n, inner, outer, h, w) in enumerate(shapes):
    layer = layer_of(inner, outer, bias=number % 2 == 0)
    for tile in TILES[0 if inner % 128 == outer % 128 == 0 else 1 :]:
        for dtype in (torch.float16, torch.bfloat16)[: 2 - min(number, 1)]:
            x, gradient = torch.randn(n, inner, h, w), torch.randn(n, outer, h, w).to(dtype)
            x[:, 5] *= 40
            x[-1, :, 2, 1] *= 300  # scales of neighbours differ
            gradient[-1, :, 1, 3] *= 300
            gradient[0, :, 2, 0] = 0
            compare(layer, tile, x if number == 1 else x.to(dtype), gradient)
x = torch.randn(1, 64, 9, 10).half().contiguous(memory_format=torch.channels_last)
compare(layer_of(64, 64, True), kernels.SMALL_TILES, x, torch.randn(1, 64, 10, 9).half().transpose(2, 3))

for kept in (1024, 64):  # a program keeps all channels, or reads them twice
    kernels._KEPT, kernels._PART = kept, 128
    x = torch.randn(2, 192, 3, 7).half()
    x[1, :, 2, 6] = 0
    x[0, 7, 0, 0] = 60000
    rows = x.permute(0, 2, 3, 1).reshape(-1, 192).float()
    factors = torch.rand(192)
    for options, expected in (({"rotated": True}, rotate(rows)), ({"factors": factors}, rows * factors)):
        pixels, scales = kernels.quantize(x, torch.float16, **options)
        quantized, of_rows = arithmetic.quantize(expected, torch.int8)
        assert (pixels.view(-1, 192).int() - quantized).abs().max() <= 1
        assert (pixels.view(-1, 192) != quantized).sum() < 5
        torch.testing.assert_close(scales.flatten(), of_rows, rtol=1e-6, atol=0)
    x[0, 1, 1, 1], x[1, 150, 2, 2] = float("nan"), float("inf")
    scales = kernels.quantize(x, torch.float16, rotated=True)[1]
    assert (~scales.isfinite()).nonzero().tolist() == [[0, 1, 1], [1, 2, 2]]

# No pass reads outside the tensors, also for pixels beyond the image's end.
load, given = interpreter._interpreter.load, []

def checked(pointers, mask, *rest):
    ranges = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in given]
    assert sum((begin <= pointers[mask]) & (pointers[mask] < end) for begin, end in ranges).all()
    return load(pointers, mask, *rest)

interpreter._interpreter.load = checked
x, weight, scales = torch.randn(2, 64, 3, 7), torch.ones(192, 9 * 64, dtype=torch.int8), torch.ones(192)
given[:] = [x, scales]
pixels = kernels.quantize(x, torch.float16, factors=scales)
given[:] = [*pixels, weight, scales]
kernels.convolve(pixels, weight, torch.float16, kernels.SMALL_TILES, scales=scales)
interpreter._interpreter.load = load

layer = layer_of(64, 64, True)
x = torch.zeros(1, 64, 6, 6).half()
y, _ = passes(layer, "kernels", kernels.SMALL_TILES, x, torch.zeros(1, 64, 6, 6).half())
assert torch.equal(y, layer.bias.half()[:, None, None].expand(1, 64, 6, 6))
x[0, 3, 5, 0] = float("nan")
y, _ = passes(layer, "kernels", kernels.SMALL_TILES, x, torch.zeros(1, 64, 6, 6).half())
neighbours = [[0, 4, 0], [0, 4, 1], [0, 5, 0], [0, 5, 1]]
assert y.isnan().all(1).nonzero().tolist() == y.isnan().any(1).nonzero().tolist() == neighbours

ones = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False).requires_grad_(False)
torch.nn.init.constant_(ones.weight, 1.0)  # a gradient of 18432 is 147456 before the rotation
convolution.convert(ones, "kernels", "cpu")
compare(ones, kernels.SMALL_TILES, torch.full((1, 64, 3, 3), 9.0).half(), torch.full((1, 64, 3, 3), 32.0).half())
print("equal")
"""


def test_kernels_equal_torchs_operations_in_the_interpreter():
    pytest.importorskip("triton")
    done = interpreted.run(INTERPRETED)
    assert done.stdout == "equal\n", done.stderr[-3000:]
