"""Dry runs: the command line with stand-ins, and tensors that say they are on a GPU."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import toml

from kohya_ext.__main__ import main
from kohya_ext.config.command_line import CommandLine
from kohya_ext.dry_run import estimation, stand_ins
from kohya_ext.dry_run.arguments import Arguments, Workload, caption_tokens
from kohya_ext.dry_run.events import Event
from kohya_ext.dry_run.repetition import repeated
from kohya_ext.dry_run.request import REQUEST
from kohya_ext.dry_run.steps import grows
from kohya_ext.errors import UserError
from kohya_ext.estimate import gpus, predict, step_time, whole_runs
from kohya_ext.estimate.result import Estimate
from kohya_ext.estimate.seconds import Kernels, Work
from kohya_ext.run.safetensors_header import read_header
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.sdscripts.families import FAMILIES
from kohya_ext.tiny import environment

LLLITE = "sdxl_train_control_net_lllite.py"


def command(script: str, *words: object) -> CommandLine:
    return CommandLine(Path("sd-scripts", script), [*map(str, words)], {})


def prepared(folder: Path, script: str, *words: object) -> CommandLine:
    """Return the command line of a dry run in ``folder``."""
    pytest.importorskip("PIL")
    asked = command(script, *words)
    arguments = Arguments(asked, Workload.of(asked), folder)
    return CommandLine(asked.script, arguments.words(), {})


@pytest.mark.parametrize("kind", [kind.title for family in FAMILIES for kind in family.checkpoints])
def test_each_kind_of_checkpoint_has_the_files_of_its_family(kind):
    family = next(each for each in FAMILIES if kind in [row.title for row in each.checkpoints])
    assert stand_ins.options(kind) == ["pretrained_model_name_or_path", *family.files]


def test_a_stand_in_has_the_tensors_of_a_checkpoint_and_takes_no_space(tmp_path):
    file = tmp_path / "model.safetensors"
    stand_ins.write_checkpoint("SDXL", "pretrained_model_name_or_path", file)
    header = read_header(file)
    assert header.shapes["model.diffusion_model.input_blocks.0.0.weight"] == (320, 4, 3, 3)
    assert file.stat().st_size > 6e9
    if hasattr(os.stat_result, "st_blocks"):
        assert file.stat().st_blocks * 512 < 1e6


def test_a_stand_in_for_a_file_of_fp8_is_of_fp8(tmp_path):
    """Its name says so: the user's, or the one that a preset for a small GPU assumes."""
    values = prepared(tmp_path, "flux_train_network.py", "--preset", "flux-lora/8gb").values
    assert {*read_header(Path(values["t5xxl"])).dtypes.values()} == {"F8_E4M3"}
    assert {*read_header(Path(values["clip_l"])).dtypes.values()} & {"BF16", "F16", "F32"}


def test_compiled_blocks_and_recorded_passes_are_those_of_the_run(tmp_path):
    words = ("--preset", "sdxl-lora/12gb", "--selective_torch_compile", "--compile_mode", "max-autotune-no-cudagraphs")
    settings = prepared(tmp_path, "sdxl_train_network.py", *words, "--cuda_graphs").settings
    assert settings["selective_torch_compile"]
    assert (settings["compile_mode"], settings["compile_dynamic"]) == ("default", "auto")
    assert settings["cuda_graphs"]
    assert settings["cuda_graphs_always"]  # within the first steps


def test_a_step_is_repeated_with_its_own_storages_in_place_of_those_of_the_one_before():
    first = [Event(0, 8, "start"), Event(1, 5, "forward")]
    step = [Event(2, 3, "backward"), Event(1, -5, "backward"), Event(2, -3, "backward"), Event(3, 5, "forward", 1)]
    assert repeated([*first, *step], len(first), 4) == [
        Event(4, 3, "backward"), Event(3, -5, "backward"), Event(4, -3, "backward"), Event(5, 5, "forward", 1),
    ]  # fmt: skip


def test_a_step_that_leaves_other_storages_than_it_frees_is_not_repeated():
    assert repeated([Event(0, 5, "forward"), Event(0, -5, "backward"), Event(1, 6, "forward")], 1, 2) is None


@pytest.mark.parametrize(
    ("reserved", "micro_steps", "expected"),
    [
        ([6, 9, 9], 1, True),
        ([6, 9, 9, 9], 1, False),
        ([6, 9, 9, 10], 1, True),  # ControlNet of SD 1.5
        ([6, 9, 9, 10, 10], 1, True),
        ([6, 9, 9, 10, 10, 10], 1, False),
        ([6, 6, 9, 9, 9, 9], 2, True),
        ([6, 6, 9, 9, 9, 9, 9, 9], 2, False),
    ],
)
def test_steps_are_added_until_two_have_reserved_no_more(reserved, micro_steps, expected):
    assert grows([{"reserved": each} for each in reserved], micro_steps) is expected


def test_missing_models_images_and_output_are_replaced_and_the_rest_is_kept(tmp_path):
    model = tmp_path / "mine.safetensors"
    model.write_bytes(b"")
    words = (
        *("--pretrained_model_name_or_path", model, "--resolution", "512,768", "--train_batch_size", "2"),
        *("--optimizer_type", "Prodigy", "--output_dir", "mine", "--save_every_n_steps", "1", "--logging_dir", "logs"),
        *("--train_data_dir", "mine", "--sample_prompts", "prompts.txt", "--torch_compile", "--vae", "stabilityai/sdxl-vae"),
    )
    values = prepared(tmp_path / "run", "sdxl_train_network.py", *words).values
    assert values["pretrained_model_name_or_path"] == str(model)
    assert values["optimizer_type"] == "Prodigy"
    assert not {"save_every_n_steps", "logging_dir", "sample_prompts", "vae"} & values.keys()
    assert values["torch_compile"] is False
    assert Path(values["output_dir"]).parent == tmp_path / "run"
    images = [*Path(values["train_data_dir"]).glob("*_sks/*.png")]
    from PIL import Image

    assert [Image.open(image).size for image in images] == [(512, 768)] * 2
    assert all(image.with_suffix(values["caption_extension"]).is_file() for image in images)


@pytest.mark.parametrize("interval", [("--sample_at_first",), ("--sample_every_n_steps", "500"), ()])
def test_the_largest_image_is_sampled_after_each_step_if_the_run_samples_any(tmp_path, interval):
    prompts = tmp_path / "mine.txt"
    prompts.write_text("a cat --w 512 --h 768 --s 40\na dog --w 640 --h 640 --s 20\n")
    words = ("--resolution", "512", "--sample_prompts", prompts, *interval)
    values = prepared(tmp_path, "sdxl_train_network.py", *words).values
    if not interval:
        assert not {"sample_prompts", "sample_every_n_steps"} & values.keys()
        return
    assert values["sample_every_n_steps"] == 1
    assert "--w 640 --h 640 --s 2 " in Path(values["sample_prompts"]).read_text()


@pytest.mark.parametrize(("script", "option"), [(LLLITE, "conditioning_data_dir"), ("fine_tune.py", "in_json")])
def test_scripts_get_their_kind_of_training_set(tmp_path, script, option):
    values = prepared(tmp_path, script, "--resolution", "512").values
    assert Path(values[option]).exists()
    assert len([*Path(values["train_data_dir"]).glob("*.png")]) == 1


def test_a_config_file_is_copied_without_what_a_dry_run_leaves_out(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('network_dim = 12\nresolution = "512"\nsave_every_n_epochs = 1\nlogging_dir = "logs"\n')
    (tmp_path / "run").mkdir()
    written = prepared(tmp_path / "run", "sdxl_train_network.py", "--config_file", file).config
    assert written.path.parent == tmp_path / "run"
    assert {"network_dim", "resolution"} <= written.values.keys()
    assert not {"save_every_n_epochs", "logging_dir"} & written.values.keys()


def test_of_a_dataset_file_the_largest_batch_is_kept_with_the_options_of_its_images(tmp_path):
    file = tmp_path / "mine.toml"
    subset = {"image_dir": "mine", "caption_dropout_rate": 0.1, "num_repeats": 7, "caption_extension": ".caption"}
    sets = [{"resolution": 512, "batch_size": 4}, {"resolution": 1024, "batch_size": 2, "subsets": [subset]}]
    file.write_text(toml.dumps({"general": {"flip_aug": True}, "datasets": sets}))
    (tmp_path / "run").mkdir()
    values = prepared(tmp_path / "run", "sdxl_train_network.py", "--dataset_config", file).values
    written = toml.load(values["dataset_config"])
    assert written["general"] == {"flip_aug": True}
    (only,) = written["datasets"]
    assert (only["resolution"], only["batch_size"]) == (1024, 2)
    assert only["subsets"][0]["caption_dropout_rate"] == 0.1
    (written,) = only["subsets"]
    images = [*Path(written["image_dir"]).glob("*.png")]
    assert len(images) == 2
    assert all(image.with_suffix(written["caption_extension"]).is_file() for image in images)


def test_without_a_resolution_there_is_no_dry_run():
    with pytest.raises(UserError, match="resolution"):
        Workload.of(command(LLLITE))


def test_scripts_that_train_on_prompts_have_no_images(tmp_path):
    values = prepared(tmp_path, "sdxl_train_leco.py").values
    assert "train_data_dir" not in values
    assert toml.load(values["prompts_file"])["prompts"][0]["resolution"] == 1024


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        (("flux_train_network.py",), 512),
        (("flux_train_network.py", "--t5xxl_max_token_length", "128"), 128),
        (("lumina_train_network.py",), 256),
        (("hunyuan_image_train_network.py",), 32 * 32 + 256 + 128),
        (("my_script.py",), 0),
    ],
)
def test_integers_that_a_script_reads_are_the_lengths_of_its_captions(words, tokens):
    asked = command(*words)
    assert caption_tokens(asked.name, asked.values, (1024, 1024)) == tokens


VERSIONS = {"sd_scripts": "0.11.1", "torch": "2.14.1", "kohya_ext": "0.1.0"}
CONFIG = {"script": LLLITE, "resolution": "512,512"}
ASSUMED = {"left_out": ["--torch_compile"], "missing": "SDXL"}
ESTIMATE = Estimate(CONFIG, 9, 9, 9, "backward", {}, {}, 1, 1, VERSIONS, "v0.11", **ASSUMED)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path / "cache"))
    for name in (LLLITE, "library/train_util.py"):
        file = tmp_path / "sd-scripts" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    return Checkout(tmp_path / "sd-scripts", "0.11.1", "v0.11", "for this test")


def test_estimates_are_known_by_code_and_options_that_matter(checkout):
    asked = command(LLLITE, "--resolution", "512")
    assert whole_runs.find(checkout, asked) is None
    whole_runs.keep(checkout, asked, ESTIMATE)
    assert whole_runs.find(checkout, asked) == ESTIMATE
    assert whole_runs.find(checkout, command(LLLITE, "--resolution", "512", "--output_name", "other")) == ESTIMATE
    assert whole_runs.find(checkout, command(LLLITE, "--resolution", "768")) is None
    (checkout.path / LLLITE).write_text("one_more_line = 1")
    assert whole_runs.find(checkout, asked) is None


def test_check_and_a_start_use_the_estimate_of_a_dry_run(checkout):
    from argparse import Namespace

    asked = command(LLLITE, "--resolution", "512")
    whole_runs.keep(checkout, asked, ESTIMATE)
    assert predict.known(checkout, Namespace(resolution="512"), asked) == ESTIMATE
    assert estimation.estimate(checkout, asked) == ESTIMATE


def test_an_estimate_says_that_the_script_was_run_and_what_was_left_out():
    from kohya_ext.commands.estimate import _lines

    lines = " ".join(_lines(ESTIMATE, card=None))
    assert f"three steps of {LLLITE}" in lines
    assert "these files are missing: the usual ones of SDXL." in lines
    assert "Not included: --torch_compile." in lines


def test_seconds_are_predicted_for_scripts_without_another_estimate():
    kernels = Work([Kernels("memory", 10, 0.0, 1e10)], [], from_python=10).as_row()
    gpu = gpus.named("RTX 4090")
    words = (LLLITE, "--resolution", "512")
    once = step_time.by_rates(replace(ESTIMATE, work=kernels), command(*words), gpu)
    twice = step_time.by_rates(replace(ESTIMATE, work=kernels), command(*words, "--gradient_accumulation_steps", 2), gpu)
    assert once.seconds > 1e10 / gpu.bandwidth
    assert twice.seconds == pytest.approx(2 * once.seconds)


def test_as_many_processes_as_gpus_are_refused(checkout):
    with pytest.raises(UserError, match="--num_processes 2"):
        estimation.estimate(checkout, command(LLLITE, "--resolution", "512", "--multi_gpu"))


OFF = {"safe_stop", "sampling_failures", "deepspeed_setup", "deepspeed_saves"}


@pytest.mark.parametrize(("given", "off"), [("ema", {"ema", *OFF}), ("*", {"*"})])
def test_patches_that_hide_a_failure_or_ask_other_processes_are_off(tmp_path, given, off):
    values = prepared(tmp_path, "sdxl_train.py", "--resolution", "512", "--disable_patch", given).values
    assert {*values["disable_patch"]} == off


#: A linear layer of 1024 x 1024 in fp32, a batch of 1024, and SGD with momentum, for three steps.
TRAINING = """
import json, sys
from pathlib import Path
from torch._subclasses.fake_tensor import FakeTensorMode
from kohya_ext.dry_run import cuda_functions, device
from kohya_ext.dry_run.request import Request
from kohya_ext.dry_run.steps import Steps
from kohya_ext.dry_run.gpu_tracker import GpuTracker
import torch

tracker = GpuTracker()
device.install()
cuda_functions.install(tracker.release_unused)
file = Path(sys.argv[1])
Steps(tracker, Request("", "", [], 3, 1, 1, False, 0, *[False] * 7), file).install()
mode = tracker.values.mode = FakeTensorMode(allow_non_fake_inputs=True)
with mode, tracker:
    layer = torch.nn.Linear(1024, 1024, bias=False).to("cuda")
    assert torch.cuda.is_available()
    assert layer.weight.is_cuda
    assert layer.weight.cpu().device.type == "cpu"
    assert torch.tensor([2, 3]).prod().item() == 6
    assert torch.Generator(layer.weight.device).device == layer.weight.device  # tensors are created there
    assert torch.Generator().device.type == "cpu"
    swapped = torch.nn.Parameter(torch.zeros(3))  # its block is on the host between steps
    optimizer = torch.optim.SGD([*layer.parameters(), swapped], lr=1, momentum=0.9)
    tried = torch.optim.SGD([torch.nn.Parameter(torch.zeros(7))])
    tried.step()
    while True:
        for images in torch.utils.data.DataLoader(torch.zeros(1024, 1024), batch_size=1024):
            loss = layer(images.to("cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def test_a_training_loop_is_measured_to_the_byte(tmp_path):
    pytest.importorskip("torch")
    variables = {**os.environ, "PYTHONPATH": environment.python_path(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(tmp_path / "result.json")], env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    matrix, workspaces = 4 * 1024**2, 2 * (2 * 4096 + 8 * 16) * 1024
    assert (result["trainable_parameters"], result["trained_tensors"]) == (1024**2 + 3, 2)
    assert result["parts"]["trained weights"] == result["parts"]["optimizer state"] == matrix
    assert result["parts"]["workspaces"] == workspaces
    # Weight, momentum, batch, output, the gradient of the mean, the three terms of the square's, and two numbers.
    assert result["allocated"] == workspaces + 8 * matrix + 2 * 512
    assert result["flops"] == 2 * 2 * 1024**3
    assert [each["allocated"] for each in result["passes"]][-1] == result["allocated"]
    assert len(result["passes"]) == 4  # the third step is a repetition
    work = Work.from_row(result["work"])
    assert sum(group.flops for group in work.batch) == pytest.approx(result["flops"], rel=1e-3)
    assert sum(group.count for group in work.optimizer) == 3  # the momentum, scaled and added to, and the weights
    assert work.copied == pytest.approx(matrix, rel=1e-3)  # the batch, by no kernel
    in_memory = sum(group.bytes for group in work.batch if group.kind == "memory")
    assert in_memory == pytest.approx(11 * matrix, rel=1e-3)  # of the square, its mean, and their gradients


def test_states_of_a_paged_optimizer_need_no_driver():
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("bitsandbytes.functional")
    from kohya_ext.dry_run.cuda_operators import bitsandbytes_without_kernels
    from kohya_ext.dry_run.tracker import Tracker

    tracker = Tracker()
    with bitsandbytes_without_kernels(tracker):
        state = functional.get_paged(40, 50, dtype=torch.uint8, device=torch.device("cuda", 0))
        functional.fill(state, 0)
        functional.prefetch_tensor(state)
    assert (state.shape, state.dtype, state.device.type, state.is_paged) == ((40, 50), torch.uint8, "cpu", True)
    (kernel,) = tracker.work.work().batch
    assert kernel.count == 1
    assert not tracker.events


def test_an_interrupt_ends_the_dry_runs_that_run_and_begins_no_other(monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(estimation, "_running", {process})
    waiting = []

    def interrupted():
        with estimation.several() as threads:
            waiting.extend(threads.submit(process.wait) for _ in range(6))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert process.returncode not in (0, None)
    assert waiting[-1].cancelled()


@pytest.mark.parametrize("interrupted", ["kohya_ext.commands.doctor.run", "kohya_ext.commands.run.main"])
def test_an_interrupted_command_or_script_has_no_traceback(monkeypatch, capsys, interrupted):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(interrupted, interrupt)
    assert main(["doctor" if "doctor" in interrupted else "sdxl_train.py"]) == 130
    assert capsys.readouterr().err == "kohya_ext: interrupted\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, getattr(signal, "SIGHUP", None) or signal.SIGBREAK])
def test_a_command_ends_by_other_signals_as_by_ctrl_c(monkeypatch, capsys, number):
    """So that it removes its temporary files."""
    cleaned = []

    def end(_):
        try:
            signal.raise_signal(number)
        finally:
            cleaned.append(True)

    monkeypatch.setattr("kohya_ext.commands.doctor.run", end)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert main(["doctor"]) == 128 + number
        assert capsys.readouterr().err == "kohya_ext: interrupted\n"
        assert cleaned
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_command_whose_file_cannot_be_written_has_no_traceback(monkeypatch, capsys):
    def refuse(_):
        raise PermissionError(13, "Permission denied", "/there/preset.json")

    monkeypatch.setattr("kohya_ext.commands.presets.run", refuse)
    assert main(["presets", "list"]) == 2
    assert capsys.readouterr().err == "kohya_ext: error: /there/preset.json: Permission denied\n"


def test_a_process_ends_with_its_parent_and_deletes_its_files(tmp_path):
    """However the parent ends, its end of the pipe is closed."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / REQUEST).write_text("")
    code = f"import time; from kohya_ext.dry_run import process; process.end_with_parent({str(folder)!r}); time.sleep(60)"
    variables = {**os.environ, "PYTHONPATH": environment.python_path()}
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, env=variables)
    child.stdin.close()
    assert child.wait(timeout=60) == 1
    assert not folder.exists()
