"""`inspect FILE --against BASE`: how far a file moves the base model, whether it is broken, and whether it is over-trained."""

import json

import pytest

from kohya_ext.__main__ import main

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file

from kohya_ext.errors import UserError  # noqa: E402
from kohya_ext.reporting import file_training  # noqa: E402
from kohya_ext.weights import base_weights, judgement, names, report  # noqa: E402
from kohya_ext.weights.tensor_file import TensorFile  # noqa: E402

MODULE = "input_blocks.{}.1.proj_in"
PREFIX = "model.diffusion_model."


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    tensors = {f"{PREFIX}{MODULE.format(block)}.weight": torch.randn(8, 6) for block in range(12)}
    tensors["cond_stage_model.model.transformer.resblocks.3.attn.in_proj_weight"] = torch.randn(12, 4)
    save_file(tensors, tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


def weight(base, block):
    from safetensors.torch import load_file

    return load_file(base)[f"{PREFIX}{MODULE.format(block)}.weight"]


def lora(blocks=range(12), size=0.01):
    """Return the tensors of a LoRA of rank 2 and alpha 1."""
    torch.manual_seed(1)
    tensors = {}
    for block in blocks:
        name = f"lora_unet_{MODULE.format(block).replace('.', '_')}"
        tensors[f"{name}.lora_up.weight"] = torch.randn(8, 2) * size
        tensors[f"{name}.lora_down.weight"] = torch.randn(2, 6)
        tensors[f"{name}.alpha"] = torch.tensor(1.0)
    return tensors


def dense(tensors, block):
    name = f"lora_unet_{MODULE.format(block).replace('.', '_')}"
    return tensors[f"{name}.lora_up.weight"] @ tensors[f"{name}.lora_down.weight"] / 2


def judged(tmp_path, base, tensors, training=None, name="cat.safetensors"):
    save_file(tensors, tmp_path / name)
    with TensorFile(tmp_path / name) as file, TensorFile(base) as model:
        described = report.describe(file)
        return described, judgement.judge(file, model, described, training)


def test_a_lora_is_measured_against_the_weights_that_it_changes(tmp_path, base):
    tensors = lora()
    described, result = judged(tmp_path, base, tensors)
    assert [block.index for block in result.blocks] == list(range(12))
    for block in (0, 11):
        expected = float(dense(tensors, block).norm() / weight(base, block).norm())
        assert result.blocks[block].relative == pytest.approx(expected, rel=1e-5)
    assert (result.unmatched, result.outliers, result.problems) == ([], [], [])
    text = result.text(described)
    assert text.startswith("cat.safetensors changes the weights of the U-Net by ")
    assert "no module is an outlier" in text
    assert "is not known, because its run was not validated" in text


def test_a_lora_without_half_of_its_tensors_is_not_one_of_another_model(tmp_path, base):
    downs = {name: tensor for name, tensor in lora().items() if "lora_up" not in name}
    described, result = judged(tmp_path, base, downs)
    assert result.problems == []
    assert "12 of 12 modules lack a tensor" in result.text(described)


def test_a_dora_includes_its_magnitudes(tmp_path, base):
    tensors, name = lora([0]), "lora_unet_input_blocks_0_1_proj_in"
    changed = weight(base, 0) + dense(tensors, 0)
    for magnitude, dimension in ((torch.rand(8, 1) + 1, 1), (torch.rand(1, 6) + 1, 0)):
        tensors[f"{name}.dora_scale"] = magnitude
        expected = magnitude * changed / changed.norm(dim=dimension, keepdim=True) - weight(base, 0)
        _, result = judged(tmp_path, base, tensors)
        assert result.blocks[0].relative == pytest.approx(float(expected.norm() / weight(base, 0).norm()), rel=1e-5)


def test_a_checkpoint_is_compared_tensor_by_tensor(tmp_path, base):
    from safetensors.torch import load_file

    tensors = load_file(base)
    tensors[f"{PREFIX}{MODULE.format(4)}.weight"] *= 1.5
    described, result = judged(tmp_path, base, tensors)
    moved = {block.index: block.relative for block in result.blocks if block.component == "U-Net"}
    assert moved == {block: pytest.approx(0.5 if block == 4 else 0.0) for block in range(12)}
    assert result.largest.index == 4
    assert "text encoder by 0.00%" in result.text(described)
    _, same = judged(tmp_path, base, load_file(base))
    assert same.problems == ["it does not change base.safetensors by more than rounding"]


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (lora(size=1e-9), "it does not change base.safetensors by more than rounding"),
        (lora(range(30, 32)), "base.safetensors has none of its modules; it was trained for another model"),
        (
            {name: torch.ones(5, 2) if "up" in name else each for name, each in lora([0, 1]).items()},
            "2 of 2 modules do not fit base.safetensors",
        ),
    ],
)
def test_a_file_that_does_nothing_or_is_for_another_model_is_a_problem(tmp_path, base, tensors, problem):
    described, result = judged(tmp_path, base, tensors)
    assert result.problems[0].startswith(problem)
    assert "is unusable" in result.text(described)


def test_an_outlier_and_a_dead_module_are_named(tmp_path, base):
    tensors = lora()
    tensors["lora_unet_input_blocks_3_1_proj_in.lora_up.weight"] *= 100
    tensors["lora_unet_input_blocks_5_1_proj_in.lora_up.weight"].zero_()
    described, result = judged(tmp_path, base, tensors)
    assert [name.split()[0] for name in result.outliers] == ["lora_unet_input_blocks_3_1_proj_in"]
    assert "1 of 12 modules never moved" in result.text(described)


def test_values_at_the_limit_of_float16_are_noted(tmp_path, base):
    tensors = {name: each.half() for name, each in lora([0, 1]).items()}
    tensors["lora_unet_input_blocks_0_1_proj_in.lora_up.weight"][0, 0] = 1e9  # becomes infinite
    tensors["lora_unet_input_blocks_1_1_proj_in.lora_up.weight"][0, 0] = 65504
    described, _ = judged(tmp_path, base, tensors)
    assert described.saturated == ["lora_unet_input_blocks_1_1_proj_in.lora_up.weight"]
    assert any("at the limit of float16" in note for note in described.notes)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("lora_unet_down_blocks_1_attentions_0_proj_in", "input_blocks_4_1_proj_in"),
        ("lora_unet_down_blocks_0_resnets_1_conv1", "input_blocks_2_0_in_layers_2"),
        ("lora_unet_down_blocks_0_downsamplers_0_conv", "input_blocks_3_0_op"),
        ("lora_unet_mid_block_resnets_1_time_emb_proj", "middle_block_2_emb_layers_1"),
        (
            "lora_unet_up_blocks_1_attentions_2_transformer_blocks_0_attn1_to_q",
            "output_blocks_5_1_transformer_blocks_0_attn1_to_q",
        ),
        ("lora_unet_up_blocks_0_upsamplers_0_conv", "output_blocks_2_1_conv"),
    ],
)
def test_modules_of_sd_1_are_those_of_its_checkpoint(module, expected):
    assert base_weights.key(names.places([module])[module]) == ("model", expected)


def test_query_key_and_value_of_open_clip_are_thirds_of_one_weight(base):
    weights = base_weights.base_weights(TensorFile(base).specs)
    with TensorFile(base) as file:
        whole = file.tensor("cond_stage_model.model.transformer.resblocks.3.attn.in_proj_weight")
        for third, part in enumerate("qkv"):
            matrix = weights["text encoder", f"text_model_encoder_layers_3_self_attn_{part}_proj"].read(file)
            assert torch.equal(matrix, whole[4 * third : 4 * third + 4])


def journal(tmp_path, losses):
    """Write the journal of a run that saved cat-STEP.safetensors at steps 20, 40, ... with these validation losses."""
    lines = [{"kind": "start", "time": 1.0, "run": "cat", "name": "cat"}]
    lines += [{"kind": "step", "time": 1.0, "step": step, "loss": 1 / step} for step in range(1, 20 * len(losses) + 1)]
    for step, loss in zip(range(20, 20 * len(losses) + 1, 20), losses, strict=True):
        lines.append({"kind": "save", "time": 1.0 + step, "step": step, "file": str(tmp_path / f"cat-{step}.safetensors")})
        both = {"loss": loss, "losses": [loss - 0.1, loss + 0.1], "held_out": True}
        lines.append({"kind": "validation", "time": 1.0 + step, "step": step, "epoch": 1, **both})
    (tmp_path / "cat.journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_file_after_the_lowest_validation_is_over_trained(tmp_path, base, capsys):
    journal(tmp_path, [1.0, 0.8, 0.72, 0.7, 0.71, 0.73, 0.75, 0.77, 0.8])
    for step in (80, 180):
        save_file(lora(), tmp_path / f"cat-{step}.safetensors")
    words = ["--against", str(base)]
    assert main(["inspect", str(tmp_path / "cat-80.safetensors"), *words, "--strict"]) == 0
    assert "0.7, -30.0% since step 20: it is not over-trained" in capsys.readouterr().out.replace("\n", " ")
    assert main(["inspect", str(tmp_path / "cat-180.safetensors"), *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "14.3% above the lowest at step 80: it is over-trained; use cat-80.safetensors" in printed
    assert main(["inspect", str(tmp_path / "cat-180.safetensors"), *words, "--strict"]) == 1
    assert "over-trained: its validation loss is 14.3% above the lowest" in capsys.readouterr().out


def test_the_best_model_that_is_left_is_judged(tmp_path):
    journal(tmp_path, [1.0, 0.8, 0.7, 0.75])
    file = tmp_path / "cat.journal.jsonl"
    assert file_training.chosen_file(file) is None, "no file exists"
    for step in (40, 80):
        (tmp_path / f"cat-{step}.safetensors").touch()
    assert file_training.chosen_file(file) == tmp_path / "cat-80.safetensors"  # the one of step 60 is gone
    (tmp_path / "cat-60.safetensors").touch()
    assert file_training.chosen_file(file) == tmp_path / "cat-60.safetensors"


def test_a_best_model_that_early_stopping_has_removed_is_not_the_best(tmp_path):
    journal(tmp_path, [0.7, 0.8, 0.9, 0.95])
    file = tmp_path / "cat.journal.jsonl"
    file.write_text(file.read_text().replace("cat-20.", "cat-best-step00000020.").replace("cat-40.", "cat-best-step00000040."))
    (run,) = file_training.runs(file)
    assert run.best_file()[0].name == "cat-best-step00000040.safetensors"


def test_the_exit_code_follows_the_threshold(tmp_path, base, capsys):
    save_file(lora(), tmp_path / "cat.safetensors")
    words = ["inspect", str(tmp_path / "cat.safetensors"), "--against", str(base), "--json"]
    assert main([*words, "--max_change", "0.5"]) == 0
    passed = json.loads(capsys.readouterr().out)
    assert passed["failures"] == []
    assert passed["judgement"].startswith("cat.safetensors changes the weights")
    assert passed["components"]["U-Net"] == pytest.approx(max(block["relative"] for block in passed["blocks"]), rel=1)
    assert main([*words, "--max-change", "0.001"]) == 1
    (failure,) = json.loads(capsys.readouterr().out)["failures"]
    assert "more than --max_change 0.001" in failure


def test_a_base_that_cannot_be_compared_is_an_error(tmp_path, base):
    save_file(lora(), tmp_path / "cat.safetensors")
    with TensorFile(tmp_path / "cat.safetensors") as file, pytest.raises(UserError, match="is a network; give the base model"):
        judgement.judge(file, file, report.describe(file))
