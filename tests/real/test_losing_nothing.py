"""Faults of every kind on the real scripts: what was promised is there, whole, and goes on bit for bit."""

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

#: Which script a generation runs by default; the other one is behind the marker.
SCRIPTS = [
    pytest.param({"v0.10": LORA, "v0.11": FULL}, id="by-turns"),
    pytest.param({"v0.10": FULL, "v0.11": LORA}, id="the-other-way", marks=pytest.mark.slow),
]

posix = pytest.mark.skipif(os.name != "posix", reason="signals and mounts as POSIX has them")


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
    """The average of the models after each step, as --ema defines it."""
    average = models[0]
    for at, model in enumerate(models):
        keep = min(decay, at / (at + 9))
        average = {name: keep * average[name].double() + (1 - keep) * model[name].double() for name in model}
    return average


def send(*numbers):
    def act(process):
        for number in numbers:
            os.kill(process, number)

    return act


def interrupt_twice(process):
    """The second time as soon as the first was noticed: two signals of a kind at once are one."""
    os.kill(process, signal.SIGINT)
    status = Path(f"/proc/{process}/status")
    while int(re.search(r"SigCgt:\s*(\w+)", status.read_text()).group(1), 16) >> (signal.SIGINT - 1) & 1:
        pass
    os.kill(process, signal.SIGINT)


def assert_all_whole(folder):
    """Whatever bears a final name can be read."""
    assert not list(folder.glob("*.partial"))
    for file in folder.glob("*.safetensors"):
        read_header(file)
    for state in folder.glob("*-state"):
        assert resume.state_problem(state) is None


def assert_nothing_failed(run):
    assert not [row for row in run.report["patches"] if row["status"] == "failed" or row["surprise"]]


def orphans(folder):
    """Processes whose command line names a run's output folder."""
    psutil = pytest.importorskip("psutil")
    return [process for process in psutil.process_iter(["cmdline"]) if str(folder) in (process.info["cmdline"] or [])]


def test_without_a_fault_everything_on_gives_upstreams_tensors(checkout, train, upstream, models, tmp_path):
    shutil.copy(upstream(checkout, LORA).file, tmp_path / "tiny.safetensors")
    options = ("--disable_patch", "nonreentrant_checkpointing", "--save_state_every_n_minutes", "0")
    ours = train(checkout, LORA, *options, output=tmp_path)
    assert same(ours.tensors, upstream(checkout, LORA).tensors)
    trained = sum(tensor.numel() for name, tensor in ours.tensors.items() if not name.endswith("alpha"))
    model = str(models("sdxl").files["pretrained_model_name_or_path"])
    args = Namespace(pretrained_model_name_or_path=model, network_module="networks.lora", network_dim=4)
    assert sizes.look(Path(LORA), args).trained == trained, "preflight estimates another size"
    applied = {row["patch"] for row in ours.report["patches"] if row["status"] == "applied"}
    assert applied >= {"atomic_saves", "exact_resume", "nan_guard", "rolling_states", "safe_stop", "training_sanity_check"}
    assert_nothing_failed(ours)
    # Reached in the training step: a state was saved after each, and the two newest are left, at the right step.
    states = sorted(path.name for path in ours.folder.glob("*-state"))
    assert states == ["tiny-rolling00000003-state", "tiny-rolling00000004-state"]
    kept = torch.load(ours.folder / states[-1] / resume.FILE, weights_only=True)
    assert (kept["step"], kept["epoch"], kept["batch"]) == (4, 0, 4)
    assert_all_whole(ours.folder)
    # What was there before is kept, and that was said before the run.
    assert "it becomes tiny.previous.safetensors" in ours.output
    assert (tmp_path / "tiny.previous.safetensors").read_bytes() == upstream(checkout, LORA).file.read_bytes()


@posix
@pytest.mark.parametrize("scripts", SCRIPTS)
@pytest.mark.parametrize("how", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_bit_for_bit(checkout, train, scripts, how):
    script, number = scripts[checkout.layout], signal.Signals[how]
    # Eight batches an epoch: the stop is in the second one, where captions have been shuffled and buckets drawn anew.
    options = ("--max_train_steps", "12", "--shuffle_caption", "--save_every_n_epochs", "1", "--save_state")
    options += ("--ema", "--ema_decay", "0.4")
    whole = train(checkout, script, *options)
    average = read(whole.folder / "tiny-ema.safetensors")
    assert not close(average, whole.tensors)
    assert_nothing_failed(whole)

    part = train(checkout, script, *options, at_step=9, act=send(number))
    assert part.code == 128 + number, part.output[-3000:]
    assert not part.file.exists()
    assert "to go on: " in part.output
    (model,) = part.folder.glob("tiny-step????????.safetensors")
    assert (model.parent / f"{model.stem}-state").is_dir()
    assert_all_whole(part.folder)

    rest = train(checkout, script, *options, "--resume", "auto", output=part.folder)
    assert same(rest.tensors, whole.tensors)
    assert same(read(rest.folder / "tiny-ema.safetensors"), average)
    assert "of training: a step with these settings took" in rest.output
    names, expected = ({path.name for path in run.folder.iterdir() if "step" not in path.name} for run in (rest, whole))
    assert names == expected


@pytest.mark.newest
def test_the_average_is_of_the_models_after_each_step(checkout, train):
    run = train(checkout, LORA, "--ema", "--ema_decay", "0.4", "--save_every_n_steps", "1")
    models = [read(file) for file in sorted(run.folder.glob("tiny-step????????.safetensors"))]
    assert close(read(run.folder / "tiny-ema.safetensors"), averaged([*models, run.tensors][:4], 0.4))


@posix
@pytest.mark.parametrize("scripts", SCRIPTS)
def test_sigkill_costs_no_more_than_the_last_rolling_state(checkout, train, scripts):
    script = scripts[checkout.layout]
    common = ("--max_train_steps", "8", "--max_data_loader_n_workers", "2")
    options = (*common, "--save_state_every_n_minutes", "0", "--adaptive_lr", "--adaptive_lr_patience", "1")
    part = train(checkout, script, *options, at_step=4, act=send(signal.SIGKILL))
    assert part.code == -signal.SIGKILL
    newest = resume.newest_state(part.folder, "tiny")
    assert int(newest.name.removeprefix("tiny-rolling").removesuffix("-state")) >= 4
    rest = train(checkout, script, *options, "--resume", "auto", output=part.folder)
    assert f"resuming from {newest}" in rest.output
    whole = train(checkout, script, *options)
    assert same(rest.tensors, whole.tensors)
    assert_all_whole(rest.folder)
    assert_nothing_failed(whole)

    # The adaptive rate, kept by the state too, is upstream's run with the same rates as a schedule.
    halved = [int(step) for step in re.findall(r"step (\d+): the loss was .* learning rate x ", whole.output)]
    assert halved
    rules = "".join(f"{0.5**at}:{step}," for at, step in enumerate(halved)) + f"{0.5 ** len(halved)}"
    scheduled = ("--lr_scheduler", "piecewise_constant", "--lr_scheduler_args", f"step_rules='{rules}'")
    assert same(whole.tensors, train(checkout, script, *common, *scheduled).tensors)


@pytest.fixture(scope="module")
def uninterrupted(train):
    """(checkout, script, options) -> the whole run, made once."""
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
@pytest.mark.parametrize("at", range(25))
def test_killed_anyhow_at_any_step_it_ends_bit_for_bit(checkout, train, uninterrupted, at, tmp_path):
    """Twenty-five for each generation: every signal with each script, each fifth of them below accelerate's launcher."""
    number = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[at % 3]
    script, start = (LORA, FULL)[at % 2], "launcher" if at % 5 else "accelerate"
    step = random.Random(at).randint(1, 9)
    saving = number == signal.SIGKILL and at % 4 < 2
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
    part = train(
        *(checkout, script, *options),
        start=start,
        output=tmp_path,
        at_step=step,
        act=kill_during_a_save(tmp_path) if saving else interrupt_all if number == signal.SIGINT else send(number),
    )
    assert part.code != 0
    if start == "launcher":  # accelerate's own, which nothing arms here, has codes of its own
        assert part.code == (-number if number == signal.SIGKILL else 128 + number), part.output[-3000:]
    assert not orphans(tmp_path)
    for partial in tmp_path.glob("*.partial"):  # what the next preflight removes
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
    assert_all_whole(tmp_path)
    newest = resume.newest_state(tmp_path, "tiny")
    assert torch.load(newest / resume.FILE, weights_only=True)["step"] >= step

    rest = train(checkout, script, *options, "--resume", "auto", output=tmp_path)
    whole = uninterrupted(checkout, script, options)
    assert same(rest.tensors, whole.tensors)
    assert same(read(tmp_path / "tiny-ema.safetensors"), read(whole.folder / "tiny-ema.safetensors"))
    assert_all_whole(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="whether a signal is caught is read from /proc")
def test_a_second_ctrl_c_stops_at_once(checkout, train):
    part = train(checkout, LORA, "--max_train_steps", "500", at_step=2, act=interrupt_twice)
    assert part.code == -signal.SIGINT
    assert_all_whole(part.folder)


@pytest.mark.slow
def test_the_stop_file_stops(checkout, train, tmp_path):
    file = tmp_path / "stop"
    part = train(checkout, FULL, "--max_train_steps", "500", "--stop_file", str(file), at_step=2, act=lambda _: file.touch())
    assert part.code == 130, part.output[-3000:]
    assert not file.exists()
    assert resume.newest_state(part.folder, "tiny") is not None


@posix
@pytest.mark.parametrize("armed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["its-own", "armed"])
def test_sigterm_to_accelerate_launch_leaves_no_orphan(checkout, train, armed):
    more = {"env": {"KOHYA_EXT": "1"}} if armed else {}
    part = train(checkout, LORA, "--max_train_steps", "500", start="accelerate", at_step=2, act=send(signal.SIGTERM), **more)
    # The pipe to the training process is closed, so it has ended.
    assert not orphans(part.folder)
    assert part.code == (143 if armed else -signal.SIGTERM)
    assert resume.newest_state(part.folder, "tiny") is not None, part.output[-3000:]
    assert_all_whole(part.folder)


#: Two processes that train on the CPU; accelerate starts only one with its own --cpu.
TWO = {"before": ("--num_processes", "2", "--multi_gpu"), "env": {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "1"}}


def interrupt_all(launcher):
    """As a terminal's Ctrl-C does: the launcher and each of its processes at once."""
    import psutil

    processes = [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]
    for process in processes:
        process.send_signal(signal.SIGINT)


@pytest.mark.slow
@posix
@pytest.mark.parametrize(("act", "code"), [(send(signal.SIGTERM), 143), (interrupt_all, 130)], ids=["SIGTERM", "Ctrl-C"])
def test_two_processes_stop_together_and_go_on(checkout, train, act, code):
    options = ("--max_train_steps", "40", "--save_state_every_n_minutes", "0", "--ema")
    part = train(checkout, FULL, *options, at_step=2, act=act, **TWO)
    assert part.code == code, part.output[-5000:]
    assert not orphans(part.folder)
    assert part.output.count("to go on: ") == 1
    state = resume.newest_state(part.folder, "tiny")
    step = torch.load(state / resume.FILE, weights_only=True)["step"]
    # One step for both: the rolling state after each step, and the stop's own, are all at it or before it.
    assert state.name == f"tiny-step{step:08d}-state"
    assert sorted(part.folder.glob("*-rolling*-state"))[-1].name == f"tiny-rolling{step:08d}-state"
    assert_all_whole(part.folder)

    more = ("--max_train_steps", str(step + 1), "--save_state_every_n_minutes", "0", "--ema")
    rest = train(checkout, FULL, *more, "--resume", "auto", output=part.folder, **TWO)
    assert rest.code == 0, rest.output[-5000:]
    assert f"going on after step {step}" in rest.output
    assert_all_whole(rest.folder)


@pytest.mark.slow
def test_two_processes_skip_the_same_step(checkout, train, tmp_path):
    write_pictures_with_nan(tmp_path)
    run = train(
        *(checkout, FULL, "--max_train_steps", "8", "--train_data_dir", str(tmp_path)),
        *("--cache_latents_to_disk", "--nan_patience", "8"),
        **TWO,
    )
    assert run.code == 0, run.output[-5000:]
    assert "is skipped, it is not finite" in run.output
    assert all(tensor.isfinite().all() for tensor in run.tensors.values())


@pytest.fixture
def small_disk(tmp_path):
    """(size) -> a folder on a file system of its own of so many KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", folder]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
        if "permi" in done.stderr or "superuser" in done.stderr:
            pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        return folder

    if sys.platform != "linux":
        pytest.skip("tmpfs is Linux's")
    yield mount
    if folder.is_mount():
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_leaves_the_earlier_file_whole(checkout, train, upstream, small_disk, tmp_path):
    earlier = upstream(checkout, LORA).file
    disk = small_disk(earlier.stat().st_size * 3 // 2 // 1024)
    shutil.copy(earlier, disk / "tiny.safetensors")
    options = ("--disk_full_timeout", "0", "--no-preflight")  # which knows that there is no room
    run = train(checkout, LORA, *options, output=disk, env={"KOHYA_EXT_REPORT": str(tmp_path / "report.json")})
    assert run.code == 1
    assert "no room for tiny.safetensors: it needs" in run.output
    assert "is missing" in run.output
    assert run.file.read_bytes() == earlier.read_bytes()
    assert_all_whole(disk)


@pytest.mark.slow
def test_a_full_disk_costs_a_rolling_state_but_not_the_run(checkout, train, upstream, small_disk, tmp_path):
    model = upstream(checkout, LORA).file.stat().st_size
    disk = small_disk(model * 9 // 2 // 1024)  # a state of some three models' size, and one model
    options = ("--save_state_every_n_minutes", "0", "--disable_patch", "nonreentrant_checkpointing")
    run = train(checkout, LORA, *options, output=disk, env={"KOHYA_EXT_REPORT": str(tmp_path / "report.json")})
    assert run.code == 0, run.output[-3000:]
    assert "what will be kept takes about" in run.output
    assert run.output.count("training goes on without this state") == 3
    (state,) = disk.glob("*-state")
    assert state.name == "tiny-rolling00000001-state"
    # The room that it asks for is that of the whole state, not of what was written when the disk was full.
    weighs = sum(file.stat().st_size for file in state.iterdir()) / 1e6
    asked = [float(size) for size in re.findall(r"no room for tiny-rolling\S+: it needs ([\d.]+) MB", run.output)]
    assert len(asked) == 3
    assert asked == [pytest.approx(weighs, rel=0.1)] * 3
    assert same(run.tensors, upstream(checkout, LORA).tensors)
    assert_all_whole(disk)


@pytest.mark.slow
def test_a_stop_on_a_full_disk_saves_to_the_fallback_and_goes_on_from_there(checkout, train, upstream, small_disk, tmp_path):
    disk, other = small_disk(100), tmp_path / "else"
    options = ("--max_train_steps", "8", "--fallback_dir", str(other), "--no-preflight")
    env = {"KOHYA_EXT_REPORT": str(tmp_path / "report.json")}
    part = train(checkout, LORA, *options, output=disk, env=env, at_step=3, act=send(signal.SIGTERM))
    assert part.code == 143, part.output[-3000:]
    assert not list(disk.glob("*.safetensors"))
    (state,) = other.glob("tiny-step*-state")
    assert str(state) in part.output.partition("to go on: ")[2]
    assert_all_whole(other)
    rest = train(checkout, LORA, "--max_train_steps", "8", "--resume", str(state))
    assert same(rest.tensors, train(checkout, LORA, "--max_train_steps", "8").tensors)


@pytest.mark.slow
def test_a_full_disk_sends_the_file_to_the_fallback(checkout, train, upstream, small_disk, tmp_path):
    disk = small_disk(upstream(checkout, FULL).file.stat().st_size // 2 // 1024)
    run = train(
        *(checkout, FULL, "--fallback_dir", str(tmp_path / "else"), "--no-preflight"),
        output=disk,
        env={"KOHYA_EXT_DISABLE_PATCH": "nonreentrant_checkpointing", "KOHYA_EXT_REPORT": str(tmp_path / "report.json")},
    )
    assert run.code == 0, run.output[-3000:]
    assert same(read(tmp_path / "else" / "tiny.safetensors"), upstream(checkout, FULL).tensors)
    assert not run.file.exists()


def write_pictures_with_nan(folder):
    """Four images, the first with latents of NaN, cached as sd-scripts does it, in the names of either generation."""
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
def test_a_batch_of_nan_is_skipped_and_named(checkout, train, scripts, tmp_path):
    write_pictures_with_nan(tmp_path)
    run = train(
        *(checkout, scripts[checkout.layout], "--max_train_steps", "8", "--train_data_dir", str(tmp_path)),
        *("--cache_latents_to_disk", "--nan_patience", "3"),
    )
    assert all(tensor.isfinite().all() for tensor in run.tensors.values())
    # Two repeats of the one image, in eight steps; upstream draws the first batch before it shuffles.
    skipped = [line for line in run.output.splitlines() if "is skipped, it is not finite: loss nan" in line]
    assert 1 <= len(skipped) <= 3
    assert all(line.endswith(str(Path(dataset.CLASS) / "000.png")) for line in skipped)


@pytest.mark.parametrize("scripts", [pytest.param({"v0.10": LORA, "v0.11": LORA}, marks=pytest.mark.slow)])
def test_weights_that_are_not_finite_are_never_written(checkout, train, upstream, scripts, tmp_path):
    from safetensors.torch import save_file

    file = tmp_path / "nan.safetensors"
    save_file({name: torch.full_like(tensor, torch.nan) for name, tensor in upstream(checkout, LORA).tensors.items()}, file)
    run = train(checkout, scripts[checkout.layout], "--network_weights", str(file), "--nan_patience", "3")
    assert run.code == 3
    assert "the trained weights are not finite" in run.output
    assert not list(run.folder.glob("*.safetensors"))
    assert not list(run.folder.glob("*-state"))


def test_preflight_says_everything_at_once_before_a_model_is_loaded(checkout, train, models, tmp_path):
    dataset.write(tmp_path, 2, 64)
    images = tmp_path / dataset.CLASS
    (images / "empty.png").touch()
    (images / "cut.png").write_bytes((images / "000.png").read_bytes()[:300])
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(models("sdxl").files["pretrained_model_name_or_path"].read_bytes()[:-5])
    run = train(
        *(checkout, LORA, "--train_data_dir", str(tmp_path), "--pretrained_model_name_or_path", str(cut)),
        *("--optimizer_type", "Adamm", "--network_module", "networks.lore", "--full_bf16", "--color_aug"),
    )
    assert run.code == 2
    for said in (
        "empty.png is empty",
        "cut.png is broken",
        "cut.safetensors is truncated",
        "Adamm",
        "networks.lora",
        "--full_bf16",
    ):
        assert said in run.output, said
    assert "--cache_latents and --color_aug cannot go together" in run.output
    assert "loading" not in run.output
    assert not list(run.folder.glob("*.safetensors"))


class RunsCode:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.slow
def test_a_ckpt_is_loaded_for_its_weights_only(checkout, train, models, tmp_path):
    weights = read(models("sd15").files["pretrained_model_name_or_path"])
    good, bad, proof = tmp_path / "good.ckpt", tmp_path / "bad.ckpt", tmp_path / "proof"
    torch.save({"state_dict": weights}, good)
    torch.save({"state_dict": weights, "callbacks": RunsCode(proof)}, bad)
    script, option = "train_network.py", "--pretrained_model_name_or_path"
    run = train(checkout, script, option, str(bad))
    assert run.code == 2, run.output[-3000:]
    assert "bad.ckpt holds more than weights and is not loaded" in run.output
    assert not proof.exists()
    ours, theirs = (train(checkout, script, "--max_train_steps", "1", *more) for more in ((option, str(good)), ()))
    assert same(ours.tensors, theirs.tensors)


#: What site/faulty_network.py does -> what is said of it.
FAULTS = {
    "dtype": "trained weights are of type torch.float8_e4m3fn, in which nothing can be learnt",
    "device": "the network's weights are on meta, the model on cpu",
    "detached": "no gradient reaches any of the trained weights",
    "base_model": "3 weights of the base model are in the optimizer",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_network_is_not_trained(checkout, train, fault):
    run = train(checkout, LORA, "--network_module", "faulty_network", "--network_args", f"fault={fault}")
    assert run.code == 2, run.output[-3000:]
    assert FAULTS[fault] in run.output
    assert not list(run.folder.glob("*.safetensors"))


def test_a_data_set_without_pictures_is_an_error_without_a_preflight(checkout, train, tmp_path):
    (tmp_path / "5_cat").mkdir()
    options = ("--no-preflight", "--train_data_dir", str(tmp_path))
    run = train(checkout, FULL, *options, start="environment")
    assert run.code == 2, run.output[-3000:]
    assert "nothing would be trained: there are no pictures" in run.output


@pytest.mark.slow
def test_a_network_that_matches_nothing_is_not_trained(checkout, train):
    nothing = "block_dims=" + ",".join(["0"] * 23)
    run = train(checkout, LORA, "--network_train_unet_only", "--network_args", nothing)
    assert run.code == 2
    assert "nothing would be trained" in run.output


#: How the repository names a patch: in its own file, and where an option belongs to it.
_NAME = re.compile(r"""^( +(?:name|patch)=)"(\w+)",$""", re.MULTILINE)


def rename_patches(source, target):
    """Install the extension with every patch under another one's name and in its file: the first takes the last one's."""
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
    settings = package / "settings.py"
    settings.write_text(_NAME.sub(rename, settings.read_text(encoding="utf-8")), encoding="utf-8")
    return renamed


@pytest.mark.slow
def test_the_names_and_files_of_patches_change_nothing(checkout, train, upstream, tmp_path):
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
    places = [torch.load(state / resume.FILE, weights_only=True) for state in states]
    assert [(place["step"], place["batch"]) for place in places] == [(step, step) for step in (1, 2, 3, 4)]
    assert len(list(ours.folder.rglob("kohya_ext_ema.safetensors"))) == 4
