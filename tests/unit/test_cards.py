"""Files of `tune --export`: nothing private is in them, and those in benchmarks/cards are what this checks."""

import copy
import json
from pathlib import Path

import pytest

from benchmarks import cards_from_results
from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate import tuned
from kohya_ext.estimate.tuned import Tuned
from kohya_ext.tuning import cards

FOLDER = Path(cards_from_results.__file__).parent / "cards"
GPU = {"name": "NVIDIA GeForce RTX 3060", "memory": 12 * 2**30, "capability": "8.6", "driver": "580.1"}
VERSIONS = {"python": "3.11.7", "torch": "2.14.1+cu130", "kohya-ext": "0.1.0"}

PRIVATE = (
    *("--pretrained_model_name_or_path", "/home/anna/models/anna.safetensors", "--output_dir", "C:\\Users\\anna"),
    *("--network_module", "anna.lora", "--optimizer_type", "anna.Secret", "--optimizer_args", "anna=1", "--vae", "anna.vae"),
    *("--network_args", "anna=2", "--sample_prompts", "anna.txt", "--output_name", "anna", "--train_data_dir", "anna"),
    *("--learning_rate", "0.0123", "--attn_mode", "anna", "--t5xxl", "anna.fp8.safetensors", "--trigger", "anna"),
)


def run_of(script, *words, **rest):
    command = CommandLine(Path(script), list(words), {}, has_bf16=True)
    values = {"seconds": 0.5, "spread": 0.01, "reserved": 8 * 10**9, "on_card": 9 * 10**9, **rest}
    return Tuned(tuned.configuration(command), **values)


def document(*runs):
    return cards.document(GPU, cards.this_machine(), VERSIONS, runs)


GOOD = document(run_of("sdxl_train_network.py", "--preset", "12gb"))


def test_an_export_contains_nothing_private():
    runs = [
        run_of("sdxl_train_network.py", "--preset", "12gb", *PRIVATE),
        run_of("flux_train_network.py", "--preset", "16gb", *PRIVATE),
        run_of(
            "sdxl_train.py", "--preset", "24gb", "--disable_patch", "journal", *PRIVATE, seconds=0.0, failed="anna: no file"
        ),
    ]
    exported = document(*runs)
    text = json.dumps(exported)
    assert "anna" not in text
    assert "0.0123" not in text
    assert cards.problems(exported) == []
    assert exported["runs"][0]["settings"]["network_module"] == exported["runs"][0]["settings"]["optimizer_type"] == "other"
    assert exported["runs"][2]["failed"] == "other"
    assert exported["runs"][2]["settings"]["disabled"] == ["journal"]


def test_an_export_has_what_a_table_needs():
    settings = GOOD["runs"][0]["settings"]
    assert settings["script"] == "sdxl_train_network.py"
    assert settings["resolution"] == "1024,1024"
    assert settings["speed"] == "auto"
    assert settings["optimizer_type"] == "AdamW"
    assert cards.problems(GOOD) == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("schema",), 0),
        (("user",), "anna"),
        (("gpu", "name"), "/dev/nvidia0"),
        (("gpu", "memory"), 12),
        (("gpu", "driver"), "C:\\driver"),
        (("machine", "processor"), "anna@home"),
        (("machine", "host"), "anna"),
        (("versions", "anna"), "1.0"),
        (("versions", "torch"), "/home/anna/torch"),
        (("runs",), []),
        (("runs", 0, "note"), "anna"),
        (("runs", 0, "seconds"), -1),
        (("runs", 0, "seconds"), 1e6),
        (("runs", 0, "seconds"), "0.5"),
        (("runs", 0, "reserved"), 10**15),
        (("runs", 0, "on_card"), 10**9),
        (("runs", 0, "waiting"), 2),
        (("runs", 0, "difference"), -0.1),
        (("runs", 0, "failed"), "ended with exit code 1"),
        (("runs", 0, "features"), ["anna"]),
        (("runs", 0, "day"), "yesterday"),
        (("runs", 0, "sd_scripts"), "/home/anna/sd-scripts"),
        (("runs", 0, "settings", "network_args"), ["anna"]),
        (("runs", 0, "settings", "optimizer_type"), "anna.Secret"),
        (("runs", 0, "settings", "resolution"), "/home/anna"),
        (("runs", 0, "settings", "pretrained_model_name_or_path"), "/home/anna"),
        (("runs", 0, "settings", "disabled"), ["anna"]),
    ],
)
def test_the_checker_finds_what_must_not_be_published(place, value):
    changed = copy.deepcopy(GOOD)
    *path, last = place
    inner = changed
    for key in path:
        inner = inner[key]
    inner[last] = value
    assert cards.problems(changed)


@pytest.mark.parametrize(
    "text", ["null", "[]", "{}", '{"schema": 1}', '{"schema": 1, "gpu": 1, "machine": {}, "versions": {}}']
)
def test_another_file_is_a_problem(text):
    assert cards.problems(json.loads(text))


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.name)
def test_every_published_file_is_right(file):
    assert file.stat().st_size < 200_000
    assert cards.problems(json.loads(file.read_text(encoding="utf-8"))) == []


def test_the_first_files_are_those_of_the_results():
    for file, content in cards_from_results.documents().items():
        assert json.loads(file.read_text(encoding="utf-8")) == json.loads(json.dumps(content))
