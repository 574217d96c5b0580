"""Weights in 8 bits with scales: which files have them, and their values."""

import json

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from kohya_ext.run.scaled_checkpoints import UnreadableError, stored_weights  # noqa: E402
from kohya_ext.weights import scaling  # noqa: E402
from kohya_ext.weights.postponed import History, PostponedCast  # noqa: E402
from kohya_ext.weights.scaling import Scaling, values_of  # noqa: E402
from tests import scaled_files  # noqa: E402

FP8, INT8, BF16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    file = tmp_path / "model.safetensors"
    names = ("blocks.0.up", "blocks.0.down", "model.diffusion_model.out")
    save_file({f"{name}.weight": torch.randn(48, 64) for name in names} | {"norm.weight": torch.randn(7)}, file)
    return file


def _save(tmp_path, metadata=None, **tensors):
    file = tmp_path / "file.safetensors"
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, file, metadata)
    return file


def _weights(file):
    tensors, stored = load_file(file), stored_weights(file)
    return {
        name: Scaling(tensors[each.scale], each.rotation).weights(values_of(tensors[name], each))
        for name, each in stored.weights.items()
    }


@pytest.mark.parametrize("name", scaled_files.FORMATS)
def test_weights_are_the_values_times_the_scales(checkpoint, tmp_path, name):
    file, usual = scaled_files.write(checkpoint, tmp_path, name)
    expected, weights = load_file(usual), _weights(file)
    assert len(weights) == 3
    # Rotations add in another order than the reference.
    tolerance = 2**-8 if name == "convrot" else 0
    for each, weight in weights.items():
        assert weight.dtype is BF16
        torch.testing.assert_close(weight, expected[each], rtol=tolerance, atol=tolerance / 8)
    stored = stored_weights(file)
    assert set(load_file(file)) - set(load_file(usual)) == stored.left_out
    assert str(stored) == f"3 weights in {'fp8' if 'fp8' in name else 'int8'} with scales{', rotated' * (name == 'convrot')}"


def test_a_rotation_is_undone(checkpoint, tmp_path):
    """A weight in rotated int8 differs from the original one by rounding alone."""
    file, _ = scaled_files.write(checkpoint, tmp_path, "convrot")
    for name, weight in _weights(file).items():
        original = load_file(checkpoint)[name]
        assert (weight.float() - original).norm() < 0.02 * original.norm()


def test_ordinary_files_are_left_alone(tmp_path):
    fp8 = torch.zeros(4, 4).to(FP8)
    for tensors in (
        {"a__weight": torch.zeros(4, 4)},
        {"a__weight": fp8},
        {"a__lora_down__weight": fp8, "a__scale": torch.ones(1)},
    ):
        assert stored_weights(_save(tmp_path, **tensors)) is None


def test_a_marker_alone_is_left_out(tmp_path):
    stored = stored_weights(_save(tmp_path, a__weight=torch.zeros(4, 4), scaled_fp8=torch.zeros(0).to(FP8)))
    assert (stored.weights, stored.left_out) == ({}, {"scaled_fp8"})


def test_an_empty_scale_is_one(tmp_path):
    """Some files have the scales' names without values (tdrussell/diffusion-pipe#381)."""
    file = _save(tmp_path, a__weight=torch.full((4, 4), 3.0).to(FP8), a__scale_weight=torch.zeros(0))
    assert (_weights(file)["a.weight"] == 3).all()


def test_weights_in_16_bits_are_scaled_too(tmp_path):
    file = _save(tmp_path, a__weight=torch.full((4, 4), 3.0, dtype=BF16), a__scale_weight=torch.full((1,), 2.0))
    assert (_weights(file)["a.weight"] == 6).all()


def test_notes_in_the_metadata_lack_the_prefix_of_names(tmp_path):
    layers = {"out": {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 4}, "up": "float8_e4m3fn"}
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    scales = {"model__out__weight_scale": torch.ones(1), "up__weight_scale": torch.ones(1)}
    values = {"model__out__weight": torch.ones(4, 4, dtype=INT8), "up__weight": torch.ones(4, 4).to(FP8).view(torch.uint8)}
    stored = stored_weights(_save(tmp_path, metadata, **values, **scales))
    assert stored.weights["model.out.weight"].rotation == 4
    assert stored.weights["up.weight"].dtype == "F8_E4M3"


def _note(text):
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"a__weight__quant_state__bitsandbytes__nf4": torch.zeros(1)}, r"bitsandbytes' 4 bits \(nf4\)"),
        ({"a__weight_scale_2": torch.zeros(1)}, "nvfp4"),
        ({"a__qweight": torch.zeros(1), "a__wscales": torch.zeros(1)}, "SVDQuant's 4 bits"),
        ({"a__weight": torch.zeros(4, 4, dtype=INT8)}, "int8 without scales"),
        ({"a__weight": torch.zeros(4, 4, dtype=INT8), "a__comfy_quant": _note('{"format": "convrot_w4a4"}')}, "convrot_w4a4"),
        ({"a__weight": torch.zeros(4, 4, dtype=INT8), "a__comfy_quant": _note("{")}, "notes that are not JSON"),
        ({"a__weight": torch.zeros(4, 4, dtype=torch.uint8), "a__weight_scale": torch.zeros(1)}, "U8 with scales in F32"),
        (
            {"a__weight": torch.zeros(4, 4, dtype=INT8), "a__weight_scale": torch.zeros(1, dtype=torch.uint8)},
            "I8 with scales in U8",
        ),
        ({"a__weight": torch.zeros(4, 4, dtype=INT8), "a__weight_scale": torch.zeros(3)}, r"scales of the shape \[3\]"),
        (
            {
                "a__weight": torch.zeros(4, 6, dtype=INT8),
                "a__weight_scale": torch.zeros(4),
                "a__comfy_quant": _note('{"format": "int8_tensorwise", "convrot": true}'),
            },
            "a rotation of 256 columns",
        ),
    ],
)
def test_other_formats_are_refused(tmp_path, tensors, reason):
    with pytest.raises(UnreadableError, match=f"^file.safetensors has weights in {reason}.*; download the checkpoint in bf16"):
        stored_weights(_save(tmp_path, **tensors))


def test_gguf_is_refused(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(UnreadableError, match="is a GGUF file"):
        stored_weights(file)


@pytest.mark.parametrize("name", scaled_files.FORMATS)
def test_postponed_weights_are_the_same(checkpoint, tmp_path, name):
    file, _ = scaled_files.write(checkpoint, tmp_path, name)
    tensors = load_file(file)
    for key, each in stored_weights(file).weights.items():
        scaling = Scaling(tensors[each.scale], each.rotation)
        weight = PostponedCast(History(tensors[key], scaling=scaling))
        expected = scaling.weights(tensors[key])
        assert (weight.dtype, weight.shape) == (BF16, expected.shape)
        assert torch.equal(weight.clone(), expected)
        again = PostponedCast(History(tensors[key], scaling=scaling)).to(torch.float32).to(torch.float16)
        assert again.history.casts == (torch.float32, torch.float16)[1:]
        assert torch.equal(again + 0, expected.to(torch.float16))


def test_scales_of_rows_are_those_of_fp8_files(checkpoint, tmp_path):
    for name, has_rows in {
        "fp8_scaled": True,
        "comfy_fp8": True,
        "fp8_blocks": False,
        "int8_rows": True,
        "convrot": False,
    }.items():
        file, _ = scaled_files.write(checkpoint, tmp_path, name)
        tensors = load_file(file)
        for key, each in stored_weights(file).weights.items():
            scales = Scaling(tensors[each.scale], each.rotation).row_scales(tensors[key])
            assert (scales is not None) == has_rows
            if scales is not None:
                assert torch.equal((tensors[key].float() * scales[:, None]).to(BF16), _weights(file)[key])


@pytest.mark.parametrize("name", scaled_files.FORMATS)
def test_parts_of_a_matrix_are_its_rows(checkpoint, tmp_path, name, monkeypatch):
    """Large matrices are computed in parts, which limits temporary memory."""
    file, _ = scaled_files.write(checkpoint, tmp_path, name)
    expected = _weights(file)
    for elements in (1, 64 * 5, 64 * 16):
        monkeypatch.setattr(scaling, "_ELEMENTS", elements)
        parts = _weights(file)
        assert all(torch.equal(parts[key], weight) for key, weight in expected.items())


def test_eight_bits_are_moved_before_weights_are_computed(monkeypatch):
    """So that a GPU computes them: a CPU is slow, and keeps temporary memory."""
    devices = []
    original = Scaling.weights
    monkeypatch.setattr(Scaling, "weights", lambda self, values: devices.append(values.device.type) or original(self, values))
    weight = PostponedCast(History(torch.zeros(4, 4).to(FP8), scaling=Scaling(torch.ones(1), 0)))
    moved = weight.to("meta", torch.float16)
    assert (moved.device.type, moved.dtype, devices) == ("meta", torch.float16, ["meta"])
    assert type(moved) is torch.Tensor
