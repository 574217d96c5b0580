"""The table of families: every family has what it needs elsewhere, and nothing elsewhere names one that is not in it."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
from kohya_ext.patches import needless_gradients, selective_torch_compile

from kohya_ext import families, overlay
from kohya_ext.families import BY_NAME, FAMILIES, Checkpoint
from kohya_ext.tiny import arguments
from kohya_ext.tiny.checkpoints import locate


def missing(family):
    """The places that a family of the table is missing from."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from kohya_ext.tiny import shrink, weights
    from kohya_ext.vram import models

    folder = family.presets(family.lora)
    there = {
        "kohya_ext/vram/models.py BUILDERS": family.name in models.BUILDERS,
        "kohya_ext/tiny/weights.py WRITERS": family.name in weights.WRITERS,
        "kohya_ext/tiny/shrink.py SHRINKERS": family.module in shrink.SHRINKERS,
        f"presets/{folder}": any(its == folder for its, _, _ in overlay.shipped()),
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
        "kohya_ext/vram/models.py BUILDERS",
        "kohya_ext/tiny/weights.py WRITERS",
        "kohya_ext/tiny/shrink.py SHRINKERS",
        "presets/qwen-image-lora",
        "checkpoints",
    ]


def test_nothing_else_names_a_family_that_is_not_in_the_table():
    pytest.importorskip("transformers")
    from kohya_ext.tiny import weights
    from kohya_ext.vram import models

    names = [*selective_torch_compile.INPUTS, *needless_gradients.REENTRANT, *models.BUILDERS, *weights.WRITERS]
    assert set(names) <= set(BY_NAME)
    for name, inputs in selective_torch_compile.INPUTS.items():
        assert set(inputs) == set(BY_NAME[name].blocks.classes)
    folders = {folder for _, _, folder in families.with_presets()}
    assert {folder for folder, _, _ in overlay.shipped()} <= {*folders, overlay.ANY}
    assert set(arguments.SCRIPTS) <= {script for family in FAMILIES for script in family.scripts}


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


def test_the_files_of_a_tiny_model_are_those_that_its_scripts_ask_for():
    assert set(locate("chroma", Path("x")).files) == {"pretrained_model_name_or_path", "t5xxl", "ae"}
