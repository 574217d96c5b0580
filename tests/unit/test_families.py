"""The table of families: every family has what it needs elsewhere, and nothing elsewhere names one that is not in it."""

import dataclasses
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from kohya_ext.patches import selective_torch_compile, skip_unused_gradients

from benchmarks import families as benchmarks
from kohya_ext.config import preset_files
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.preflight import numbers
from kohya_ext.sdscripts import families
from kohya_ext.sdscripts.families import BY_NAME, FAMILIES, Checkpoint
from kohya_ext.tiny import arguments
from kohya_ext.tiny.checkpoints import locate


def missing(family):
    """The places that a family of the table is missing from."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from kohya_ext.estimate import models
    from kohya_ext.tiny import shrink, weights

    folder = family.presets(family.lora)
    there = {
        "kohya_ext/estimate/models.py BUILDERS": family.name in models.BUILDERS,
        "kohya_ext/tiny/weights.py WRITERS": family.name in weights.WRITERS,
        "kohya_ext/tiny/shrink.py SHRINKERS": family.module in shrink.SHRINKERS,
        f"presets/{folder}": any(its == folder for its, _, _ in preset_files.shipped()),
        "checkpoints": all(kind.tensors for kind in family.checkpoints),
    }
    return [place for place, has in there.items() if not has]


@pytest.mark.parametrize("family", FAMILIES, ids=BY_NAME)
def test_a_family_is_in_every_place(family):
    assert missing(family) == []


def test_places_that_lack_a_family_are_named():
    new = dataclasses.replace(
        BY_NAME["hunyuan-image"],
        name="qwen-image",
        checkpoints=(Checkpoint("Qwen-Image", ()),),
        lora="qwen_image_train_network.py",
        networks=("networks.lora_qwen_image",),
        module="library.qwen_image_models",
    )
    assert missing(new) == [
        "kohya_ext/estimate/models.py BUILDERS",
        "kohya_ext/tiny/weights.py WRITERS",
        "kohya_ext/tiny/shrink.py SHRINKERS",
        "presets/qwen-image-lora",
        "checkpoints",
    ]


A_NEW_ROW = """
import dataclasses
from argparse import Namespace
from pathlib import Path
from kohya_ext.sdscripts import families
from kohya_ext.sdscripts.families import Blocks, Checkpoint

row = dataclasses.replace(
    families.BY_NAME["flux"],
    name="qwen-image",
    checkpoints=(Checkpoint("Qwen-Image", ("txt_norm.",)),),
    lora="qwen_image_train_network.py",
    finetune=("qwen_image_train.py",),
    others=(),
    files=("qwen_vl",),
    module="library.qwen_image_models",
    model="QwenImage",
    first_input="latents",
    blocks=Blocks("library.qwen_image_models", ("QwenBlock",), "_forward"),
    networks=("networks.lora_qwen_image",),
    max_blocks_to_swap=58,
    fp8="fp8_scaled",
    bucket_steps=(16, 16),
)
families.FAMILIES = (*families.FAMILIES, row)
families.BY_NAME[row.name] = row

from kohya_ext import preflight
from kohya_ext.config import preset_conflicts, preset_files
from kohya_ext.patches import skip_unused_gradients, selective_checkpointing, selective_torch_compile
from kohya_ext.preflight import models, options
from kohya_ext.tiny import arguments, checkpoints
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.planning.memory_savings import Attempt, steps

targets = {
    str(target.module) + ":" + target.attribute
    for patch in (skip_unused_gradients, selective_checkpointing, selective_torch_compile)
    for target in patch.PATCH.targets
}
assert targets >= {
    "library.qwen_image_models:QwenImage.forward",
    "library.qwen_image_models:QwenImage.enable_gradient_checkpointing",
    "library.qwen_image_models:QwenBlock._forward",
}, targets
assert preset_files.FAMILIES[row.lora] == "qwen-image-lora"
assert preset_files.FAMILIES["qwen_image_train.py"] == "qwen-image-finetune"
assert MemoryConfig(row.lora).kind == "qwen-image-lora"
assert MemoryConfig(row.lora).family is row
run = Attempt(row.lora, {"mixed_precision": "bf16", "gradient_checkpointing": True}, lambda key: True)
changes = {key: value for step in steps(run) for key, value in step.changes.items()}
assert changes["fp8_scaled"] is True
assert changes["blocks_to_swap"] == 29
assert preset_conflicts.held_back(row.lora, {"cache_text_encoder_outputs": True}, {"caption_dropout_rate": 0.1})
assert families.recognize(["transformer.txt_norm.weight"]) == (row, row.checkpoints[0])
assert "qwen_vl" in models._OTHERS
wrong = options._impossible(Path(row.lora), Namespace(enable_bucket=True, bucket_reso_steps=8))
assert any("multiple of 16" in problem for problem in wrong)
tiny = checkpoints.locate("qwen-image", Path("tiny"))
words = arguments.training_arguments(row.lora, tiny, Path("data"), Path("output"))
assert words[words.index("--network_module") + 1] == "networks.lora_qwen_image"
assert "--qwen_vl" in words
"""


def test_a_new_row_reaches_every_reader():
    """Of a family that is not there yet; in a process of its own, where nothing has read the table."""
    done = subprocess.run([sys.executable, "-c", A_NEW_ROW], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_nothing_else_names_a_family_that_is_not_in_the_table():
    pytest.importorskip("transformers")
    from kohya_ext.estimate import models
    from kohya_ext.tiny import weights

    names = [*selective_torch_compile.INPUTS, *skip_unused_gradients.REENTRANT, *models.BUILDERS, *weights.WRITERS]
    assert set(names) <= set(BY_NAME)
    for name, inputs in selective_torch_compile.INPUTS.items():
        assert set(inputs) == set(BY_NAME[name].blocks.classes)
    folders = {folder for _, _, folder in families.with_presets()}
    assert {folder for folder, _, _ in preset_files.shipped()} <= {*folders, preset_files.ANY}
    for name, row in benchmarks.FAMILIES.items():
        assert BY_NAME[row.models].presets(row.script) == name
    scripts = {script for family in FAMILIES for script in family.scripts}
    assert {*arguments.SCRIPTS, *(script for bound in numbers.BOUNDS.values() for script in bound.scripts)} <= scripts


def test_a_script_trains_one_family_unless_an_option_chooses_another():
    counted = Counter(script for family in FAMILIES if not family.is_chosen_by_option for script in family.scripts)
    assert set(counted.values()) == {1}
    for family in FAMILIES:
        option = family.checkpoints[0].option
        values = {} if option is None else {option[0]: option[1]}
        assert all(families.of(script, values) is family for script in family.scripts)
        assert families.checkpoint_of(family.lora, values) is family.checkpoints[0]
    assert families.of("flux_train_network.py", {}) is BY_NAME["flux"]
    assert families.of("flux_train.py", {"model_type": "chroma"}) is BY_NAME["flux"]
    assert families.of("mine.py", {}) is None
    # The option of another script, in a preset of the user's own: it is read without the script's parser.
    assert MemoryConfig("flux_train_network.py", model_type="chroma").kind == "chroma-lora"
    assert MemoryConfig("sdxl_train_network.py", model_type="chroma").kind == "sdxl-lora"


def test_the_files_of_a_tiny_model_are_those_that_its_scripts_ask_for():
    assert set(locate("chroma", Path("x")).files) == {"pretrained_model_name_or_path", "t5xxl", "ae"}
