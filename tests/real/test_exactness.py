"""With all default patches and no preset, a script writes upstream's own files, bit for bit.

Captions are shuffled, and models and states are saved in the middle of training: a random number that the extension draws, or
keeps from being drawn, shows in every weight after it. CI runs this with sd-scripts' own pins too (see .ci/run): rich 14.1,
which they name, draws one for each line that is logged.
"""

import re

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

#: What non-reentrant checkpointing, the default here, may differ by from the reentrant kind: it sums in another order.
ANOTHER_ORDER = 1e-7


def saved(run: Run) -> dict[str, dict[str, torch.Tensor]]:
    """Every model file of a run, those in the middle of training too."""
    from safetensors.torch import load_file

    assert run.code == 0, run.output[-4000:]
    return {file.name: load_file(file) for file in sorted(run.folder.glob("*.safetensors"))}


def distances(train, checkout, case: str, **options) -> dict[str, float]:
    """The largest difference in each file between upstream's plain run and the one with default patches."""
    theirs, ours = (train(checkout, *RUNS[case], start=start, **options) for start in ("plain", "launcher"))
    assert theirs.report == {}
    applied = {row["patch"] for row in ours.report["patches"] if row["status"] == "applied"}
    assert applied >= {"honest_resume", "nan_guard", "safe_stop", "atomic_saves", "needless_gradients", "single_process_reduce"}
    expected, found = saved(theirs), saved(ours)
    assert found.keys() == expected.keys()
    assert len(found) > 1
    for name, tensors in expected.items():
        assert {key: (value.shape, value.dtype) for key, value in found[name].items()} == {
            key: (value.shape, value.dtype) for key, value in tensors.items()
        }
    return {
        name: max((found[name][key].double() - value.double()).abs().max().item() for key, value in tensors.items())
        for name, tensors in expected.items()
    }


DEFAULT = "sdxl lora"


@pytest.mark.parametrize("case", [DEFAULT, *(pytest.param(case, marks=pytest.mark.slow) for case in RUNS if case != DEFAULT)])
def test_every_file_is_upstreams_bit_for_bit(checkout, train, case):
    found = distances(train, checkout, case, without=("--gradient_checkpointing",))
    assert found == dict.fromkeys(found, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS)
def test_with_gradient_checkpointing_sums_are_made_in_another_order(checkout, train, case):
    found = distances(train, checkout, case)
    assert max(found.values()) <= ANOTHER_ORDER, found


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
