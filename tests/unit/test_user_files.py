"""Reading of the user's files as sd-scripts reads them."""

import json
from pathlib import Path

import pytest
import toml
from kohya_ext.patches.toml_byte_order_mark import PATCH

from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.settings import Settings
from kohya_ext.config.user_files import read_config_file, read_dataset_config, subsets
from kohya_ext.errors import UserError
from kohya_ext.patching.patch import Patcher
from kohya_ext.planning import tiers
from kohya_ext.sdscripts.checkouts import Checkout

DOCUMENT = {"general": {"a": 1, "b": 1}, "datasets": [{"b": 2, "resolution": 768, "subsets": [{"image_dir": "x"}, {"a": 3}]}]}


def test_subset_options_override_dataset_and_general_options():
    assert [(subset["a"], subset["b"]) for subset in subsets(DOCUMENT)] == [(1, 2), (3, 2)]


def test_config_file_that_is_no_toml_is_an_error_with_the_name_that_works(tmp_path):
    file = tmp_path / "cfg.json"
    with pytest.raises(UserError, match=r"cfg\.json does not exist, nor does .*cfg\.json\.toml"):
        read_config_file(str(file))
    file.write_text("{}")
    with pytest.raises(UserError, match=r"reads only TOML files, with names in \.toml; save it as cfg\.toml"):
        read_config_file(str(file))
    (tmp_path / "cfg.json.toml").write_text("seed = 1")
    assert read_config_file(str(file)).values == {"seed": 1}, "sd-scripts adds .toml"


def test_estimate_reads_a_json_dataset_config(tmp_path):
    (tmp_path / "data.json").write_text(json.dumps(DOCUMENT))
    argv = ["--preset", "12gb", "--dataset_config", str(tmp_path / "data.json")]
    assert tiers.read("sdxl_train_network.py", argv).resolution == "768,768"


@pytest.mark.parametrize(
    "document",
    [[], {"general": 1}, {"datasets": "x"}, {"datasets": {"subsets": []}}, {"datasets": [{"subsets": "x"}]}, {"datasets": [1]}],
)
def test_malformed_dataset_config_is_an_error_but_does_not_stop_argument_parsing(tmp_path, document):
    file = tmp_path / "data.json"
    file.write_text(json.dumps(document))
    with pytest.raises(UserError, match="must be a list of tables"):
        read_dataset_config(file)
    command = CommandLine(Path("sdxl_train_network.py"), ["--preset", "12gb", "--dataset_config", str(file)], {})
    assert command.presets.held_back == {}


def test_upstreams_toml_reader_accepts_a_byte_order_mark(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_bytes(b"\xef\xbb\xbf[a]\r\nseed = 1\r\n")
    patcher = Patcher({PATCH.name: PATCH}, Settings(), Checkout(tmp_path, "0.11.1", "v0.11", ""))
    with pytest.raises(toml.TomlDecodeError):
        toml.load(file.open(encoding="utf-8"))
    patcher.arm()
    try:
        assert toml.load(str(file)) == toml.load(file.open(encoding="utf-8")) == {"a": {"seed": 1}}
    finally:
        patcher.undo()
