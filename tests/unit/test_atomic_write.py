"""Atomic writes: only complete files get their final name, and a full disk loses nothing."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace

import pytest
from kohya_ext.patches import atomic_saves

from kohya_ext.config.settings import Settings
from kohya_ext.run import atomic_write
from kohya_ext.run.atomic_write import DiskFullError, WritePolicy, fail_fast, write_atomically


def fill_disk(path):
    path.write_text("part")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_file_is_replaced_only_when_complete(tmp_path):
    final = tmp_path / "model.safetensors"
    final.write_text("old")

    def write(path):
        assert path.parent == tmp_path
        path.write_text("new")
        assert final.read_text() == "old"
        return "result"

    assert write_atomically(final, write, lambda: 3) == "result"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("model.safetensors", "new")]


def test_preserved_file_is_renamed_once(tmp_path):
    final = tmp_path / "model.safetensors"
    for text in ("first run", "second run", "third run", "third run, later"):
        if text != "third run, later":  # a run replaces its own file
            atomic_write.preserve(final)
        write_atomically(final, lambda path: path.write_text(text), lambda: 3)  # noqa: B023 - called immediately
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "model.safetensors": "third run, later",
        "model.previous.safetensors": "second run",
    }


def test_preserved_folder_is_renamed(tmp_path):
    final = tmp_path / "model-v1.5"
    final.mkdir()
    (final / "old").touch()
    atomic_write.preserve(final)
    write_atomically(final, lambda path: path.mkdir(), lambda: 0)
    assert (tmp_path / "model-v1.5.previous" / "old").is_file()
    assert not list(final.iterdir())


def test_failed_write_leaves_the_earlier_file(tmp_path):
    final = tmp_path / "model.safetensors"
    final.write_text("old")

    def write(path):
        path.write_text("part")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(final, write, lambda: 3)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("model.safetensors", "old")]


def test_folder_replaces_a_folder(tmp_path):
    final = tmp_path / "a-state"
    final.mkdir()
    (final / "old").touch()

    def write(path):
        path.mkdir()
        (path / "new").write_text("x")

    write_atomically(final, write, lambda: 0)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["a-state", "a-state/new"]


def test_disk_full_error_names_the_missing_space(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(DiskFullError) as caught:
        write_atomically(tmp_path / "model.ckpt", fill_disk, lambda: free + 2_000_000_000)
    assert caught.value.needed - caught.value.free == pytest.approx(2_000_000_000, abs=5e8)
    assert "disk full: cannot write model.ckpt (" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["I/O error: No space left on device (os error 28)", "Os { code: 28 }"])
def test_full_disk_is_recognized_in_the_text_of_safetensors_errors(tmp_path, text):
    def write(path):
        raise ValueError(text)

    with pytest.raises(DiskFullError):
        write_atomically(tmp_path / "x", write, lambda: 1)


def test_other_errors_are_raised_unchanged(tmp_path):
    def write(path):
        raise ValueError("a tensor is not contiguous")

    with pytest.raises(ValueError, match="contiguous"):
        write_atomically(tmp_path / "x", write, lambda: 1)


def test_write_is_retried_until_the_disk_has_space(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(atomic_write, "_POLL_SECONDS", 0.0)
    tries = iter([fill_disk, fill_disk, lambda path: path.write_text("complete")])
    write_atomically(tmp_path / "x", lambda path: next(tries)(path), lambda: 9, WritePolicy(wait_seconds=60))
    assert (tmp_path / "x").read_text() == "complete"
    log = capsys.readouterr().err
    assert "stays in memory" in log
    assert "disk has free space again" in log


def test_retries_end_after_the_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_write, "_POLL_SECONDS", 0.0)
    with pytest.raises(DiskFullError):
        write_atomically(tmp_path / "x", fill_disk, lambda: 9, WritePolicy(wait_seconds=0.05))


def test_fallback_folder_is_used(tmp_path):
    def write(path):
        return fill_disk(path) if path.parent == tmp_path else path.write_text("complete")

    write_atomically(tmp_path / "x", write, lambda: 9, WritePolicy(60, tmp_path / "fallback"))
    assert (tmp_path / "fallback" / "x").read_text() == "complete"


def test_full_disk_inside_a_folder_fails_at_once_and_counts_all_bytes(tmp_path):
    def write(folder):
        folder.mkdir()
        (folder / "first").write_bytes(bytes(1000))
        write_atomically(folder / "second", fill_disk, lambda: 500, WritePolicy(wait_seconds=600))

    with fail_fast(), pytest.raises(DiskFullError) as caught:
        write_atomically(tmp_path / "a-state", write, lambda: 0, WritePolicy(wait_seconds=600))
    assert caught.value.path.name == "a-state"
    assert caught.value.needed == 1500


@pytest.mark.linux("needs POSIX file modes")
def test_file_has_the_mode_that_open_gives(tmp_path):
    def private(path):  # as safetensors 0.8 writes
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))

    (tmp_path / "opened").touch()
    default = (tmp_path / "opened").stat().st_mode
    final = tmp_path / "model.safetensors"
    write_atomically(final, private, lambda: 0)
    assert final.stat().st_mode == default
    final.chmod(0o640)
    write_atomically(final, private, lambda: 0)
    assert final.stat().st_mode & 0o777 == 0o640


def test_concurrent_writers_of_one_file_do_not_interfere(tmp_path):
    final = tmp_path / "model.safetensors"

    def slow(path):
        path.write_text("first")
        assert atomic_write.final_path(path) == final
        write_atomically(final, lambda other: other.write_text("second"), lambda: 0)
        assert path.read_text() == "first"

    write_atomically(final, slow, lambda: 0)
    assert final.read_text() == "first"
    assert list(tmp_path.iterdir()) == [final]


def test_states_of_one_earlier_run_are_kept(tmp_path):
    for run in ("first", "second", "third"):
        (tmp_path / f"{run}-state").mkdir()
        atomic_write.rename_to_previous([tmp_path / f"{run}-state"], list(tmp_path.glob("*.previous")))
        atomic_write.rename_to_previous([], list(tmp_path.glob("*.previous")))
        assert [path.name for path in tmp_path.iterdir()] == [f"{run}-state.previous"]


def test_temporary_files_of_a_failed_writer_are_removed(tmp_path):
    def write(path):
        path.with_name(".tmp123456").write_text("part")  # as safetensors 0.8 does
        if fails:
            raise OSError("failed")
        path.with_name(".tmp123456").rename(path)

    final = tmp_path / "model.safetensors"
    fails = True
    with pytest.raises(OSError, match="failed"):
        write_atomically(final, atomic_write.in_temporary_folder(write), lambda: 0)
    assert not list(tmp_path.iterdir())
    fails = False
    write_atomically(final, atomic_write.in_temporary_folder(write), lambda: 0)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("model.safetensors", "part")]


def test_failed_rename_of_a_state_is_a_warning(tmp_path, capsys):
    atomic_write.rename_to_previous([tmp_path / "absent-state"], [])
    assert "cannot rename the states of an earlier run" in capsys.readouterr().err


def test_name_of_the_maximum_length_is_written(tmp_path):
    final = tmp_path / ("\u732b" * 82 + ".safetensors")  # 3 bytes a character: 258 bytes, 3 too many
    final = final.with_name(final.name[1:])
    assert len(final.name.encode()) == 255
    write_atomically(final, atomic_write.in_temporary_folder(lambda path: path.write_text("x")), lambda: 0)
    assert [path.name for path in tmp_path.iterdir()] == [final.name]


def test_temporary_files_of_dead_processes_are_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    own = atomic_write._partial(tmp_path / "a.npz")
    theirs = own.with_name(own.name.replace(f"-{os.getpid()}-", f"-{dead.pid}-"))
    elsewhere = theirs.with_name(theirs.name.replace(atomic_write._host(), "elsewhere"))
    for file in (own, theirs, elsewhere):
        file.touch()
    atomic_write.remove_abandoned(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {own.name, elsewhere.name}


# --- folders that cannot be written to ---------------------------------------------------------------------------------


OUTPUT = WritePolicy(is_output=True)


@pytest.mark.parametrize("name", ["cat", "pets/cat", None])
def test_files_of_an_output_name_with_folders_are_outputs(tmp_path, monkeypatch, name):
    args = Namespace(output_dir=str(tmp_path), output_name=name)
    outputs = atomic_saves._start(args, None, Settings())
    monkeypatch.setattr(atomic_saves, "current", lambda kind: outputs)
    assert atomic_saves._policy(Settings(), tmp_path / f"{name or 'last'}.safetensors").is_output
    assert not atomic_saves._policy(Settings(), tmp_path.parent / "cat.npz").is_output


def write_text(path):
    path.write_text("trained")


@pytest.fixture
def replaced_folder(tmp_path, monkeypatch):
    """An output folder that was replaced by a file; the user's cache is in the test's folder."""
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(atomic_write, "_POLL_SECONDS", 0.0)
    folder = tmp_path / "output"
    folder.write_text("not a folder")
    return folder


def test_deleted_folder_is_created_again(tmp_path, capsys):
    write_atomically(tmp_path / "deleted" / "x", write_text, lambda: 7, OUTPUT)
    assert (tmp_path / "deleted" / "x").read_text() == "trained"
    assert "Retrying" not in capsys.readouterr().err


def test_folder_that_is_a_file_is_waited_for(replaced_folder, capsys):
    def write(path):
        try:
            write_text(path)
        finally:
            if "Retrying" in capsys.readouterr().err:
                replaced_folder.unlink()

    write_atomically(replaced_folder / "x", write, lambda: 7, WritePolicy(60, is_output=True))
    assert (replaced_folder / "x").read_text() == "trained"


def test_fallback_folder_is_used_without_a_wait(replaced_folder, tmp_path, capsys):
    policy = WritePolicy(600, tmp_path / "fallback", is_output=True)
    with atomic_write.written_files() as files:
        write_atomically(replaced_folder / "x", write_text, lambda: 7, policy)
    assert files == [tmp_path / "fallback" / "x"]
    assert files[0].read_text() == "trained"
    assert f"cannot write x to {replaced_folder}: " in capsys.readouterr().err


@pytest.mark.parametrize("cache_is_writable", [True, False])
def test_last_folders_are_the_cache_and_the_temporary_folder(replaced_folder, tmp_path, capsys, cache_is_writable):
    used, unused = tmp_path / "cache", tmp_path / "temporary"
    if not cache_is_writable:
        used.write_text("not a folder")
        used = unused
    with atomic_write.written_files() as files:
        write_atomically(replaced_folder / "x", write_text, lambda: 7, WritePolicy(0.05, is_output=True))
    (file,) = files
    assert used in file.parents
    assert file.read_text() == "trained"
    assert f"Writing to {file} instead" in capsys.readouterr().err


def test_full_disk_past_the_wait_writes_to_the_last_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(atomic_write, "_POLL_SECONDS", 0.0)

    def write(path):
        return fill_disk(path) if path.parent in (tmp_path, tmp_path / "fallback") else write_text(path)

    with atomic_write.written_files() as files:
        write_atomically(tmp_path / "x", write, lambda: 9, WritePolicy(0.05, tmp_path / "fallback", is_output=True))
    assert [tmp_path / "cache" in file.parents for file in files] == [True]


def test_a_process_that_ends_does_not_wait(replaced_folder):
    with atomic_write.not_waiting(), atomic_write.written_files() as files:
        write_atomically(replaced_folder / "x", write_text, lambda: 7, WritePolicy(1e9, is_output=True))
    assert len(files) == 1


def test_caches_are_written_to_no_other_folder(replaced_folder, tmp_path):
    with pytest.raises(OSError, match="cannot write x to "):
        write_atomically(replaced_folder / "x", write_text, lambda: 7, WritePolicy(600))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "error",
    [
        OSError("We couldn't connect to 'https://huggingface.co' to load the files"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/models/vae/config.json"),
    ],
)
def test_errors_of_other_files_are_raised_unchanged(tmp_path, error):
    def write(path):
        raise error

    with pytest.raises(OSError, match=r"connect|config\.json") as caught:
        write_atomically(tmp_path / "x", write, lambda: 1, OUTPUT)
    assert caught.value is error


@pytest.mark.parametrize(
    "text",
    [
        "I/O error: Permission denied (os error 13)",
        "Parent directory /output does not exist.",
        "[enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0: PytorchStreamWriter failed writing file data",
        "[enforce fail at inline_container.cc:671] . unexpected pos 799680 vs 799572",
    ],
)
def test_errors_of_safetensors_and_torch_are_recognized_by_their_text(tmp_path, monkeypatch, text):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path / "cache"))

    def write(path):
        if path.parent == tmp_path:
            raise RuntimeError(text)
        write_text(path)

    with atomic_write.written_files() as files:
        write_atomically(tmp_path / "x", write, lambda: 1, OUTPUT)
    assert [tmp_path / "cache" in file.parents for file in files] == [True]
