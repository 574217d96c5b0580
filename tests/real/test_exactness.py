"""With all default patches and no preset, a script writes upstream's own files, bit for bit.

Captions are shuffled, and models and states are saved in the middle of training: a random number that the extension draws, or
keeps from being drawn, shows in every weight after it. CI runs this with sd-scripts' own pins too (see .ci/run): rich 14.1,
which they name, draws one for each line that is logged.
"""

import re
from collections.abc import Callable

import pytest

from tests.real.conftest import ROOT, Run

torch = pytest.importorskip("torch")

SHUFFLED = ("--shuffle_caption", "--caption_dropout_rate", "0.2")
SAVING = ("--save_every_n_steps", "2", "--save_state")

#: Case -> script and more arguments. Text encoders are trained wherever the script can.
RUNS = {
    "sdxl lora": ("sdxl_train_network.py", *SHUFFLED, *SAVING),
    "sdxl fine-tune": ("sdxl_train.py", *SHUFFLED, *SAVING),
    "sd15 lora": ("train_network.py", *SHUFFLED, *SAVING),
    "flux lora": ("flux_train_network.py", *SHUFFLED, *SAVING),
    "lumina lora": ("lumina_train_network.py", *SHUFFLED, *SAVING),
    "sdxl lora, two epochs": ("sdxl_train_network.py", *SHUFFLED, "--max_train_epochs", "2", "--save_every_n_epochs", "1"),
    "sdxl lora, two workers": ("sdxl_train_network.py", *SHUFFLED, *SAVING, "--max_data_loader_n_workers", "2"),
}

#: Where upstream's reentrant checkpointing, in SDXL's U-Net and its text encoders, is itself further from no checkpointing
#: than rounding: AdamW divides the rounding error of a gradient near zero by that gradient. The extension's file is upstream's
#: without checkpointing there. In the other scripts the switch does more than recompute: it puts models into training mode, in
#: which T5 has dropout.
LIKE_NONE = [case for case in RUNS if case.startswith(("sdxl", "lumina"))]

#: How far sums in another order are from upstream's.
ANOTHER_ORDER = 1e-7

Files = dict[str, dict[str, torch.Tensor]]
CHECKPOINTING = "--gradient_checkpointing"


@pytest.fixture(scope="session")
def files(train) -> Callable[..., Files]:
    """(checkout, case, start, checkpointing) -> the model files of a run; each is run once a session."""
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


#: Of the patches that are on by default, those with something to do in every row.
DEFAULTS = {"exact_resume", "nan_guard", "safe_stop", "atomic_saves", "skip_unused_gradients", "single_process_reduce"}


def distances(ours: Files, theirs: Files) -> dict[str, float]:
    """The largest difference in each file."""
    kinds = [
        {(file, name): (value.shape, value.dtype) for file, tensors in one.items() for name, value in tensors.items()}
        for one in (ours, theirs)
    ]
    assert kinds[0] == kinds[1]
    return {
        file: max((ours[file][name].double() - value.double()).abs().max().item() for name, value in tensors.items())
        for file, tensors in theirs.items()
    }


DEFAULT = "sdxl lora"


@pytest.mark.parametrize("case", [DEFAULT, *(pytest.param(case, marks=pytest.mark.slow) for case in RUNS if case != DEFAULT)])
def test_every_file_is_upstreams_bit_for_bit(checkout, files, case):
    found = distances(files(checkout, case, "launcher", False), files(checkout, case, "plain", False))
    assert found == dict.fromkeys(found, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS)
def test_with_gradient_checkpointing_it_is_upstreams_up_to_the_order_of_sums(checkout, files, case):
    exactly = case in LIKE_NONE
    found = distances(files(checkout, case, "launcher", True), files(checkout, case, "plain", not exactly))
    assert max(found.values()) <= (0.0 if exactly else ANOTHER_ORDER), found


def pins(text: str) -> dict[str, str]:
    """The versions that a requirements file pins; OpenCV's builds with and without a window system count as one."""
    return {
        name.lower().replace("opencv-python-headless", "opencv-python"): version
        for name, version in re.findall(r"^([\w-]+)(?:\[\w+\])?==([\w.]+)", text, re.MULTILINE)
    }


def test_the_pins_in_ci_are_upstreams(checkout):
    ours = pins((ROOT / "tests" / "upstream-pins.txt").read_text(encoding="utf-8"))
    theirs = pins((checkout.path / "requirements.txt").read_text(encoding="utf-8"))
    differ = {name for name in ours | theirs if ours.get(name) != theirs.get(name)}
    assert differ == ({"pytorch-optimizer"} if checkout.layout == "v0.10" else set())
