"""The real scripts on Windows, started in every way."""

import pytest

from kohya_ext.run import resume

pytest.importorskip("torch")

SCRIPTS = ("sdxl_train_network.py", "train_network.py", "flux_train_network.py", "sdxl_train.py")

pytestmark = [pytest.mark.newest, pytest.mark.slow]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("start", ["launcher", "plain", "environment", "gui"])
def test_a_script_trains(checkout, train, output, gui_options, script, start):
    folder = output()
    options = gui_options(folder, save_every_n_steps=3, save_state=True)
    run = train(checkout, script, *options, start=start, output=folder)
    assert run.code == 0, run.output[-4000:]
    assert run.tensors
    assert {path.name for path in folder.glob("tiny*")} == {
        *("tiny.safetensors", "tiny-step00000003.safetensors", "tiny-step00000003-state", "tiny-state"),
        *(() if start == "plain" else ("tiny.journal.jsonl",)),
    }
    if start != "plain":
        assert "kohya_ext: error" not in run.output
        assert resume.state_problem(folder / "tiny-state") is None
