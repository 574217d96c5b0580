"""Locks, journals and indexes change no other file, and open files do not end a run on Windows."""

import errno
import os
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
from kohya_ext.patches import atomic_saves, rolling_states

from kohya_ext import renames
from kohya_ext.config.settings import Settings
from kohya_ext.errors import UserError
from kohya_ext.run import atomic_write, output_lock, plain_file, rank_reports
from kohya_ext.run.atomic_write import preserve, previous, write_atomically
from kohya_ext.run.file_index import FileIndex
from kohya_ext.run.journal import Journal
from kohya_ext.run.journal_reader import JournalReader

links = pytest.mark.linux("symbolic links need a right on Windows, and Wine has none")
PRECIOUS = "precious\n"


@pytest.fixture
def precious(tmp_path) -> Path:
    file = tmp_path / "elsewhere"
    file.write_text(PRECIOUS)
    return file


@pytest.fixture(autouse=True)
def _release():
    yield
    output_lock.release_all()


def place(kind: str, name: Path, target: Path) -> None:
    """Put another file where the extension writes one."""
    if kind == "symbolic link":
        name.symlink_to(target)
    elif kind == "dangling link":
        name.symlink_to(target.with_name("missing"))
    elif kind == "hard link":
        os.link(target, name)
    elif kind == "pipe":
        os.mkfifo(name)
    else:
        name.write_text(PRECIOUS)


KINDS = [
    pytest.param("symbolic link", marks=links),
    pytest.param("dangling link", marks=links),
    "hard link",
    pytest.param("pipe", marks=links),
    "other file",
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_is_a_plain_file_of_ours(tmp_path, precious, kind):
    args = Namespace(output_dir=str(tmp_path / "out"), output_name="cat")
    (tmp_path / "out").mkdir()
    place(kind, tmp_path / "out" / ".cat.lock", precious)
    for call in (output_lock.acquire, output_lock.other_owner):
        with pytest.raises(
            UserError, match=r"cannot lock .*\.cat\.lock: it is a.*; remove it, or choose another --output_name"
        ):
            call(args)
    assert precious.read_text() == PRECIOUS
    assert not (tmp_path / "missing").exists()
    assert not output_lock._locks


@pytest.mark.parametrize("kind", KINDS)
def test_a_journal_is_appended_to_a_journal_only(tmp_path, precious, kind, capsys):
    (tmp_path / "out").mkdir()
    file = tmp_path / "out" / "cat.journal.jsonl"
    place(kind, file, precious)
    written = Journal(file, "a")
    written.open()
    written.write("start", run="a")
    written.report_problem()
    written.close()
    assert "which is left unchanged; remove it or set --journal_file; training continues" in capsys.readouterr().err
    assert precious.read_text() == PRECIOUS
    assert not (tmp_path / "missing").exists()
    assert kind != "other file" or file.read_text() == PRECIOUS


@links
def test_an_index_in_a_downloaded_folder_follows_no_link(tmp_path, precious):
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.npz").write_bytes(b"x")
    (folder / ".kohya_ext_cache_index").symlink_to(precious)
    FileIndex().add(str(folder / "a.npz"), "check")
    assert precious.read_text() == PRECIOUS


@links
def test_a_report_of_a_process_follows_no_link(tmp_path, precious):
    (tmp_path / "cat.journal.jsonl.rank1.json.partial").symlink_to(precious)
    rank_reports.RankReport(tmp_path / "cat.journal.jsonl", 1, "here").write(0.5)
    assert precious.read_text() == PRECIOUS
    assert [row["own_seconds"] for row in rank_reports.read(tmp_path / "cat.journal.jsonl")] == [0.5]


def test_an_open_journal_can_be_renamed_read_and_removed(tmp_path):
    file, renamed = tmp_path / "cat.journal.jsonl", tmp_path / "dog.journal.jsonl"
    written = Journal(file, "a")
    written.open()
    written.write("start", run="a")
    file.rename(renamed)
    written.write("step", step=1)
    reader = JournalReader(renamed)
    assert reader.update()
    assert reader.latest.step == 1
    with plain_file.shared_reader(renamed) as stream:
        renamed.unlink()
        assert stream.read().count(b"\n") == 2
    written.close()


# --- open files on Windows -------------------------------------------------------------------------------------------


class Held:
    """Fails like Windows while a program has files open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: set[str], attempts: int) -> None:
        self.names, self.left, self.replace = names, attempts, os.replace
        monkeypatch.setattr(renames.os, "replace", self)
        monkeypatch.setattr(renames, "PATIENCE", 0.2)
        monkeypatch.setattr(renames, "_PAUSE", 0.0)

    def __call__(self, source: Path, target: Path) -> None:
        if self.left and {Path(source).name, Path(target).name} & self.names:
            self.left -= 1
            error = PermissionError(errno.EACCES, "The process cannot access the file")
            error.winerror = 32  # type: ignore[attr-defined]
            raise error
        self.replace(source, target)


def write(file: Path, text: str) -> None:
    write_atomically(file, lambda partial: partial.write_text(text), lambda: 1)


def test_a_file_that_is_open_for_a_moment_is_replaced(tmp_path, monkeypatch):
    file = tmp_path / "cat.safetensors"
    file.write_text("old")
    held = Held(monkeypatch, {file.name}, attempts=3)
    write(file, "new")
    assert (file.read_text(), held.left) == ("new", 0)


@pytest.mark.parametrize("keeps_previous", [False, True])
def test_a_model_that_stays_open_is_saved_next_to_it(tmp_path, monkeypatch, capsys, keeps_previous):
    file = tmp_path / "cat.safetensors"
    file.write_text("old")
    if keeps_previous:
        preserve(file)
    Held(monkeypatch, {file.name}, attempts=10**9)
    write(file, "new")
    write(file, "newer")
    assert file.read_text() == "old"
    assert (tmp_path / "cat.2.safetensors").read_text() == "new"
    assert (tmp_path / "cat.3.safetensors").read_text() == "newer"
    assert not previous(file).exists()
    assert "cat.safetensors is open in another program and cannot be replaced: saved cat.2.safetensors instead" in (
        capsys.readouterr().err
    )
    atomic_write._preserved.discard(file)


def test_a_state_that_cannot_be_replaced_keeps_its_earlier_contents(tmp_path, monkeypatch):
    """The earlier state is renamed first, because a folder cannot replace another."""
    state, partial = tmp_path / "cat-state", tmp_path / "cat-state.partial"
    for folder, text in ((state, "old"), (partial, "new")):
        folder.mkdir()
        (folder / "optimizer.bin").write_text(text)
    Held(monkeypatch, {partial.name}, attempts=10**9)
    with pytest.raises(PermissionError):
        atomic_write._replace(partial, state)
    assert (state / "optimizer.bin").read_text() == "old"


@pytest.fixture
def removals(tmp_path, monkeypatch):
    """The functions with which sd-scripts removes old models and states of an output folder."""
    outputs = atomic_saves._start(Namespace(output_dir=str(tmp_path), output_name="cat"), None, Settings())
    monkeypatch.setattr(atomic_saves, "current", lambda kind: outputs)
    return [atomic_saves._remove(original, Settings()) for original in (os.remove, shutil.rmtree)]


def test_an_old_model_and_state_that_are_open_are_kept_whole(tmp_path, removals, monkeypatch, capsys):
    remove, remove_folder = removals
    model, state = tmp_path / "cat-step00000010.safetensors", tmp_path / "cat-step00000010-state"
    model.write_text("old")
    state.mkdir()
    (state / "optimizer.bin").write_text("old")
    with monkeypatch.context() as patched:
        Held(patched, {state.name}, attempts=10**9)
        fails = atomic_saves._remove(lambda path: os.replace(path, state), Settings())
        fails(str(model))
        remove_folder(str(state))
    assert capsys.readouterr().err.count("is open in another program and cannot be removed; training continues") == 2
    assert model.exists()
    assert (state / "optimizer.bin").read_text() == "old"
    remove(str(model))
    remove_folder(str(state))
    assert not list(tmp_path.iterdir())


def test_an_old_state_of_which_a_file_is_open_is_removed_in_part(tmp_path, removals, monkeypatch, capsys):
    """Where a folder can be renamed nevertheless: with a file that was opened for sharing."""
    monkeypatch.setattr(renames, "PATIENCE", 0.0)
    state = tmp_path / "cat-step00000010-state"
    state.mkdir()

    def fail(folder):
        assert folder != state
        error = PermissionError(errno.EACCES, "The process cannot access the file")
        error.winerror = 32  # type: ignore[attr-defined]
        raise error

    atomic_saves._remove(fail, Settings())(str(state))
    assert "is open in another program and cannot be removed; training continues" in capsys.readouterr().err
    assert not state.exists(), "a part of a state must not look like a state"


def test_other_errors_of_a_removal_are_raised(tmp_path, removals):
    remove, remove_folder = removals
    with pytest.raises(FileNotFoundError):
        remove(str(tmp_path / "cat.safetensors"))
    with pytest.raises(FileNotFoundError):
        remove_folder(str(tmp_path / "cat-state"))


def test_a_timed_state_that_is_open_is_removed_after_a_later_one(tmp_path, monkeypatch, capsys):
    states = [tmp_path / f"cat-rolling0000000{step}-state" for step in (1, 2, 3)]
    for state in states:
        state.mkdir()
    rolling = rolling_states._Rolling(tmp_path, "cat", 0.0, 1, saved=states[:2])
    with monkeypatch.context() as patched:
        Held(patched, {states[0].name}, attempts=10**9)
        rolling._remove_oldest()
    assert "cannot remove the older state" in capsys.readouterr().err
    rolling.saved.append(states[2])
    rolling._remove_oldest()
    assert rolling.saved == [*tmp_path.iterdir()] == states[2:]


def test_other_errors_of_a_rename_are_raised_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(renames, "PATIENCE", 3600.0)
    with pytest.raises(FileNotFoundError):
        renames.rename(tmp_path / "missing", tmp_path / "x")
