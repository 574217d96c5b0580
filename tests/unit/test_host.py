"""Installing into a GUI's environment: found, switched on, tried, undone, and no other file changed."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from kohya_ext.errors import UserError
from kohya_ext.launch import host
from tests.unit.test_checkouts import make_tree

ROOT = Path(__file__).parents[2]
makes_environment = pytest.mark.wine("its Python lacks venvlauncher.exe")


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


@makes_environment
def test_switch_works_in_a_plain_start_and_undo_leaves_no_trace(gui):
    before, target, sd_scripts = files(gui), host.environment(gui), host.checkout(gui)
    assert host.first_lines(target, sd_scripts) == []
    host.switch_on(target, [])
    (line,) = host.first_lines(target, sd_scripts)
    assert "patches on" in line
    assert host.undo(target) == []
    assert files(gui) == before


@makes_environment
def test_variable_of_the_user_comes_first(gui):
    target = host.environment(gui)
    host.switch_on(target, [])
    code = "import os; print(os.environ['KOHYA_EXT'])"
    environ = {**os.environ, "KOHYA_EXT": "0"}
    done = subprocess.run([str(target.python), "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


@makes_environment
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


@pytest.mark.parametrize(
    ("uv", "command"),
    [
        ("/uv", ["/uv", "pip", "uninstall", "--python", "PYTHON", "x"]),
        (None, ["HERE", "-m", "pip", "--disable-pip-version-check", "--python", "PYTHON", "uninstall", "--yes", "x"]),
    ],
)
def test_environment_of_uv_has_no_pip(monkeypatch, tmp_path, uv, command):
    """As gui-uv.sh of the kohya_ss GUI makes it."""
    bare = host.Environment(tmp_path / "python", tmp_path, {"torch": "2.7.0"})
    ran = []
    monkeypatch.setattr(host.shutil, "which", lambda name: uv)
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(host.subprocess, "run", lambda *args, **more: ran.append((*args, more)) or done)
    host._pip(bare, "uninstall", "x")
    names = {"PYTHON": str(bare.python), "HERE": sys.executable}
    ((words, more),) = ran
    assert words == [names.get(word, word) for word in command]
    assert more["env"]["PYTHONNOUSERSITE"] == "1", "never into the user's own folder, which GUIs leave out"


def test_uv_takes_the_newest_code_of_a_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(host.shutil, "which", lambda name: "/uv")
    command = host._installer(host.Environment(tmp_path / "python", tmp_path, {}), "install", ["folder"])
    assert command[-3:] == ["--reinstall-package", "kohya-ext", "folder"]


def test_without_any_installer_the_message_names_ensurepip(monkeypatch, tmp_path):
    monkeypatch.setattr(host.shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(UserError, match=r"neither uv nor pip is installed here; run: .*python -m ensurepip"):
        host._pip(host.Environment(tmp_path / "python", tmp_path, {}), "install", "x")


@makes_environment
def test_pip_of_this_python_installs_into_an_environment_without_pip(tmp_path, monkeypatch):
    """A package of one file, which needs no build and no network."""
    venv.create(tmp_path / "venv", symlinks=os.name != "nt")
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tiny.py", "")
        file.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        file.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("tiny-1.0.dist-info/RECORD", "tiny.py,,\ntiny-1.0.dist-info/METADATA,,\ntiny-1.0.dist-info/WHEEL,,\n")
    monkeypatch.setattr(host.shutil, "which", lambda name: None)
    monkeypatch.setattr(host, "_source", lambda: str(wheel))
    before, target = files(tmp_path), host.environment(tmp_path)
    assert host.install(target) == ["tiny"]
    host.switch_on(target, ["tiny"])
    assert (target.site_packages / "tiny.py").is_file()
    assert host.undo(host.environment(tmp_path)) == ["tiny"]
    assert files(tmp_path) == before


#: Program -> the Pythons in its folder, that of training first, and its copy of sd-scripts.
LAYOUTS = {
    "kohya_ss": (["venv/bin/python"], "sd-scripts"),
    "kohya_ss with uv": ([".venv/bin/python"], "sd-scripts"),
    "fluxgym": (["env/Scripts/python.exe"], "sd-scripts"),
    "LoRA_Easy_Training_Scripts": (["backend/sd_scripts/venv/bin/python", "venv/bin/python"], "backend/sd_scripts"),
    "LoRA_Easy_Training_Scripts of 2024": (["sd_scripts/venv/Scripts/python.exe"], "sd_scripts"),
    "lora-scripts": (["venv/Scripts/python.exe"], "scripts/dev"),
    "lora-scripts, portable": (["python/python.exe"], "scripts/stable"),
    "lora-scripts-next": (["../python_embeded/python.exe"], "vendor/sd-scripts"),
    "lora-scripts-next, the portable folder": (["python_embeded/python.exe"], "Next-Trainer/vendor/sd-scripts"),
    "lora-scripts-anima": (["venv/bin/python"], "vendor/sd-scripts"),
    "LoRA-Forge": ([".venv/bin/python"], "scripts/sd-scripts"),
    "a notebook": (["venv/bin/python"], ""),
}


@pytest.fixture
def asked_nothing(monkeypatch):
    """An empty file stands for each environment's Python."""
    monkeypatch.setattr(host, "_describe", lambda python: ([3, 10], str(python.parent), {}, True))


@pytest.mark.usefixtures("asked_nothing")
@pytest.mark.parametrize("name", LAYOUTS)
def test_environments_of_guis_are_found(tmp_path, name):
    pythons, copy = LAYOUTS[name]
    folder = tmp_path / "a program"
    make_tree(folder / copy)
    for python in pythons:
        (folder / python).parent.mkdir(parents=True)
        (folder / python).touch()
    assert host.environment(folder).python.resolve() == (folder / pythons[0]).resolve()
    assert host.checkout(folder).path == folder / copy


@pytest.mark.usefixtures("asked_nothing")
@pytest.mark.parametrize("data", ["Data/Packages", "Packages"])
def test_packages_of_stability_matrix_are_named(tmp_path, data):
    """Each has an environment of its own."""
    for package in ("kohya_ss", "fluxgym"):
        make_tree(tmp_path / data / package / "sd-scripts")
        (tmp_path / data / package / "venv" / "bin").mkdir(parents=True)
        (tmp_path / data / package / "venv" / "bin" / "python").touch()
    (tmp_path / data / "ComfyUI").mkdir()
    with pytest.raises(UserError, match=r"name one of its packages: --for \S+fluxgym'? or \S+kohya_ss'?$"):
        host.environment(tmp_path)
    assert host.environment(tmp_path / data / "kohya_ss").python.is_file()


def test_embedded_python_that_reads_no_pth_says_what_to_change(tmp_path, monkeypatch):
    """A portable package's Python imports no site packages unless its ._pth file says so."""
    monkeypatch.setattr(host, "_describe", lambda python: ([3, 10], "", {}, False))
    (tmp_path / "python_embeded").mkdir()
    for name in ("python.exe", "python310._pth"):
        (tmp_path / "python_embeded" / name).touch()
    with pytest.raises(UserError, match=r"in .*python310\._pth, remove the # before `import site`, and run this again"):
        host.environment(tmp_path)


def test_what_pip_has_left_of_a_package_does_not_count(tmp_path, monkeypatch):
    for folder, name in (("~ich-1.0.dist-info", "leftover"), ("whole-1.0.dist-info", "whole"), ("empty-1.0.dist-info", "")):
        (tmp_path / folder).mkdir()
        if name:
            (tmp_path / folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    packages = host._describe(Path(sys.executable))[2]
    assert packages["whole"] == "1.0"
    assert "leftover" not in packages


@pytest.mark.linux("a program of the shell")
def test_a_python_that_prints_lines_or_does_not_start_is_described(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "a startup file prints"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert host._describe(python)[0] == list(sys.version_info[:2])
    for program, reason in (("echo No Python at C: >&2; exit 103", "No Python at C:"), ("exit 3", "exit code 3")):
        python.write_text(f"#!/bin/sh\n{program}\n")
        with pytest.raises(UserError, match=f"does not work as a Python: {reason}$"):
            host._describe(python)


def test_problems_are_named(tmp_path):
    with pytest.raises(UserError, match=r"no Python environment in .* --for PATH_TO/python"):
        host.environment(tmp_path)
    (tmp_path / "python").write_text("not a program")
    with pytest.raises(UserError, match="does not work as a Python"):
        host.environment(tmp_path / "python")
