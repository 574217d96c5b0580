"""The environment-gated start-up file, run as ``site`` runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_checkouts import make_tree

ROOT = Path(__file__).parent.parent.parent
LINE = (ROOT / "kohya_ext.pth").read_text()
ADVICE = "Reinstall kohya_ext, or unset its variables"

#: Prints the modules and hooks that the line added to a bare interpreter.
IMPORTED = """
import os, sys
before = set(sys.modules)
{line}
print(sorted(set(sys.modules) - before - {{"__future__"}}))
"""


def start(code: str, *folders: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Start Python with the line run twice, as in some virtual environments, and packages importable from ``folders``."""
    path = os.pathsep.join(map(str, folders or (ROOT,)))
    environ = {**os.environ, "PYTHONPATH": path, **env}
    command = [sys.executable, "-c", f"{LINE}\n{LINE}\n{code}"]
    return subprocess.run(command, env=environ, capture_output=True, text=True)


@pytest.fixture
def tree(tmp_path) -> Path:
    """A folder that looks like sd-scripts, whose ``library`` can be imported."""
    folder = make_tree(tmp_path / "tree")
    (folder / "library" / "__init__.py").write_text("")
    return folder


def test_the_startup_file_is_one_line_that_site_executes():
    assert LINE.startswith("import os;")
    assert LINE.count("\n") == 1


@pytest.mark.parametrize("env", [{}, {"KOHYA_SD_SCRIPTS": "x"}])
def test_without_a_switch_nothing_is_imported(env):
    done = start("import sys; print([name for name in sys.modules if name.startswith('kohya_ext')])", **env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize("env", [{"KOHYA_EXT": "1"}, {"KOHYA_EXT": "0"}, {"KOHYA_EXT_PRESET": "16gb"}])
def test_a_program_without_sd_scripts_imports_only_the_hook(env):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, "-S", "-c", IMPORTED.format(line=LINE)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "['kohya_ext', 'kohya_ext.launch', 'kohya_ext.launch.autoload']\n"


@pytest.mark.parametrize(
    "env", [{"KOHYA_EXT": "0"}, {"KOHYA_EXT_DISABLE_PATCH": "*"}, {"SDSCRIPTS_SELECTIVE_TORCH_COMPILE": "0"}]
)
def test_a_disabled_switch_starts_no_session(tree, env):
    done = start("import library, sys; print('kohya_ext.launch.session' in sys.modules)", ROOT, tree, **env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


@pytest.mark.parametrize(
    "env", [{"KOHYA_EXT": "1"}, {"KOHYA_EXT_PRESET": "16gb"}, {"SDSCRIPTS_TORCH_COMPILE_ACTIVATION_MEMORY_BUDGET": "0"}]
)
def test_a_switch_starts_the_session_when_library_is_imported(tree, env):
    code = "import library, kohya_ext.launch.session as s, sys; print(s.current().checkout.path, 'torch' in sys.modules)"
    done = start(code, ROOT, tree, **env)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tree} False\n", "")


def test_a_library_imported_before_the_hook_is_detected(tree):
    code = (
        "import library; from kohya_ext.launch import autoload, session\n"
        "autoload.watch(); print(session.current().checkout.path)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tree)])}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tree}\n", "")


def test_find_spec_does_not_import_library_and_keeps_the_hook(tree):
    code = (
        "import importlib, importlib.util, sys; spec = importlib.util.find_spec('library'); print('library' in sys.modules)\n"
        "import library; library = importlib.reload(library); import kohya_ext.launch.session as s\n"
        "print(s.current() is not None)"
    )
    done = start(code, ROOT, tree, KOHYA_EXT="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\nTrue\n", "")


def test_another_programs_library_starts_no_session(tmp_path):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "__init__.py").write_text("")
    done = start("import library, kohya_ext.launch.session as s; print(s.current())", ROOT, tmp_path, KOHYA_EXT="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")


@pytest.mark.parametrize("env", [{"KOHYA_EXT": "1"}, {"KOHYA_EXT_EMA": "1"}])
def test_another_programs_library_imports_no_patch(tmp_path, env):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "__init__.py").write_text("")
    done = start("import library, sys; print('kohya_ext.patches' in sys.modules)", ROOT, tmp_path, **env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


@pytest.mark.parametrize(("trains", "started"), [("", False), ("# read_config_from_file(args, parser)", True)])
def test_gui_that_imports_sd_scripts_starts_no_session(tree, tmp_path, trains, started):
    """fluxgym builds its form from a script's parser, in its own process."""
    program = tmp_path / "app.py"
    program.write_text(f"{LINE}\nimport library, sys\nprint('kohya_ext.launch.session' in sys.modules)\n{trains}\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tree)]), "KOHYA_EXT": "1"}
    done = subprocess.run([sys.executable, str(program)], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [str(started)], "")


LAUNCHER = """
import sys, types
sys.modules["accelerate"] = accelerate = types.ModuleType("accelerate"); accelerate.__path__ = []
sys.modules["accelerate.commands"] = commands = types.ModuleType("accelerate.commands"); commands.__path__ = [{folder!r}]
import accelerate.commands.launch as launch
print(hasattr(launch.simple_launcher, "__wrapped__"), hasattr(launch, "multi_gpu_launcher"))
"""


@pytest.mark.parametrize(
    ("env", "patched"), [({"KOHYA_EXT": "1"}, True), ({"KOHYA_EXT_EMA": "1"}, True), ({"KOHYA_EXT": "0"}, False)]
)
def test_a_switch_patches_accelerates_launcher(tmp_path, env, patched):
    (tmp_path / "launch.py").write_text("def simple_launcher(*args):\n    return 0\n")
    done = start(LAUNCHER.format(folder=str(tmp_path)), ROOT, **env)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{patched} False\n", "")


@pytest.mark.parametrize(("env", "patched"), [({"KOHYA_EXT": "1"}, True), ({"KOHYA_EXT": "0"}, False), ({}, False)])
def test_launcher_that_runs_as_a_module_is_patched(tmp_path, env, patched):
    """lora-scripts starts ``python -m accelerate.commands.launch``, which runs the launcher's code without importing it."""
    commands = tmp_path / "accelerate" / "commands"
    commands.mkdir(parents=True)
    for folder in (commands.parent, commands):
        (folder / "__init__.py").touch()
    (commands / "launch.py").write_text(
        "import sys\ndef simple_launcher(*args):\n    return 0\n"
        "def main():\n    print(hasattr(simple_launcher, '__wrapped__'), sys.argv[1:])\n    sys.exit(3)\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    (tmp_path / "sitecustomize.py").write_text(LINE)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), **env}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "train.py"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, f"{patched} ['--quiet', 'train.py']\n", "")


def test_a_broken_installation_does_not_prevent_startup(tmp_path):
    (tmp_path / "kohya_ext").mkdir()
    (tmp_path / "kohya_ext" / "__init__.py").write_text("raise RuntimeError('spoilt')")
    done = start("print('started')", tmp_path, KOHYA_EXT="1")
    assert (done.returncode, done.stdout) == (0, "started\n")
    # Virtual environments read start-up files twice.
    assert set(done.stderr.splitlines()) == {f"kohya_ext: not active: RuntimeError('spoilt'). {ADVICE}"}


@pytest.mark.parametrize("missing", ["wrapt", "toml", "kohya_ext.patches"])
def test_a_missing_package_disables_the_extension_and_training_runs(tree, missing):
    code = f"import sys; sys.modules['{missing}'] = None; import library; print('trains')"
    done = start(code, ROOT, tree, KOHYA_EXT="1")
    assert (done.returncode, done.stdout) == (0, "trains\n"), done.stderr
    assert done.stderr.startswith("kohya_ext: not active: ModuleNotFoundError(")
    assert done.stderr.endswith(f"{ADVICE}\n")
    assert done.stderr.count("\n") == 1


def test_a_process_without_standard_error_can_start():
    """pythonw.exe on Windows, which may run the GUI, has no standard error."""
    code = "import sys; sys.stderr = sys.stdout = None\n" + LINE
    environ = {**os.environ, "PYTHONPATH": "nowhere", "KOHYA_EXT": "1"}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_invalid_variable_is_reported_only_where_sd_scripts_runs(tree):
    wrong = {"SDSCRIPTS_TORCH_COMPILE_ACTIVATION_MEMORY_BUDGET": "1.5"}
    assert start("print('started')", **wrong).stderr == ""
    done = start("import library", ROOT, tree, **wrong)
    assert done.returncode == 2
    assert "must be a number from 0 to 1, not 1.5" in done.stderr
    assert done.stderr.count("\n") == 1
