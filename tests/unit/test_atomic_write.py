"""A name is given only to what is whole; a full disk loses nothing."""

import errno
import os
import shutil

import pytest

from kohya_ext.run import atomic_write
from kohya_ext.run.atomic_write import DiskFullError, WhenFull, impatient, write_whole


def full(path):
    path.write_text("a part")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_appears_with_its_contents_only(tmp_path):
    final = tmp_path / "model.safetensors"
    final.write_text("the one before")

    def write(path):
        assert path.parent == tmp_path
        path.write_text("new")
        assert final.read_text() == "the one before"
        return "result"

    assert write_whole(final, write, lambda: 3) == "result"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("model.safetensors", "new")]


def test_what_is_spared_is_kept_aside_once(tmp_path):
    final = tmp_path / "model.safetensors"
    for text in ("two nights ago", "last night", "today", "tonight"):
        if text != "tonight":  # a run's own file, which it may replace
            atomic_write.spare(final)
        write_whole(final, lambda path: path.write_text(text), lambda: 3)  # noqa: B023 - called at once
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "model.safetensors": "tonight",
        "model.previous.safetensors": "last night",
    }


def test_a_spared_folder_is_kept_aside(tmp_path):
    final = tmp_path / "model-v1.5"
    final.mkdir()
    (final / "old").touch()
    atomic_write.spare(final)
    write_whole(final, lambda path: path.mkdir(), lambda: 0)
    assert (tmp_path / "model-v1.5.previous" / "old").is_file()
    assert not list(final.iterdir())


def test_whatever_goes_wrong_the_earlier_file_stays(tmp_path):
    final = tmp_path / "model.safetensors"
    final.write_text("the one before")

    def write(path):
        path.write_text("a part")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(final, write, lambda: 3)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("model.safetensors", "the one before")]


def test_a_folder_replaces_a_folder(tmp_path):
    final = tmp_path / "a-state"
    final.mkdir()
    (final / "old").touch()

    def write(path):
        path.mkdir()
        (path / "new").write_text("x")

    write_whole(final, write, lambda: 0)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["a-state", "a-state/new"]


def test_the_error_says_how_much_is_missing(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(DiskFullError) as caught:
        write_whole(tmp_path / "model.ckpt", full, lambda: free + 2_000_000_000)
    assert caught.value.needed - caught.value.free == pytest.approx(2_000_000_000, abs=5e8)
    assert "no room for model.ckpt: it needs" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["I/O error: No space left on device (os error 28)", "Os { code: 28 }"])
def test_a_full_disk_is_told_from_safetensors_own_words(tmp_path, text):
    def write(path):
        raise ValueError(text)

    with pytest.raises(DiskFullError):
        write_whole(tmp_path / "x", write, lambda: 1)


def test_another_failure_is_passed_on(tmp_path):
    def write(path):
        raise ValueError("a tensor is not contiguous")

    with pytest.raises(ValueError, match="contiguous"):
        write_whole(tmp_path / "x", write, lambda: 1)


def test_it_waits_for_room_with_the_data_in_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(atomic_write, "_POLL_SECONDS", 0.0)
    tries = iter([full, full, lambda path: path.write_text("all of it")])
    write_whole(tmp_path / "x", lambda path: next(tries)(path), lambda: 9, WhenFull(wait_seconds=60))
    assert (tmp_path / "x").read_text() == "all of it"
    said = capsys.readouterr().err
    assert "stays in memory" in said
    assert "there is room again" in said


def test_it_gives_up_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_write, "_POLL_SECONDS", 0.0)
    with pytest.raises(DiskFullError):
        write_whole(tmp_path / "x", full, lambda: 9, WhenFull(wait_seconds=0.05))


def test_it_goes_to_the_fallback_folder(tmp_path):
    def write(path):
        return full(path) if path.parent == tmp_path else path.write_text("all of it")

    write_whole(tmp_path / "x", write, lambda: 9, WhenFull(60, tmp_path / "else"))
    assert (tmp_path / "else" / "x").read_text() == "all of it"


def test_a_file_in_a_folder_waits_for_nothing_and_the_folder_counts_it(tmp_path):
    def write(folder):
        folder.mkdir()
        (folder / "first").write_bytes(bytes(1000))
        write_whole(folder / "second", full, lambda: 500, WhenFull(wait_seconds=600))

    with impatient(), pytest.raises(DiskFullError) as caught:
        write_whole(tmp_path / "a-state", write, lambda: 0, WhenFull(wait_seconds=600))
    assert caught.value.path.name == "a-state"
    assert caught.value.needed == 1500


@pytest.mark.skipif(os.name != "posix", reason="modes as POSIX has them")
def test_a_file_has_the_mode_that_open_gives(tmp_path):
    def private(path):  # as safetensors 0.8 writes
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))

    (tmp_path / "opened").touch()
    usual = (tmp_path / "opened").stat().st_mode
    final = tmp_path / "model.safetensors"
    write_whole(final, private, lambda: 0)
    assert final.stat().st_mode == usual
    final.chmod(0o640)
    write_whole(final, private, lambda: 0)
    assert final.stat().st_mode & 0o777 == 0o640


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    final = tmp_path / "model.safetensors"

    def slow(path):
        path.write_text("the first one's")
        assert atomic_write.final_of(path) == final
        write_whole(final, lambda other: other.write_text("the second one's"), lambda: 0)
        assert path.read_text() == "the first one's"

    write_whole(final, slow, lambda: 0)
    assert final.read_text() == "the first one's"
    assert list(tmp_path.iterdir()) == [final]


def test_one_earlier_run_is_kept_aside(tmp_path):
    for night in ("first", "second", "third"):
        (tmp_path / f"{night}-state").mkdir()
        atomic_write.set_aside([tmp_path / f"{night}-state"], list(tmp_path.glob("*.previous")))
        atomic_write.set_aside([], list(tmp_path.glob("*.previous")))
        assert [path.name for path in tmp_path.iterdir()] == [f"{night}-state.previous"]


def test_a_writers_own_temporary_files_go_with_it(tmp_path):
    def write(path):
        path.with_name(".tmp123456").write_text("a part")  # as safetensors 0.8 does
        if fails:
            raise OSError("no more")
        path.with_name(".tmp123456").rename(path)

    final = tmp_path / "model.safetensors"
    fails = True
    with pytest.raises(OSError, match="no more"):
        write_whole(final, atomic_write.in_own_folder(write), lambda: 0)
    assert not list(tmp_path.iterdir())
    fails = False
    write_whole(final, atomic_write.in_own_folder(write), lambda: 0)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("model.safetensors", "a part")]


def test_a_state_that_cannot_be_renamed_does_not_end_the_run(tmp_path, capsys):
    atomic_write.set_aside([tmp_path / "absent-state"], [])
    assert "states of an earlier run stay under their names" in capsys.readouterr().err


def test_a_name_as_long_as_a_file_system_allows_is_written(tmp_path):
    final = tmp_path / ("\u732b" * 82 + ".safetensors")  # 3 bytes a letter: 258 would not fit
    final = final.with_name(final.name[1:])
    assert len(final.name.encode()) == 255
    write_whole(final, atomic_write.in_own_folder(lambda path: path.write_text("x")), lambda: 0)
    assert [path.name for path in tmp_path.iterdir()] == [final.name]
