"""Options, presets, doctor and demo against the real scripts' parsers and modules."""

import importlib.util
import json
import os
from argparse import Namespace
from pathlib import Path

import pytest

from kohya_ext.__main__ import main
from kohya_ext.config import preset_files
from kohya_ext.config.settings import Settings
from kohya_ext.preflight import Findings, data
from kohya_ext.sdscripts import checkouts
from kohya_ext.tiny import environment

torch = pytest.importorskip("torch")


CHECK_PRESETS = """
import sys
from pathlib import Path
from kohya_ext.config import preset_files
from kohya_ext.config.arguments import complete, find_problem
from kohya_ext.config.settings import options
from kohya_ext.planning.memory_savings import Attempt, steps
from kohya_ext.sdscripts.checkouts import describe
from kohya_ext.sdscripts.introspect import option_names, script_parser

checkout = describe(Path(sys.argv[1]), "named")
parsers, checked = {}, 0
others = "train_textual_inversion.py", "train_controlnet.py"  # v0.10's second one imports its setup_parser
for script in filter(checkout.scripts().__contains__, others):
    actions = script_parser(checkout, checkout.script(script))._option_string_actions
    theirs = {option[2:] for option in actions if option.startswith("--")}
    if unread := theirs - {"help"} - option_names(checkout.script(script)):
        print(f"PROBLEM {script}'s text lacks its options {unread}")
for family, name, _ in preset_files.shipped():
    for script in preset_files.FAMILIES if family == preset_files.ANY else preset_files.scripts(family):
        if script not in parsers:
            parsers[script] = script_parser(checkout, checkout.script(script))
            theirs = {option[2:] for option in parsers[script]._option_string_actions if option.startswith("--")}
            if unread := theirs - {"help"} - option_names(checkout.script(script)):
                print(f"PROBLEM {script}'s text lacks its options {unread}")
            known = theirs | {name for name, _ in options()}
            offered = steps(Attempt(script, {}, option_names(checkout.script(script)).__contains__))
            if unknown := {key for step in offered for key in step.changes} - known:
                print(f"PROBLEM {script}: savings with {unknown}, which it does not have")
            complete(parsers[script])
        for key, value in preset_files.load([f"{family}/{name}"], script).values.items():
            if family == preset_files.ANY and f"--{key}" not in parsers[script]._option_string_actions:
                continue  # generic presets leave out what a script does not have
            checked += 1
            if problem := find_problem(parsers[script], key, value.value):
                print(f"PROBLEM {family}/{name} with {script}: {problem}")
print("CHECKED", checked)
"""


def test_shipped_presets_are_valid_for_their_scripts_parsers(checkout, call):
    done = call("-c", CHECK_PRESETS, checkout.path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "PROBLEM" not in done.stdout, done.stdout
    assert int(done.stdout.rpartition("CHECKED ")[2]) > 500


@pytest.mark.oldest
@pytest.mark.parametrize("start", ["launcher", pytest.param("environment", marks=pytest.mark.slow)])
def test_a_scripts_help_lists_the_extensions_options(checkout, call, start):
    script = checkout.path / "sdxl_train.py"
    command = ["-m", "kohya_ext", script] if start == "launcher" else [script]
    done = call(*command, "--help", **({} if start == "launcher" else {"KOHYA_EXT": "1"}))
    assert done.returncode == 0, done.stderr[-4000:]
    for flag in ("--preset NAME", "--activation_memory_budget", "--selective_torch_compile", "--fused_backward_pass"):
        assert flag in done.stdout


@pytest.mark.oldest
def test_invalid_config_file_is_an_error_before_anything_is_loaded(checkout, call, tmp_path):
    (tmp_path / "mine.toml").write_text('learnign_rate = 1e-4\nresolution = 512\nsave_model_as = "zip"\n')
    script = checkout.path / "sdxl_train_network.py"
    done = call(script, "--config_file", "mine.toml", "--strict", folder=tmp_path, KOHYA_EXT="1")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("kohya_ext: error: ")]
    assert len(errors) == 3
    assert "Did you mean learning_rate?" in errors[0]
    assert "Traceback" not in done.stderr


@pytest.mark.newest
def test_explain_shows_the_origin_of_every_value(checkout, call, tmp_path):
    (tmp_path / "mine.toml").write_text("learning_rate = 3e-5\n")
    done = call(
        *("-m", "kohya_ext", "presets", "show", "auto", "--sd-scripts", checkout.path, "--script", "sdxl_train.py"),
        *("--explain", "--with", "--vram", "16", "--config_file", "mine.toml", "--no-full_bf16"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    rows = {key: rest for line in lines if (key := line.partition(" = ")[0]) != line for rest in [line.partition(" = ")[2]]}
    assert "preset sdxl-finetune/16gb (auto: --vram, 16 GB GPU (17.18e9 bytes))" in done.stdout
    assert rows["learning_rate"] == "3e-05  (mine.toml, over preset sdxl-finetune/base's 1e-05)"
    assert rows["full_bf16"] == "false  (command line, over preset sdxl-finetune/16gb's True)"
    assert rows["cache_latents"] == "true  (preset sdxl-finetune/base)"
    assert rows["train_batch_size"].endswith("  (preset sdxl-finetune/16gb)")
    key = next(index for index, line in enumerate(lines) if line.startswith("train_batch_size = "))
    assert lines[key + 1].startswith("    ")
    assert rows["preset"] == "auto  (command line)"


@pytest.mark.newest
def test_check_says_what_a_preset_leaves_out(checkout, call, tmp_path):
    argv = ("sdxl_train_network.py", "--preset", "12gb", "--shuffle_caption", "--network_dim", "64")
    done = call("-m", "kohya_ext", "check", "--sd-scripts", checkout.path, *argv, folder=tmp_path)
    skipped = "skipped network_alpha (network_dim = 64); cache_text_encoder_outputs (shuffle_caption = True: "
    assert skipped in done.stderr, done.stderr[-4000:]
    assert "The run needs more memory than the preset is designed for" in done.stderr


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("networks/check_lora_weights.py", marks=pytest.mark.newest),
        pytest.param("tools/show_metadata.py", marks=pytest.mark.slow),
    ],
)
def test_scripts_in_tools_run(checkout, call, upstream, script):
    file = upstream(checkout, "sdxl_train_network.py").file
    option = ["--model"] if "metadata" in script else []
    done = call("-m", "kohya_ext", "--sd-scripts", checkout.path, script, *option, file, folder=file.parent)
    assert done.returncode == 0, done.stderr[-4000:]
    assert ("ss_network_dim" if option else "lora_unet_") in done.stdout


def test_doctor_shows_every_patch_applied(checkout, call):
    done = call("-m", "kohya_ext", "doctor", "--json", "--sd-scripts", checkout.path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["sd_scripts"]["layout"] == checkout.layout
    assert result["sd_scripts"]["version"] == checkout.version
    assert result["packages"]["torch"] == torch.__version__.split("+")[0]
    statuses = {(row["patch"], row["target"]): (row["status"], row["reason"]) for row in result["patches"]}
    assert statuses["nonreentrant_checkpointing", "torch.utils.checkpoint:CheckpointFunction"] == ("applied", "")
    assert sum(status == "applied" for status, _ in statuses.values()) >= 3
    assert all(status == "applied" or reason for status, reason in statuses.values())


def test_planning_an_unsupported_script_is_an_error_of_one_line(checkout, capsys):
    training = [script for script in checkout.scripts() if checkouts.is_training_script(checkout.path / script)]
    others = [script for script in training if script not in preset_files.FAMILIES]
    assert len(others) >= 9, "ControlNet, LLLite and textual inversion of each model"
    for command, script in [*(("plan", script) for script in others), ("budget", others[0])]:
        assert main([command, "--sd-scripts", str(checkout.path), script, "--resolution", "512", "--vram", "24"]) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"kohya_ext: error: {Path(script).name} has no presets; scripts with presets: ")
        assert message.count("\n") == 1


UPSTREAMS_TESTS = """
import sys
import pytest
from kohya_ext.launch import autoload, session

autoload.watch()
code = pytest.main(sys.argv[1:])
print("ON", session.current())
sys.exit(code)
"""


@pytest.mark.oldest
@pytest.mark.skipif(importlib.util.find_spec("dadaptation") is None, reason="upstream's tests need dadaptation ([test])")
def test_upstreams_tests_pass_with_the_extension(checkout, call):
    done = call("-c", UPSTREAMS_TESTS, "-q", "-p", "no:cacheprovider", folder=checkout.path)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "ON Session(" in done.stdout
    assert " passed" in done.stdout


@pytest.fixture
def path_without_matplotlib(tmp_path):
    """A PYTHONPATH with which importing matplotlib fails."""
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "matplotlib.py").write_text("raise ModuleNotFoundError('No module named matplotlib')")
    return os.pathsep.join([str(tmp_path / "absent"), environment.python_path()])


@pytest.mark.thorough
@pytest.mark.newest
def test_demo_trains_with_the_real_script_and_writes_a_report(checkout, call, tmp_path, path_without_matplotlib):
    words = ["demo", "--steps", "6", "--output", tmp_path, "--sd-scripts", checkout.path]
    done = call("-m", "kohya_ext", *words, PYTHONPATH=path_without_matplotlib)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"sdxl_train_network.py of {checkout.label}" in done.stdout
    assert "sdxl-lora/8gb" in done.stdout
    assert (tmp_path / "demo.safetensors").is_file()
    page = tmp_path / "demo.report.html"
    assert f"report on the run: {page.resolve()}" in " ".join(done.stderr.split())
    assert "nonreentrant_checkpointing" in page.read_text("utf-8")
    assert "matplotlib" not in done.stdout + done.stderr


def test_demo_trains_without_sd_scripts_and_matplotlib(call, tmp_path, path_without_matplotlib):
    no_network = {"KOHYA_EXT_CACHE": tmp_path / "cache", "GIT_ALLOW_PROTOCOL": "none"}
    done = call(
        "-m",
        "kohya_ext",
        "demo",
        "--steps",
        "6",
        "--output",
        tmp_path / "demo",
        folder=tmp_path,
        PYTHONPATH=path_without_matplotlib,
        **{name: str(value) for name, value in no_network.items()},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "sd-scripts was not found and could not be fetched" in " ".join(done.stdout.split())
    assert "the built-in loop, without sd-scripts" in done.stdout
    assert "only runs of sd-scripts write a journal" in done.stderr
    assert (tmp_path / "demo" / "demo.safetensors").is_file()


def test_what_the_scripts_schema_rejects_in_a_dataset_config_is_an_error(checkout, checkout_module, tmp_path):
    checkout_module("library.config_util")
    file = tmp_path / "data.toml"
    document = '[general]\nenable_buckets = true\n[[datasets]]\nresolution = "64"\n[[datasets.subsets]]\nimage_dirs = "cats"\n'
    file.write_text(f"{document}num_repeats = 2.0\n")
    findings = Findings()
    args = Namespace(dataset_config=str(file), max_train_steps=3)
    data.check(checkout.script("sdxl_train_network.py"), args, findings, Settings())
    assert {error.removeprefix(f"--dataset_config {file}: ") for error in findings.errors} == {
        "unknown key general.enable_buckets. Did you mean enable_bucket?",
        "datasets[0].resolution: expected int, not '64'",
        "unknown key datasets[0].subsets[0].image_dirs. Did you mean image_dir?",
        "datasets[0].subsets[0].num_repeats: expected int, not 2.0",
        "datasets[0].subsets[0].image_dir: required key not provided",
    }
