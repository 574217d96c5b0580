"""Files that the user wrote for sd-scripts."""

import json

import pytest

from kohya_ext.arguments import read_arguments
from kohya_ext.errors import UserError
from kohya_ext.user_files import read_dataset_config, subsets
from kohya_ext.vram import tiers

DOCUMENT = {"general": {"a": 1, "b": 1}, "datasets": [{"b": 2, "resolution": 768, "subsets": [{"image_dir": "x"}, {"a": 3}]}]}


def test_a_subsets_own_options_count_over_its_datasets_and_the_general_ones():
    assert [(subset["a"], subset["b"]) for subset in subsets(DOCUMENT)] == [(1, 2), (3, 2)]


def test_an_estimate_reads_a_dataset_config_in_json_too(tmp_path):
    (tmp_path / "data.json").write_text(json.dumps(DOCUMENT))
    argv = ["--preset", "12gb", "--dataset_config", str(tmp_path / "data.json")]
    assert tiers.read("sdxl_train_network.py", argv).resolution == "768,768"


@pytest.mark.parametrize(
    "document",
    [[], {"general": 1}, {"datasets": "x"}, {"datasets": {"subsets": []}}, {"datasets": [{"subsets": "x"}]}, {"datasets": [1]}],
)
def test_a_dataset_config_of_another_shape_is_refused_and_takes_no_start_down(tmp_path, document):
    file = tmp_path / "data.json"
    file.write_text(json.dumps(document))
    with pytest.raises(UserError, match="must be a list of tables"):
        read_dataset_config(file)
    read_arguments("sdxl_train_network.py", ["--preset", "12gb", "--dataset_config", str(file)], {})
