"""`train FOLDER --try`: the runs, which of them are left to train, and their comparison."""

import io
import json
import signal

import pytest
from rich.console import Console

from kohya_ext import installed_gpus
from kohya_ext.config.settings import HIDDEN
from kohya_ext.errors import UserError
from kohya_ext.planning.trials import trials
from kohya_ext.reporting import sweep
from tests.unit.test_from_folder import images, start
from tests.unit.test_from_folder import model as model
from tests.unit.test_plan import checkout as checkout


def test_trials_are_all_combinations():
    runs = trials(["learning_rate=5e-5,1e-4", "--network-dim=8,16"])
    assert [run.name for run in runs] == [
        "learning_rate=5e-5-network_dim=8",
        "learning_rate=5e-5-network_dim=16",
        "learning_rate=1e-4-network_dim=8",
        "learning_rate=1e-4-network_dim=16",
    ]
    assert runs[1].words == ["--learning_rate", "5e-5", "--network_dim", "16"]
    assert [run.words for run in trials([])] == [[]]
    assert trials(["optimizer_type=a/b:c"])[0].name == "optimizer_type=a_b_c"


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (["learning_rate"], "must be OPTION=VALUE,VALUE"),
        (["=1"], "must be OPTION=VALUE,VALUE"),
        (["a=1", "a=2"], "is given twice"),
        (["a=x/y,x_y"], "in the same folder"),
        (["a=AdamW,adamw"], "in the same folder"),
        ([f"a={','.join(map(str, range(51)))}"], "makes 51 runs"),
    ],
)
def test_other_choices_are_errors(choices, message):
    with pytest.raises(UserError, match=message):
        trials(choices)


def write_journal(file, losses, status="finished", steps=300):
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {"kind": "start", "time": 1.0, "run": file.name, "name": "cat"},
        {"kind": "training", "time": 2.0, "steps": steps},
        *({"kind": "step", "time": 2.0 + step, "step": step, "loss": 0.5} for step in (100, 200, 300)),
    ]
    for number, loss in enumerate(losses, 1):
        both = {"loss": loss, "losses": [loss - 0.3, loss + 0.301], "held_out": True}
        lines.append({"kind": "validation", "time": 100.0, "step": 100 * number, "epoch": 1, **both})
    lines += [{"kind": "end", "time": 400.0, "status": status, "code": 0, "step": 300}] if status else []
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def shown(rows):
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(sweep.table(rows))
    return console.export_text()


def test_runs_are_ranked_by_their_lowest_validation(tmp_path):
    losses = {"a": [1.0, 0.9], "b": [0.8, 0.85], "c": [0.8005], "d": []}
    rows = [
        sweep.Row(name, sweep.newest_run(write_journal(tmp_path / f"{name}.journal.jsonl", each)))
        for name, each in losses.items()
    ]
    rows.append(sweep.Row("e", sweep.newest_run(tmp_path / "missing.journal.jsonl")))
    assert [row.name for row in sweep.ranked(rows)] == ["b", "c", "a", "d", "e"]
    text = shown(rows)
    assert "12.5% ± 0.0%" in text
    assert text.count("±") == 2, "the best one has no difference from itself"
    assert "not begun" in text
    assert sweep.verdict(rows) == "best: b, with a validation loss of 0.8005 at step 100"
    assert sweep.verdict(rows[3:]) == "no run was validated, so the runs cannot be compared"


@pytest.mark.parametrize(
    ("status", "steps", "finished"),
    [("finished", 300, True), ("finished", 500, False), ("stopped", 300, False), ("", 300, False)],
)
def test_a_run_is_finished_if_it_ended_as_planned(tmp_path, status, steps, finished):
    file = write_journal(tmp_path / "a.journal.jsonl", [0.9], status)
    assert sweep.is_finished(file, steps) is finished


def test_each_run_has_a_folder_and_finished_ones_are_not_repeated(checkout, tmp_path, model, monkeypatch, capsys):
    installed_gpus.first_gpu()  # before processes are replaced
    words = ("--yes", "--try", "learning_rate=5e-5,1e-4", "--steps", "300")
    folders = [tmp_path / "output" / f"cats-learning_rate={rate}" for rate in ("5e-5", "1e-4")]
    code, started = start(checkout, tmp_path, model, monkeypatch, None, *words)
    assert (code, len(started)) == (143, 1), "a stop ends the sweep"
    assert "the same command continues it" in capsys.readouterr().err

    write_journal(folders[0] / "cats-learning_rate=5e-5.journal.jsonl", [0.9])
    code, started = start(checkout, tmp_path, model, monkeypatch, None, *words)
    (command,) = started
    assert command[command.index("--output_dir") + 1] == str(folders[1])
    assert command[command.index("--learning_rate") + 1] == "1e-4"
    assert command[command.index("--max_train_steps") + 1] == "300"
    assert 'class_tokens = "cats"' in (folders[1] / "cats-learning_rate=1e-4.dataset.toml").read_text()
    printed = capsys.readouterr()
    assert "run 1 of 2, learning_rate=5e-5: already finished" in printed.err
    assert "and 1 more runs" in printed.out
    assert (tmp_path / "output" / "cats.sweep.report.html").is_file()


def test_a_signal_in_the_last_save_of_a_run_ends_the_sweep(checkout, tmp_path, model, monkeypatch, capsys):
    """The run finishes, with exit code 0."""
    installed_gpus.first_gpu()  # before processes are replaced

    def finish():
        signal.raise_signal(signal.SIGTERM)
        return 0

    words = ("--yes", "--try", "learning_rate=5e-5,1e-4", "--steps", "300")
    code, started = start(checkout, tmp_path, model, monkeypatch, None, *words, during=finish)
    assert (code, len(started)) == (143, 1)
    assert "the same command continues it" in capsys.readouterr().err


def test_a_finished_run_with_other_options_is_reported(tmp_path):
    file = write_journal(tmp_path / "a.journal.jsonl", [0.9])
    assert sweep.changed(file, {"network_dim": 8}) == [], "of a journal without settings"
    first, *rest = file.read_text().splitlines()
    settings = {"network_dim": [4, "command line"], "seed": [1, "preset"], "wandb_api_key": [HIDDEN, "environment"]}
    file.write_text("\n".join([json.dumps({**json.loads(first), "settings": settings}), *rest]) + "\n")
    assert sweep.changed(file, {"network_dim": 4, "seed": 1, "wandb_api_key": "secret"}) == []
    assert sweep.changed(file, {"network_dim": 8, "loss_type": "l1"}) == ["loss_type", "network_dim", "seed"]


def test_a_few_images_are_held_out_of_a_sweep(tmp_path):
    from kohya_ext.planning.from_folder import images_in

    assert [images_in(images(tmp_path / str(count), count)).compared for count in (7, 8, 40)] == [0, 2, 4]
