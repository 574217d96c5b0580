"""`tune`: what it measures, keeps and recommends, without a GPU; its processes are made-up programs."""

import errno
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kohya_ext import installed_gpus
from kohya_ext.config.command_line import CommandLine
from kohya_ext.errors import UserError
from kohya_ext.estimate import gpus, machine, tuned
from kohya_ext.estimate.result import Estimate
from kohya_ext.installed_gpus import InstalledGpu
from kohya_ext.planning import alternatives
from kohya_ext.planning import plan as planning
from kohya_ext.sdscripts import checkouts
from kohya_ext.tuning import base_judgement, child, rows, task
from kohya_ext.tuning import tuner as tuner_module
from kohya_ext.tuning.step_measurement import StepMeasurement
from kohya_ext.tuning.task import Task
from kohya_ext.tuning.tuner import Tuner
from kohya_ext.units import GIB
from tests.unit.test_plan import FLUX, LORA
from tests.unit.test_plan import checkout as checkout

GPU = "NVIDIA GeForce RTX 4070"
STEPS = 6


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path / "cache"))
    here = InstalledGpu(GPU, 12 * GIB, 8.9)
    for module in (tuned, planning, tuner_module):
        monkeypatch.setattr(module, "first_gpu", lambda: here)
    monkeypatch.setattr(installed_gpus, "first_gpu", lambda: here)
    monkeypatch.setattr(tuned, "driver_version", lambda: "580.1")
    monkeypatch.setattr(alternatives.estimation, "estimate", unknown)


def unknown(checkout, command):
    raise UserError("not estimated here")


class Processes:
    """The processes of a tune, which take made-up seconds."""

    def __init__(self, outcomes):
        self.outcomes = outcomes
        self.commands = []
        self.tasks = []

    def __call__(self, checkout, command, given, seconds):
        self.commands.append(command)
        self.tasks.append(given)
        outcome = self.outcomes(command, given)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def steps(seconds, images=1, **rest):
    measured = [
        {"seconds": seconds * images * (1 + 0.001 * number), "images": images, "waiting": 0.0} for number in range(STEPS)
    ]
    described = {"gpu": GPU, "memory": 12 * GIB, "capability": "8.9"}
    return {"steps": measured, "reserved": 8 * 10**9, "on_card": 9 * 10**9, "features": [], "machine": described, **rest}


def seconds_of(command):
    if "*" in command.settings.disable_patch:
        return 1.0
    return {"int8": 0.3, None: 0.5}[command.settings["base_precision"]]


def tune(checkout, outcomes, *argv, seconds=600.0):
    lines = []
    processes = Processes(outcomes)
    tuner = Tuner(checkout, CommandLine(checkout.script(LORA), list(argv), {}), seconds, lines.append, processes)
    tuner.run()
    return tuner, processes, lines


def measured_or_judged(losses_in_8_bits):
    """Outcomes of processes that measure, and of those that record losses."""

    def outcome(command, given):
        if given.kind == "steps":
            return steps(seconds_of(command))
        if given.reference:
            return {"losses": losses_in_8_bits, "batches": ["a", "b"], "blocks": {"block": 0.02}}
        layers = {"int8": {"first": 0.01, "second": 0.02}}
        return {"losses": [1.0, 2.0], "reversed": [1.001, 2.0], "batches": ["a", "b"], "layers": layers}

    return outcome


def planning_gpu():
    return gpus.named("RTX 4070")


def estimate_of(config, reserved):
    images = config.train_batch_size * config.gradient_accumulation_steps
    return Estimate(
        config=config.key(), allocated=0, reserved=int(reserved), minimum_reserved=0, peak_phase="backward", parts={},
        phase_peaks={}, flops=10**12 * images, trainable_parameters=0, versions={}, layout="v0.11",
    )  # fmt: skip


GOOD, BAD = [1.001, 2.002], [1.03, 2.0]


def test_upstream_the_command_and_faster_configurations_are_measured(checkout):
    tuner, processes, lines = tune(checkout, measured_or_judged(GOOD), "--preset", "12gb")
    names = [row.name for row in tuner.rows]
    assert names[:2] == ["as typed", "upstream, with the options of sdxl-lora/12gb"]
    assert "preset sdxl-lora/12gb-int8" in names
    assert not any("6gb" in name or name == "10gb" for name in names if "int8" not in name), "they are predicted to be slower"
    assert processes.commands[1].settings.disable_patch == ("*",)
    assert all(row.measured is not None for row in tuner.rows)
    assert len(tuner.rows) <= 12
    assert "as typed: 0.50 s per image, 8.00 GB reserved" in lines


@pytest.mark.thorough
def test_the_images_of_a_step_stay_the_same(checkout):
    argv = ("--preset", "16gb", "--train_batch_size", "1", "--gradient_accumulation_steps", "4")
    tuner, _, _ = tune(checkout, measured_or_judged(GOOD), *argv)
    for row in tuner.rows:
        values = row.command.values
        assert values.get("train_batch_size", 1) * values.get("gradient_accumulation_steps", 1) == 4, row.name


@pytest.mark.parametrize(
    ("losses", "best"), [(GOOD, "preset sdxl-lora/12gb-int8"), pytest.param(BAD, "as typed", marks=pytest.mark.thorough)]
)
def test_an_8_bit_base_is_recommended_only_if_it_is_good_enough(checkout, losses, best):
    tuner, processes, lines = tune(checkout, measured_or_judged(losses), "--preset", "12gb")
    assert tuner.best.name == best
    advice = "use it" if losses is GOOD else "do not use it"
    assert any(line.startswith(f"--base_precision int8: {advice}. It changes the loss of 2 batches") for line in lines)
    assert "Layers with the largest errors: second 2.0%, first 1.0%." in lines
    judging = [command for command, given in zip(processes.commands, processes.tasks, strict=True) if given.kind == "losses"]
    assert [command.settings["base_precision"] for command in judging] == [None, "int8", "fp8"]
    assert {command.settings["speed"] for command in judging} == {"off"}


def test_a_base_with_8_bit_convolutions_has_a_judgement_of_its_own(checkout):
    words = ("--preset", "12gb", "--base_precision", "int8", "--int8_convolutions")
    tuner, processes, lines = tune(checkout, measured_or_judged(GOOD), *words)
    judging = [command for command, given in zip(processes.commands, processes.tasks, strict=True) if given.kind == "losses"]
    assert [(each.settings["base_precision"], each.settings["int8_convolutions"]) for each in judging] == [
        *((None, False), ("int8", False), ("fp8", False), ("int8", True))
    ]
    assert any(line.startswith("--base_precision int8 --int8_convolutions: use it") for line in lines)
    assert tuner.judgements[-1].layers == tuner.judgements[0].layers != {}


def test_a_configuration_that_fails_is_a_row_with_its_reason(checkout):
    def outcome(command, given):
        if "*" in command.settings.disable_patch:
            return {"failed": "out of memory"}
        if command.settings["base_precision"]:
            return {"failed": "ended by signal 11: Fatal Python error"}
        return steps(0.5)

    tuner, _, lines = tune(checkout, outcome, "--preset", "12gb")
    assert "upstream, with the options of sdxl-lora/12gb: out of memory" in lines
    assert "preset sdxl-lora/12gb-int8: ended by signal 11: Fatal Python error" in lines
    assert tuner.best.name == "as typed"
    assert not tuner.judgements
    tuner.keep()
    kept = tuned.load(tuned.machine(GPU))
    assert [(run.failed, run.does_not_fit) for run in kept] == [("", False), ("out of memory", True)], "another may succeed"


@pytest.mark.thorough
def test_a_command_that_does_not_fit_gets_one_that_does(checkout):
    def outcome(command, given):
        fits = command.settings["base_precision"] is None and command.values.get("gradient_checkpointing")
        return steps(0.5) if fits else {"failed": "out of memory"}

    tuner, _, _ = tune(checkout, outcome, "--preset", "16gb")
    assert [row.measured.failed for row in tuner.rows[:2]] == ["out of memory", "out of memory"]
    assert tuner.best.kind == "candidate"


def test_an_interrupt_keeps_what_was_measured(checkout):
    def outcome(command, given):
        return KeyboardInterrupt() if command.settings["base_precision"] else steps(seconds_of(command))

    tuner, _, lines = tune(checkout, outcome, "--preset", "12gb")
    assert tuner.is_stopped
    assert lines[-1] == "stopped; what was measured so far is kept"
    tuner.keep()
    kept = tuned.load(tuned.machine(GPU))
    assert [run.seconds for run in kept[:2]] == [pytest.approx(0.5, rel=0.01), pytest.approx(1.0, rel=0.01)]


def test_nothing_is_started_after_the_time(checkout):
    now, lines = iter(range(0, 100_000, 50)), []
    processes = Processes(lambda command, given: steps(0.5))
    command = CommandLine(checkout.script(LORA), ["--preset", "12gb"], {})
    tuner = Tuner(checkout, command, 60.0, lines.append, processes, clock=lambda: next(now))
    tuner.run()
    assert [row.name for row in tuner.rows] == ["as typed"]
    assert "no time to measure upstream; repeat with more --minutes" in lines


@pytest.mark.thorough
def test_a_gain_within_the_noise_changes_nothing(checkout):
    tuner, _, _ = tune(
        checkout, lambda command, given: steps(0.49 if command.settings["base_precision"] else 0.5), "--preset", "12gb"
    )
    assert tuner.best.name == "as typed"


# --- other configurations -----------------------------------------------------------------------------------------------


def search(checkout, monkeypatch, reserved, *argv, may_estimate=lambda: True, only_faster=False):
    """Return the configurations of a search in which ``reserved(config)`` is the memory that each needs."""

    def estimate(checkout, command):
        config = planning.memory_config.normalized(planning.memory_config.read(command)[0])
        tried.append(config)
        return estimate_of(config, reserved(config))

    tried = []
    monkeypatch.setattr(alternatives.estimation, "estimate", estimate)
    command = CommandLine(checkout.script(LORA), list(argv), {}, has_bf16=True)
    searched = alternatives.Search(checkout, command, 12 * GIB, planning_gpu(), may_estimate, only_faster)
    return searched, searched.run(), tried


def memory_of(config):
    ratio = (config.gradient_checkpointing_ratio or 1.0) if config.gradient_checkpointing else 0.0
    base = 5 * GIB if config.base_precision else 7 * GIB
    return base + config.train_batch_size * (1 - ratio) * 8 * GIB


TYPED = ("--network_module", "networks.lora", "--mixed_precision", "bf16", "--resolution", "1024,1024", "--sdpa")
CHECKPOINTED = (*TYPED, "--cache_latents", "--network_train_unet_only", "--gradient_checkpointing")


def test_the_search_finds_the_least_checkpointing_that_fits_with_both_bases(checkout, monkeypatch):
    searched, candidates, tried = search(checkout, monkeypatch, memory_of, *CHECKPOINTED)
    values = [each.command.values for each in candidates]
    ways = {(each.get("base_precision"), each.get("gradient_checkpointing_ratio")) for each in values}
    assert {(None, 0.75), ("int8", 0.5)} <= ways
    assert {each.command.settings["int8_convolutions"] for each in candidates} == {False, True}
    assert searched.is_complete
    assert len(tried) <= 8


def test_the_search_merges_accumulated_micro_batches(checkout, monkeypatch):
    _, candidates, _ = search(
        checkout, monkeypatch, memory_of, *CHECKPOINTED, "--train_batch_size", "1", "--gradient_accumulation_steps", "4"
    )
    values = [each.command.values for each in candidates]
    splits = {(each["train_batch_size"], each["gradient_accumulation_steps"]) for each in values}
    assert splits == {(1, 4), (2, 2), (4, 1)}


def test_a_preset_that_selects_the_model_gets_others_of_it(checkout, monkeypatch):
    monkeypatch.setattr(alternatives.estimation, "estimate", unknown)
    command = CommandLine(checkout.script(FLUX), ["--preset", "chroma-lora/16gb"], {}, has_bf16=True)
    candidates = alternatives.Search(checkout, command, 24 * GIB, gpus.named("RTX 4090"), lambda: False, False).run()
    assert candidates
    assert {planning.memory_config.read(each.command)[0].kind for each in candidates} == {"chroma-lora"}


def test_a_search_without_time_says_so(checkout, monkeypatch):
    searched, candidates, tried = search(checkout, monkeypatch, memory_of, *CHECKPOINTED, may_estimate=lambda: False)
    assert not searched.is_complete
    assert candidates == tried == []


def test_what_changes_the_training_is_never_changed(checkout, monkeypatch):
    kept = {"resolution", "network_module", "mixed_precision", "cache_latents", "network_train_unet_only", "optimizer_type"}
    argv = (*CHECKPOINTED, "--optimizer_type", "Lion", "--learning_rate", "1e-5")
    _, candidates, _ = search(checkout, monkeypatch, memory_of, *argv)
    typed = CommandLine(checkout.script(LORA), list(argv), {}, has_bf16=True).values
    assert candidates
    for each in candidates:
        assert {name: each.command.values.get(name) for name in kept} == {name: typed.get(name) for name in kept}
        assert not each.command.presets.presets


# --- kept measurements -------------------------------------------------------------------------------------------------


def run_of(checkout, *argv, **rest):
    command = CommandLine(checkout.script(LORA), list(argv), {}, has_bf16=True)
    return tuned.Tuned(tuned.configuration(command), **{"seconds": 0.5, **rest})


@pytest.mark.thorough
def test_plan_and_auto_prefer_the_fastest_measured_preset(checkout, capsys):
    command = CommandLine(checkout.script(LORA), [], {}, planning.automatic, has_bf16=True)
    gpu = replace(planning_gpu(), name=GPU)
    assert planning.plan(checkout, command, 12 * GIB, gpu, pytest.fail).answer.name == "preset sdxl-lora/12gb"
    runs = [run_of(checkout, "--preset", "12gb", seconds=0.9), run_of(checkout, "--preset", "10gb", seconds=0.6)]
    tuned.keep(tuned.machine(GPU), runs)
    result = planning.plan(checkout, command, 12 * GIB, gpu, pytest.fail)
    assert (result.answer.name, result.answer.measured.seconds) == ("preset sdxl-lora/10gb", 0.6)
    planning._say_measured.cache_clear()
    assert planning.automatic(command, 12 * GIB) == "sdxl-lora/10gb"
    assert "--preset auto: sdxl-lora/10gb was the fastest preset that `tune` measured on this GPU" in capsys.readouterr().err
    assert planning.automatic(command, 16 * GIB) == "sdxl-lora/16gb", "another GPU"
    tuned.keep(tuned.machine(GPU), [run_of(checkout, "--preset", "10gb", failed=tuned.OUT_OF_MEMORY, seconds=0.0)])
    assert planning.automatic(command, 12 * GIB) == "sdxl-lora/12gb"


def test_measurements_of_another_driver_or_package_do_not_count(checkout, monkeypatch):
    tuned.keep(tuned.machine(GPU), [run_of(checkout, "--preset", "12gb")])
    assert len(tuned.of_first_gpu()) == 1
    monkeypatch.setattr(tuned, "driver_version", lambda: "590.1")
    assert tuned.of_first_gpu() == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-20],
        lambda text: text.replace('"schema": 1', '"schema": 0'),
        lambda text: text.replace('"seconds": 0.5', '"seconds": -1'),
        lambda text: text.replace('"seconds": 0.5', '"seconds": "a"'),
        lambda text: text.replace('"seconds"', '"minutes"'),
        lambda text: "[" * 100_000,
    ],
)
def test_a_damaged_file_counts_as_none(checkout, damage):
    here = tuned.machine(GPU)
    tuned.keep(here, [run_of(checkout, "--preset", "12gb")])
    file = tuned.file_of(here)
    assert len(tuned.load(here)) == 1
    file.write_text(damage(file.read_text()))
    assert tuned.load(here) == []
    tuned.keep(here, [run_of(checkout, "--preset", "12gb")])
    assert len(tuned.load(here)) == 1


def test_a_later_measurement_replaces_the_one_of_the_same_configuration(checkout):
    here = tuned.machine(GPU)
    for seconds in (0.5, 0.4):
        tuned.keep(here, [run_of(checkout, "--preset", "12gb", seconds=seconds), run_of(checkout, "--preset", "10gb")])
    assert [run.seconds for run in tuned.load(here)] == [0.4, 0.5]
    command = CommandLine(checkout.script(LORA), ["--preset", "12gb", "--output_name", "other"], {}, has_bf16=True)
    assert tuned.find(tuned.load(here), command).seconds == 0.4
    assert tuned.find(tuned.load(here), command.with_({"speed": "off"})) is None


@pytest.mark.thorough
def test_steps_without_features_correct_the_time_model(checkout):
    tuner, _, _ = tune(checkout, lambda command, given: steps(0.5), "--preset", "12gb", "--speed", "off")
    tuner.keep()
    assert machine.correction(GPU) != 1.0
    with_graphs, _, _ = tune(checkout, lambda command, given: steps(0.1, features=["cuda_graphs"]), "--preset", "12gb")
    before = machine.correction(GPU)
    with_graphs.keep()
    assert machine.correction(GPU) == before


# --- processes ---------------------------------------------------------------------------------------------------------

#: Programs in place of the launcher; each gets the task in the environment.
WRITES = "import os, json; t = json.loads(os.environ['KOHYA_EXT_TUNE']); open(t['folder'] + '/result.json', 'w').write('{}')"


def start(program, tmp_path, seconds=20.0):
    (tmp_path / "task").mkdir(exist_ok=True)
    described = checkouts.Checkout(tmp_path, "0.11.1", "v0.11", "for this test")
    command = CommandLine(tmp_path / LORA, [], dict(os.environ), launcher=("-c", program))
    return child.measure(described, command, Task(str(tmp_path / "task")), seconds)


def test_a_process_returns_what_it_writes(tmp_path):
    assert start(WRITES.format('{"seconds": 1}'), tmp_path) == {"seconds": 1, "facts": {}}


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; print('loading'); sys.exit('no such file')", "ended with exit code 1: no such file"),
        ("raise SystemExit(print('kohya_ext: error: out of memory (step 1)') or 1)", "out of memory (step 1)"),
        pytest.param("import os; os.abort()", "ended by signal 6", marks=pytest.mark.linux("needs POSIX signals")),
        (WRITES.format("{half"), "ended with exit code 0"),
    ],
)
def test_a_process_without_a_result_has_a_reason(tmp_path, program, reason):
    assert start(program, tmp_path) == {"failed": reason}


def test_a_wrong_command_line_ends_the_tune(tmp_path):
    with pytest.raises(child.CommandError, match="unknown option"):
        start("raise SystemExit(print('kohya_ext: error: unknown option') or 2)", tmp_path)


def exists(file):
    """Wait for a file that a process writes."""
    until = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < until, f"{file} does not exist"
        time.sleep(0.02)


def test_a_process_that_hangs_is_ended_with_its_own_processes(tmp_path, monkeypatch):
    psutil = pytest.importorskip("psutil")
    own, file = "import time; time.sleep(600)", tmp_path / "pid"
    lines = (
        "import os, subprocess, sys",
        f"p = subprocess.Popen([sys.executable, '-c', {own!r}])",
        f"open({str(file)!r} + '.part', 'w').write(str(p.pid))",
        f"os.rename({str(file)!r} + '.part', {str(file)!r})",
        "p.wait()",
    )
    waited = child._wait

    def wait(process, until):
        exists(file)
        return waited(process, time.monotonic() + 0.1)

    monkeypatch.setattr(child, "_wait", wait)
    assert start("\n".join(lines), tmp_path) == {"failed": "no result after 20 s"}
    pid, until = int(file.read_text()), time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "its process still runs"
        time.sleep(0.02)


def test_an_interrupt_lets_the_process_end(tmp_path, monkeypatch):
    """The process ends as after Ctrl-C, because the parent asks for it by a file."""
    program = (
        # A shell starts background jobs, such as these tests, without SIGINT.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from kohya_ext.tuning import task; import time, pathlib; t = task.current(); task.watch_parent(t)\n"
        "try: pathlib.Path(t.folder, 'started').touch(); time.sleep(600)\n"
        "except KeyboardInterrupt: pathlib.Path(t.folder, 'ended').touch()"
    )

    def interrupted(process, until):
        exists(tmp_path / "task" / "started")
        raise KeyboardInterrupt

    monkeypatch.setattr(child, "_wait", interrupted)
    monkeypatch.setattr(child, "_PATIENCE", 60.0)
    root = str(Path(child.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))
    with pytest.raises(KeyboardInterrupt):
        start(program, tmp_path)
    assert (tmp_path / "task" / "ended").exists()


def test_a_process_without_its_parent_ends(tmp_path):
    """The parent was killed, or its window closed."""
    program = "from kohya_ext.tuning import task; import time; task.watch_parent(task.current()); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", "pass"]) as gone:
        gone.wait()
    variables = Task(str(tmp_path), parent=gone.pid).variables()
    root = str(Path(child.__file__).parents[2])
    ended = subprocess.run([sys.executable, "-c", program], env={**os.environ, **variables, "PYTHONPATH": root}, timeout=50)
    assert ended.returncode != 0


# --- in the process ----------------------------------------------------------------------------------------------------


def test_a_process_writes_nothing_of_the_run(tmp_path):
    args = Namespace(
        output_dir="mine", output_name="cats", resume="state", log_with="wandb", sample_prompts="p.txt", sample_at_first=True,
        save_every_n_steps=1, save_state=True, max_train_steps=5, max_train_epochs=1, huggingface_repo_id="me/cats", seed=None,
        report="added", disable_patch=["mine", "added"],
    )  # fmt: skip
    task.quiet(args, Task(str(tmp_path), own={"report": None, "preflight": None, "disable_patch": ["mine"]}))
    assert vars(args) == {
        "output_dir": str(tmp_path / "output"), "output_name": "tune", "resume": None, "log_with": None, "sample_prompts": None,
        "sample_at_first": False, "save_every_n_steps": None, "save_state": False, "max_train_steps": 100_000,
        "max_train_epochs": None, "huggingface_repo_id": None, "seed": None, "disable_patch": ["mine"],
    }  # fmt: skip


def test_patches_that_write_something_of_the_run_are_off():
    assert {"journal", "notify", "safe_stop", "step_times", "rolling_states"} <= set(child.only_training())
    assert not {"cuda_graphs", "speed", "base_precision", "out_of_memory"} & set(child.only_training())


def test_few_images_are_used_evenly():
    data_set = SimpleNamespace(image_data=dict.fromkeys(range(1000)))
    task._with_few_images(lambda self: list(self.image_data), None)(data_set)
    assert list(data_set.image_data) == list(range(0, 1000, 8))
    task._with_few_images(lambda self: None, None)(data_set)
    assert len(data_set.image_data) == 125


def test_steps_are_measured_after_the_first_ones_with_their_images_and_waits(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("kohya_ext.tuning.step_measurement.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("kohya_ext.tuning.step_measurement.current_batch", lambda: {"loss_weights": [1, 1]})
    accelerator = SimpleNamespace(sync_gradients=False, device=SimpleNamespace(type="cpu"))
    measurement = StepMeasurement(Namespace(), accelerator, Task(str(tmp_path), first=3))

    def train():
        for micro_batch in range(1000):
            measurement.before_data()
            now[0] += 0.25
            measurement.after_data()
            measurement.before_batch(accelerator)
            now[0] += 1.0 if micro_batch > 7 else 5.0
            accelerator.sync_gradients = micro_batch % 2 == 1
            measurement.after_batch(accelerator)

    with pytest.raises(SystemExit, match="0"):
        train()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"][0] == {"seconds": 10.5, "images": 4, "waiting": 0.5}
    assert result["steps"][1:] == [{"seconds": 2.5, "images": 4, "waiting": 0.5}] * (len(result["steps"]) - 1)
    measured = rows.read_result({}, {**result, "machine": {}})
    assert (measured.seconds, measured.waiting) == (2.5 / 4, 0.2)


def test_an_error_is_the_result(tmp_path):
    measurement = StepMeasurement(Namespace(), SimpleNamespace(), Task(str(tmp_path)))
    measurement.on_exception(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert json.loads((tmp_path / "result.json").read_text())["failed"] == "out of memory"


def test_a_training_run_has_no_task(monkeypatch):
    monkeypatch.delenv(task.VARIABLE, raising=False)
    from kohya_ext.tuning import process

    assert process.patches() == ()
    args = Namespace(output_dir="mine")
    process.silence(args)
    assert args.output_dir == "mine"


# --- the 8-bit base ----------------------------------------------------------------------------------------------------

REFERENCE = {"losses": [1.0, 2.0], "reversed": [1.0, 2.0], "batches": ["a", "b"], "layers": {"int8": {"x": 0.01}}}
RESULT = {"losses": [1.001, 2.0], "batches": ["a", "b"], "blocks": {"first": 0.01, "second": 0.03}}


@pytest.mark.parametrize(
    ("reference", "result", "is_good"),
    [
        ({}, {}, True),
        ({}, {"losses": [1.05, 2.0]}, False),
        ({"reversed": [1.05, 2.0]}, {"losses": [1.05, 2.0]}, True),
        ({}, {"blocks": {"first": 0.2}}, False),
        ({}, {"losses": [float("nan"), 2.0]}, False),
        ({}, {"blocks": {"first": float("nan"), "second": 0.01}}, False),
    ],
)
def test_the_rule_for_an_8_bit_base(reference, result, is_good):
    assert base_judgement.judge("int8", {**REFERENCE, **reference}, {**RESULT, **result}).is_good is is_good


def test_a_judgement_is_kept_for_the_checkpoint_and_printed_by_plan(checkout, tmp_path):
    from kohya_ext.commands.plan import _about_8_bits

    file = tmp_path / "model.safetensors"
    file.write_text("1")
    words = ["--pretrained_model_name_or_path", str(file)]
    command = CommandLine(checkout.script(LORA), words, {})
    with_8_bits = command.with_({"base_precision": "int8"})
    assert "no GeForce GPU has run yet" in _about_8_bits(with_8_bits)
    tuned.keep_judgement(command, "int8", True, 0.002)
    tuned.keep_judgement(command, "fp8", False, 0.03)
    assert "is good enough for this checkpoint" in _about_8_bits(with_8_bits)
    assert "(it changes losses by 0.20%):" in _about_8_bits(with_8_bits)
    assert "is not good enough" in _about_8_bits(command.with_({"base_precision": "fp8"}))
    assert tuned.judgement(command) is None
    with_convolutions = with_8_bits.with_({"int8_convolutions": True})
    assert tuned.judgement(with_convolutions) is None
    tuned.keep_judgement(command, "int8 --int8_convolutions", False, 0.02)
    assert not tuned.judgement(with_convolutions).is_good
    assert tuned.judgement(with_8_bits).is_good
    file.write_text("another")
    assert tuned.judgement(with_8_bits) is None
    assert tuned.judgement(CommandLine(checkout.script(LORA), ["--base_precision", "int8"], {})) is None


@pytest.mark.parametrize(
    ("reference", "result"),
    [({"failed": "out of memory"}, {}), ({}, {"failed": "x"}), ({}, {"batches": ["a", "c"]}), ({"losses": [0.0, 1.0]}, {})],
)
def test_runs_that_cannot_be_compared_have_no_judgement(reference, result):
    with pytest.raises(base_judgement.NotComparableError):
        base_judgement.judge("int8", {**REFERENCE, **reference}, {**RESULT, **result})


def test_a_full_disk_is_a_warning(checkout, monkeypatch, capsys):
    from kohya_ext.commands import tune as command

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tuned, "replace_text", full)
    monkeypatch.setattr(command, "_require_gpu", lambda: None)
    monkeypatch.setattr(command, "Tuner", lambda *given: Tuner(*given, measure=Processes(lambda *_: steps(0.5))))
    question = SimpleNamespace(
        checkout=checkout, command=CommandLine(checkout.script(LORA), ["--preset", "12gb"], {}), own={"minutes": 0.01}
    )
    assert command._tune(question) == 0
    printed = capsys.readouterr()
    assert "warning: the measurements cannot be kept: [Errno 28]" in printed.err
    assert "Fastest: as typed. To run it:" in printed.out
    assert f"python -m kohya_ext {LORA} --preset 12gb\n" in printed.out
