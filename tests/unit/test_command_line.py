"""The command line: invalid input is one line and exit code 2, before anything is loaded."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kohya_ext.__main__ import main
from kohya_ext.config.settings import flags, options
from tests.unit.test_checkouts import make_tree

ROOT = Path(__file__).parent.parent.parent


def call(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, "-m", "kohya_ext", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environ, cwd=cwd)


@pytest.fixture
def call_here(monkeypatch, capfd):
    """Run a command without a script in this process, which is faster; used like :func:`call`."""

    def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        if cwd is not None:
            monkeypatch.chdir(cwd)
        try:
            code = main(arguments)
        except SystemExit as leaving:  # argparse's help
            code = leaving.code
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A folder that looks like sd-scripts. Its scripts print their arguments."""
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path / "cache"))
    folder = make_tree(tmp_path / "tree")
    body = "import sys\nprint('ran', sys.path[0], sys.argv)\nif '--fail' in sys.argv: sys.exit(7)\n"
    (folder / "sdxl_train.py").write_text(body + "if __name__ != '__main__': read_config_from_file()\n")
    (folder / "tools").mkdir()
    (folder / "tools" / "merge_models.py").write_text(body + "'__main__'\n")
    return folder


WRONG = [
    (["sdxl_trian.py"], "Did you mean sdxl_train.py?"),
    (["sdxl_train.py", "--preset", "6gb"], "no preset 6gb for sdxl_train.py"),
    (["--preset", "sdxl-lora/16gb", "sdxl_train.py"], "is for sdxl_train_network.py, not for sdxl_train.py"),
    (["sdxl_train.py", "--activation_memory_budget", "1.5"], "must be a number from 0 to 1, not 1.5"),
    (["--activation-memory-budget=x", "sdxl_train.py"], "must be a number from 0 to 1, not 'x'"),
    (["sdxl_train.py", "--config_file", "broken.toml"], "broken.toml is not valid TOML"),
    (["sdxl_train.py", "--config_file", "absent"], "--config_file absent does not exist, nor does absent.toml"),
    (["--presett", "16gb", "sdxl_train.py"], "Did you mean --preset?"),
    (["--preset", "16gb", "tools/merge_models.py"], "--preset only applies to training scripts, not to merge_models.py"),
    (["--num_processes", "0", "sdxl_train.py"], "must be a whole number of 1 or more"),
    (["--sd-scripts", "nowhere", "sdxl_train.py"], "--sd-scripts: no sd-scripts in nowhere"),
    (["presets", "show", "6gb", "--script", "sdxl_train.py"], "no preset 6gb"),
    (["setup", "--repo", "nowhere", "--ref", "v1"], "could not fetch v1 of nowhere"),
    (["run", "sdxl_trian.py"], "Did you mean sdxl_train.py?"),
    (["estimte", "sdxl_train.py"], "no command or script estimte. Did you mean estimate?"),
    (["--sd-scripts", "nowhere", "estimate", "sdxl_train.py"], "--sd-scripts: no sd-scripts in nowhere"),
    (["--sd_scripts", "nowhere", "presets", "show", "sdxl-lora/16gb", "--explain"], "--sd-scripts: no sd-scripts in nowhere"),
    (["presets", "show", "nonsense/16gb"], "no preset nonsense/16gb"),
    (["presets", "show", "nowhere/mine.toml"], "preset file nowhere/mine.toml does not exist"),
    (["presets", "show", "16gb"], "give --script sdxl_train_network.py, for example, or a full name"),
    (["estimate", "--preset", "16gb"], "the following arguments are required: SCRIPT"),
    (["demo", "--steps", "0"], "argument --steps: must be a whole number of 1 or more"),
    (["demo", "--output", "README.md/demo"], f"{Path('README.md/demo')} cannot be created: "),  # the reason is the system's
    (["library"], "library is a folder; name a script"),
    (["README.md"], "README.md is not a Python script"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_an_error_is_one_line_and_exit_code_2(tree, call_here, arguments, message):
    (tree / "broken.toml").write_text("a = \n")
    done = call_here(*arguments, cwd=tree)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("kohya_ext: error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


@pytest.mark.parametrize("arguments", [["sdxl_trian.py"], ["estimate", "--preset", "16gb"]], ids=" ".join)
def test_a_process_with_an_error_prints_one_line_and_exits_with_2(tree, arguments):
    done = call(*arguments, cwd=tree)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kohya_ext: error: ")
    assert done.stderr.count("\n") == 1


def test_an_unknown_layout_is_an_error_with_solutions(tmp_path, call_here):
    old = make_tree(tmp_path / "old", "unknown", "0.9.1")
    done = call_here("train_network.py", cwd=old)
    assert done.returncode == 2
    assert "has an unknown layout; kohya_ext" in done.stderr
    assert "--allow-unknown-version" in done.stderr
    assert call("--allow-unknown-version", "networks/merge_lora.py", cwd=old).returncode == 0


def test_a_newer_release_with_an_unknown_layout_needs_no_option(tmp_path):
    newer = make_tree(tmp_path / "newer", "unknown", "99.0.0")
    assert call("networks/merge_lora.py", cwd=newer).returncode == 0


@pytest.mark.parametrize("script", ["sdxl_train.py", "tools/merge_models.py"])
def test_the_script_runs_as_when_started_without_the_extension(tree, tmp_path, script):
    done = call("--sd-scripts", str(tree), script, "--a", "b c", "--fail", cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    path = tree / script
    assert done.stdout == f"ran {path.parent} {[str(path), '--a', 'b c', '--fail']}\n"


def test_the_launcher_imports_little_before_the_script(tree):
    """The launcher imports no slow package that the script may not need, because every start would wait for it."""
    (tree / "sdxl_train.py").write_text("import sys\nprint(*sys.modules)\n'read_config_from_file('\n")
    done = call("--preset", "16gb", "sdxl_train.py", cwd=tree)
    assert done.returncode == 0, done.stderr
    imported = done.stdout.split()
    assert not {"asyncio", "numpy", "PIL", "psutil", "rich", "torch", "wrapt"} & set(imported)
    assert [name for name in imported if name.startswith("kohya_ext.commands.")] == ["kohya_ext.commands.run"]


@pytest.mark.parametrize("missing", ["toml", "wrapt"])
def test_a_missing_package_is_an_error_of_one_line(tree, missing):
    """Of these packages one is imported before the script, and the other when it imports sd-scripts."""
    (tree / "library" / "__init__.py").touch()
    (tree / "sdxl_train.py").write_text("import library; print('trains'); 'read_config_from_file('")
    code = (
        f"import sys; sys.modules[{missing!r}] = None; from kohya_ext.__main__ import main; sys.exit(main(['sdxl_train.py']))"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, cwd=tree)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("kohya_ext: error: ")
    assert "einstall kohya_ext" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_startup_line_counts_patches_and_lists_those_enabled_by_options(tree):
    (tree / "library" / "__init__.py").touch()
    (tree / "sdxl_train.py").write_text("import library; 'read_config_from_file('")
    (line,) = call("sdxl_train.py", cwd=tree).stderr.splitlines()
    # The folder has almost no files of sd-scripts.
    start = r"kohya_ext: [\d.]+, sd-scripts v[\d.]+, no preset, ((\d+) patches on, (\d+) not in this release)"
    counts = re.fullmatch(start, line)[1]
    (line,) = call("sdxl_train.py", "--ema", "--disable_patch", "spill_watch", cwd=tree).stderr.splitlines()
    assert line.endswith(f", no preset, {counts}, with ema, off: spill_watch")
    (line,) = call("sdxl_train.py", "--disable_patch", "*", cwd=tree).stderr.splitlines()
    assert line.endswith(", no preset, 0 patches on, off: *")


def test_options_before_the_script_are_passed_to_it(tree):
    done = call("--strict", "--report", "x.json", "sdxl_train.py", "--seed", "1", cwd=tree)
    assert "['--strict', '--report', 'x.json', '--seed', '1']"[1:-1] in done.stdout


def test_the_master_switch_disables_the_launchers_extension(tree, call_here, monkeypatch):
    done = call("sdxl_train.py", "--seed", "1", cwd=tree, KOHYA_EXT="0")
    assert done.returncode == 0
    monkeypatch.setenv("KOHYA_EXT", "0")
    done = call_here("--preset", "16gb", "sdxl_train.py", cwd=tree)
    assert done.returncode == 2
    assert "KOHYA_EXT=0 turns the extension off, but --preset is set" in done.stderr


COMMANDS_ANYWHERE = [
    ["estimate", "sdxl_train_network.py", "--preset", "16gb", "--sd-scripts", "TREE", "--vram", "24", "--json"],
    ["--sd-scripts", "TREE", "estimate", "sdxl_train_network.py", "--preset", "16gb", "--vram", "24", "--json"],
    ["--sd_scripts", "TREE", "--preset", "16gb", "--json", "estimate", "--vram", "24", "sdxl_train_network.py"],
    ["estimate", "--json", "--preset", "16gb", "--vram=24", "--sd_scripts=TREE", "sdxl_train_network.py"],
]


def test_an_option_may_precede_the_command_or_the_script_or_follow_it(tree, tmp_path, call_here):
    (tree / "sdxl_train_network.py").write_text("read_config_from_file()\n")
    (tree / "library" / "more.py").write_text('"--preset"\n')
    answers = [call_here(*(word.replace("TREE", str(tree)) for word in words), cwd=tmp_path) for words in COMMANDS_ANYWHERE]
    assert [(done.returncode, done.stderr) for done in answers] == [(0, "")] * len(answers)
    assert {done.stdout for done in answers} == {answers[0].stdout}
    assert json.loads(answers[0].stdout)["card"] == 24 * 2**30


def test_the_run_command_may_precede_a_script(tree, tmp_path):
    expected = f"ran {tree} {[str(tree / 'sdxl_train.py'), '--seed', '1']}\n"
    for words in (["run", "--sd-scripts", str(tree), "sdxl_train.py"], ["--sd-scripts", str(tree), "run", "sdxl_train.py"]):
        done = call(*words, "--seed", "1", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, expected)


def test_presets_show_needs_no_script_for_a_preset_with_a_family(tmp_path, call_here):
    (tmp_path / "mine.toml").write_text('learning_rate = 1e-5\n[preset]\nfamily = "flux-lora"\nextends = ["12gb"]\n')
    own = call_here("presets", "show", "mine.toml", cwd=tmp_path)
    assert own.returncode == 0, own.stderr
    assert "blocks_to_swap" in own.stdout
    done = call_here("presets", "show", "flux-lora/12gb", "quality")
    assert done.returncode == 0, done.stderr
    assert "flux-lora/12gb + any/quality" in done.stdout


@pytest.mark.parametrize("words", [["help"], ["--help"], ["help", "estimate"], ["estimate", "--help"], ["help", "run"]])
def test_help_is_an_option_and_a_command(call_here, words):
    done = call_here(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("--save_state_every_n_minutes" in done.stdout) == ("estimate" not in words)
    assert done.stdout.startswith("usage: python -m kohya_ext")


def test_the_help_fits_a_screen_and_contains_only_existing_options(call_here):
    lines = call_here("--help").stdout.splitlines()
    assert 24 <= len(lines) <= 40
    assert max(map(len, lines)) <= 80
    others = {"--help", "--version", "--config_file", "--model"}
    known = {flag for name, _ in options() for flag in flags(name)} | others
    assert set(re.findall(r"--[a-z][\w-]+", "\n".join(lines))) <= known


@pytest.mark.parametrize("command", [[], ["estimate"]])
def test_a_path_to_another_checkouts_script_is_an_error(tree, tmp_path, call_here, command):
    other = make_tree(tmp_path / "other", "v0.10", "0.10.1")
    (other / "sdxl_train.py").write_text((tree / "sdxl_train.py").read_text())
    done = call_here("--sd-scripts", str(other), *command, str(tree / "sdxl_train.py"), cwd=tmp_path)
    assert done.returncode == 2
    assert f"sdxl_train.py belongs to {tree} (sd-scripts v0.11.1), but --sd-scripts is {other}" in done.stderr


def test_a_script_name_belongs_to_the_named_checkout(tree, tmp_path):
    other = make_tree(tmp_path / "other", "v0.10", "0.10.1")
    (other / "sdxl_train.py").write_text((tree / "sdxl_train.py").read_text())
    assert f"ran {other} " in call("--sd-scripts", str(other), "sdxl_train.py", cwd=tree).stdout


def test_without_arguments_the_usage_is_printed(call_here):
    done = call_here()
    assert done.returncode == 0
    assert "COMMAND" in done.stdout
    assert "demo" in done.stdout


def test_resolving_a_preset_imports_no_torch(tree):
    code = "import sys; from kohya_ext.__main__ import main; main(['presets', 'list']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
    assert done.returncode == 0
