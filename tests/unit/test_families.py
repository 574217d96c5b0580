"""The table of families is complete, and other modules name only families in it."""

import dataclasses
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from kohya_ext.patches import selective_torch_compile, skip_unused_gradients

from kohya_ext.config import preset_files
from kohya_ext.config.settings import Settings
from kohya_ext.dry_run import stand_ins
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.gpu import attention
from kohya_ext.preflight import numbers
from kohya_ext.sdscripts import families, parts
from kohya_ext.sdscripts.families import BY_NAME, FAMILIES, Checkpoint
from kohya_ext.tiny import arguments
from kohya_ext.tiny.checkpoints import locate


def missing(family):
    """Return the places that lack a family of the table."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from kohya_ext.tiny import shrink, weights

    folder = family.presets(family.lora)
    places = {
        "kohya_ext/dry_run/headers.json": all(stand_ins.options(kind.title) for kind in family.checkpoints),
        "kohya_ext/tiny/weights.py WRITERS": family.name in weights.WRITERS,
        "kohya_ext/tiny/shrink.py SHRINKERS": family.module in shrink.SHRINKERS,
        "kohya_ext/gpu/attention.py HEADS": family.name in attention.HEADS,
        f"presets/{folder}": any(each == folder for each, _, _ in preset_files.shipped()),
        "kohya_ext/sdscripts/tensor_names.json": family.name in parts._table(),
        "checkpoints": all(kind.tensors for kind in family.checkpoints),
    }
    return [place for place, is_present in places.items() if not is_present]


@pytest.mark.parametrize("family", FAMILIES, ids=BY_NAME)
def test_a_family_is_complete(family):
    assert missing(family) == []


def test_missing_places_are_named():
    new = dataclasses.replace(
        BY_NAME["hunyuan-image"],
        name="qwen-image",
        checkpoints=(Checkpoint("Qwen-Image", ()),),
        lora="qwen_image_train_network.py",
        networks=("networks.lora_qwen_image",),
        module="library.qwen_image_models",
    )
    assert missing(new) == [
        "kohya_ext/dry_run/headers.json",
        "kohya_ext/tiny/weights.py WRITERS",
        "kohya_ext/tiny/shrink.py SHRINKERS",
        "kohya_ext/gpu/attention.py HEADS",
        "presets/qwen-image-lora",
        "kohya_ext/sdscripts/tensor_names.json",
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
    files={"qwen_vl": "qwen-vl"},
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
assert "qwen_vl" in models.OTHERS
wrong = options.impossible(Path(row.lora), Namespace(enable_bucket=True, bucket_reso_steps=8))
assert any("multiple of 16" in problem for problem in wrong)
tiny = checkpoints.locate("qwen-image", Path("tiny"))
argv = arguments.training_arguments(row.lora, tiny, Path("data"), Path("output"))
assert argv[argv.index("--network_module") + 1] == "networks.lora_qwen_image"
assert "--qwen_vl" in argv
"""


def test_a_new_row_is_used_everywhere():
    """A new family works in a child process, where no module has read the table yet."""
    process = subprocess.run([sys.executable, "-c", A_NEW_ROW], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]


@pytest.mark.parametrize(
    ("budget", "compiled"),
    [
        *(({}, False), ({"activation_memory_budget": 1.0}, False), ({"activation_memory_budget": 0.5}, True)),
        *(({"activation_memory_budget": 0.0}, True), ({"vram_budget": 8 * 10**9}, True)),
        ({"vram_budget": 8 * 10**9, "activation_memory_budget": 1.0}, False),
    ],
)
def test_convolution_blocks_are_compiled_only_for_a_memory_budget(budget, compiled):
    settings = Settings(selective_torch_compile=True, **budget)
    wanted = {target.label: target.wanted(settings) for target in selective_torch_compile.PATCH.targets}
    convolutions = [label for label in wanted if "ResnetBlock2D" in label]
    assert [wanted.pop(label) for label in convolutions] == [compiled] * 3
    assert all(wanted.values())


def test_other_modules_name_only_families_in_the_table():
    pytest.importorskip("transformers")
    from kohya_ext.tiny import weights

    names = [*selective_torch_compile.INPUTS, *skip_unused_gradients.REENTRANT, *weights.WRITERS]
    assert set(names) <= set(BY_NAME)
    for name, inputs in selective_torch_compile.INPUTS.items():
        assert set(inputs) == set(BY_NAME[name].blocks.classes)
    folders = {folder for _, _, folder in families.with_presets()}
    assert {folder for folder, _, _ in preset_files.shipped()} <= {*folders, preset_files.ANY}
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
    # A user's preset may have another script's option, because it is read without the script's parser.
    assert MemoryConfig("flux_train_network.py", model_type="chroma").kind == "chroma-lora"
    assert MemoryConfig("sdxl_train_network.py", model_type="chroma").kind == "sdxl-lora"


def test_a_tiny_model_has_the_files_that_its_scripts_need():
    assert set(locate("chroma", Path("x")).files) == {"pretrained_model_name_or_path", "t5xxl", "ae"}
