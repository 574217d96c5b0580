"""With the default patches and no preset, model files are bit-identical to upstream's.

Captions are shuffled, and models and states are saved during training, so any change in the sequence of random numbers
changes all later weights. CI also runs this with sd-scripts' pinned packages (see .ci/run): their rich 14.1 draws a random
number per logged line.
"""

import re
from collections.abc import Callable

import pytest

from tests.real.conftest import ROOT, Run

torch = pytest.importorskip("torch")

SHUFFLED = ("--shuffle_caption", "--caption_dropout_rate", "0.2")
SAVING = ("--save_every_n_steps", "2", "--save_state")

#: Case -> script and further arguments. Text encoders are trained if the script supports it.
RUNS = {
    "sdxl lora": ("sdxl_train_network.py", *SHUFFLED, *SAVING),
    "sdxl lora, AdamW8bit": ("sdxl_train_network.py", *SHUFFLED, *SAVING, "--optimizer_type", "AdamW8bit"),
    "sdxl lora, Prodigy": ("sdxl_train_network.py", *SHUFFLED, *SAVING, "--optimizer_type", "Prodigy", "--learning_rate", "1"),
    "sdxl fine-tune": ("sdxl_train.py", *SHUFFLED, *SAVING),
    "sd15 lora": ("train_network.py", *SHUFFLED, *SAVING),
    "flux lora": ("flux_train_network.py", *SHUFFLED, *SAVING),
    "lumina lora": ("lumina_train_network.py", *SHUFFLED, *SAVING),
    "sdxl lora, two epochs": ("sdxl_train_network.py", *SHUFFLED, "--max_train_epochs", "2", "--save_every_n_epochs", "1"),
    "sdxl lora, two workers": ("sdxl_train_network.py", *SHUFFLED, *SAVING, "--max_data_loader_n_workers", "2"),
}

#: Cases compared with upstream without checkpointing. Upstream's reentrant checkpointing (in SDXL's U-Net and text encoders)
#: differs from no checkpointing by more than rounding, because AdamW divides the rounding error of a gradient near zero by
#: that gradient. Other scripts are compared with it, because their option also enables training mode, where T5 has dropout.
COMPARED_WITHOUT_CHECKPOINTING = [case for case in RUNS if case.startswith(("sdxl", "lumina"))]

#: Tolerance for sums in another order.
SUMMATION_TOLERANCE = 1e-7

Files = dict[str, dict[str, torch.Tensor]]
CHECKPOINTING = "--gradient_checkpointing"


@pytest.fixture(scope="session")
def files(train) -> Callable[..., Files]:
    """(checkout, case, start, checkpointing) -> the model files of a run; each runs once per session."""
    from safetensors.torch import load_file

    runs: dict[tuple[object, ...], Files] = {}

    def of(checkout, case: str, start: str, checkpointing: bool) -> Files:
        key = checkout.layout, case, start, checkpointing
        if key not in runs:
            run: Run = train(checkout, *RUNS[case], start=start, without=() if checkpointing else (CHECKPOINTING,))
            assert run.code == 0, run.output[-4000:]
            applied = {row["patch"] for row in run.report.get("patches", []) if row["status"] == "applied"}
            assert applied >= DEFAULTS if start == "launcher" else not run.report
            runs[key] = {file.name: load_file(file) for file in run.folder.glob("*.safetensors")}
            assert len(runs[key]) > 1
        return runs[key]

    return of


#: The default patches that are applied in every case.
DEFAULTS = {"exact_resume", "nan_guard", "safe_stop", "atomic_saves", "skip_unused_gradients", "single_process_reduce"}


def distances(ours: Files, theirs: Files) -> dict[str, float]:
    """Return the largest difference in each file."""
    specs = [
        {(file, name): (value.shape, value.dtype) for file, tensors in files.items() for name, value in tensors.items()}
        for files in (ours, theirs)
    ]
    assert specs[0] == specs[1]
    return {
        file: max((ours[file][name].double() - value.double()).abs().max().item() for name, value in tensors.items())
        for file, tensors in theirs.items()
    }


DEFAULT = "sdxl lora"


@pytest.mark.parametrize("case", [DEFAULT, *(pytest.param(case, marks=pytest.mark.slow) for case in RUNS if case != DEFAULT)])
def test_files_are_bit_identical_to_upstream(checkout, files, case):
    differences = distances(files(checkout, case, "launcher", False), files(checkout, case, "plain", False))
    assert differences == dict.fromkeys(differences, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS)
def test_gradient_checkpointing_equals_upstream_up_to_the_order_of_sums(checkout, files, case):
    is_exact = case in COMPARED_WITHOUT_CHECKPOINTING
    differences = distances(files(checkout, case, "launcher", True), files(checkout, case, "plain", not is_exact))
    assert max(differences.values()) <= (0.0 if is_exact else SUMMATION_TOLERANCE), differences


def pins(text: str) -> dict[str, str]:
    """Return the versions that a requirements file pins, with both builds of OpenCV under one name."""
    return {
        name.lower().replace("opencv-python-headless", "opencv-python"): version
        for name, version in re.findall(r"^([\w-]+)(?:\[\w+\])?==([\w.]+)", text, re.MULTILINE)
    }


def test_pins_in_ci_equal_upstreams(checkout):
    ours = pins((ROOT / "tests" / "upstream-pins.txt").read_text(encoding="utf-8"))
    theirs = pins((checkout.path / "requirements.txt").read_text(encoding="utf-8"))
    differ = {name for name in ours | theirs if ours.get(name) != theirs.get(name)}
    assert differ == ({"pytorch-optimizer"} if checkout.layout == "v0.10" else set())
