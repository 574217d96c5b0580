"""--early_stopping with the real scripts: training is unchanged, equal weights have equal losses, a resume respects it."""

import json

import pytest

from kohya_ext.run import evaluations
from kohya_ext.tiny import dataset
from kohya_ext.tiny.arguments import OUTPUT_NAME

torch = pytest.importorskip("torch")

FULL, LORA = "sdxl_train.py", "sdxl_train_network.py"
OTHERS = ("flux_train_network.py", "sd3_train_network.py", "anima_train_network.py")
PATIENT = ("--early_stopping", "9", "--validate_every_n_steps", "2")

#: A learning rate that changes no weight, so that all validations are of the same weights.
STILL = ("--learning_rate", "1e-30")


def validations(folder):
    lines = (folder / f"{OUTPUT_NAME}.journal.jsonl").read_text().splitlines()
    return evaluations.of_lines(map(json.loads, filter(None, lines)))  # a resumed run begins with an empty line


@pytest.mark.parametrize("script", [LORA, *(pytest.param(script, marks=pytest.mark.slow) for script in (FULL, *OTHERS))])
def test_training_is_the_same_and_the_best_model_is_kept(checkout, train, script):
    run = train(checkout, script, *PATIENT)
    other = train(checkout, script)
    assert run.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(tensor, run.tensors[name]) for name, tensor in other.tensors.items())
    assert "measures memorisation only partly" in run.output
    measured = validations(run.folder)
    assert [each.step for each in measured] == [2, 4]
    assert [len(each.losses) for each in measured] == [4, 4]
    assert not measured[0].held_out
    assert measured[0].bands
    assert measured[0].loss != measured[1].loss
    best = evaluations.best(measured)
    assert [file.name for file in run.folder.glob("*-best-*")] == [f"{OUTPUT_NAME}-best-step{best.step:08d}.safetensors"]


@pytest.mark.parametrize("seed", [(), pytest.param(("--validation_seed", "2"), marks=pytest.mark.slow)])
def test_other_images_are_validated_than_upstream_trains(checkout, train, seed, tmp_path):
    dataset.write(tmp_path, 11, 128)
    words = ("--train_data_dir", str(tmp_path), "--validation_split", "0.5", *seed)
    usual, stopping = train(checkout, LORA, *words), train(checkout, LORA, *words, *PATIENT)
    # Upstream rounds 5.5 images of both kinds up, and without a seed draws twice.
    assert "some validation images are also trained on, because upstream" in usual.output
    assert [(len(each.losses), each.held_out) for each in validations(stopping.folder)] == [(5, True)] * 2
    assert usual.tensors.keys() == stopping.tensors.keys()
    assert all(torch.equal(tensor, stopping.tensors[name]) for name, tensor in usual.tensors.items())


@pytest.mark.parametrize("script", [LORA, pytest.param(FULL, marks=pytest.mark.slow)])
def test_a_run_stops_early_and_stays_stopped(checkout, train, script):
    # Workers shuffle upstream's validation images.
    words = (*STILL, "--early_stopping", "2", "--validate_every_n_steps", "2", "--max_train_steps", "30")
    words += ("--max_data_loader_n_workers", "1", "--validation_split", "0.5", "--resume", "auto")
    words += ("--optimizer_type", "SGDNesterov")  # AdamW takes a step of the learning rate, however small the gradient
    run = train(checkout, script, *words)
    assert run.code == 0, run.output[-4000:]
    measured = validations(run.folder)
    assert len(measured) >= 3
    assert measured[0].held_out
    assert len({each.losses for each in measured}) == 1, "the losses of the same weights differ"
    assert "early stopping: no validation since step 2 was better" in run.output
    assert "to resume" not in run.output
    (state,) = run.folder.glob("*-state")
    again = train(checkout, script, *words, output=run.folder)
    assert again.code == 0, again.output[-4000:]
    assert "nothing left to train: no validation since step 2" in again.output
    assert validations(run.folder) == measured
    assert [path.name for path in run.folder.glob("*-state")] == [state.name]


@pytest.mark.slow
@pytest.mark.parametrize("script", [LORA, FULL])
def test_a_state_of_a_validated_step_can_be_resumed(checkout, train, script):
    words = (*PATIENT, "--save_state", "--save_every_n_steps", "2", "--learning_rate", "0.01")
    run = train(checkout, script, *words)
    state = str(run.folder / f"{OUTPUT_NAME}-step00000002-state")
    resumed = train(checkout, script, *words, "--resume", state)
    assert all(torch.equal(tensor, resumed.tensors[name]) for name, tensor in run.tensors.items())
    files = [sorted(file.name for file in each.folder.glob("*.safetensors")) for each in (run, resumed)]
    assert [name for name in files[0] if "best" in name] == [name for name in files[1] if "best" in name]


@pytest.mark.slow
def test_processes_share_the_batches_and_agree(checkout, train):
    run = train(checkout, LORA, *PATIENT, "--validation_split", "0.5", "--max_data_loader_n_workers", "0", ranks=2)
    assert run.code == 0, run.output[-4000:]
    measured = validations(run.folder)
    assert [(each.step, len(each.losses)) for each in measured] == [(2, 2), (4, 2)]
    best = evaluations.best(measured)
    assert [file.name for file in run.folder.glob("*-best-*")] == [f"{OUTPUT_NAME}-best-step{best.step:08d}.safetensors"]
