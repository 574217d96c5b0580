import argparse
from pathlib import Path

import pytest

from kohya_ext.config import arguments
from kohya_ext.config.arguments import find_problem, take_over, trace
from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.quiet_parser import QuietParser
from kohya_ext.config.user_files import read_config_file
from kohya_ext.errors import UserError, one_letter_off

SCRIPT = "sdxl_train.py"


def make_parser() -> argparse.ArgumentParser:
    """A parser with every kind of action that sd-scripts' parsers have."""
    parser = argparse.ArgumentParser(prog=SCRIPT)
    parser.add_argument("--config_file")
    parser.add_argument("--output_config", action="store_true")
    parser.add_argument("--resolution", type=str)
    parser.add_argument("--train_batch_size", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=2e-6)
    parser.add_argument("--lr_warmup_steps", type=lambda text: float(text) if "." in text else int(text), default=0)
    parser.add_argument("--validate_every_n_steps", type=int)  # of the extension in other scripts
    parser.add_argument("--cache_latents", action="store_true")
    parser.add_argument("--no_half_vae", action="store_true")
    parser.add_argument("--network_args", nargs="*")
    parser.add_argument("--save_model_as", choices=[None, "ckpt", "safetensors"])
    return parser


def parse(monkeypatch, *argv, environ=None, script=SCRIPT):
    """Parse as a script does: once, and again over its config file, as upstream's read_config_from_file does."""
    monkeypatch.setattr("sys.argv", [script, *argv])
    parser = make_parser()
    take_over(parser, CommandLine(Path(script), argv, environ or {}))
    args = parser.parse_args()
    if args.config_file:
        args = parser.parse_args(namespace=argparse.Namespace(**read_config_file(args.config_file).values))
    return args


@pytest.fixture
def preset(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('train_batch_size = 4 # why\ncache_latents = true\nresolution = "1024,1024"\n')
    return str(file)


@pytest.fixture
def config(tmp_path):
    def write(text):
        file = tmp_path / "config.toml"
        file.write_text(text)
        return str(file)

    return write


def test_each_origin_overrides_the_previous_one(monkeypatch, preset, config):
    file = config("train_batch_size = 8\nlearning_rate = 0.5\n")
    args = parse(monkeypatch, "--preset", preset, "--config_file", file, "--learning_rate", "0.1")
    assert (args.train_batch_size, args.learning_rate, args.resolution, args.no_half_vae) == (8, 0.1, "1024,1024", False)


def test_a_switch_of_a_preset_or_config_file_can_be_turned_off(monkeypatch, preset, config):
    assert parse(monkeypatch, "--preset", preset).cache_latents is True
    assert parse(monkeypatch, "--preset", preset, "--no-cache_latents").cache_latents is False
    assert parse(monkeypatch, "--config_file", config("cache_latents = true"), "--no-cache-latents").cache_latents is False
    assert parse(monkeypatch, "--preset", preset, "--config_file", config("cache_latents = false")).cache_latents is False


def test_a_preset_can_be_set_in_the_config_file_or_the_environment(monkeypatch, preset, config):
    named = config(f"preset = '{preset}'")
    assert parse(monkeypatch, "--config_file", named).train_batch_size == 4
    assert parse(monkeypatch, environ={"KOHYA_EXT_PRESET": preset}).train_batch_size == 4


def test_extension_options_are_read_from_config_then_environment_then_command_line(config):
    file = config("activation_memory_budget = 0.2\nselective_torch_compile = true\n")
    environ = {"SDSCRIPTS_TORCH_COMPILE_ACTIVATION_MEMORY_BUDGET": "0.4"}
    run = CommandLine(Path(SCRIPT), ["--config_file", file], {})
    assert (run.settings["activation_memory_budget"], run.origin("activation_memory_budget")) == (0.2, "config file")
    run = CommandLine(Path(SCRIPT), ["--config_file", file], environ)
    assert (run.settings["activation_memory_budget"], run.origin("activation_memory_budget")) == (0.4, "environment")
    argv = ["--config_file", file, "--activation-memory-budget=0.6", "--no-selective_torch_compile"]
    run = CommandLine(Path(SCRIPT), argv, environ)
    assert (run.settings["activation_memory_budget"], run.settings["selective_torch_compile"]) == (0.6, False)


def test_help_shows_the_extension(monkeypatch, capsys):
    with pytest.raises(SystemExit) as leaving:
        parse(monkeypatch, "--help")
    shown = capsys.readouterr().out
    assert leaving.value.code == 0
    assert "kohya_ext:" in shown
    assert "--activation_memory_budget" in shown
    assert "--no-cache" not in shown


def test_the_scripts_own_option_is_not_replaced(monkeypatch):
    monkeypatch.setattr("sys.argv", [SCRIPT, "--activation_memory_budget", "0.5"])
    parser = make_parser()
    take_over(parser, CommandLine(Path(SCRIPT), ["--activation_memory_budget", "0.5"], {}))
    parser.add_argument("--activation_memory_budget", type=str, default="theirs")
    assert parser.parse_args().activation_memory_budget == "0.5"


def test_a_preset_does_not_apply_to_arguments_passed_as_a_list(monkeypatch, preset):
    parser = make_parser()
    take_over(parser, CommandLine(Path(SCRIPT), ["--preset", preset], {}))
    assert parser.parse_args([]).train_batch_size == 1


def test_a_misspelled_option_is_an_error_of_one_line(monkeypatch, capsys):
    with pytest.raises(SystemExit) as leaving:
        parse(monkeypatch, "--learnign_rate", "1")
    assert leaving.value.code == 2
    assert capsys.readouterr().err == (
        "kohya_ext: error: unrecognized arguments: --learnign_rate 1 Did you mean --learning_rate?\n"
    )


PROBLEMS = [
    ("learnign_rate", 1e-4, "unknown key learnign_rate. Did you mean learning_rate?"),
    ("learning_rate", "1e-4", "learning_rate must be a number without quotes, not '1e-4'"),
    ("train_batch_size", 1.5, "train_batch_size must be a whole number without quotes, not 1.5"),
    ("train_batch_size", True, "train_batch_size must be a whole number without quotes, not True"),
    ("train_batch_size", 4.0, "train_batch_size must be a whole number without quotes, not 4.0"),
    ("resolution", 512, 'resolution must be text: resolution = "512"'),
    ("cache_latents", "false", "cache_latents must be true or false without quotes, not 'false'"),
    ("network_args", "a=b", 'network_args must be a list: network_args = ["a=b"]'),
    ("network_args", [1], 'network_args must be text: network_args = "1"'),
    ("save_model_as", "zip", "save_model_as must be one of ckpt, safetensors, not 'zip'."),
    ("lr_warmup_steps", "many", "lr_warmup_steps cannot be 'many': "),
]


@pytest.mark.parametrize(("key", "value", "problem"), PROBLEMS, ids=[f"{key}={value}" for key, value, _ in PROBLEMS])
def test_a_problem_names_the_value_and_the_expected_format(key, value, problem):
    assert str(find_problem(make_parser(), key, value)).startswith(problem)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", 1),
        ("learning_rate", 1e-4),
        ("lr_warmup_steps", 10),
        ("lr_warmup_steps", 0.1),
        ("network_args", ["a=b"]),
        ("save_model_as", "ckpt"),
        ("cache_latents", False),
        ("cache_latents", 1),
        ("resolution", "512"),
    ],
)
def test_a_valid_value_is_no_problem(key, value):
    assert find_problem(make_parser(), key, value) is None


def test_a_config_file_problem_is_a_warning_or_in_strict_mode_an_error(monkeypatch, config, capsys):
    file = config("[one]\nlerning_rat = 1.0\ntrain_batch_size = 2\n[two]\ntrain_batch_size = 3\n[two.three]\nx = 1\n")
    assert parse(monkeypatch, "--config_file", file).train_batch_size == 3
    printed = capsys.readouterr().err
    assert "warning: " in printed
    assert "Did you mean learning_rate?" in printed
    assert "duplicate key train_batch_size; using the last value: 3" in printed
    assert "[two.three] is a table in a table" in printed
    with pytest.raises(SystemExit) as leaving:
        parse(monkeypatch, "--config_file", file, "--strict")
    assert leaving.value.code == 2
    assert "error: " in capsys.readouterr().err


CERTAIN = [
    'save_model_as = "zip"',
    'cache_latents = "false"',
    'cache_latents = "off"',
    'learning_rate = "1e-3"',
    "train_batch_size = 1.5",
    "train_batch_size = 4.0",
    "train_batch_size = inf",
    "resolution = 512",
    'network_args = "a=b"',
    'validate_every_n_steps = "2"',
    "learnin_rate = 1e-3",
    "learning_ratee = 1e-3",
    "learnign_rate = 1e-3",
    "lesrning_rate = 1e-3",
]


@pytest.mark.parametrize("line", CERTAIN)
def test_a_harmful_config_line_is_an_error_except_with_no_strict(monkeypatch, config, capsys, line):
    file = config(f"{line}\n")
    with pytest.raises(SystemExit) as leaving:
        parse(monkeypatch, "--config_file", file)
    assert leaving.value.code == 2
    assert "kohya_ext: error: " in capsys.readouterr().err
    parse(monkeypatch, "--config_file", file, "--no-strict")
    printed = capsys.readouterr().err
    assert "kohya_ext: warning: " in printed
    assert "error" not in printed


@pytest.mark.parametrize("line", ['cache_latents = "true"', "train_batch_size = true", "epoch = 3"])
def test_a_harmless_config_line_is_a_warning(monkeypatch, config, capsys, line):
    parse(monkeypatch, "--config_file", config(f"{line}\n"))
    assert "kohya_ext: warning: " in capsys.readouterr().err


def test_an_invalid_preset_value_is_always_an_error(monkeypatch, tmp_path, capsys):
    file = tmp_path / "wrong.toml"
    file.write_text("learnign_rate = 1.0\nresolution = 512\n")
    with pytest.raises(SystemExit) as leaving:
        parse(monkeypatch, "--preset", str(file))
    printed = capsys.readouterr().err
    assert leaving.value.code == 2
    assert printed.count("kohya_ext: error: preset") == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config_file", "nowhere"], r"--config_file nowhere does not exist, nor does nowhere\.toml"),
        (["--activation_memory_budget", "1.5"], r"must be a number from 0 to 1, not 1\.5"),
        (["--preset"], "expected one argument"),
        (["--preset", "6gb"], "no preset 6gb"),
    ],
)
def test_an_error_exits_before_the_script_runs(argv, message):
    with pytest.raises(UserError, match=message):
        _ = CommandLine(Path(SCRIPT), argv, {}).settings


def test_invalid_toml_is_an_error_with_the_file_name(config):
    with pytest.raises(UserError, match=r"config\.toml is not valid TOML: .*line 1"):
        _ = CommandLine(Path(SCRIPT), ["--config_file", config("a = \n")], {}).settings


def test_the_output_config_file_need_not_exist():
    assert CommandLine(Path(SCRIPT), ["--config_file", "new", "--output_config"], {}).config is None


def test_other_programs_command_lines_are_not_read():
    run = CommandLine(None, ["--strict", "--preset", "nonsense"], {})
    assert run.settings.strict is None
    assert run.settings.preset == ()


def test_every_argument_has_an_origin(preset, config):
    file = config("train_batch_size = 8\nactivation_memory_budget = 0.5\n")
    argv = ["--preset", preset, "--config_file", file, "--no-cache_latents"]
    parser = make_parser()
    arguments.complete(parser)
    traced = {row.key: row for row in trace(parser, CommandLine(Path(SCRIPT), argv, {}))}
    assert traced["resolution"].origin == f"preset {preset}"
    assert (traced["train_batch_size"].value, traced["train_batch_size"].origin) == (8, f"{file}, over preset {preset}'s 4")
    assert (traced["cache_latents"].value, traced["cache_latents"].origin) == (
        False,
        f"command line, over preset {preset}'s True",
    )
    assert (traced["activation_memory_budget"].value, traced["activation_memory_budget"].origin) == (0.5, "config file")
    assert traced["preset"].origin == "command line"


def test_a_binary_config_file_is_an_error(tmp_path):
    (tmp_path / "mine.toml").write_bytes(bytes(range(256)))
    with pytest.raises(UserError, match="is not UTF-8 text"):
        _ = CommandLine(Path(SCRIPT), ["--config_file", str(tmp_path / "mine.toml")], {}).settings


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "byte-order-mark"])
def test_a_config_file_may_have_a_byte_order_mark_and_windows_line_ends(tmp_path, mark):
    (tmp_path / "mine.toml").write_bytes(mark + b"[a]\r\nseed = 1\r\n")
    assert read_config_file(str(tmp_path / "mine.toml")).values == {"seed": 1}


def test_a_training_option_before_the_script_is_an_error():
    parser = QuietParser()
    parser.add_argument("script")
    with pytest.raises(UserError, match="write --strict after SCRIPT"):
        parser.parse_args(["--strict", "sdxl_train.py"])


@pytest.mark.parametrize(
    ("word", "right", "near"),
    [
        *(("learnin_rate", "learning_rate", True), ("leraning_rate", "learning_rate", True), ("resum", "resume", True)),
        *(("learning_rate", "learning_rate", False), ("lerning_rat", "learning_rate", False), ("ae", "vae", False)),
        *(("learning_rate_te1", "learning_rate_te2", False), ("learning_rate_te", "learning_rate_te1", False)),
    ],
)
def test_one_letter_off_detects_single_typos(word, right, near):
    assert one_letter_off(word, right) is near


def test_the_preset_is_printed_once_after_the_last_parse(monkeypatch, preset, config, capsys):
    parse(monkeypatch, "--preset", preset, "--config_file", config("train_batch_size = 8\n"), "--no-cache_latents")
    assert capsys.readouterr().err == f"kohya_ext: preset {preset} set resolution=1024,1024\n"
