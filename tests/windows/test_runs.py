"""The real scripts on Windows: started in every way, in folders with any name, with outputs that other programs have open."""

import pytest

from kohya_ext.run import resume
from kohya_ext.tiny import dataset
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


@pytest.mark.parametrize(
    ("script", "start"),
    [
        (LORA, "gui"),
        pytest.param(LORA, "launcher", marks=pytest.mark.slow),
        pytest.param(LORA, "plain", marks=pytest.mark.slow),
        pytest.param(LORA, "environment", marks=pytest.mark.slow),
        *(
            pytest.param(script, start, marks=pytest.mark.slow)
            for script in ("train_network.py", "flux_train_network.py", "sdxl_train.py")
            for start in ("launcher", "plain", "gui")
        ),
    ],
)
def test_a_script_trains_in_a_folder_of_any_name(checkout, train, tmp_path, script, start):
    """kohya_ss gives its options in a file, with a byte order mark if an editor of Windows has added one."""
    output = tmp_path / FOLDER
    output.mkdir()
    config = output / "config_lora-20260101-120000.toml"
    config.write_text(
        "max_train_steps = 3\r\nsave_every_n_steps = 2\r\nsave_state = true\r\n", encoding="utf-8-sig", newline=""
    )
    run = train(checkout, script, "--config_file", str(config), start=start, output=output, without=("--max_train_steps", "4"))
    assert run.code == 0, run.output[-4000:]
    assert run.tensors
    assert {path.name for path in output.glob("tiny*")} == {
        *("tiny.safetensors", "tiny-step00000002.safetensors", "tiny-step00000002-state", "tiny-state"),
        *(() if start == "plain" else ("tiny.journal.jsonl",)),
    }
    if start != "plain":
        assert "kohya_ext: error" not in run.output
        assert resume.state_problem(output / "tiny-state") is None


def test_outputs_that_another_program_has_open_do_not_end_a_run(checkout, train, tmp_path):
    """Upstream removes old models, and replaces the final one: both are loaded elsewhere, for example in ComfyUI."""
    final = tmp_path / "tiny.safetensors"
    final.write_bytes((ROOT / "LICENSE").read_bytes())
    opened = [final.open("rb")]

    def open_outputs(process):
        names = ("tiny-step00000002.safetensors", "tiny-step00000002-state/optimizer.bin")
        opened.extend((tmp_path / name).open("rb") for name in names)

    options = ("--max_train_steps", "8", "--save_every_n_steps", "2", "--save_last_n_steps", "2", "--save_state")
    try:
        run = train(checkout, LORA, *options, output=tmp_path, at_step=3, act=open_outputs)
    finally:
        for file in opened:
            file.close()
    assert run.code == 0, run.output[-4000:]
    assert run.output.count("is open in another program and cannot be removed; training continues") == 2
    assert "tiny.safetensors is open in another program and cannot be replaced: saved tiny.2.safetensors instead" in run.output
    assert final.read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (tmp_path / "tiny.2.safetensors").stat().st_size > 1000
    assert resume.state_problem(tmp_path / "tiny-step00000002-state") is None
    assert not list(tmp_path.glob("*.partial"))
