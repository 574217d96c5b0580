"""LECO's scripts have no images and load no state: they start, stop and resume like the others."""

import signal

import pytest

from kohya_ext.run import resume
from tests.real.test_journal import steps_of
from tests.real.test_losing_nothing import posix, same, send

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.thorough

TIMED = ("--save_state_every_n_minutes", "0", "--save_last_n_timed_states", "99", "--lr_scheduler", "cosine")


@pytest.mark.only("v0.11")
@posix
@pytest.mark.parametrize("script", ["train_leco.py", pytest.param("sdxl_train_leco.py", marks=pytest.mark.slow)])
def test_a_resumed_run_equals_the_undisturbed_one(checkout, train, script):
    undisturbed = train(checkout, script, *TIMED)
    assert undisturbed.tensors
    for step in (2, 4):
        state = resume.newest_state(undisturbed.folder, "tiny").with_name(f"tiny-rolling0000000{step}-state")
        resumed = train(checkout, script, *TIMED, "--resume", str(state))
        assert same(resumed.tensors, undisturbed.tensors)
    assert "all 4 steps are trained; writing the final model" in resumed.output

    stopped = train(checkout, script, "--max_train_steps", "400", at_step=1, act=send(signal.SIGTERM))
    assert stopped.code == 143, stopped.output[-3000:]
    assert resume.newest_state(stopped.folder, "tiny") is not None
    assert "to resume: " in stopped.output


@pytest.mark.only("v0.11")
def test_upstream_gives_the_same_model_and_the_journal_has_its_losses(checkout, train, upstream):
    ours = train(checkout, "train_leco.py", "--disable_patch", "nonreentrant_checkpointing")
    assert same(ours.tensors, upstream(checkout, "train_leco.py").tensors)
    assert [type(line["loss"]) for line in steps_of(ours)] == [float] * 4


@pytest.mark.only("v0.11")
def test_options_that_leco_does_not_read_are_errors(checkout, call, models, images, tmp_path):
    options = ("--prompts_file", tmp_path / "none.toml", "--save_state", "--output_dir", tmp_path)
    check = call("-m", "kohya_ext", "check", "--sd-scripts", checkout.path, "train_leco.py", *options)
    assert check.returncode == 2, check.stderr
    assert "train_leco.py does not read --save_state; use --save_state_every_n_minutes" in check.stderr
    assert "--prompts_file" in check.stderr
    assert "training data" not in check.stderr
    assert "resolution" not in check.stderr
