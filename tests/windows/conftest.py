"""Fixtures of the tests with the real scripts, in folders with any name. These tests are for Windows alone."""

import sys

import pytest

from kohya_ext.tiny import dataset
from tests.real.conftest import (  # noqa: F401 - fixtures, and the hook that parametrizes `checkout`
    _fork_server,
    call,
    models,
    models_folder,
    pytest_generate_tests,
    train,
)

collect_ignore_glob = [] if sys.platform == "win32" else ["test_*.py"]

#: A space, an umlaut, Japanese, and what cmd.exe and TOML treat as special.
FOLDER = "Größe 学習 (1) & 100% it's"


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """A folder with four images and captions."""
    folder = tmp_path_factory.mktemp("images") / FOLDER
    dataset.write(folder, 4, 128)
    return folder


@pytest.fixture(scope="session")
def output(tmp_path_factory):
    """() -> a new folder for the outputs of a run."""

    def new():
        folder = tmp_path_factory.mktemp("run") / FOLDER
        folder.mkdir()
        return folder

    return new


@pytest.fixture(scope="session")
def gui_options():
    """Write options to an output folder as kohya_ss gives them, with what an editor of Windows may add: CRLF and a BOM."""

    def write(folder, **options):
        file = folder / "config_lora-20260101-120000.toml"
        text = "".join(f"{name} = {str(value).lower()}\r\n" for name, value in options.items())
        file.write_text(text, encoding="utf-8-sig", newline="")
        return "--config_file", str(file)

    return write
