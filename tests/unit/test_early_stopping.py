"""--early_stopping: when it stops, what it keeps, and how a resumed run counts on."""

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kohya_ext.run import stop_request
from kohya_ext.run.atomic_write import write_atomically
from kohya_ext.run.evaluations import Evaluation
from patches import early_stopping

pytest.importorskip("torch")


def evaluation(step, loss):
    return Evaluation(step, 1, (loss - 0.3, loss + 0.3), {}, True)


@pytest.fixture
def stopper(monkeypatch, tmp_path):
    stopper = stop_request.Stopper(Namespace(), SimpleNamespace(num_processes=1, is_main_process=True), tmp_path / "stop", 0)
    monkeypatch.setattr(early_stopping.stop_request, "stopper", lambda: stopper)
    return stopper


@pytest.fixture
def start(monkeypatch, tmp_path):
    """patience -> a callback that saves its models as empty files."""

    def save(step, args, accelerator, as_file):
        write_atomically(tmp_path / f"{args.output_name}-step{step:08d}.safetensors", Path.touch, lambda: 0)

    monkeypatch.setattr(early_stopping, "step_save", lambda frame: SimpleNamespace(run=save, saves_folders=False))

    def start(patience):
        args = Namespace(output_name="cat", output_dir=str(tmp_path))
        return early_stopping._EarlyStopping(args, SimpleNamespace(is_main_process=True), patience)

    return start


def validate(callback, *losses):
    for number, loss in enumerate(losses, 1 + len(callback.evaluations)):
        callback.after_validation(evaluation(10 * number, loss))


def models(folder):
    return sorted(file.name for file in folder.glob("*.safetensors"))


def test_only_the_best_model_is_kept_and_the_users_files_stay(start, stopper, tmp_path):
    (tmp_path / "cat-best-step00000005.safetensors").touch()  # of no validation of this run
    callback = start(3)
    validate(callback, 1.0, 0.8, 0.9, 0.85)
    assert models(tmp_path) == ["cat-best-step00000005.safetensors", "cat-best-step00000020.safetensors"]
    assert callback.args.output_name == "cat"
    assert not stopper.reason
    validate(callback, 0.81)
    assert stopper.reason == "early stopping: no validation since step 20 was better than its loss of 0.8"
    assert stopper.code == 0


def test_files_of_an_earlier_run_stay_although_their_steps_are_validated(start, stopper, tmp_path):
    earlier = ["cat-best-step00000010.previous.safetensors", "cat-best-step00000020.safetensors"]
    for name in earlier:
        (tmp_path / name).touch()
    state = tmp_path / "cat-state"
    state.mkdir()
    callback = start(9)
    validate(callback, 1.0, 1.1)
    callback.on_state_save(state)
    resumed = start(9)
    resumed.on_state_load(state)
    validate(resumed, 0.9)
    assert models(tmp_path) == [*earlier, "cat-best-step00000030.safetensors"]


def test_an_improvement_starts_the_count_again(start, stopper):
    callback = start(2)
    validate(callback, 1.0, 1.1, 0.9, 1.0)
    assert not stopper.reason
    validate(callback, 1.0)
    assert stopper.reason


def test_a_resumed_run_counts_on_and_a_stopped_one_ends(start, stopper, tmp_path, capsys):
    state = tmp_path / "cat-state"
    state.mkdir()
    callback = start(2)
    validate(callback, 1.0)
    callback.on_state_save(state)
    recorded = {file: file.read_bytes() for file in state.iterdir()}
    validate(callback, 1.1)  # of the step that has saved the state, so it belongs to it
    callback.before_batch(callback.accelerator)
    validate(callback, 1.2)
    assert [line["step"] for line in json.loads((state / early_stopping.LATER_FILE).read_text())["evaluations"]] == [10, 20]
    assert {file: file.read_bytes() for file in recorded} == recorded, "a state with other sizes cannot be resumed"
    stopper.reason = ""

    resumed = start(2)
    resumed.on_state_load(state)
    assert not stopper.reason
    assert resumed.evaluations == callback.evaluations[:2]
    validate(resumed, 1.2)
    assert stopper.reason

    with pytest.raises(SystemExit) as end:
        start(1).on_state_load(state)
    assert end.value.code == 0
    assert "nothing left to train: no validation since step 10 was better" in capsys.readouterr().err


@pytest.mark.parametrize("is_kept", [True, False])
def test_messages_name_the_best_model_of_the_run_that_is_resumed_if_it_exists(start, stopper, tmp_path, capsys, is_kept):
    state = tmp_path / "cat-state"
    state.mkdir()
    callback = start(2)
    validate(callback, 1.0)
    callback.on_state_save(state)
    best = tmp_path / "cat-best-step00000010.safetensors"
    if not is_kept:  # the run saved a better one after the state, or its user has moved it
        best.unlink()
    resumed = start(2)
    resumed.on_state_load(state)
    validate(resumed, 1.1, 1.2)
    printed = capsys.readouterr().err
    assert (
        f"better than its loss of 1; the best model is {tmp_path / 'cat-best-step00000010.safetensors'};" in printed
    ) == is_kept
    assert ("cat-best-step00000010.safetensors, the best model so far, is missing; another is saved" in printed) != is_kept


def test_a_run_that_was_never_validated_says_so(start, stopper, capsys):
    callback = start(2)
    stopper.reason = "SIGINT"
    callback.after_training()
    stopper.reason = ""
    callback.after_training()
    validate(callback, 1.0)
    callback.after_training()
    assert capsys.readouterr().err.count("--early_stopping had no effect: nothing was validated") == 1


def test_a_planned_stop_has_code_0_and_still_saves(monkeypatch, tmp_path):
    args = Namespace(save_every_n_steps=None, save_state=False)
    accelerator = SimpleNamespace(num_processes=1, is_main_process=True, sync_gradients=True)
    stopper = stop_request.Stopper(args, accelerator, tmp_path / "stop", 0)
    stopper.after_batch(accelerator)
    assert args.save_every_n_steps is None
    stopper.request("early stopping", 0)
    stopper.after_batch(accelerator)
    assert (args.save_every_n_steps, args.save_state) == (1, True)
    monkeypatch.setattr(stop_request.ranks, "largest", lambda accelerator, value: max(value, 131))
    other = stop_request.Stopper(args, accelerator, tmp_path / "stop", 0)
    other.after_batch(accelerator)
    assert other.code == 130, "of another process"
