"""Reading a training command line as the script's argparse does, editing and quoting it."""

import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kohya_ext.__main__ import main
from kohya_ext.config import command_line
from kohya_ext.config.arguments import complete
from kohya_ext.config.command_line import CommandLine, option_words, quoted, quoted_word
from kohya_ext.errors import UserError
from kohya_ext.estimate import memory_config

LORA = "sdxl_train_network.py"

OPTIONS = """
parser.add_argument("--config_file")
parser.add_argument("--resolution")
parser.add_argument("--network_dim", type=int)
parser.add_argument("--network_args", nargs="*")
parser.add_argument("--training_comment")
parser.add_argument("--seed", type=int)
parser.add_argument("--cache_latents", action="store_true")
parser.add_argument("--cache_latents_to_disk", action="store_true")
parser.add_argument("--pretrained_model_name_or_path")
"""


@pytest.fixture
def script(tmp_path):
    """A script whose parser gets its options from a function of the library, as sd-scripts' do."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "train_util.py").write_text("def add_arguments(parser):" + OPTIONS.replace("\n", "\n    "))
    (tmp_path / LORA).write_text("from library import train_util\n\ndef setup_parser():\n    train_util.add_arguments(parser)")
    return tmp_path / LORA


def parsed(argv):
    parser = argparse.ArgumentParser()
    exec(OPTIONS, {"parser": parser})
    complete(parser)
    return {key: value for key, value in vars(parser.parse_args(argv)).items() if value not in (None, False)}


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        (["--resol", "512,768"], {"resolution": "512,768"}),
        (["--resol=512,768", "--see", "3"], {"resolution": "512,768", "seed": 3}),
        (["--network_dim", "-4"], {"network_dim": -4}),
        (["--network_dim=-4"], {"network_dim": -4}),
        (["--seed", "1", "--seed", "2"], {"seed": 2}),
        (["--network_args", "a=1", "b=2", "--network_a", "c=3", "d=4"], {"network_args": ["c=3", "d=4"]}),
        (["--training_comment", "--n blurry, text"], {"training_comment": "--n blurry, text"}),
        (["--training_comment", "--n blurry=1, text", "--seed", "1"], {"training_comment": "--n blurry=1, text", "seed": 1}),
        (["--training_comment=a=b"], {"training_comment": "a=b"}),
        (["--cache_latents", "--no-cache_latents"], {}),
        (["--cache_latents_to", "--no-cache-latents"], {"cache_latents_to_disk": True}),
        (["--gradient_checkpointing_r", "0.5"], {"gradient_checkpointing_ratio": 0.5}),
        (["--disable-patch", "a,b", "--disable_patch=c"], {"disable_patch": ("a", "b", "c")}),
    ],
)
def test_words_are_parsed_as_by_the_scripts_parser(script, argv, values):
    given = {key: value for key, value in CommandLine(script, argv, {}).given.items() if value is not False}
    theirs = {key: tuple(value) if key == "disable_patch" else value for key, value in parsed(argv).items()}
    assert given == theirs == values


def test_abbreviations_are_expanded_for_every_reader(script, tmp_path):
    (tmp_path / "mine.toml").write_text("train_batch_size = 3\n")
    config = str(tmp_path / "mine")
    command = CommandLine(script, ["--prese", "16gb", "--conf", config, "--resol", "512", "--network_di", "77"], {})
    assert command.presets.label == "sdxl-lora/16gb"
    assert command.origin("train_batch_size") == "config file"
    choices = memory_config.read(command)[0]
    assert (choices.resolution, choices.network_dim, choices.train_batch_size) == ("512", 77, 3)


@pytest.mark.parametrize("word", ["--cache", "--p", "--unknown"])
def test_unknown_and_ambiguous_abbreviations_are_unchanged(script, word):
    assert CommandLine(script, [word, "x"], {}).words == [word, "x"]


def test_nothing_is_expanded_without_the_scripts_source():
    assert CommandLine(Path(LORA), ["--gradient_checkpointing"], {}).settings["gradient_checkpointing_ratio"] is None


def test_every_value_has_an_origin(script, tmp_path):
    (tmp_path / "mine.toml").write_text("seed = 3\nema = true\n")
    argv = ["--preset", "16gb", "--config_file", str(tmp_path / "mine.toml"), "--no-cache_latents"]
    command = CommandLine(script, argv, {"KOHYA_EXT_NAN_PATIENCE": "5"})
    keys = ("cache_latents", "nan_patience", "seed", "ema", "resolution", "resume", "ema_decay")
    assert [command.origin(key) for key in keys] == [
        *("command line", "environment", "config file", "config file", "preset", "default", "default"),
    ]
    assert (command.values["cache_latents"], command.values["seed"], command.settings["nan_patience"]) == (False, 3, 5)
    assert "resume" not in command.values


def test_changes_replace_the_earlier_words(script):
    argv = [
        *("--network_args", "a=1", "b=2", "--network_dim=4", "--lr_warmup_steps", "-1", "--no-cache-latents"),
        *("--training_comment", "--resolution of 512", "--resol", "512"),
    ]
    changes = {"network_args": ["c=3"], "network_dim": 2, "cache_latents": True, "resolution": None, "sdpa": False}
    assert CommandLine(script, argv, {}).with_(changes).argv == (
        *("--lr_warmup_steps", "-1", "--training_comment", "--resolution of 512"),
        *("--network_args", "c=3", "--network_dim", "2", "--cache_latents", "--no-sdpa"),
    )


@pytest.mark.parametrize(
    ("argv", "environ", "presets"),
    [
        (["--preset", "auto"], {}, ("sdxl-lora/16gb",)),
        (["--preset=auto,quality"], {}, ("sdxl-lora/16gb", "quality")),
        (["--preset", "quality", "--preset", "auto"], {}, ("quality", "sdxl-lora/16gb")),
        (["--preset", "quality"], {}, ("sdxl-lora/16gb", "quality")),
        ([], {"KOHYA_EXT_PRESET": "auto"}, ("sdxl-lora/16gb",)),
    ],
)
def test_a_tier_replaces_auto(script, argv, environ, presets):
    command = CommandLine(script, argv, environ)
    assert command.with_tier("sdxl-lora/16gb").settings.preset == presets
    assert command.with_tier(None).settings.preset == tuple(name for name in presets if name == "quality")


def test_a_tier_that_is_a_preset_already_is_not_added(script):
    command = CommandLine(script, ["--preset", "quality", "--preset", "sdxl-lora/16gb"], {})
    assert command.with_tier("sdxl-lora/16gb").settings.preset == ("quality", "sdxl-lora/16gb")


def test_auto_is_resolved_by_the_callers_function():
    asked = []
    command = CommandLine(
        Path(LORA), ["--preset", "auto", "--vram", "16"], {}, lambda *given: asked.append(given) or "sdxl-lora/12gb"
    )
    assert command.presets.label.startswith("sdxl-lora/12gb (auto: --vram, 16 GB")
    assert asked == [(command, 16 * 2**30)]
    with pytest.raises(UserError, match="--preset auto is not supported here"):
        _ = CommandLine(Path(LORA), ["--preset", "auto", "--vram", "16"], {}).presets


def test_launcher_options_in_a_config_file_are_the_scripts(tmp_path):
    (tmp_path / "gui.toml").write_text("multi_gpu = true\nnum_processes = 2\n")
    settings = CommandLine(Path(LORA), ["--config_file", str(tmp_path / "gui.toml")], {}).settings
    assert (settings.multi_gpu, settings.num_processes) == (False, None)


def test_a_commands_own_options_are_not_abbreviated(capsys):
    """The words are parsed twice. The second parser would take an abbreviation for the script's option."""
    assert main(["estimate", "--js", LORA]) == 2
    assert "Did you mean --json?" in capsys.readouterr().err


def test_importing_the_module_loads_no_heavy_package():
    code = "import sys; import kohya_ext.config.command_line; print(*sys.modules)"
    imported = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split())
    assert not {"asyncio", "numpy", "psutil", "rich", "torch", "wrapt", "kohya_ext.planning", "kohya_ext.estimate"} & imported
    assert "kohya_ext.config.command_line" in imported


# --- quoting ---------------------------------------------------------------------------------------------------------

WORDS = ["python", "-m", "kohya_ext", "a b.py", "--resolution", "1024,768", "--training_comment", 'say "hi" it\'s', "$x"]


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        (
            "sh",
            "python -m kohya_ext 'a b.py' --resolution 1024,768 --training_comment 'say \"hi\" it'\"'\"'s' '$x'",
        ),
        (
            "cmd",
            'python -m kohya_ext "a b.py" --resolution "1024,768" --training_comment ^"say \\^"hi\\^" it\'s^" $x',
        ),
        (
            "powershell",
            "& { $PSNativeCommandArgumentPassing = 'Legacy'; & python -m kohya_ext '\"a b.py\"' --resolution '\"1024,768\"' "
            "--training_comment '\"say \\\"hi\\\" it''s\"' '\"$x\"' }",
        ),
    ],
)
def test_words_are_quoted_for_the_shell(monkeypatch, shell, line):
    monkeypatch.setattr(command_line, "shell", lambda: shell)
    assert quoted(WORDS) == line


def test_powershell_quoting_uses_single_quotes_only_where_needed(monkeypatch):
    monkeypatch.setattr(command_line, "shell", lambda: "powershell")
    assert quoted(["python", "-m", "kohya_ext", "sdxl_train.py", "--seed", "1"]) == (
        "python -m kohya_ext sdxl_train.py --seed 1"
    )
    assert quoted_word("it's $x") == "'it''s $x'"
    line = CommandLine(Path(LORA), ["--resolution", "1,2"], {"CUDA_VISIBLE_DEVICES": "0,1"}).shell_line()
    assert line.startswith("Set-Location -LiteralPath ")
    assert "; $env:CUDA_VISIBLE_DEVICES = '0,1'; & " in line
    assert line.endswith(f"{LORA} --resolution '1,2'")


@pytest.mark.parametrize(
    ("parents", "shell"),
    [
        (["python.exe", "pwsh.exe", "explorer.exe"], "powershell"),
        (["powershell.exe", "cmd.exe"], "powershell"),
        (["python.exe", "cmd.exe", "powershell.exe"], "cmd"),
        (["explorer.exe"], "cmd"),
    ],
)
def test_the_nearest_parent_shell_decides_the_quoting_on_windows(monkeypatch, parents, shell):
    process = SimpleNamespace(parents=lambda: [SimpleNamespace(name=lambda name=name: name) for name in parents])
    monkeypatch.setattr(psutil, "Process", lambda: process)
    assert command_line._windows_shell.__wrapped__() == shell


@pytest.mark.linux("sh")
def test_sh_reads_quoted_words_back_unchanged():
    program = quoted([sys.executable, "-c", "import sys; print(sys.argv[1:])", *WORDS])
    assert subprocess.run(program, shell=True, capture_output=True, text=True).stdout == f"{WORDS}\n"


def test_option_words_are_built_from_values():
    changes = {"sdpa": True, "ema": False, "resume": None, "network_args": ["a=1", "b"], "seed": -1}
    assert option_words(changes) == ["--sdpa", "--no-ema", "--network_args", "a=1", "b", "--seed", "-1"]
