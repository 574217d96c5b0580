"""Locks, journals and indexes change no other file, and open files do not end a run on Windows."""

import errno
import os
from argparse import Namespace
from pathlib import Path

import pytest

from kohya_ext import renames
from kohya_ext.errors import UserError
from kohya_ext.run import atomic_write, output_lock, plain_file, rank_reports
from kohya_ext.run.atomic_write import preserve, previous, write_atomically
from kohya_ext.run.file_index import FileIndex
from kohya_ext.run.journal import Journal
from kohya_ext.run.journal_reader import JournalReader

links = pytest.mark.skipif(os.name == "nt", reason="symbolic links need a right on Windows, and Wine has none")
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


def test_other_errors_of_a_rename_are_raised_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(renames, "PATIENCE", 3600.0)
    with pytest.raises(FileNotFoundError):
        renames.rename(tmp_path / "missing", tmp_path / "x")
