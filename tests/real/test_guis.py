"""Runs that other programs start, each with that program's folders, command line and way of stopping.

Written from the sources of LoRA_Easy_Training_Scripts, lora-scripts, fluxgym and hollowstrawberry's Colab notebooks. The
extension is switched on by ``setup --for``'s file in the program's environment, as for its users.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kohya_ext.launch import host
from kohya_ext.tiny import arguments, dataset, environment
from tests.real import starting
from tests.real.conftest import PROGRESS, REPORT, ROOT, SITE, Run

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif(os.name != "posix", reason="bash and POSIX signals"),
]

LORA, FLUX = "sdxl_train_network.py", "flux_train_network.py"

#: Arguments that a dataset config replaces.
OF_DATASETS = re.compile(
    r"train_data_dir|caption_extension|resolution|enable_bucket|bucket_|min_bucket|max_bucket|train_batch_size"
)


@pytest.fixture
def program(tmp_path, checkout) -> Callable[..., Path]:
    """(environment, sd-scripts) -> the folder of a program with an environment, and a copy of sd-scripts without .git."""

    def lay_out(environment_folder: str, sd_scripts: str) -> Path:
        folder = tmp_path / "a program"
        shutil.copytree(checkout.path, folder / sd_scripts, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        venv.create(folder / environment_folder, symlinks=True)
        target = host.environment(folder)
        others = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
        (target.site_packages / "a.pth").write_text("\n".join(others) + "\n")
        (target.site_packages / starting.STARTUP.name).write_text(starting.STARTUP.read_text())
        host.switch_on(target, [])
        assert host.environment(folder).python == target.python
        assert host.checkout(folder).path == (folder / sd_scripts).resolve()
        return folder

    return lay_out


@pytest.fixture
def written(models, images, tmp_path) -> Callable[..., dict[str, Path]]:
    """(script, options) -> the config file and dataset config of a tiny run into ``tmp_path``/output."""

    def write(script: str, **options: object) -> dict[str, Path]:
        words = arguments.training_arguments(script, models(arguments.SCRIPTS[script][0]), images, tmp_path / "output")
        values = parsed(words) | options
        if "train_data_dir" not in options:
            values = {key: value for key, value in values.items() if not OF_DATASETS.match(key)}
        files = {"--config_file": tmp_path / "config.toml", "--dataset_config": tmp_path / "dataset.toml"}
        files["--config_file"].write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
        files["--dataset_config"].write_text(
            "[general]\ncaption_extension = '.txt'\n\n[[datasets]]\nresolution = 128\nbatch_size = 1\n\n"
            f"[[datasets.subsets]]\nimage_dir = '{images / dataset.CLASS}'\nnum_repeats = 2\n"
        )
        (tmp_path / "output").mkdir(exist_ok=True)
        return files

    return write


def parsed(words: list[str]) -> dict[str, object]:
    """Return the arguments by name, as a config file has them."""
    values: dict[str, object] = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            following = words[index + 1] if index + 1 < len(words) else "--"
            values[word[2:]] = True if following.startswith("--") else number(following)
    return values


def number(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.fixture
def start(models, tmp_path) -> Callable[..., Run]:
    """(command, folder, variables, step, act) -> the run of a program's command; calls act(process) at a step."""

    def run(
        command: list[object],
        folder: Path,
        at_step: int = 0,
        act: Callable[[psutil.Process], None] | None = None,
        **variables: str,
    ) -> Run:
        environ = {
            **os.environ,
            **environment.variables(models("sdxl").tokenizers),
            "PYTHONPATH": environment.python_path(SITE),
            "KOHYA_EXT_REPORT": str(tmp_path / "output" / REPORT),
            **variables,
        }
        words = [str(word) for word in command]
        process = subprocess.Popen(words, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        printed = b""
        while chunk := os.read(process.stdout.fileno(), 65536):
            printed += chunk
            if act is not None and any(int(step) >= at_step for step in PROGRESS.findall(printed)):
                act(psutil.Process(process.pid))
                act = None
        process.stdout.close()
        return Run(Path(words[-1]).name, process.wait(), printed.decode(errors="replace"), tmp_path / "output")

    return run


def assert_trained(run: Run, script: str) -> None:
    """Assert that a run with all of its patches was complete."""
    assert run.code == 0, run.output[-4000:]
    assert run.file.is_file()
    assert run.report["script"] == script
    assert not [row for row in run.report["patches"] if row["status"] == "failed" or row["surprise"]]


@pytest.mark.thorough
def test_terminate_of_lora_easy_saves_a_state_from_which_the_same_start_resumes(program, written, start):
    """It starts the script without accelerate, and stops it with Popen.terminate()."""
    folder = program("sd_scripts/venv", "sd_scripts")
    files = written(LORA, resume="auto")
    options = [f"{flag}={file}" for flag, file in files.items()]
    command = [folder / "sd_scripts/venv/bin/python", folder / "sd_scripts" / LORA, *options]
    stopped = start(command, folder, at_step=2, act=psutil.Process.terminate)
    assert stopped.code == 128 + signal.SIGTERM, stopped.output[-4000:]
    assert not stopped.file.exists()
    resumed = start(command, folder)
    assert_trained(resumed, LORA)
    assert "resumed after step" in resumed.output


def kill_children(launcher: psutil.Process) -> None:
    for child in launcher.children(recursive=True):
        child.kill()


@pytest.mark.slow
def test_kill_of_lora_scripts_loses_what_follows_the_last_state(program, written, start, images, tmp_path):
    """It runs accelerate's launcher as a module, and stops a run by killing the launcher's children.

    Its form takes ``--resume`` as a folder and no option that it does not know, so a preset file sets ``auto``.
    """
    folder = program("venv", "scripts/dev")
    config = written(LORA, save_state=True, save_every_n_steps=2, train_data_dir=str(images))["--config_file"]
    preset = tmp_path / "mine.toml"
    preset.write_text('resume = "auto"\n')
    launcher = [folder / "venv/bin/python", "-m", "accelerate.commands.launch", "--num_cpu_threads_per_process", "2", "--quiet"]
    command = [*launcher, f"./scripts/dev/{LORA}", "--config_file", config]
    variables = {"ACCELERATE_DISABLE_RICH": "1", "PYTHONUNBUFFERED": "1", "PYTHONNOUSERSITE": "1", "NO_COLOR": "1"}
    variables["KOHYA_EXT_PRESET"] = str(preset)
    killed = start(command, folder, at_step=3, act=kill_children, **variables)
    assert killed.code != 0
    resumed = start(command, folder, **variables)
    assert_trained(resumed, LORA)
    assert "resumed after step 2" in resumed.output


@pytest.mark.slow
def test_terminate_of_a_launcher_that_runs_as_a_module_saves(program, written, start, images):
    """lora-scripts starts it so; its console or a service manager may end the launcher alone."""
    folder = program("venv", "scripts/dev")
    config = written(LORA, train_data_dir=str(images))["--config_file"]
    launcher = [folder / "venv/bin/python", "-m", "accelerate.commands.launch", "--num_cpu_threads_per_process", "2"]
    command = [*launcher, f"./scripts/dev/{LORA}", "--config_file", config]
    stopped = start(command, folder, at_step=2, act=psutil.Process.terminate)
    assert stopped.code == 128 + signal.SIGTERM, stopped.output[-4000:]
    assert list(stopped.folder.glob("*-state"))


@pytest.mark.slow
def test_script_of_fluxgym_trains_and_its_own_process_has_no_session(program, written, start, models, tmp_path):
    """It writes a shell script with the options of accelerate and of FLUX, and builds its form from a script's parser."""
    folder = program("env", "sd-scripts")
    python, accelerate = folder / "env/bin/python", folder / "env/bin/accelerate"
    accelerate.write_text(f'#!/bin/sh\nexec {shlex.quote(str(python))} -m accelerate.commands.accelerate_cli "$@"\n')
    accelerate.chmod(0o755)
    dataset_config = written(FLUX)["--dataset_config"]
    words = arguments.training_arguments(FLUX, models("flux"), tmp_path, tmp_path / "output")
    values = {key: value for key, value in parsed(words).items() if not OF_DATASETS.match(key)}
    options = [f"--{key}" if value is True else f"--{key} {shlex.quote(str(value))}" for key, value in values.items()]
    lines = ["accelerate launch", "--mixed_precision no", "--num_cpu_threads_per_process 1", f"sd-scripts/{FLUX}", *options]
    train = folder / "outputs" / "a lora" / "train.sh"
    train.parent.mkdir(parents=True)
    train.write_text(" \\\n  ".join([*lines, f'--dataset_config "{dataset_config}" \\\n']))
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    assert_trained(start(["bash", train], folder, PATH=path), FLUX)

    app = folder / "app.py"
    app.write_text(
        "import sys\nsys.path.append('sd-scripts')\nfrom library import flux_train_utils\nimport train_network\n"
        "parser = train_network.setup_parser()\nprint('FORM', '--preset' in parser._option_string_actions)\n"
    )
    gui = start([python, app], folder)
    assert (gui.code, "FORM False" in gui.output) == (0, True), gui.output[-4000:]
    assert "kohya_ext" not in gui.output


#: As in the notebooks, which print what a script raises, and exit with code 0.
WRAPPER = """try:
    from sdxl_train_network import setup_parser, SdxlNetworkTrainer
    from library.train_util import read_config_from_file

    parser = setup_parser()
    trainer = SdxlNetworkTrainer()
    trainer.train(read_config_from_file(parser.parse_args(), parser))
except BaseException as error:
    print("FAILED", repr(error))
"""


@pytest.mark.slow
def test_wrapper_of_a_notebook_trains_with_edited_files(program, written, start):
    """A notebook edits upstream's files with sed. The patch of an edited function is off, and no other."""
    folder = program("venv", "sd-scripts")
    sd_scripts = folder / "sd-scripts"
    wrapper, edited = sd_scripts / "train_network_wrapper.py", sd_scripts / "networks" / "lora.py"
    wrapper.write_text(WRAPPER)
    forward = re.compile(r"(class LoRAModule.*?def forward\([^)]*\):\n)", re.DOTALL)
    edited.write_text(forward.sub(r"\1        edited = True\n", edited.read_text(), count=1))
    command = [folder / "venv/bin/python", wrapper.name, *(f"{flag}={file}" for flag, file in written(LORA).items())]
    run = start(command, sd_scripts, KOHYA_EXT_PRESET="16gb")
    assert run.file.is_file(), run.output[-4000:]
    assert run.report["script"] == LORA
    assert run.report["presets"][-1] == "sdxl-lora/16gb"
    left_out = {row["target"]: row["reason"] for row in run.report["patches"] if row["surprise"]}
    assert left_out.keys() == {"networks.lora:LoRAModule.forward"}
    assert "FAILED" not in run.output
