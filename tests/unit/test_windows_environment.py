"""The Windows Python of tests/windows is complete or missing, also after a killed build and when two runs start together."""

import threading

import pytest

pytest.importorskip("fcntl")

from tests.windows import environment

pytestmark = pytest.mark.linux("Wine runs it on Linux")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path))


def complete(folder):
    folder.mkdir()
    (folder / "python.exe").touch()


def test_two_runs_build_it_once(monkeypatch):
    builds, both = [], threading.Barrier(2)
    folders = []

    def build(folder):
        builds.append(folder)
        complete(folder)

    def run():
        both.wait()
        folders.append(environment.ready())

    monkeypatch.setattr(environment, "_build", build)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(builds) == 1
    assert folders[0] == folders[1] == environment.ready()
    assert [path.name for path in folders[0].iterdir()] == ["python.exe"]


def test_a_build_that_fails_is_repeated_from_the_start(monkeypatch):
    def fail(folder):
        folder.mkdir()
        (folder / "half").touch()
        raise RuntimeError("no connection")

    monkeypatch.setattr(environment, "_build", fail)
    with pytest.raises(RuntimeError):
        environment.ready()
    assert not environment._folder().exists()
    monkeypatch.setattr(environment, "_build", complete)
    assert [path.name for path in environment.ready().iterdir()] == ["python.exe"]


def test_another_description_is_another_environment(monkeypatch, tmp_path):
    before = environment._folder()
    for name in ("requirements.txt", "environment.py", "interpreter/python.c", "site/wine.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("other")
    monkeypatch.setattr(environment, "HERE", tmp_path)
    assert environment._folder() != before


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(environment.shutil, "which", lambda program: None if program == "wine" else program)
    assert "run `apt-get install --no-install-recommends wine64 wine`" in environment.missing()
    monkeypatch.setattr(environment.platform, "machine", lambda: "aarch64")
    assert "on x86-64 only, not on linux on aarch64" in environment.missing()


def test_every_wheel_has_a_version_and_a_hash():
    for file in (environment.HERE / "requirements.txt", environment.HERE / "interpreter" / "requirements.txt"):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert lines
        assert all("==" in line and "--hash=sha256:" in line for line in lines)
