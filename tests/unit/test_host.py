"""Installing into a GUI's environment: found, switched on, tried, undone, and no other file changed."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from kohya_ext.errors import UserError
from kohya_ext.launch import host
from tests.unit.test_checkouts import make_tree

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gui(tmp_path):
    """The folder of a GUI: an environment that sees this one's packages, and a copy of sd-scripts."""
    folder = tmp_path / "my gui"
    venv.create(folder / "venv", symlinks=os.name != "nt")
    sd_scripts = make_tree(folder / "sd-scripts")
    (sd_scripts / "library" / "__init__.py").write_text("")
    (sd_scripts / "train_network.py").write_text(
        "import sys\nsys.path.insert(0, '.')\nimport library\nprint('usage')  # as read_config_from_file() would\n"
    )
    target = host.environment(folder)
    others = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    (target.site_packages / "a.pth").write_text("\n".join(others) + "\n")
    (target.site_packages / "kohya_ext.pth").write_text((ROOT / "kohya_ext.pth").read_text())
    return folder


def files(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts}


def test_switch_works_in_a_plain_start_and_undo_leaves_no_trace(gui):
    before, target, sd_scripts = files(gui), host.environment(gui), host.checkout(gui)
    assert host.first_lines(target, sd_scripts) == []
    host.switch_on(target, [])
    (line,) = host.first_lines(target, sd_scripts)
    assert line.endswith("patches on")
    assert host.undo(target) == []
    assert files(gui) == before


def test_variable_of_the_user_comes_first(gui):
    target = host.environment(gui)
    host.switch_on(target, [])
    code = "import os; print(os.environ['KOHYA_EXT'])"
    environ = {**os.environ, "KOHYA_EXT": "0"}
    done = subprocess.run([str(target.python), "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


def test_packages_stay_as_they_are_and_added_ones_are_removed(gui, monkeypatch):
    target = host.environment(gui)
    asked: list[tuple[str, ...]] = []
    constraints: list[str] = []

    def pip(target, action, *words):
        asked.append((action, *words))
        if action == "install":
            constraints.extend(Path(words[1]).read_text().split())

    monkeypatch.setattr(host, "_pip", pip)
    added = host.install(target)
    assert added == [], "nothing new appeared in the environment"
    assert len(constraints) == len({name for name in target.packages if name.lower().replace("_", "-") != "kohya-ext"})
    assert asked[0][-1] == str(ROOT)
    host.switch_on(target, ["kohya-ext", "wrapt"])
    assert host.undo(target) == ["kohya-ext", "wrapt"]
    assert asked[-1] == ("uninstall", "kohya-ext", "wrapt")


def test_environment_without_pip_takes_uv(gui, monkeypatch):
    target = host.environment(gui)
    bare = host.Environment(target.python, target.site_packages, {})
    monkeypatch.setattr(host.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="has no pip, and uv is not installed"):
        host._pip(bare, "install", "x")
    ran = []
    monkeypatch.setattr(host.shutil, "which", lambda name: "/uv")
    monkeypatch.setattr(host.subprocess, "run", lambda command: ran.append(command) or subprocess.CompletedProcess(command, 0))
    host._pip(bare, "uninstall", "x")
    assert ran == [["/uv", "pip", "uninstall", "--python", str(target.python), "x"]]


@pytest.mark.parametrize("name", ["venv", ".venv", "env", "sd_scripts/venv"])
def test_environments_of_guis_are_found(tmp_path, name):
    venv.create(tmp_path / name, symlinks=os.name != "nt")
    assert host.environment(tmp_path).python.is_relative_to(tmp_path / name)
    assert host.environment(tmp_path / name).python.is_relative_to(tmp_path / name)


def test_problems_are_named(tmp_path):
    with pytest.raises(UserError, match=r"no Python environment in .* --for PATH_TO/python"):
        host.environment(tmp_path)
    (tmp_path / "python").write_text("not a program")
    with pytest.raises(UserError, match="does not work as a Python"):
        host.environment(tmp_path / "python")
