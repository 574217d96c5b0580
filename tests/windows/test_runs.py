"""The real scripts on Windows: started in every way, in folders with any name, with outputs that other programs have open."""

import pytest

from kohya_ext.run import resume
from kohya_ext.tiny import dataset
from tests.conftest import runs_in_wine
from tests.real.conftest import ROOT

torch = pytest.importorskip("torch")

LORA = "sdxl_train_network.py"

#: A space, an umlaut, Japanese, and what cmd.exe and TOML treat as special.
FOLDER = "Größe 学習 (1) & 100% it's"

pytestmark = pytest.mark.newest


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """The images are in such a folder, too."""
    folder = tmp_path_factory.mktemp("images") / FOLDER
    dataset.write(folder, 4, 128)
    return folder


@pytest.fixture
def output(tmp_path):
    folder = tmp_path / FOLDER
    folder.mkdir()
    return folder


def config(output, **options):
    """Write options as kohya_ss gives them, with what an editor of Windows may add: CRLF and a byte order mark."""
    file = output / "config_lora-20260101-120000.toml"
    text = "".join(f"{name} = {str(value).lower()}\r\n" for name, value in options.items())
    file.write_text(text, encoding="utf-8-sig", newline="")
    return "--config_file", str(file)


SCRIPTS = (LORA, "train_network.py", "flux_train_network.py", "sdxl_train.py")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("start", ["launcher", "plain", "environment", "gui"])
def test_a_script_trains_in_a_folder_of_any_name(checkout, train, output, script, start):
    run = train(checkout, script, *config(output, save_every_n_steps=3, save_state=True), start=start, output=output)
    assert run.code == 0, run.output[-4000:]
    assert run.tensors
    assert {path.name for path in output.glob("tiny*")} == {
        *("tiny.safetensors", "tiny-step00000003.safetensors", "tiny-step00000003-state", "tiny-state"),
        *(() if start == "plain" else ("tiny.journal.jsonl",)),
    }
    if start != "plain":
        assert "kohya_ext: error" not in run.output
        assert resume.state_problem(output / "tiny-state") is None


@pytest.mark.newest
def test_a_run_of_the_gui_whose_outputs_are_open_elsewhere(checkout, train, output):
    """Upstream removes old models, and replaces the final one: both are loaded elsewhere, for example in ComfyUI."""
    final = output / "tiny.safetensors"
    final.write_bytes((ROOT / "LICENSE").read_bytes())
    opened = [final.open("rb")]

    def open_outputs(process):
        names = ("tiny-step00000002.safetensors", "tiny-step00000002-state/optimizer.bin")
        opened.extend((output / name).open("rb") for name in names)

    options = (*config(output, save_every_n_steps=2, save_last_n_steps=2, save_state=True), "--max_train_steps", "8")
    try:
        run = train(checkout, LORA, *options, start="gui", output=output, at_step=3, act=open_outputs)
    finally:
        for file in opened:
            file.close()
    assert run.code == 0, run.output[-4000:]
    assert run.output.count("is open in another program and cannot be removed; training continues") == 2
    assert "tiny.safetensors is open in another program and cannot be replaced: saved tiny.2.safetensors instead" in run.output
    assert final.read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (output / "tiny.2.safetensors").stat().st_size > 1000
    state = output / "tiny-step00000002-state"  # Wine lets a folder be renamed in which a file is open
    assert (runs_in_wine() and not state.exists()) or resume.state_problem(state) is None
    assert not list(output.glob("*.partial"))
