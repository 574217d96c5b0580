"""Presets and config files that others wrote run nothing, and secrets are in no file and no printed command."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from kohya_ext.config import preset_files
from kohya_ext.config.arguments import trace
from kohya_ext.config.command_line import CommandLine, quoted, without_secrets
from kohya_ext.config.settings import is_secret, secrets
from kohya_ext.config.user_files import read_config_file, read_dataset_config
from kohya_ext.errors import UserError
from kohya_ext.launch import processes
from kohya_ext.run import run_record

SCRIPT = Path("sdxl_train_network.py")


def write(folder: Path, text: str, name: str = "mine.toml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


# --- what a file may set ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--preset", "--config_file"])
def test_a_file_runs_no_command(tmp_path, option):
    file = write(tmp_path, 'notify = "touch owned"\n')
    with pytest.raises(
        UserError, match=r"notify is not allowed in a file.*use --notify or the environment variable KOHYA_EXT_NOTIFY"
    ):
        _ = CommandLine(SCRIPT, [option, file], {}).settings
    command = CommandLine(SCRIPT, ["--notify", "true"], {"KOHYA_EXT_NOTIFY": "false"})
    assert command.settings["notify"] == "true"


@pytest.mark.parametrize("key", ["huggingface_repo_id", "huggingface_token", "wandb_api_key", "log_tracker_config"])
def test_a_preset_sends_nothing_to_a_host_and_a_config_file_of_the_gui_may(tmp_path, key):
    file = write(tmp_path, f'{key} = "x"\n')
    with pytest.raises(UserError, match=f"{key} is not allowed in a file, because it runs a command or names a host"):
        _ = CommandLine(SCRIPT, ["--preset", file], {}).presets
    assert CommandLine(SCRIPT, ["--config_file", file], {}).values[key] == "x"


def test_shipped_presets_are_allowed():
    assert [preset_files._read(file).name for _, _, file in preset_files.shipped()]


# --- paths with backslashes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (r'output_dir = "C:\new\table"', r"output_dir has the escape sequence \n and \t instead of a folder's name; write it "),
        (r'output_dir = "out\new"', r"output_dir = 'out\new'"),
        (r'anything = ["D:\train"]', r"anything = 'D:\train'"),
        (r'output_dir = "C:\new\utput"', "so write paths with / or in single quotes"),
        (r'train_data_dir = "C:\Users\me"', "so write paths with / or in single quotes"),
    ],
)
def test_a_windows_path_in_double_quotes_is_explained(tmp_path, line, message):
    file = write(tmp_path, f"{line}\n")
    with pytest.raises(UserError) as config:
        read_config_file(file)
    with pytest.raises(UserError) as dataset:
        read_dataset_config(Path(file))
    with pytest.raises(UserError) as preset:
        preset_files.parse(f"{line}\n", "mine", None)
    assert all(message in str(each.value) for each in (config, dataset, preset))


def test_other_texts_may_have_line_breaks_and_paths_backslashes(tmp_path):
    text = 'output_dir = \'C:\\new\\table\'\nae = "C:\\\\new"\nmetadata_description = "a\\nb"\nnetwork_args = ["a=\\t"]\n'
    values = read_config_file(write(tmp_path, text)).values
    assert values == {"output_dir": r"C:\new\table", "ae": r"C:\new", "metadata_description": "a\nb", "network_args": ["a=\t"]}


# --- secrets ---------------------------------------------------------------------------------------------------------

SECRET = [
    "--wandb_api_key",
    "key-1",
    "--huggingface_token=key-2",
    "--notify",
    "key-3",
    "--wandb_api",
    "key-4",
    "--my_password",
    "key-5",
]
PLAIN = ["--wandb_run_name", "run", "--num_vectors_per_token", "4", "--seed", "1"]


def test_no_secret_is_printed_or_written(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "orig_argv", ["python", "x.py", *SECRET, *PLAIN])
    run_record.write(tmp_path, run_record.describe("x.py", Namespace()), 1)
    command = CommandLine(SCRIPT, [*SECRET, *PLAIN], {"KOHYA_EXT_NOTIFY": "key-6"})
    texts = (
        (tmp_path / run_record.FILE).read_text(),
        command.shell_line(),
        command.with_({"resume": "auto"}).shell_line(),
        quoted(["python", *SECRET, *PLAIN]),
    )
    for text in texts:
        assert "key-" not in text
        assert "num_vectors_per_token" in text
        assert "wandb_run_name" in text


def test_the_launcher_passes_secrets_in_variables():
    arguments, variables = processes._secrets_in_variables([*SECRET[:5], *SECRET[7:], *PLAIN])
    assert arguments == [*PLAIN, "--my_password", "key-5"]  # a fork's option has no variable
    assert variables == {"WANDB_API_KEY": "key-1", "HF_TOKEN": "key-2", "KOHYA_EXT_NOTIFY": "key-3"}


def test_origins_are_shown_without_secrets(tmp_path):
    parser = ArgumentParser()
    for name in ("wandb_api_key", "config_file", "notify"):
        parser.add_argument(f"--{name}")
    file = write(tmp_path, 'wandb_api_key = "key-2"\n')
    argv = ["--wandb_api_key", "key-1", "--notify", "key-3", "--config_file", file]
    rows = {row.key: row for row in trace(parser, CommandLine(SCRIPT, argv, {}))}
    assert (rows["wandb_api_key"].value, rows["notify"].value) == ("***", "***")
    assert "key-" not in repr(rows)


def test_names_of_secrets():
    assert secrets().keys() == {"notify", "wandb_api_key", "huggingface_token"}
    assert all(map(is_secret, (*secrets(), "other_api_key", "hub_token", "smtp_password", "client_secret")))
    assert not any(map(is_secret, ("num_vectors_per_token", "no_token_padding", "token_string", "keep_tokens", "seed")))
    assert without_secrets(["--seed", "1", "--not", "x", "--no"]) == (["--seed", "1", "--no"], {"notify": "x"})
