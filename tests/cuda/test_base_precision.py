"""--base_precision on the virtual GPU: less memory, and no more waiting for the GPU."""

import pytest
from packaging.version import Version

from tests.cuda.configurations import Configuration

torch = pytest.importorskip("torch")


def _configuration(*options):
    # In fp16 as a default configuration, whose run of upstream this shares.
    mixed = ("--mixed_precision", "fp16")
    return Configuration("flux_train_network.py", mixed, extension_options=("--base_precision", "int8", *options))


@pytest.mark.thorough
@pytest.mark.only("v0.11")
def test_8_bit_base_needs_less_memory(checkout, train_both):
    pytest.importorskip("triton")
    pair = train_both(checkout, _configuration())
    assert "base precision: 42 frozen linear layers in 8 bits" in pair.ours.output
    assert "saves memory but no time" not in pair.ours.output
    for ours, theirs in zip(pair.ours.later_steps, pair.upstream.later_steps, strict=True):
        assert ours.bytes < theirs.bytes - 600_000  # half of the layers' 1.4 MB, less scales
        assert ours.syncs <= theirs.syncs
        assert ours.random_state == theirs.random_state  # the check of the kernels draws none
    assert pair.ours.peak < pair.upstream.peak


@pytest.fixture(scope="module")
def products(printed_on_gpu):
    """How layers multiply, and the kernels that they launch."""
    pytest.importorskip("triton")
    return printed_on_gpu("eight_bit_products.py")


def test_fp8_rows_are_multiplied_by_triton_where_torch_cannot(products):
    """As under Windows, and with torch 2.6 on compute capability 8.9."""
    expected = {"int8": "kernels", "int8 without scaled products": "kernels", "fp8 without scaled products": "triton"}
    expected["fp8"] = "kernels" if Version(torch.__version__) >= Version("2.7") else "triton"
    assert {name: products[name]["products"] for name in expected} == expected
    assert all(products[name]["obstacle"] is None for name in expected)
    multiplied = {name: products[name]["kernels"].get("_multiply", 0) for name in expected}
    assert multiplied == {name: 0 if (name, way) == ("fp8", "kernels") else 2 for name, way in expected.items()}


def test_a_weight_is_dequantized_in_one_pass(products):
    """Each pass of a layer: scales times the rotation's growth, the weight, its product and the rotation's."""
    kernels = products["weights"]
    by_cublas = sum(count for name, count in kernels.items() if name.startswith("cublas"))
    assert by_cublas == 4
    assert sum(kernels.values()) - by_cublas == 4, kernels


def test_a_convolution_launches_five_kernels(products):
    expected = {"_quantize_pixels": 2, "_convolve": 2, "_transpose": 1}
    assert products["convolution"] == {"products": "kernels", "obstacle": None, "kernels": expected}


def test_no_kernels_of_triton_on_turing(printed_on_gpu):
    triton = pytest.importorskip("triton")
    measured = printed_on_gpu("turing.py", VIRTUAL_GPU="3060", VIRTUAL_GPU_CAPABILITY="7.5")
    assert measured["products"] == "weights"
    assert "compute capability 7.5, and 8-bit products need 8.0" in measured["obstacle"]
    assert measured["has_kernels"] == (Version(triton.__version__) < Version("3.3"))


@pytest.mark.slow
@pytest.mark.only("v0.11")
@pytest.mark.parametrize("graphs", [(), ("--cuda_graphs", "--cuda_graphs_always")])
def test_8_bit_convolutions_train_sdxl(checkout, train_both, graphs):
    pytest.importorskip("triton")
    options = ("--base_precision", "int8", "--int8_convolutions", *graphs)
    pair = train_both(
        checkout, Configuration("sdxl_train_network.py", ("--mixed_precision", "bf16"), extension_options=options)
    )
    assert "convolutions in 8 bits" in pair.ours.output
    assert "--int8_convolutions has no effect" not in pair.ours.output
    for ours, theirs in zip(pair.ours.later_steps, pair.upstream.later_steps, strict=True):
        assert graphs or ours.syncs <= theirs.syncs  # recording waits
        assert ours.random_state == theirs.random_state
    assert (pair.ours.steps[-1].launches_in_graphs > 0) is bool(graphs)


@pytest.mark.slow
def test_8_bit_products_are_recorded_in_cuda_graphs(checkout, train_both):
    pytest.importorskip("triton")
    pair = train_both(checkout, _configuration("--cuda_graphs", "--cuda_graphs_always", "--fused_operations"))
    assert pair.ours.steps[-1].launches_in_graphs > 1000
