"""Fault injection on the real scripts: saved files are complete, and resumed runs are bit-identical."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from kohya_ext.preflight import sizes
from kohya_ext.run import resume
from kohya_ext.run.safetensors_header import read_header
from kohya_ext.tiny import dataset, environment
from tests.real.conftest import ROOT, SITE

torch = pytest.importorskip("torch")

LORA, FULL = "sdxl_train_network.py", "sdxl_train.py"

#: The script that each generation runs by default. The other combination is marked slow.
SCRIPTS = [
    pytest.param({"v0.10": LORA, "v0.11": FULL}, id="default"),
    pytest.param({"v0.10": FULL, "v0.11": LORA}, id="swapped", marks=pytest.mark.slow),
]

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and mounts")


def same(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def read(file):
    from safetensors.torch import load_file

    return load_file(file)


def close(left, right):
    assert left.keys() == right.keys()
    return all(torch.allclose(left[name].double(), right[name].double(), rtol=0, atol=1e-6) for name in left)


def averaged(models, decay):
    """Return the EMA of the models after each step, as defined by --ema."""
    average = models[0]
    for step, model in enumerate(models):
        keep = min(decay, step / (step + 9))
        average = {name: keep * average[name].double() + (1 - keep) * model[name].double() for name in model}
    return average


def send(*numbers):
    def act(process):
        for number in numbers:
            os.kill(process, number)

    return act


def interrupt_twice(process):
    """Send SIGINT twice, the second time after the first was handled: pending signals of a kind are merged."""
    os.kill(process, signal.SIGINT)
    status = Path(f"/proc/{process}/status")
    while int(re.search(r"SigCgt:\s*(\w+)", status.read_text()).group(1), 16) >> (signal.SIGINT - 1) & 1:
        pass
    os.kill(process, signal.SIGINT)


def assert_all_complete(folder):
    """Assert that every file with a final name is complete and no temporary file is left."""
    assert not list(folder.glob("*.partial"))
    for file in folder.glob("*.safetensors"):
        read_header(file)
    for state in folder.glob("*-state"):
        assert resume.state_problem(state) is None


def assert_nothing_failed(run):
    assert not [row for row in run.report["patches"] if row["status"] == "failed" or row["surprise"]]


def orphans(folder):
    """Return the processes whose command line contains a run's output folder."""
    psutil = pytest.importorskip("psutil")
    return [process for process in psutil.process_iter(["cmdline"]) if str(folder) in (process.info["cmdline"] or [])]


def test_run_without_faults_is_bit_identical_to_upstream(checkout, train, upstream, models, tmp_path):
    shutil.copy(upstream(checkout, LORA).file, tmp_path / "tiny.safetensors")
    options = ("--disable_patch", "nonreentrant_checkpointing", "--save_state_every_n_minutes", "0")
    ours = train(checkout, LORA, *options, output=tmp_path)
    assert same(ours.tensors, upstream(checkout, LORA).tensors)
    trained = sum(tensor.numel() for name, tensor in ours.tensors.items() if not name.endswith("alpha"))
    model = str(models("sdxl").files["pretrained_model_name_or_path"])
    args = Namespace(pretrained_model_name_or_path=model, network_module="networks.lora", network_dim=4)
    assert sizes.predict(Path(LORA), args).trained == trained, "preflight predicts another size"
    applied = {row["patch"] for row in ours.report["patches"] if row["status"] == "applied"}
    assert applied >= {"atomic_saves", "exact_resume", "nan_guard", "rolling_states", "safe_stop", "training_sanity_check"}
    assert_nothing_failed(ours)
    # A state was saved after each step and the two newest are kept, so the patch was reached.
    states = sorted(path.name for path in ours.folder.glob("*-state"))
    assert states == ["tiny-rolling00000003-state", "tiny-rolling00000004-state"]
    position = torch.load(ours.folder / states[-1] / resume.FILE, weights_only=True)
    assert (position["step"], position["epoch"], position["batch"]) == (4, 0, 4)
    assert_all_complete(ours.folder)
    # The earlier model is kept, and preflight announced that.
    assert "will be renamed to tiny.previous.safetensors" in ours.output
    assert (tmp_path / "tiny.previous.safetensors").read_bytes() == upstream(checkout, LORA).file.read_bytes()


@pytest.mark.newest
@posix
@pytest.mark.parametrize("scripts", SCRIPTS)
@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_stopped_run_resumes_bit_identically(checkout, train, scripts, name):
    script, number = scripts[checkout.layout], signal.Signals[name]
    # An epoch has eight batches. The stop is in the second, after captions and buckets were shuffled again.
    options = ("--max_train_steps", "12", "--shuffle_caption", "--save_every_n_epochs", "1", "--save_state")
    options += ("--ema", "--ema_decay", "0.4")
    full_run = train(checkout, script, *options)
    average = read(full_run.folder / "tiny-ema.safetensors")
    assert not close(average, full_run.tensors)
    assert_nothing_failed(full_run)

    stopped = train(checkout, script, *options, at_step=9, act=send(number))
    assert stopped.code == 128 + number, stopped.output[-3000:]
    assert not stopped.file.exists()
    assert "to resume: " in stopped.output
    (model,) = stopped.folder.glob("tiny-step????????.safetensors")
    assert (model.parent / f"{model.stem}-state").is_dir()
    assert_all_complete(stopped.folder)

    resumed = train(checkout, script, *options, "--resume", "auto", output=stopped.folder)
    assert same(resumed.tensors, full_run.tensors)
    assert same(read(resumed.folder / "tiny-ema.safetensors"), average)
    assert "expected training time: " in resumed.output
    names, expected = ({path.name for path in run.folder.iterdir() if "step" not in path.name} for run in (resumed, full_run))
    assert names == expected


@pytest.mark.thorough
@posix
@pytest.mark.parametrize("scripts", SCRIPTS)
def test_averages_go_with_the_models_that_upstream_removes_also_after_a_resume(checkout, train, scripts):
    options = ("--max_train_steps", "6", "--save_every_n_steps", "1", "--save_last_n_steps", "1", "--save_state", "--ema")
    options += ("--early_stopping", "9", "--validate_every_n_steps", "1", "--resume", "auto")
    stopped = train(checkout, scripts[checkout.layout], *options, at_step=3, act=send(signal.SIGTERM))
    moved = stopped.folder / "chosen.safetensors"
    next(stopped.folder.glob("tiny-step00000002.safetensors")).rename(moved)
    resumed = train(checkout, scripts[checkout.layout], *options, output=stopped.folder)
    assert resumed.code == 0, resumed.output[-4000:]
    models = {path.stem for path in resumed.folder.glob("tiny*.safetensors")}
    averaged = {name.removesuffix("-ema") for name in models if name.endswith("-ema")}
    assert averaged - models == {"tiny-step00000002"}, "the user has moved its model"
    assert {name for name in models if not name.endswith("-ema")} <= averaged
    assert len(averaged) == 5, "the last, the two newest, the best and the moved one"


@pytest.mark.newest
def test_ema_averages_the_models_after_each_step(checkout, train):
    run = train(checkout, LORA, "--ema", "--ema_decay", "0.4", "--save_every_n_steps", "1")
    models = [read(file) for file in sorted(run.folder.glob("tiny-step????????.safetensors"))]
    assert close(read(run.folder / "tiny-ema.safetensors"), averaged([*models, run.tensors][:4], 0.4))


@pytest.mark.oldest
@posix
@pytest.mark.parametrize("scripts", SCRIPTS)
def test_run_killed_by_sigkill_resumes_from_its_last_timed_state(checkout, train, scripts):
    script = scripts[checkout.layout]
    common = ("--max_train_steps", "8", "--max_data_loader_n_workers", "2")
    options = (*common, "--save_state_every_n_minutes", "0", "--adaptive_lr", "--adaptive_lr_patience", "1")
    stopped = train(checkout, script, *options, at_step=4, act=send(signal.SIGKILL))
    assert stopped.code == -signal.SIGKILL
    newest = resume.newest_state(stopped.folder, "tiny")
    assert int(newest.name.removeprefix("tiny-rolling").removesuffix("-state")) >= 4
    resumed = train(checkout, script, *options, "--resume", "auto", output=stopped.folder)
    assert f"resuming from {newest}" in resumed.output
    full_run = train(checkout, script, *options)
    assert same(resumed.tensors, full_run.tensors)
    assert_all_complete(resumed.folder)
    assert_nothing_failed(full_run)

    # The adaptive learning rate is saved in the state. Upstream with the same rates as a schedule gives the same tensors.
    halved = [int(step) for step in re.findall(r"step (\d+): mean loss .* learning rate x ", full_run.output)]
    assert halved
    rules = "".join(f"{0.5**index}:{step}," for index, step in enumerate(halved)) + f"{0.5 ** len(halved)}"
    scheduled = ("--lr_scheduler", "piecewise_constant", "--lr_scheduler_args", f"step_rules='{rules}'")
    assert same(full_run.tensors, train(checkout, script, *common, *scheduled).tensors)


@pytest.fixture(scope="module")
def uninterrupted_run(train):
    """(checkout, script, options) -> an uninterrupted run; each runs once."""
    runs = {}

    def of(checkout, script, options):
        key = checkout.layout, script, options
        if key not in runs:
            runs[key] = train(checkout, script, *options)
        return runs[key]

    return of


def kill_during_a_save(folder):
    psutil = pytest.importorskip("psutil")

    def act(process):
        while psutil.Process(process).status() != psutil.STATUS_ZOMBIE and not any(folder.glob("*.partial")):
            pass
        os.kill(process, signal.SIGKILL)

    return act


@pytest.mark.slow
@posix
@pytest.mark.parametrize("index", range(25))
def test_run_ended_by_any_signal_at_any_step_resumes_bit_identically(checkout, train, uninterrupted_run, index, tmp_path):
    """Combine every signal with each script; every fifth case runs under accelerate's launcher."""
    number = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[index % 3]
    script, start = (LORA, FULL)[index % 2], "launcher" if index % 5 else "accelerate"
    step = random.Random(index).randint(1, 9)
    saving = number == signal.SIGKILL and index % 4 < 2
    options = (
        "--max_train_steps",
        "12",
        "--save_every_n_steps",
        "4",
        "--save_state",
        "--save_state_every_n_minutes",
        "0",
        "--ema",
    )
    stopped = train(
        *(checkout, script, *options),
        start=start,
        output=tmp_path,
        at_step=step,
        act=kill_during_a_save(tmp_path) if saving else interrupt_all if number == signal.SIGINT else send(number),
    )
    assert stopped.code != 0
    if start == "launcher":  # accelerate's launcher returns other exit codes
        assert stopped.code == (-number if number == signal.SIGKILL else 128 + number), stopped.output[-3000:]
    assert not orphans(tmp_path)
    for partial in tmp_path.glob("*.partial"):  # the next run removes them
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
    assert_all_complete(tmp_path)
    newest = resume.newest_state(tmp_path, "tiny")
    assert torch.load(newest / resume.FILE, weights_only=True)["step"] >= step

    resumed = train(checkout, script, *options, "--resume", "auto", output=tmp_path)
    full_run = uninterrupted_run(checkout, script, options)
    assert same(resumed.tensors, full_run.tensors)
    assert same(read(tmp_path / "tiny-ema.safetensors"), read(full_run.folder / "tiny-ema.safetensors"))
    assert_all_complete(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads signal handlers from /proc")
@pytest.mark.oldest
def test_second_ctrl_c_kills_at_once(checkout, train):
    stopped = train(checkout, LORA, "--max_train_steps", "500", at_step=2, act=interrupt_twice)
    assert stopped.code == -signal.SIGINT
    assert_all_complete(stopped.folder)


@pytest.mark.slow
def test_stop_file_stops_the_run(checkout, train, tmp_path):
    file = tmp_path / "stop"
    stopped = train(checkout, FULL, "--max_train_steps", "500", "--stop_file", str(file), at_step=2, act=lambda _: file.touch())
    assert stopped.code == 130, stopped.output[-3000:]
    assert not file.exists()
    assert resume.newest_state(stopped.folder, "tiny") is not None


@pytest.mark.thorough
@pytest.mark.oldest
@posix
@pytest.mark.parametrize("is_active", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["accelerate", "extension"])
def test_sigterm_to_accelerate_launch_leaves_no_process(checkout, train, is_active):
    environment = {"PYTHONIOENCODING": "cp1252"} | ({"KOHYA_EXT": "1"} if is_active else {})
    act = send(signal.SIGTERM)
    stopped = train(checkout, LORA, "--max_train_steps", "500", start="accelerate", at_step=2, act=act, env=environment)
    assert "running training / ????" in stopped.output, "the script's Japanese would end the run, as on Windows"
    # The run's output was read to its end, so the training process has ended.
    assert not orphans(stopped.folder)
    assert stopped.code == (143 if is_active else -signal.SIGTERM)
    assert resume.newest_state(stopped.folder, "tiny") is not None, stopped.output[-3000:]
    assert_all_complete(stopped.folder)


#: Two processes on the CPU. With --cpu accelerate starts only one.
TWO = {"before": ("--num_processes", "2", "--multi_gpu"), "env": {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "1"}}


def interrupt_all(launcher):
    """Send SIGINT to the launcher and all of its processes, as Ctrl-C in a terminal does."""
    import psutil

    processes = [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]
    for process in processes:
        process.send_signal(signal.SIGINT)


@pytest.mark.slow
@posix
@pytest.mark.parametrize(("act", "code"), [(send(signal.SIGTERM), 143), (interrupt_all, 130)], ids=["SIGTERM", "Ctrl-C"])
def test_two_processes_stop_at_the_same_step_and_resume(checkout, train, act, code):
    options = ("--max_train_steps", "40", "--save_state_every_n_minutes", "0", "--ema")
    stopped = train(checkout, FULL, *options, at_step=2, act=act, **TWO)
    assert stopped.code == code, stopped.output[-5000:]
    assert not orphans(stopped.folder)
    assert stopped.output.count("to resume: ") == 1
    state = resume.newest_state(stopped.folder, "tiny")
    step = torch.load(state / resume.FILE, weights_only=True)["step"]
    # Both processes stop at the same step, which is that of the last timed state.
    assert state.name == f"tiny-step{step:08d}-state"
    assert sorted(stopped.folder.glob("*-rolling*-state"))[-1].name == f"tiny-rolling{step:08d}-state"
    assert_all_complete(stopped.folder)

    more = ("--max_train_steps", str(step + 1), "--save_state_every_n_minutes", "0", "--ema")
    resumed = train(checkout, FULL, *more, "--resume", "auto", output=stopped.folder, **TWO)
    assert resumed.code == 0, resumed.output[-5000:]
    assert f"resumed after step {step}" in resumed.output
    assert_all_complete(resumed.folder)


@pytest.fixture
def small_disk(tmp_path):
    """(size in KiB) -> a folder on a separate file system of that size."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", folder]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
        if "permi" in done.stderr or "superuser" in done.stderr:
            pytest.skip(f"mounting a file system is not permitted: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        return folder

    if sys.platform != "linux":
        pytest.skip("tmpfs needs Linux")
    yield mount
    if folder.is_mount():
        subprocess.run(["umount", folder], check=True)


@pytest.mark.oldest
def test_full_disk_leaves_the_earlier_file_intact(checkout, train, upstream, small_disk, tmp_path):
    earlier = upstream(checkout, LORA).file
    disk = small_disk(earlier.stat().st_size * 3 // 2 // 1024)
    shutil.copy(earlier, disk / "tiny.safetensors")
    # Preflight would reject the run.
    options = ("--disk_full_timeout", "0", "--no-preflight", "--disable_patch", "nonreentrant_checkpointing")
    env = {"KOHYA_EXT_REPORT": str(tmp_path / "report.json"), "KOHYA_EXT_CACHE": str(tmp_path / "cache")}
    run = train(checkout, LORA, *options, output=disk, env=env)
    assert run.code == 0, run.output[-4000:]
    assert "disk full: cannot write tiny.safetensors (" in run.output
    assert "; free up " in run.output
    assert run.file.read_bytes() == earlier.read_bytes()
    assert_all_complete(disk)
    (saved,) = (tmp_path / "cache").rglob("tiny.safetensors")
    assert f"Writing to {saved} instead" in run.output
    assert same(read(saved), upstream(checkout, LORA).tensors)


@pytest.mark.slow
def test_full_disk_skips_a_timed_state_without_ending_the_run(checkout, train, upstream, small_disk, tmp_path):
    model = upstream(checkout, LORA).file.stat().st_size
    disk = small_disk(model * 9 // 2 // 1024)  # room for a state (about three models) and one model
    options = ("--save_state_every_n_minutes", "0", "--disable_patch", "nonreentrant_checkpointing")
    run = train(checkout, LORA, *options, output=disk, env={"KOHYA_EXT_REPORT": str(tmp_path / "report.json")})
    assert run.code == 0, run.output[-3000:]
    assert "saves will need about" in run.output
    assert run.output.count("training continues without this state") == 3
    (state,) = disk.glob("*-state")
    assert state.name == "tiny-rolling00000001-state"
    # The error gives the size of the whole state, not of the part written before the disk was full.
    state_size = sum(file.stat().st_size for file in state.iterdir()) / 1e6
    needed = [float(size) for size in re.findall(r"cannot write tiny-rolling\S+ \(([\d.]+) MB\)", run.output)]
    assert len(needed) == 3
    assert needed == [pytest.approx(state_size, rel=0.1)] * 3
    assert same(run.tensors, upstream(checkout, LORA).tensors)
    assert_all_complete(disk)


@pytest.mark.slow
def test_stop_on_a_full_disk_saves_to_the_fallback_folder(checkout, train, upstream, small_disk, tmp_path):
    disk, fallback = small_disk(100), tmp_path / "fallback"
    options = ("--max_train_steps", "8", "--fallback_dir", str(fallback), "--no-preflight")
    env = {"KOHYA_EXT_REPORT": str(tmp_path / "report.json")}
    stopped = train(checkout, LORA, *options, output=disk, env=env, at_step=3, act=send(signal.SIGTERM))
    assert stopped.code == 143, stopped.output[-3000:]
    assert not list(disk.glob("*.safetensors"))
    (state,) = fallback.glob("tiny-step*-state")
    assert str(state) in stopped.output.partition("to resume: ")[2]
    assert_all_complete(fallback)
    resumed = train(checkout, LORA, "--max_train_steps", "8", "--resume", str(state))
    assert same(resumed.tensors, train(checkout, LORA, "--max_train_steps", "8").tensors)


@pytest.mark.slow
def test_full_disk_writes_the_model_to_the_fallback_folder(checkout, train, upstream, small_disk, tmp_path):
    disk = small_disk(upstream(checkout, FULL).file.stat().st_size // 2 // 1024)
    run = train(
        *(checkout, FULL, "--fallback_dir", str(tmp_path / "fallback"), "--no-preflight"),
        output=disk,
        env={"KOHYA_EXT_DISABLE_PATCH": "nonreentrant_checkpointing", "KOHYA_EXT_REPORT": str(tmp_path / "report.json")},
    )
    assert run.code == 0, run.output[-3000:]
    assert same(read(tmp_path / "fallback" / "tiny.safetensors"), upstream(checkout, FULL).tensors)
    assert not run.file.exists()


def write_images_with_nan(folder):
    """Write four images, the first with cached latents of NaN under the names of both generations."""
    import numpy

    dataset.write(folder, 4, 128)
    cached = {
        "latents": numpy.full((4, 16, 16), numpy.nan, numpy.float32),
        "original_size": (128, 128),
        "crop_ltrb": (0, 0, 128, 128),
    }
    both = cached | {f"{name}_16x16": value for name, value in cached.items()}
    numpy.savez(folder / dataset.CLASS / "000_0128x0128_sdxl.npz", **both)


@pytest.mark.parametrize("scripts", SCRIPTS)
def test_batch_of_nan_is_skipped_and_its_image_named(checkout, train, scripts, tmp_path):
    write_images_with_nan(tmp_path)
    run = train(
        *(checkout, scripts[checkout.layout], "--max_train_steps", "8", "--train_data_dir", str(tmp_path)),
        *("--cache_latents_to_disk", "--caching_workers", "0", "--nan_patience", "3"),
    )
    assert all(tensor.isfinite().all() for tensor in run.tensors.values())
    # The image has two repeats in eight steps. Upstream draws the first batch before it shuffles.
    skipped = [line for line in run.output.splitlines() if "skipped: loss or gradient is not finite (loss nan" in line]
    assert 1 <= len(skipped) <= 3
    assert all(line.endswith(str(Path(dataset.CLASS) / "000.png")) for line in skipped)


@pytest.mark.parametrize("scripts", [pytest.param({"v0.10": LORA, "v0.11": LORA}, marks=pytest.mark.slow)])
def test_weights_that_are_not_finite_are_not_saved(checkout, train, upstream, scripts, tmp_path):
    from safetensors.torch import save_file

    file = tmp_path / "nan.safetensors"
    save_file({name: torch.full_like(tensor, torch.nan) for name, tensor in upstream(checkout, LORA).tensors.items()}, file)
    run = train(checkout, scripts[checkout.layout], "--network_weights", str(file), "--nan_patience", "3")
    assert run.code == 3
    assert "the trained weights are not finite" in run.output
    assert not list(run.folder.glob("*.safetensors"))
    assert not list(run.folder.glob("*-state"))


def test_preflight_reports_all_errors_before_a_model_is_loaded(checkout, train, models, tmp_path):
    dataset.write(tmp_path, 2, 64)
    images = tmp_path / dataset.CLASS
    (images / "empty.png").touch()
    (images / "truncated.png").write_bytes((images / "000.png").read_bytes()[:300])
    model = tmp_path / "truncated.safetensors"
    model.write_bytes(models("sdxl").files["pretrained_model_name_or_path"].read_bytes()[:-5])
    run = train(
        *(checkout, LORA, "--train_data_dir", str(tmp_path), "--pretrained_model_name_or_path", str(model)),
        *("--optimizer_type", "Adamm", "--network_module", "networks.lore", "--full_bf16", "--color_aug"),
    )
    assert run.code == 2
    for message in (
        "empty.png is empty",
        "truncated.png is damaged",
        "truncated.safetensors is truncated",
        "Adamm",
        "networks.lora",
        "--full_bf16",
    ):
        assert message in run.output, message
    assert "--cache_latents and --color_aug cannot be combined" in run.output
    assert "loading" not in run.output
    assert not list(run.folder.glob("*.safetensors"))


class RunsCode:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.slow
def test_ckpt_with_code_is_rejected(checkout, train, models, tmp_path):
    weights = read(models("sd15").files["pretrained_model_name_or_path"])
    good, bad, proof = tmp_path / "good.ckpt", tmp_path / "bad.ckpt", tmp_path / "proof"
    torch.save({"state_dict": weights}, good)
    torch.save({"state_dict": weights, "callbacks": RunsCode(proof)}, bad)
    script, option = "train_network.py", "--pretrained_model_name_or_path"
    run = train(checkout, script, option, str(bad))
    assert run.code == 2, run.output[-3000:]
    assert "bad.ckpt contains more than weights and could run code" in run.output
    assert not proof.exists()
    ours, theirs = (train(checkout, script, "--max_train_steps", "1", *more) for more in ((option, str(good)), ()))
    assert same(ours.tensors, theirs.tensors)


#: Fault of site/faulty_network.py -> error message.
FAULTS = {
    "dtype": "trained weights are torch.float8_e4m3fn, which is too coarse for updates",
    "device": "the network's weights are on meta, the model on cpu",
    "detached": "no gradient reaches any of the trained weights",
    "base_model": "3 weights of the base model are in the optimizer",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_network_is_rejected(checkout, train, fault):
    run = train(checkout, LORA, "--network_module", "faulty_network", "--network_args", f"fault={fault}")
    assert run.code == 2, run.output[-3000:]
    assert FAULTS[fault] in run.output
    assert not list(run.folder.glob("*.safetensors"))


def test_dataset_without_images_is_an_error_without_preflight(checkout, train, tmp_path):
    (tmp_path / "5_cat").mkdir()
    options = ("--no-preflight", "--train_data_dir", str(tmp_path))
    run = train(checkout, FULL, *options, start="environment")
    assert run.code == 2, run.output[-3000:]
    assert "nothing would be trained: the dataset has no images" in run.output


@pytest.mark.slow
def test_network_without_modules_is_rejected(checkout, train):
    nothing = "block_dims=" + ",".join(["0"] * 23)
    run = train(checkout, LORA, "--network_train_unet_only", "--network_args", nothing)
    assert run.code == 2
    assert "nothing would be trained" in run.output


#: A patch's name in its own file, and in the options that belong to it.
_NAME = re.compile(r"""^( +(?:name|patch)=)"(\w+)",$""", re.MULTILINE)


def rename_patches(source, target):
    """Copy the extension with the names and files of its patches reversed; return old name -> new name."""
    package = target / "kohya_ext"
    for folder, installed in (("kohya_ext", package), ("presets", package / "presets")):
        shutil.copytree(source / folder, installed, ignore=shutil.ignore_patterns("__pycache__"))
    names = sorted(file.stem for file in (source / "patches").glob("*.py") if file.stem != "__init__")
    renamed = dict(zip(names, reversed(names), strict=True))

    def rename(match):
        return f'{match[1]}"{renamed.get(match[2], match[2])}",'

    (package / "patches").mkdir()
    for file in (source / "patches").glob("*.py"):
        copy = package / "patches" / f"{renamed.get(file.stem, file.stem)}.py"
        copy.write_text(_NAME.sub(rename, file.read_text(encoding="utf-8")), encoding="utf-8")
    settings = package / "config" / "settings.py"
    settings.write_text(_NAME.sub(rename, settings.read_text(encoding="utf-8")), encoding="utf-8")
    return renamed


@pytest.mark.slow
def test_names_and_files_of_patches_do_not_affect_results(checkout, train, upstream, tmp_path):
    renamed = rename_patches(ROOT, tmp_path)
    options = ("--disable_patch", renamed["nonreentrant_checkpointing"], "--save_state_every_n_minutes", "0", "--ema")
    path = os.pathsep.join([str(tmp_path), environment.python_path(SITE)])
    ours = train(checkout, LORA, *options, "--save_last_n_timed_states", "9", env={"PYTHONPATH": path}, bare=True)
    assert same(ours.tensors, upstream(checkout, LORA).tensors)
    assert_nothing_failed(ours)
    stages = {row["patch"]: row["target"] for row in ours.report["patches"] if row["target"].startswith("training_loop:")}
    assert stages[renamed["exact_resume"]] == "training_loop:COUNT"
    assert stages[renamed["rolling_states"]] == "training_loop:SAVE"
    states = sorted(ours.folder.glob("*-state"))
    assert [state.name for state in states] == [f"tiny-rolling0000000{step}-state" for step in (1, 2, 3, 4)]
    positions = [torch.load(state / resume.FILE, weights_only=True) for state in states]
    assert [(position["step"], position["batch"]) for position in positions] == [(step, step) for step in (1, 2, 3, 4)]
    assert len(list(ours.folder.rglob("kohya_ext_ema.safetensors"))) == 4
