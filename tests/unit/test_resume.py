"""A run's position, and the choice of the state to resume."""

import contextlib
import os
import random
import re
import sys
import zipfile
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kohya_ext import preflight, renames
from kohya_ext.config.settings import Settings
from kohya_ext.errors import UserError
from kohya_ext.preflight import models
from kohya_ext.run import atomic_write, resume, run_record
from kohya_ext.run.atomic_write import folders_elsewhere
from kohya_ext.run.loaded_parts import GRADIENTS_FILE, gradient_differences
from patches import exact_resume


def write_state(folder, name, age, without=(), truncated=()):
    state = folder / name
    state.mkdir()
    for file in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "pytorch_model.bin"):
        if file in without:
            continue
        with zipfile.ZipFile(state / file, "w") as archive:
            archive.writestr("data", bytes(100))
        if file in truncated:
            (state / file).write_bytes((state / file).read_bytes()[:-30])
    os.utime(state, (1e9 - age, 1e9 - age))
    return state


def test_newest_state_is_the_newest_complete_one(tmp_path, capsys):
    write_state(tmp_path, "cat-step00000100-state", 30)
    expected = write_state(tmp_path, "cat-000002-state", 20)
    write_state(tmp_path, "cat-rolling00000300-state", 10, without=["random_states_0.pkl"])
    write_state(tmp_path, "cat-state", 5, truncated=["optimizer.bin"])
    write_state(tmp_path, "cat-big-state", 1)
    write_state(tmp_path, "cat-step00000400-state.partial", 1)
    assert resume.newest_state(tmp_path, "cat") == expected
    log = capsys.readouterr().err
    assert "random_states_0.pkl missing" in log
    assert "optimizer.bin is damaged" in log


def test_newest_state_is_none_without_states(tmp_path):
    assert resume.newest_state(tmp_path, "cat") is None


def test_local_variable_of_a_running_function_is_set():
    def train(steps):
        global_step = 0
        for _ in steps():
            global_step += 1
        return global_step

    def steps():
        yield 1
        assert resume._set_local(sys._getframe().f_back, "global_step", 40)
        yield 2
        yield 3

    assert train(steps) == 42


def test_random_state_is_restored():
    torch = pytest.importorskip("torch")
    numpy = pytest.importorskip("numpy")
    import random

    def draw():
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    state = resume.random_state()
    first = draw()
    assert draw() != first
    resume.set_random_state(state)
    assert draw() == first


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def position(accumulated=1, processes=1, index=0, **more):
    args = SimpleNamespace(gradient_accumulation_steps=accumulated, max_train_steps=9)
    accelerator = SimpleNamespace(
        is_main_process=index == 0, num_processes=processes, process_index=index, _models=[], _optimizers=[]
    )
    return resume.Position(args, accelerator, **more)


BEGAN = {"random": {}, "counters": [0, 0], "next_step": None, "seeds": [7], "generator": None}


@pytest.mark.parametrize(
    ("sizes", "now", "expected"),
    [([4, 2], [4, 2], 6), ([4, 2], [2, 1], 12), ([1], [3], 2), ([], [3], 6), ([4], [2, 2], 6), ([4], [None], 6)],
)
def test_position_has_as_many_images_with_another_batch_size(sizes, now, expected):
    loader = SimpleNamespace(dataset=SimpleNamespace(datasets=[SimpleNamespace(batch_size=size) for size in now]))
    assert resume.data_order.batches_of_as_many_images(loader, 6, sizes) == expected


def test_position_stays_when_gradient_accumulation_changes(torch, tmp_path):
    position(2, step=3, epoch=0, batch=6, _began=BEGAN).on_state_save(tmp_path)
    resumed = position(8)
    resumed.on_state_load(tmp_path)
    assert (resumed._target["step"], resumed._target["batch"]) == (3, 6)


@pytest.mark.parametrize("case", ["complete", "failed", "missing", "none"])
def test_gradients_that_are_not_those_of_the_step_are_reported(torch, tmp_path, case):
    model = torch.nn.Linear(2, 2, bias=False)  # in no optimizer
    saving = position(2, _began=BEGAN)
    saving.accelerator._models, saving.accelerator.unwrap_model = [model], lambda model: model
    for number in range(2 + (case == "failed")):
        saving.before_backward()
        saving.accelerator.sync_gradients = number == 1
        if case != "none":
            model.weight.grad = torch.ones(2, 2)
        if number < 2:
            saving.after_batch(saving.accelerator)
    saving.on_state_save(tmp_path)
    if case == "missing":
        (tmp_path / GRADIENTS_FILE).unlink()
    saved = torch.load(tmp_path / resume.FILE, weights_only=True)
    words = {"failed": "a part of the failed step's gradients", "missing": f"lacks {GRADIENTS_FILE}"}.get(case)
    assert [words in each for each in gradient_differences(tmp_path, saved)] == [True] * (words is not None)


def test_state_holds_the_random_state_of_the_next_step(torch, tmp_path):
    running = position(step=3, epoch=0, batch=3, _began=BEGAN)
    running.on_state_save(tmp_path)
    random.random()  # as rich 14.1 does for each line logged about the save
    next_state = random.getstate()
    running._save_next_random_state()
    random.random()
    resumed = position()
    resumed.on_state_load(tmp_path)
    resume.set_random_state(resumed._random)
    assert random.getstate() == next_state


def test_extra_state_leaves_the_random_state_unchanged(torch, tmp_path):
    running = position(step=3, epoch=0, batch=3, _began=BEGAN)
    before = random.getstate()
    with running.preserving_random_state():
        random.random()
        running.on_state_save(tmp_path)
        random.random()
    assert random.getstate() == before
    running._save_next_random_state()
    assert not (tmp_path / resume.RANDOM_FILE).exists()
    resumed = position()
    resumed.on_state_load(tmp_path)
    random.random()
    resume.set_random_state(resumed._random)
    assert random.getstate() == before


def test_every_process_restores_its_own_random_state(torch, tmp_path, capsys):
    ranks = []
    for seed in (1, 2):
        random.seed(seed)
        ranks.append({"random": resume.random_state(), "began": BEGAN})
    position(processes=2, step=3, _ranks=ranks).on_state_save(tmp_path)
    for index, seed in enumerate((1, 2)):
        resumed = position(processes=2, index=index)
        resumed.on_state_load(tmp_path)
        resume.set_random_state(resumed._random)
        random_after = random.getstate()
        random.seed(seed)
        assert random.getstate() == random_after
    assert "will differ" not in capsys.readouterr().err
    position(processes=1).on_state_load(tmp_path)
    assert "holds the random state of 2 of 2 processes, but this run has 1" in capsys.readouterr().err


def test_a_batch_that_was_loaded_before_the_save_is_loaded_again_with_the_same_random_numbers(torch, tmp_path):
    """Between loads, a script's own saves may draw random numbers, which a resumed run that skips batches does not."""
    loaders = pytest.importorskip("accelerate.data_loader")

    class Captions(torch.utils.data.Dataset):
        seed = 7

        def __len__(self):
            return 6

        def __getitem__(self, index):
            return random.random()

    def train(running, folder):
        loader = loaders.DataLoaderShard(Captions())
        random.seed(0)
        global_step, drawn = 0, {}
        batches = running.batches(loader, lambda: loaders.DataLoaderShard.__iter__(loader), sys._getframe())
        for batch in batches:
            global_step += 1  # noqa: SIM113, a resume sets it
            drawn[global_step] = batch.item()
            running.after_batch(SimpleNamespace(num_processes=1, sync_gradients=True))
            if global_step in (2, 3):
                (folder / f"{global_step}").mkdir()
                running.on_state_save(folder / f"{global_step}")
                random.random()  # as rich 14.1 does for each line logged about the save
        return drawn

    expected = train(position(epoch=-1), tmp_path)
    resumed = position()
    resumed.epoch, resumed.args.resume, resumed.accelerator.log = -1, tmp_path / "3", None
    resumed.on_state_load(tmp_path / "3")
    (tmp_path / "resumed").mkdir()
    assert train(resumed, tmp_path / "resumed") == {step: value for step, value in expected.items() if step > 3}


def describe(**more):
    given = {"train_data_dir": "cats", "network_dim": 4, "seed": 1, **more}
    return run_record.describe("sdxl_train_network.py", Namespace(**given))


def test_auto_resumes_the_newest_state_of_this_run_only(tmp_path, capsys):
    run = describe()
    older, newer = (write_state(tmp_path, f"cat-rolling0000000{step}-state", 0) for step in (9, 3))
    run_record.write(older, run, 9)
    run_record.write(newer, describe(), 3)  # the same command, started again
    other = write_state(tmp_path, "cat-rolling00000090-state", 0)
    run_record.write(other, describe(network_dim=8), 90)
    assert resume.state_to_resume(tmp_path, "cat", run) == newer
    assert "cat-rolling00000090-state, saved by another run (--network_dim was 8 and is 4)" in capsys.readouterr().err
    assert resume.state_to_resume(tmp_path, "cat", describe(seed=2)) is None


def test_auto_resumes_the_last_save_although_the_clock_was_set_back(tmp_path, monkeypatch):
    monkeypatch.setattr(run_record, "_current", None)
    monkeypatch.setattr(run_record, "_last_saved", 0.0)
    run, states = describe(), {}
    for step, hours in ((3, 0), (6, 2), (9, 1), (12, 0.5)):
        states[step] = write_state(tmp_path, f"cat-step{step:08d}-state", 0)
        if step == 12:  # another process resumes it
            monkeypatch.setattr(run_record, "_last_saved", 0.0)
            run = describe().as_continuation_of(run_record.read(states[9]))
        monkeypatch.setattr(run_record.time, "time", lambda hours=hours: 1.8e9 + 3600 * hours)
        run_record.write(states[step], run, step)
        assert resume.state_to_resume(tmp_path, "cat", run) == resume.newest_state(tmp_path, "cat") == states[step]


@pytest.mark.parametrize("name", ["cat", "pets/cat"])
def test_auto_finds_a_state_that_had_to_be_saved_elsewhere(tmp_path, monkeypatch, name):
    """The disk was full: newer states than the output folder's are in the cache folder, with those of other runs."""
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    run = describe(output_dir=str(out), output_name=name)
    other = describe(output_dir=str(tmp_path / "other"), output_name=name)
    states = {}
    for folder, record, step in (
        (out / "pets" if "/" in name else out, run, 3),
        (tmp_path / "cache/saved/1", run, 9),
        (tmp_path / "cache/saved/2", other, 12),
    ):
        folder.mkdir(parents=True)
        states[step] = write_state(folder, f"cat-rolling{step:08d}-state", 0)
        run_record.write(states[step], record, step)
    elsewhere = folders_elsewhere(None)
    assert resume.state_to_resume(out, name, run, elsewhere=elsewhere) == states[9]
    assert resume.stale_states(out, name, describe(output_dir=str(out), output_name=name), None, elsewhere) == [
        states[9],
        states[3],
    ]
    assert folders_elsewhere(tmp_path / "fallback")[0] == tmp_path / "fallback"


def test_auto_fails_when_every_state_is_damaged(tmp_path):
    run = describe()
    state = write_state(tmp_path, "cat-rolling00000009-state", 0)
    run_record.write(state, run, 9)
    (state / "optimizer.bin").write_bytes(b"PK")
    with pytest.raises(
        UserError, match=r"every state in .* is damaged .*optimizer.bin is truncated: 2 of \d+ bytes\)\. Restore.* backup, or"
    ):
        resume.state_to_resume(tmp_path, "cat", run)


def test_damaged_random_state_alone_can_be_resumed_with_other_random_numbers(tmp_path):
    run = describe()
    for step, damaged in ((3, "optimizer.bin"), (9, "random_states_0.pkl")):
        run_record.write(write_state(tmp_path, f"cat-rolling0000000{step}-state", 0, truncated=[damaged]), run, step)
        inexact = resume.inexact_advice(tmp_path / f"cat-rolling0000000{step}-state")
        assert inexact == (", or add --inexact_resume to resume with other random numbers" if step == 9 else "")
    with pytest.raises(UserError, match="or add --inexact_resume to resume with other random numbers, or remove --resume"):
        resume.state_to_resume(tmp_path, "cat", run)
    assert resume.state_to_resume(tmp_path, "cat", run, inexact=True) == tmp_path / "cat-rolling00000009-state"


def test_random_state_is_loaded_by_an_accelerate_that_does_not_allow_numpy(torch, tmp_path):
    """accelerate before 1.1, as LoRA_Easy_Training_Scripts has it with PyTorch 2.6: it ends with ``KeyError: 'step'``."""
    import numpy

    saved = {"step": 3, "random_state": random.getstate(), "torch_manual_seed": torch.get_rng_state()}
    torch.save({**saved, "numpy_random_seed": numpy.random.get_state()}, tmp_path / "random_states_0.pkl")
    (tmp_path / resume.FILE).touch()
    torch.serialization.clear_safe_globals()
    loaded = []

    def load_state(accelerator, folder):
        loaded.append(torch.load(Path(folder) / "random_states_0.pkl", weights_only=True)["step"])

    exact_resume._load_state(load_state, Settings())(SimpleNamespace(process_index=0), str(tmp_path))
    assert loaded == [3]


def test_stale_states_are_of_other_runs_or_later_steps(tmp_path):
    run = describe()
    paths = {}
    for name, record, step in (
        ("cat-rolling00000003-state", run, 3),
        ("cat-rolling00000009-state", run, 9),
        ("cat-000002-state", describe(), 5),
    ):
        paths[name] = write_state(tmp_path, name, 0)
        run_record.write(paths[name], record, step)
    without_record = write_state(tmp_path, "cat-step00000004-state", 0)
    resumed = paths["cat-rolling00000003-state"]
    assert set(resume.stale_states(tmp_path, "cat", run, None)) == {*paths.values(), without_record}
    # Steps after the resumed state are trained again. A state without a record may belong to this run.
    stale = {paths["cat-rolling00000009-state"], paths["cat-000002-state"]}
    assert set(resume.stale_states(tmp_path, "cat", run, resumed)) == stale
    assert resume.stale_states(tmp_path, "cat", run, without_record) == []


def test_progress_bar_starts_at_the_resumed_step():
    tqdm = pytest.importorskip("tqdm")
    bar = tqdm.tqdm(total=80, file=open(os.devnull, "w"))  # noqa: SIM115
    resume._set_initial_step(bar, 60)
    bar.update(1)
    shown = bar.format_dict
    assert (shown["initial"], shown["n"]) == (60, 61)
    assert shown["elapsed"] < 60


def test_state_of_an_earlier_version_is_rejected(torch, tmp_path, capsys):
    torch.save({"step": 3, "epoch": 0, "batch": 3, "finished": False}, tmp_path / resume.FILE)
    with pytest.raises(SystemExit):
        position().on_state_load(tmp_path)
    assert "was saved by an earlier version of kohya_ext" in capsys.readouterr().err


def starting_at(step=None, epoch=None, skips=False, **more):
    started = position(_began=BEGAN, **more)
    vars(started.args).update(initial_step=step, initial_epoch=epoch, skip_until_initial_step=skips)
    return started


@pytest.mark.parametrize("resumed", [starting_at(), starting_at(0, 1), starting_at(skips=True)])
def test_resume_of_a_run_from_the_first_epoch_sets_no_start(torch, tmp_path, resumed):
    starting_at().on_state_save(tmp_path)
    resumed.on_state_load(tmp_path)
    assert (resumed.args.initial_step, resumed.args.initial_epoch) == (0, None)
    assert resumed._target is not None


@pytest.mark.parametrize("resumed", [starting_at(), starting_at(epoch=3)], ids=["without", "again"])
def test_resume_of_a_run_from_a_later_epoch_continues_it(torch, tmp_path, capsys, resumed):
    running = starting_at(epoch=3)
    running.step = 4
    running.on_state_save(tmp_path)
    resumed.on_state_load(tmp_path)
    assert (resumed.step, resumed.args.initial_step, resumed.args.initial_epoch) == (4, None, 3)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("resumed", [starting_at(epoch=2), starting_at(step=4), starting_at(epoch=3, skips=True)])
def test_another_start_than_the_position_of_the_state_is_reported(torch, tmp_path, capsys, resumed):
    running = starting_at(epoch=3)
    running.step = 4
    running.on_state_save(tmp_path)
    resumed.on_state_load(tmp_path)
    assert resumed._target is None
    assert "is not used, because --initial_step or --initial_epoch sets the start" in capsys.readouterr().err


def test_run_without_an_epoch_left_keeps_the_position_of_its_state(torch, tmp_path):
    running = starting_at(epoch=3)
    running.step = 4
    (earlier := tmp_path / "earlier").mkdir()
    running.on_state_save(earlier)
    resumed = starting_at(epoch=3)
    resumed.args.resume = str(earlier)
    resumed.on_state_load(earlier)
    resumed.on_state_save(tmp_path)
    assert (tmp_path / resume.FILE).read_bytes() == (earlier / resume.FILE).read_bytes()


def test_resumed_run_begins_with_the_first_batch_of_an_accumulated_step(tmp_path):
    resumed = position(accumulated=4)
    resumed.accelerator.step = 3  # accelerate's, from a state that was saved within a step
    resumed.keep_loaded(tmp_path)
    assert resumed.accelerator.step == 0


def test_paths_of_a_run_that_differ_in_case_are_compared_as_the_file_system_does(tmp_path):
    (tmp_path / "data").mkdir()
    is_same = (tmp_path / "DATA").exists()

    def record(data, name):
        return run_record.RunRecord("x.py", {"train_data_dir": data, "seed": "1"}, output=os.path.join(data, name))

    earlier, run = record(str(tmp_path / "data"), "cat"), record(str(tmp_path / "DATA"), "Cat")
    assert bool(run.differences(earlier)) == (not is_same)
    assert run.has_same_output(earlier) == is_same
    assert run.differences(record(run.identity["train_data_dir"], "cat")) == []
    assert run_record.RunRecord("x.py", {"seed": "2"}).differences(run_record.RunRecord("x.py", {})) == [
        "--seed was not given and is 2"
    ]


def test_auto_resumes_a_state_that_was_saved_next_to_one_that_is_open(tmp_path, monkeypatch, capsys):
    def replace(source, target, original=os.replace):
        if Path(source).name == "my.cat-state":
            error = PermissionError(13, "in use")
            error.winerror = 32  # type: ignore[attr-defined]
            raise error
        original(source, target)

    def save(folder):
        folder.mkdir()
        write_state(folder, "files", 0)
        run_record.write(folder, run_record.RunRecord("x.py", {}, id="1"), 1)

    monkeypatch.setattr(renames, "PATIENCE", 0.0)
    monkeypatch.setattr(os, "replace", replace)
    for _ in range(2):
        atomic_write.write_atomically(tmp_path / "my.cat-state", save, lambda: 0)
    assert "saved my.cat-state.2 instead" in capsys.readouterr().err
    run = run_record.RunRecord("x.py", {}, id="1")
    assert resume.state_to_resume(tmp_path, "my.cat", run) == tmp_path / "my.cat-state.2"
    assert {path.name for path in resume.stale_states(tmp_path, "my.cat", run, None)} == {"my.cat-state", "my.cat-state.2"}


@contextlib.contextmanager
def held(file, monkeypatch, attempts=10**9):
    """Lets no other program read a file, as an indexer on Windows: simulated elsewhere, and for a number of attempts."""
    if os.name == "nt" and attempts > 100:
        import _winapi

        handle = _winapi.CreateFile(str(file), _winapi.GENERIC_READ, 0, 0, _winapi.OPEN_EXISTING, 0, 0)
        yield
        _winapi.CloseHandle(handle)
        return
    left = [attempts]

    def open_unless_held(path, *args, original=Path.open, **kwargs):
        if path == file and left[0]:
            left[0] -= 1
            error = PermissionError(13, "Permission denied")
            error.winerror = 32  # type: ignore[attr-defined]
            raise error
        return original(path, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", open_unless_held)
        yield
    assert left[0] == 0 or attempts > 100


@pytest.mark.parametrize("name", ["optimizer.bin", "model.safetensors", run_record.FILE])
def test_a_state_of_which_a_file_is_open_is_not_left_for_an_older_one(tmp_path, monkeypatch, name):
    monkeypatch.setattr(renames, "PATIENCE", 0.1)
    run = run_record.RunRecord("x.py", {}, id="1")
    for step in (1, 2):
        state = write_state(tmp_path, f"cat-step0000000{step}-state", 0)
        (state / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        run_record.write(state, run, step)
    with held(state / name, monkeypatch):
        with pytest.raises(UserError, match=rf"{re.escape(name)} is open in another program.*close that program"):
            resume.state_to_resume(tmp_path, "cat", run)
        with pytest.raises(SystemExit):
            exact_resume._load_state(None, Settings())(SimpleNamespace(process_index=0), str(state))
        findings = preflight.Findings()
        models._check_state(Path("x.py"), Namespace(resume=str(state)), Settings(), findings)
        assert "is open in another program" in findings.errors[0]
    with held(state / name, monkeypatch, attempts=1):
        assert resume.state_to_resume(tmp_path, "cat", run) == state
