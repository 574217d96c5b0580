"""What holds for the repository as a whole."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomlkit

from kohya_ext.commands import options

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("command", [("ruff", "check"), ("ruff", "format", "--check"), ("mypy",)], ids=" ".join)
def test_the_code_is_checked(command):
    pytest.importorskip(command[0])
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_imports_between_rooms_point_downwards():
    pytest.importorskip("importlinter")
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readmes_tables_are_current():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert options.with_tables(text) == text, "run: python -m kohya_ext options --write README.md"


def test_ci_runs_the_readmes_test_command():
    command = next(
        line.strip() for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if "-m pytest" in line
    )
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_the_base_install_leaves_a_kohya_environment_alone():
    dependencies = tomlkit.parse((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    names = {dependency.split(">")[0] for dependency in dependencies}
    assert names == {"packaging", "platformdirs", "rich", "toml", "tomlkit", "wrapt"}
    assert all("<" not in dependency and "==" not in dependency for dependency in dependencies)


def test_the_wheel_holds_patches_presets_and_the_startup_file(tmp_path):
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("patches", "presets"):
        there = {
            file.relative_to(ROOT / folder).as_posix() for file in (ROOT / folder).rglob("*.*") if "pycache" not in str(file)
        }
        assert {f"kohya_ext/{folder}/{name}" for name in there} <= names
    assert "kohya_ext.pth" in names
    assert not any(name.startswith(("tests/", "patches/", "presets/")) for name in names)
