"""The environment-gated start-up file, run as ``site`` runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LINE = (ROOT / "kohya_ext.pth").read_text()


def start(code: str, folder: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Start Python with the line run twice, as in some virtual environments, and the package importable from ``folder``."""
    environ = {**os.environ, "PYTHONPATH": str(folder), **env}
    return subprocess.run([sys.executable, "-c", f"{LINE}\n{LINE}\n{code}"], env=environ, capture_output=True, text=True)


def test_it_is_one_line_that_site_executes():
    assert LINE.startswith("import os;")
    assert LINE.count("\n") == 1


@pytest.mark.parametrize("env", [{}, {"KOHYA_SD_SCRIPTS": "x"}, {"PATH": os.environ["PATH"]}])
def test_without_a_switch_nothing_is_imported(env):
    done = start("import sys; print([name for name in sys.modules if name.startswith('kohya_ext')])", **env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize("env", [{"KOHYA_EXT": "0"}, {"KOHYA_EXT_DISABLE": "*"}, {"SDSCRIPTS_SELECTIVE_TORCH_COMPILE": "0"}])
def test_a_switch_that_is_off_watches_nothing(env):
    done = start("import kohya_ext.autoload as a; print(a._watching)", **env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


@pytest.mark.parametrize(
    "env", [{"KOHYA_EXT": "1"}, {"KOHYA_EXT_PRESET": "16gb"}, {"SDSCRIPTS_TORCH_COMPILE_ACTIVATION_MEMORY_BUDGET": "0"}]
)
def test_a_switch_arms_without_torch(env):
    done = start("import kohya_ext.autoload as a, sys; print(a._watching, 'torch' in sys.modules)", **env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True False\n", "")


def test_a_library_of_another_program_is_left_alone(tmp_path):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "__init__.py").write_text("")
    code = "import library, kohya_ext.session as s; print(s.current())"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "KOHYA_EXT": "1"}
    done = subprocess.run([sys.executable, "-c", f"{LINE}\n{code}"], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")


def test_a_broken_installation_never_breaks_a_start(tmp_path):
    (tmp_path / "kohya_ext").mkdir()
    (tmp_path / "kohya_ext" / "__init__.py").write_text("raise RuntimeError('spoilt')")
    done = start("print('started')", tmp_path, KOHYA_EXT="1")
    assert (done.returncode, done.stdout) == (0, "started\n")
    assert done.stderr == "kohya_ext: not active: RuntimeError('spoilt')\n" * 2


def test_a_wrong_variable_is_said_where_sd_scripts_runs_and_nowhere_else(tmp_path):
    from tests.unit.test_sdscripts import make_tree

    tree = make_tree(tmp_path / "tree")
    (tree / "library" / "__init__.py").write_text("")
    wrong = {"SDSCRIPTS_TORCH_COMPILE_ACTIVATION_MEMORY_BUDGET": "1.5"}
    assert start("print('started')", **wrong).stderr == ""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tree)]), **wrong}
    done = subprocess.run([sys.executable, "-c", f"{LINE}\nimport library"], env=environ, capture_output=True, text=True)
    assert done.returncode == 2
    assert "must be a number from 0 to 1, not 1.5" in done.stderr
    assert done.stderr.count("\n") == 1
