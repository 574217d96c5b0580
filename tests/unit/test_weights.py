"""Descriptions and comparisons of LoRAs and checkpoints."""

import json
import math
import struct
import subprocess
import sys

import pytest

from kohya_ext.__main__ import main

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file

from kohya_ext.errors import UserError  # noqa: E402
from kohya_ext.weights import comparison, deltas, names, report, training_metadata  # noqa: E402
from kohya_ext.weights.tensor_file import TensorFile  # noqa: E402
from tests import scaled_files  # noqa: E402

METADATA = {
    "ss_output_name": "cat",
    "ss_sd_model_name": "sd_xl_base_1.0.safetensors",
    "ss_base_model_version": "sdxl_base_v1-0",
    "ss_network_module": "networks.lora",
    "ss_network_dim": "16",
    "ss_network_alpha": "8.0",
    "ss_network_args": json.dumps({"conv_dim": 4}),
    "ss_steps": "1500",
    "ss_max_train_steps": "2000",
    "ss_epoch": "7",
    "ss_num_epochs": "10",
    "ss_training_started_at": "1000.0",
    "ss_training_finished_at": "4600.0",
    "ss_learning_rate": "0.0001",
    "ss_unet_lr": "0.0002",
    "ss_text_encoder_lr": "None",
    "ss_optimizer": "bitsandbytes.optim.adamw.AdamW8bit",
    "ss_lr_scheduler": "cosine",
    "ss_num_train_images": "400",
    "ss_datasets": json.dumps(
        [
            {
                "resolution": [1024, 1024],
                "batch_size_per_device": 2,
                "dataset_dirs": {"10_cat": {"n_repeats": 10, "img_count": 40}},
            }
        ]
    ),
    "ss_tag_frequency": json.dumps({"10_cat": {"cat": 40, "red": 3}}),
    "ss_gradient_accumulation_steps": "4",
}


def lora(rank=4, alpha=2.0, modules=("lora_unet_input_blocks_4_1_proj_in", "lora_te1_text_model_encoder_layers_0_mlp_fc1")):
    """Return the tensors of a LoRA of modules of 8x6 weights."""
    torch.manual_seed(0)
    tensors = {}
    for module in modules:
        tensors[f"{module}.lora_up.weight"] = torch.randn(8, rank)
        tensors[f"{module}.lora_down.weight"] = torch.randn(rank, 6)
        tensors[f"{module}.alpha"] = torch.tensor(alpha)
    return tensors


@pytest.fixture
def write(tmp_path):
    """Write tensors; ``write(tensors, name=, metadata=)`` returns the path."""

    def write(tensors, name="cat.safetensors", metadata=None):
        path = tmp_path / name
        if path.suffix == ".safetensors":
            save_file(tensors, path, metadata)
        else:
            torch.save(tensors, path)
        return path

    return write


def described(path):
    with TensorFile(path) as file:
        return report.describe(file)


def compared(first, second):
    with TensorFile(first) as ours, TensorFile(second) as theirs:
        return comparison.compare(ours, theirs)


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "component", "family", "index"),
    [
        ("lora_unet_input_blocks_4_1_proj_in", "U-Net", "input_blocks", 4),
        ("lora_unet_down_blocks_1_attentions_0_proj_in", "U-Net", "down_blocks", 1),
        ("unet.down_blocks.1.attentions.0.proj_in", "U-Net", "down_blocks", 1),
        ("model.diffusion_model.middle_block.1.norm", "U-Net", "middle_block", 1),
        ("lora_unet_double_blocks_18_img_attn_qkv", "transformer", "double_blocks", 18),
        ("diffusion_model.single_blocks.3.linear1", "transformer", "single_blocks", 3),
        ("transformer.transformer_blocks.3.attn.to_q", "transformer", "transformer_blocks", 3),
        ("layers.2.attention.qkv", "transformer", "layers", 2),
        ("context_refiner.0.attention.qkv", "transformer", "context_refiner", 0),
        ("lora_te_text_model_encoder_layers_11_mlp_fc1", "text encoder", "text_model_encoder_layers", 11),
        ("lora_te3_encoder_block_2_layer_0", "text encoder 3", "encoder_block", 2),
        ("text_encoder_2.text_model.encoder.layers.1.mlp", "text encoder 2", "text_model_encoder_layers", 1),
        ("conditioner.embedders.0.transformer.text_model.x", "text encoder 1", "", None),
        (
            "cond_stage_model.transformer.text_model.encoder.layers.4.x",
            "text encoder",
            "transformer_text_model_encoder_layers",
            4,
        ),
        ("first_stage_model.decoder.conv_in.weight", "VAE", "", None),
    ],
)
def test_place_of_a_name(name, component, family, index):
    place = names.places([name])[name]
    assert (place.component, place.family, place.index) == (component, family, index)


def test_modules_outside_of_blocks_are_in_the_component_of_the_blocks():
    places = names.places(["diffusion_model.img_in", "diffusion_model.double_blocks.0.x"])
    assert {place.component for place in places.values()} == {"transformer"}


@pytest.mark.parametrize(
    ("suffixes", "kind"),
    [
        (("lora_up.weight", "lora_down.weight", "alpha"), "LoRA"),
        (("lora_A.weight", "lora_B.weight"), "LoRA"),
        (("lora_A.default.weight", "lora_B.default.weight"), "LoRA"),
        (("lora.up.weight", "lora.down.weight"), "LoRA"),
        (("lora_linear_layer.up.weight", "lora_linear_layer.down.weight"), "LoRA"),
        (("lora_up.weight", "lora_down.weight", "dora_scale", "alpha"), "DoRA"),
        (("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"), "DoRA"),
        (("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "alpha"), "LoHa"),
        (("lokr_w1", "lokr_w2_a", "lokr_w2_b"), "LoKr"),
        (("oft_blocks", "alpha"), "OFT"),
        (("oft_blocks.0", "oft_blocks.1"), "OFT"),
        (("oft_R.weight",), "OFTv2"),
        (("boft_R", "boft_s"), "BOFT"),
        (("diff", "diff_b"), "full difference"),
        (("w_norm", "b_norm"), "norm"),
    ],
)
def test_kind_of_a_module(suffixes, kind):
    modules, others = names.adapted_modules([*(f"unet.proj.{suffix}" for suffix in suffixes), "x.weight"])
    assert [(module.name, module.kind) for module in modules.values()] == [("unet.proj", kind)]
    assert len(modules["unet.proj"].tensors) == len(suffixes)
    assert others == ["x.weight"]


def test_attention_processors_of_old_diffusers_are_loras():
    modules, _ = names.adapted_modules([f"unet.attn.processor.to_q_lora.{part}.weight" for part in ("up", "down")])
    assert [(module.name, module.kind) for module in modules.values()] == [("unet.attn.processor.to_q", "LoRA")]


# --- changes of weights ----------------------------------------------------------------------------------------------


def test_norm_of_a_lora_is_that_of_its_product(write):
    tensors = lora(rank=4, alpha=2.0)
    (module, *_) = described(write(tensors)).modules
    product = tensors[f"{module.name}.lora_up.weight"] @ tensors[f"{module.name}.lora_down.weight"] * (2.0 / 4)
    assert module.norm == pytest.approx(float(product.norm()), rel=1e-5)
    assert (module.rank, module.alpha, module.moved) == (4, 2.0, True)


def test_a_zero_or_missing_alpha_does_not_scale(write):
    whole = lora(alpha=4.0)
    norm = described(write(whole)).modules[0].norm
    for changed in (lora(alpha=0.0), {name: each for name, each in whole.items() if not name.endswith("alpha")}):
        assert described(write(changed)).modules[0].norm == pytest.approx(norm)


def lllite(up):
    """Return the tensors of a LLLite for Anima with one module."""
    module = "lllite_dit_blocks_0_self_attn_q_proj"
    parts = {"down": (4, 8), "mid": (4, 12), "cond_to_film": (8, 8)}
    return {
        **{f"{module}.{part}.weight": torch.randn(shape) for part, shape in parts.items()},
        f"{module}.up.weight": up,
        f"{module}.depth_embed": torch.randn(8),
        "lllite_conditioning1.proj.weight": torch.randn(8, 3),
    }


def test_a_lllite_for_anima_is_described(write):
    up = torch.randn(8, 4)
    trained = described(write(lllite(up)))
    assert (trained.kind, trained.problems, trained.notes) == ("ControlNet-LLLite", [], [])
    (module,) = trained.modules
    assert (module.rank, module.place.family, module.place.index) == (4, "blocks", 0)
    assert module.norm == pytest.approx(float(torch.linalg.vector_norm(up)))
    (problem,) = described(write(lllite(torch.zeros(8, 4)), "new.safetensors")).problems
    assert problem.startswith("the file does not change the model")


def test_change_of_a_rotation_is_its_distance_from_the_identity(write):
    """A rotation by an angle moves a unit vector by the chord 2 sin(angle / 2)."""
    half = 0.01  # tan(angle / 2) by Cayley's formula; both modules have two blocks of two channels
    chord = 2 * math.sin(math.atan(half)) * 4**0.5
    for parts, kind in (
        ({"oft_R.weight": torch.full((2, 1), half)}, "OFTv2"),
        ({"boft_R": torch.tensor([[[0, half], [-half, 0]]] * 2)[None], "boft_s": torch.ones(3, 1)}, "BOFT"),
    ):
        (module,) = described(
            write({f"lora_unet_x.{part}": values for part, values in parts.items()}, f"{kind}.safetensors")
        ).modules
        assert (module.kind, module.rank, module.moved) == (kind, None, True)
        assert module.norm == pytest.approx(chord, rel=1e-4)
    scaled = {"lora_unet_x.boft_R": torch.eye(2).expand(1, 2, 2, 2).contiguous(), "lora_unet_x.boft_s": torch.full((3, 1), 1.5)}
    assert described(write(scaled)).modules[0].norm == pytest.approx(0.5 * 3**0.5)


def test_convolutions_are_locon(write):
    tensors = lora()
    tensors |= {"lora_unet_input_blocks_1_0_x.lora_up.weight": torch.randn(8, 2, 1, 1)}
    tensors |= {"lora_unet_input_blocks_1_0_x.lora_down.weight": torch.randn(2, 6, 3, 3)}
    result = described(write(tensors))
    assert result.kind == "LoCon"
    assert [(group.rank, group.convolution) for group in result.groups] == [(2, True), (4, False), (4, False)]


def test_difference_of_products_is_that_of_the_matrices():
    torch.manual_seed(0)
    first, second = (deltas.Product(torch.randn(8, rank), torch.randn(rank, 6)) for rank in (2, 3))
    expected = float((first.dense() - second.dense()).norm())
    assert first.minus(second).norm() == pytest.approx(expected, rel=1e-5)
    assert first.minus(deltas.Product(second.dense())).norm() == pytest.approx(expected, rel=1e-5)


# --- files -----------------------------------------------------------------------------------------------------------


def test_description_of_a_lora(write):
    result = described(write(lora(), metadata=METADATA))
    assert (result.kind, result.tensors, result.dtypes) == ("LoRA", 6, {"float32": 2 * (14 * 4 + 1)})
    assert [(group.component, group.family, group.blocks, group.rank) for group in result.groups] == [
        ("U-Net", "input_blocks", (4,), 4),
        ("text encoder 1", "text_model_encoder_layers", (0,), 4),
    ]
    assert not result.problems
    assert result.summary() == "LoRA: 2 modules, rank 4, alpha 2, float32, all values finite"
    integers = {name: tensor.long() if name.endswith("alpha") else tensor for name, tensor in lora().items()}
    assert "float32, all values finite" in described(write(integers)).summary()


def test_files_of_torch_are_the_same(write):
    expected = described(write(lora()))
    for content in (lora(), {"state_dict": lora(), "epoch": 3}):
        result = described(write(content, "cat.pt"))
        assert (result.modules, result.groups) == (expected.modules, expected.groups)


@pytest.mark.parametrize("network", ["dylora", "lora_fa"])
def test_networks_with_the_names_of_a_lora_are_known_by_metadata(write, network):
    result = described(write(lora(), metadata={"ss_network_module": f"networks.{network}"}))
    assert result.kind == {"dylora": "DyLoRA", "lora_fa": "LoRA-FA"}[network]


def test_modules_that_never_moved_are_a_note_and_all_of_them_a_problem(write):
    tensors = lora()
    still = "lora_te1_text_model_encoder_layers_0_mlp_fc1"
    tensors[f"{still}.lora_up.weight"].zero_()
    result = described(write(tensors))
    assert not result.problems
    assert result.notes == [f"text encoder 1: none has moved of 1 modules ({still})"]
    assert "1 never moved" in result.summary()
    tensors["lora_unet_input_blocks_4_1_proj_in.lora_up.weight"].zero_()
    (problem,) = described(write(tensors)).problems
    assert problem.startswith("the file does not change the model")


def test_unused_last_layer_of_a_text_encoder_is_expected(write):
    tensors = lora(
        modules=[f"lora_te1_text_model_encoder_layers_{layer}_mlp_fc{number}" for layer in (0, 1) for number in (1, 2)]
    )
    for number in (1, 2):
        tensors[f"lora_te1_text_model_encoder_layers_1_mlp_fc{number}.lora_up.weight"].zero_()
    result = described(write(tensors))
    assert result.notes == [
        "text encoder 1: the 2 modules of the last layer never moved, because the model uses the output of the layer before"
    ]
    assert "never moved" not in result.summary()
    tensors["lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_up.weight"].zero_()
    result = described(write(tensors))
    assert result.notes[0].startswith("text encoder 1: 3 never moved of 4 modules")
    assert "3 never moved" in result.summary()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e5m2"])
def test_values_that_are_not_finite_are_a_problem(write, value, dtype):
    tensors = lora()
    name = "lora_unet_input_blocks_4_1_proj_in.lora_up.weight"
    tensors[name][3, 1] = value
    tensors[name] = tensors[name].to(getattr(torch, dtype))
    result = described(write(tensors))
    assert result.not_finite == {name: 1}
    assert result.problems[0].startswith(f"1 of 6 tensors have values that are infinite or NaN ({name});")
    assert "all values finite" not in result.summary()


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_incomplete_modules_are_a_problem(write, change):
    tensors, name = lora(), "lora_unet_input_blocks_4_1_proj_in.lora_down.weight"
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = torch.randn(3, 6)
    (problem,) = described(write(tensors)).problems
    assert problem.startswith("1 of 2 modules lack a tensor, or their shapes do not fit together")


def test_checkpoints_are_described_by_component(write):
    tensors = {"model.diffusion_model.input_blocks.0.0.weight": torch.full((2, 2), 2.0, dtype=torch.bfloat16)}
    tensors |= {"first_stage_model.decoder.conv_in.weight": torch.zeros(3)}
    result = described(write(tensors))
    assert (result.kind, result.modules) == ("checkpoint", [])
    assert [(group.component, group.norm, group.largest) for group in result.groups] == [("U-Net", 4.0, 2.0), ("VAE", 0.0, 0.0)]
    assert result.problems == ["all values of the VAE are 0"]


@pytest.mark.parametrize("name", ["fp8_scaled", "comfy_fp8", "convrot"])
def test_checkpoints_in_8_bits_with_scales_are_described(write, tmp_path, name):
    tensors = {"model.diffusion_model.double_blocks.0.img_attn.qkv.weight": torch.randn(64, 64)}
    file, _ = scaled_files.write(write(tensors), tmp_path, name)
    result = described(file)
    assert (result.kind, result.problems, result.not_finite) == ("checkpoint", [], {})
    kind = "int8 with scales, rotated" if name == "convrot" else "fp8 with scales"
    assert result.notes == [f"1 weights in {kind}; the values shown are those of the 8 bits, without scales"]


def test_checkpoints_that_cannot_be_read_are_described(write):
    result = described(write({"a.weight": torch.ones(4, 4, dtype=torch.int8)}))
    (note,) = result.notes
    assert note.startswith("cat.safetensors has weights in int8 without scales, which cannot be read; download")


def test_textual_inversion(write):
    assert described(write({"emb_params": torch.randn(2, 8)})).kind == "textual inversion"
    assert described(write({"string_to_param": {"*": torch.randn(2, 8)}}, "cat.pt")).kind == "textual inversion"


def test_unknown_networks_are_no_checkpoints(write):
    result = described(
        write({"lora_unet_input_blocks_1_x.on_input": torch.ones(2), "lora_unet_input_blocks_1_x.weight": torch.ones(4)})
    )
    assert (result.kind, result.problems) == ("network of an unknown kind", [])


@pytest.mark.linux("the module resource measures the memory")
def test_memory_does_not_grow_to_the_size_of_a_checkpoint(tmp_path):
    size = 2**28  # of each of two tensors, in bytes
    rows = {
        f"double_blocks.{block}.weight": {
            "dtype": "F32",
            "shape": [size // 4],
            "data_offsets": [block * size, (block + 1) * size],
        }
        for block in range(2)
    }
    header = json.dumps(rows).encode()
    with open(tmp_path / "large.safetensors", "wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + 2 * size)
    code = """if True:
        import resource, sys
        from pathlib import Path
        from kohya_ext.weights import report, tensor_file
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with tensor_file.TensorFile(Path(sys.argv[1])) as file:
            report.describe(file)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    command = [sys.executable, "-c", code, str(tmp_path / "large.safetensors")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown * 1024 < size / 2  # a quarter of the file


# --- comparison ------------------------------------------------------------------------------------------------------


def test_a_file_is_identical_to_itself_and_to_other_spellings_of_its_names(write):
    modules = ("lora_unet_double_blocks_0_img_attn_proj", "lora_unet_single_blocks_1_linear1")
    first = lora(modules=modules)
    comfy = {
        name.replace("lora_unet_double_blocks_0_img_attn_proj", "diffusion_model.double_blocks.0.img_attn.proj")
        .replace("lora_unet_single_blocks_1_linear1", "diffusion_model.single_blocks.1.linear1")
        .replace("lora_down", "lora_A")
        .replace("lora_up", "lora_B"): tensor
        for name, tensor in first.items()
    }
    path = write(first)
    for second in (path, write(comfy, "comfy.safetensors")):
        result = compared(path, second)
        assert result.identical
        assert [(group.family, group.count, group.relative) for group in result.groups] == [
            ("double_blocks", 1, 0.0),
            ("single_blocks", 1, 0.0),
        ]


def test_relative_difference_is_that_of_the_changes(write):
    first, second = lora(), lora()
    for name in second:
        if name.startswith("lora_unet") and "up" in name:
            second[name] = second[name] * 1.25
    result = compared(write(first), write(second, "other.safetensors"))
    assert [group.relative for group in result.groups] == [pytest.approx(0.25, rel=1e-6), 0.0]
    assert [group.cosine for group in result.groups] == [pytest.approx(1.0), pytest.approx(1.0)]
    assert [group.differing for group in result.groups] == [1, 0]
    assert not result.identical


def test_the_same_change_at_another_rank_has_no_difference(write):
    first = lora(rank=4, alpha=4.0)
    second = {}
    for name, tensor in first.items():
        zeros = torch.zeros_like(tensor)
        second[name] = torch.tensor(8.0) if "alpha" in name else torch.cat([tensor, zeros], 1 if "up" in name else 0)
    result = compared(write(first), write(second, "other.safetensors"))
    assert all(group.relative < 1e-7 for group in result.groups)
    assert [*result.reshaped.values()] == [("LoRA rank 4 alpha 4", "LoRA rank 8 alpha 8")] * 2


def test_modules_and_metadata_of_one_file(write):
    first, second = lora(), lora(modules=("lora_unet_input_blocks_4_1_proj_in", "lora_unet_input_blocks_5_1_proj_in"))
    result = compared(write(first, metadata={"a": "1", "b": "2"}), write(second, "other.safetensors", {"a": "1", "c": "3"}))
    assert result.only_first == ["lora_te1_text_model_encoder_layers_0_mlp_fc1"]
    assert result.only_second == ["lora_unet_input_blocks_5_1_proj_in"]
    assert result.metadata == {"b": ("2", None), "c": (None, "3")}


def test_checkpoints_are_compared_by_their_weights(write):
    first = {"model.diffusion_model.out.0.weight": torch.full((4,), 2.0), "x": torch.zeros(2), "y": torch.zeros(3)}
    second = {"model.diffusion_model.out.0.weight": torch.full((4,), 2.5), "x": torch.zeros(2), "y": torch.zeros(4)}
    result = compared(write(first), write(second, "other.safetensors"))
    assert {group.family: group.relative for group in result.groups} == {"out": 0.25, "": 0.0}
    assert result.reshaped == {"y": ("[3]", "[4]")}
    assert result.unread == ["y"]


def test_a_network_and_a_checkpoint_cannot_be_compared(write):
    first, second = write(lora()), write({"x": torch.zeros(2)}, "x.safetensors")
    with pytest.raises(UserError, match=r"cat.safetensors is a network and x.safetensors is not"):
        compared(second, first)


# --- metadata and command --------------------------------------------------------------------------------------------


def test_metadata_describe_the_run():
    topics = training_metadata.describe(METADATA)
    assert topics["base model"] == "sd_xl_base_1.0.safetensors (sdxl_base_v1-0)"
    assert topics["network"] == "networks.lora, rank 16, alpha 8.0, conv_dim=4"
    assert topics["trained"].startswith("1,500 of 2,000 steps, 7 of 10 epochs, in 1 h, until 19")
    assert topics["learning rate"] == "0.0001, U-Net or transformer 0.0002, bitsandbytes.optim.adamw.AdamW8bit, cosine"
    assert topics["images"] == "40 images, 400 with repeats, 1024x1024"
    assert topics["batch size"] == "2, gradient accumulation 4"
    assert topics["tags"] == "cat (40), red (3)"


def test_metadata_of_other_programs_are_no_error():
    unexpected = dict.fromkeys(METADATA, "[1") | {"ss_tag_frequency": "[1]", "ss_datasets": "[1]", "ss_network_args": "[]"}
    assert isinstance(training_metadata.describe(unexpected), dict)
    assert training_metadata.describe({}) == {}


def test_command_prints_the_description(write, capsys):
    assert main(["inspect", str(write(lora(), metadata=METADATA))]) == 0
    text = capsys.readouterr().out
    assert "cat.safetensors  LoRA: 2 modules, rank 4, alpha 2" in text
    assert "sd_xl_base_1.0.safetensors" in text
    assert "U-Net input_blocks 4" in text


def test_command_exits_with_1_for_a_broken_file(write, capsys, tmp_path):
    path = write(lora())
    content = path.read_bytes()
    tensors = lora()
    tensors["lora_unet_input_blocks_4_1_proj_in.lora_up.weight"][0] = math.nan
    cases = {"truncated": content[:-50], "is empty": b"", "not a safetensors file": b"\x80" * 200}
    for problem, damaged in cases.items():
        path.write_bytes(damaged)
        assert main(["inspect", str(path)]) == 1
        assert problem in capsys.readouterr().out
    (tmp_path / "cat.pt").write_bytes(b"\x80\x02x" * 20)
    assert main(["inspect", str(tmp_path / "cat.pt")]) == 1
    assert "cannot be read by torch.load" in capsys.readouterr().out
    assert main(["inspect", str(write(tensors)), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"]
    assert main(["inspect", str(tmp_path / "missing.safetensors")]) == 2
    assert "missing.safetensors cannot be read: " in capsys.readouterr().err


def test_json_has_every_module(write, capsys):
    path = write(lora(), metadata=METADATA)
    assert main(["inspect", "--json", str(path)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["file"], data["kind"], data["metadata"]["ss_steps"]) == (str(path), "LoRA", "1500")
    (module, _) = data["modules"]
    assert {"name", "component", "family", "index", "rank", "alpha", "norm", "moved"} <= module.keys()
    assert main(["inspect", "--json", str(path), str(path)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["identical"]
    assert data["differences"]["groups"][0]["relative"] == 0.0


def test_command_compares_two_files(write, capsys):
    first, second = (
        write(lora(), metadata={"a": "1"}),
        write(lora(rank=2), "other.safetensors", {"a": "2", "ss_session_id": "3"}),
    )
    assert main(["inspect", str(first), str(second)]) == 0
    text = capsys.readouterr().out
    assert "LoRA rank 4 alpha 2 and LoRA rank 2 alpha 2" in text
    assert "1 -> 2" in text
    assert "ss_session_id" not in text
    assert main(["inspect", str(first), str(first), str(first)]) == 2


# --- the end of a run ------------------------------------------------------------------------------------------------


def test_check_returns_problems_and_a_summary(write, monkeypatch, tmp_path):
    path = write(lora())
    assert report.check(path) == ([], "LoRA: 2 modules, rank 4, alpha 2, float32, all values finite")
    tensors = lora()
    for name in tensors:
        if "up" in name:
            tensors[name].zero_()
    ((problem,), _) = report.check(write(tensors, "zero.safetensors"))
    assert problem.startswith("the file does not change the model")
    ((problem,), summary) = report.check(tmp_path / "missing.safetensors")
    assert (summary, "missing" in problem) == ("", True)
    monkeypatch.setattr(report, "_LARGEST", 10)
    monkeypatch.setattr(TensorFile, "chunks", lambda *_: pytest.fail("it reads values"))
    assert report.check(path) == ([], f"6 tensors, {path.stat().st_size / 1e6:.1f} MB; values were not checked")
