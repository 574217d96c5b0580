"""The journal: complete lines, a reader that tolerates incomplete ones, and a command that only reads."""

import asyncio
import errno
import importlib.util
import json
import math
import os
import re
import socket
import sys
import time
from argparse import Namespace
from array import array
from types import SimpleNamespace

import pytest

from kohya_ext import console
from kohya_ext.__main__ import main
from kohya_ext.config.command_line import quoted_word
from kohya_ext.errors import UserError
from kohya_ext.run import journal, journal_reader
from kohya_ext.run.journal import SUFFIX, Journal
from kohya_ext.run.journal_reader import JournalReader, RunLog
from kohya_ext.watching import page
from tests.counting import lines_run

START = {
    "name": "cat",
    "script": "sdxl_train_network.py",
    "host": socket.gethostname(),
    "pid": os.getpid(),
    "command": "python -m kohya_ext sdxl_train_network.py",
    "resume_command": "python -m kohya_ext sdxl_train_network.py --resume auto",
    "gpu": {"name": "RTX 4090", "memory": 25_757_220_864},
    "predicted": {"seconds_per_step": 1.15, "reserved": 11_900_000_000},
    "stop_file": "/output/cat.stop",
}


@pytest.fixture
def write(tmp_path):
    """Write a run: ``write(name, steps=, total=, end=, **changes of the start line)``; returns the journal, still open."""
    opened = []

    def run(name="cat", steps=20, total=100, end=None, **changes):
        written = Journal(tmp_path / f"{name}{SUFFIX}", changes.pop("run", name), frozenset({str(tmp_path)}))
        written.open()
        opened.append(written)
        written.write("start", **{**START, "run": written.run, "name": name, **changes})
        written.write("training", steps=total, images=10, epochs=4)
        for step in range(1, steps + 1):
            written.write(
                *("step",), step=step, epoch=1 + step // 30, loss=1 / step, seconds=1.0 + step / 1000, data=0.01, outside=0.0,
                learning_rates=[1e-4], reserved=10**10, peak_reserved=11 * 10**9, allocated=9 * 10**9, peak_allocated=10**10,
            )  # fmt: skip
        if end is not None:
            written.write("end", **end)
        return written

    yield run
    for each in opened:
        each.close()


@pytest.fixture
def current(write):
    """A run's journal that receives events."""
    written = write()
    journal.begin(written)
    yield written
    journal.begin(None)


def read(file):
    reader = JournalReader(file)
    reader.update()
    return reader


# --- writer ----------------------------------------------------------------------------------------------------------


def test_each_line_is_one_write_and_at_once_in_the_file(write, monkeypatch):
    writes = []
    original = os.write
    monkeypatch.setattr(os, "write", lambda file, data: writes.append(data) or original(file, data))
    written = write(steps=3)
    assert [json.loads(text)["kind"] for text in writes] == ["start", "training", "step", "step", "step"]
    assert written.file.read_bytes() == b"".join(writes)


def test_numbers_that_are_not_finite_are_null(write):
    written = write(steps=0)
    written.write("step", step=1, loss=math.nan, losses=(math.inf, 1.0), memory={"a": -math.inf})
    line = json.loads(written.file.read_text().splitlines()[-1], parse_constant=pytest.fail)
    assert (line["loss"], line["losses"], line["memory"]) == (None, [None, 1.0], {"a": None})


def test_full_disk_costs_lines_and_is_reported_once(write, monkeypatch, capsys):
    written, original = write(steps=2), os.write

    def full(file, data):
        if len(data) > 40:
            original(file, data[:20])  # as much as there was space for
            return 20
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    written.write("step", step=3, loss=1.0, seconds=1.0, data=0.0)
    written.write("x")
    monkeypatch.setattr(os, "write", original)
    written.write("step", step=4, loss=1.0, seconds=1.0)
    for _ in range(2):
        written.report_problem()
    assert capsys.readouterr().err.count("is incomplete: No space left on device; training continues") == 1
    assert list(read(written.file).latest.steps) == [1, 2, 4]
    assert list(written.log.steps) == [1, 2, 3, 4]
    assert not written.complete


def test_folder_that_cannot_be_written_is_reported(tmp_path, capsys):
    (tmp_path / "file").touch()
    written = Journal(tmp_path / "file" / "cat.journal.jsonl", "cat")
    written.open()
    written.write("start")
    written.report_problem()
    assert "cat.journal.jsonl is incomplete: " in capsys.readouterr().err


def test_forked_process_writes_nothing(write):
    written = write(steps=1)
    before = written.file.read_bytes()
    written.process = -1
    written.write("step", step=2)
    assert written.file.read_bytes() == before


def test_events_have_the_current_step(current):
    current.step = lambda: 7
    journal.event("spill", problem="slow")
    journal.event("skip", step=8)
    assert [(line["kind"], line["step"]) for line in read(current.file).latest.events] == [("spill", 7), ("skip", 8)]


def test_warnings_are_events_of_the_current_run(current, capsys):
    console.warn("the disk is full")
    (line,) = read(current.file).latest.events
    assert (line["kind"], line["problem"], line["step"]) == ("warning", "the disk is full", 0)
    journal.begin(None)
    console.warn("later")
    assert len(read(current.file).latest.events) == 1
    assert capsys.readouterr().err.splitlines() == ["kohya_ext: warning: the disk is full", "kohya_ext: warning: later"]


def test_only_models_states_and_samples_of_the_output_folder_are_recorded(current, tmp_path):
    for folder in ("cat-state", "cat-state.2", "sample"):
        (tmp_path / folder).mkdir()
    for name in ("cat.safetensors", "image.npz", "cat-state/model.safetensors", "sample/a.png", "b.png"):
        (tmp_path / name).write_bytes(b"1234")
        (journal.sampled if name.endswith("png") else lambda path: journal.saved(path, 0.5))(tmp_path / name)
    journal.saved(tmp_path / "cat-state", 1.25)
    journal.saved(tmp_path / "cat-state.2", 0.25)
    events = [(line["kind"], line["file"], line.get("bytes")) for line in read(current.file).latest.events]
    saved = [("save", "cat.safetensors", 4), ("sample", "sample/a.png", None)]
    expected = [*saved, ("state", "cat-state", None), ("state", "cat-state.2", None)]
    assert events == [(kind, str(tmp_path / name), size) for kind, name, size in expected]
    assert (current.files, current.seconds) == (4, 2.0)


def test_events_without_a_journal_do_nothing(tmp_path):
    journal.event("skip")
    journal.saved(tmp_path / "cat.safetensors", 1.0)
    journal.sampled(tmp_path / "sample" / "a.png")


@pytest.mark.parametrize(("code", "expected"), [(None, 0), (3, 3), ("an error", 1)])
def test_exit_code_is_that_of_python(monkeypatch, code, expected):
    monkeypatch.setattr(journal, "_exit_code", None)
    journal.set_exit_code(code)
    assert journal.exit_code() == expected


# --- reader ----------------------------------------------------------------------------------------------------------


def test_reader_ignores_incomplete_lines_and_unknown_keys(write):
    written = write(steps=2)
    with written.file.open("ab") as stream:
        stream.write(b'{"kind":"step","step":99')
    killed = read(written.file)
    assert killed.latest.step == 2
    resumed = Journal(written.file, "cat")
    resumed.open()
    resumed.write("start", run="cat", unknown={"a": 1})
    resumed.write("of a later version", step=3)
    resumed.write("step", step=3, loss=0.5, seconds=1.0)
    resumed.close()
    killed.update()
    assert list(killed.latest.steps) == [1, 2, 3]
    assert killed.latest.parts == 2


def test_reader_reads_only_new_lines(write, monkeypatch):
    written = write(steps=2)
    reader = read(written.file)
    assert not reader.update()
    content = written.file.read_bytes()
    with written.file.open("ab") as stream:
        stream.write(b'{"kind":"step","st')
        stream.flush()
        assert not reader.update()
        stream.write(b'ep":3,"loss":1,"seconds":1}\n')
    assert reader.update()
    assert reader.latest.step == 3
    written.file.write_bytes(content[:-1] + b"\n" + b'{"kind":"step","step":9}'[:5])  # a shorter file
    reader.update()
    assert reader.latest.step == 2


def test_steps_that_a_resume_repeats_count_once(write):
    log = read(write(steps=10).file).latest
    for step in (6, 7):
        log.add({"kind": "step", "step": step, "loss": 100.0 + step, "seconds": 1.0})
    assert list(log.steps) == [1, 2, 3, 4, 5, 6, 7]
    assert log.losses[-2:].tolist() == [106.0, 107.0]
    assert len(log.seconds) == len(log.outside) == 7


def test_new_run_of_the_same_name_is_separate(write):
    write(steps=10, end={"status": "finished"}).close()
    written = write(steps=3, run="another")
    reader = read(written.file)
    assert (reader.latest.id, reader.latest.step, reader.latest.end) == ("another", 3, None)
    assert reader.runs["cat"].step == 10


def test_reading_a_journal_takes_work_for_its_new_lines_only(tmp_path):
    row = {"kind": "step", "time": 1.0, "epoch": 1, "loss": 0.1, "learning_rates": [1e-4], "seconds": 1.01, "data": 0.01}
    row |= {"outside": 0.0, "allocated": 9_123_456_789, "peak_allocated": 10**10, "reserved": 10**10, "peak_reserved": 10**10}
    work = []
    for steps in (200, 400):
        file = tmp_path / f"{steps}{SUFFIX}"
        lines = [json.dumps({"kind": "start", "run": "cat", **START})]
        lines += [json.dumps({**row, "step": step}) for step in range(1, steps + 1)]
        file.write_text("\n".join(lines) + "\n")
        reader = JournalReader(file)

        def read_on(reader=reader):
            reader.update()
            reader.latest.summary()

        work.append((lines_run(read_on), lines_run(read_on)))
        assert reader.latest.step == steps
    (first, again), (twice, _) = work
    assert twice < 2.5 * first
    assert again < first / 10


def test_times_and_losses(write):
    log = read(write(steps=100, total=150).file).latest
    assert log.median_seconds() == pytest.approx(1.051)
    assert log.seconds_left() == pytest.approx(50 * 1.051)
    assert log.smoothing == 10
    assert log.first_loss() == pytest.approx(sum(1 / step for step in range(1, 11)) / 10)
    assert log.smoothed_loss() == pytest.approx(sum(1 / step for step in range(91, 101)) / 10)
    assert len(log.loss_curve(30)) == 30
    assert log.loss_curve(30) == sorted(log.loss_curve(30), reverse=True)
    log.outside[50] = 99.0
    assert log.seconds_left() == pytest.approx(50 * (1.051 + 1.0))


def test_the_first_loss_is_that_of_the_first_step_that_was_not_skipped(write):
    log = read(write(steps=3, total=5).file).latest
    log.losses[0] = math.nan
    assert log.first_loss() == log.losses[1]
    assert "at the start" in page.loss(log.summary())
    log.losses[:] = array("d", [math.nan] * 3)
    assert page.loss(log.summary()) == ""


def test_run_without_steps_has_no_times():
    log = RunLog("cat")
    assert (log.median_seconds(), log.seconds_left(), log.first_loss(), log.loss_curve(10)) == (None, None, None, [])
    assert log.summary(0.0)["step"] == 0


ENDS = {"finished": "DONE", "stopped": "STOPPED", "failed": "FAILED", "out of memory": "FAILED"}


@pytest.mark.parametrize(("end", "status"), ENDS.items())
def test_status_of_an_ended_run(write, end, status):
    assert read(write(end={"status": end}).file).latest.status(0.0) == status


def test_status_of_a_run_without_end(write, monkeypatch):
    pytest.importorskip("psutil")
    log = read(write(process_started=journal_reader.process_start(os.getpid())).file).latest
    assert log.status(log.time + 1e9) == "RUNNING"
    log.start["process_started"] -= 1000  # another process has the number now
    assert log.status(log.time) == "DEAD"
    monkeypatch.setattr(journal_reader, "process_start", lambda pid: 0.0)
    assert log.status(log.time) == "DEAD"
    log.start["host"] = "another"
    assert log.status(log.time + 100) == "RUNNING"
    assert log.status(log.time + 1000) == "UNKNOWN"


@pytest.mark.linux("needs /proc")
def test_status_without_psutil(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    log = read(write().file).latest
    assert log.status(0.0) == "RUNNING"
    log.start["pid"] = 2**22 + 1  # above the largest number of a process
    assert log.status(0.0) == "DEAD"


def test_command_to_continue_needs_a_state(current, tmp_path):
    current.write("end", status="stopped", reason="SIGTERM", code=143)
    log = read(current.file).latest
    assert log.summary()["next_command"] == START["command"]
    (tmp_path / "cat-state").mkdir()
    journal.saved(tmp_path / "cat-state", 1.0)
    assert read(current.file).latest.summary()["next_command"] == START["resume_command"]


# --- watch -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def watch(capsys):
    def run(*words, columns="80"):
        os.environ["COLUMNS"] = columns
        code = main(["watch", *map(str, words)])
        return code, *capsys.readouterr()

    before = os.environ.get("COLUMNS")
    yield run
    os.environ["COLUMNS"] = before or "200"


def test_page_fits_80_columns(watch, current, tmp_path):
    journal.event("skip", problem="loss nan", images=["/images/" + "long " * 30 + ".png"])
    code, printed, _ = watch(tmp_path, "--once")
    assert code == 0
    assert max(map(len, printed.splitlines())) <= 80
    text = re.sub(r"\s+", " ", printed)
    for part in (
        *("cat RUNNING sdxl_train_network.py", "20 of 100 (20%), epoch 1 of 4, 1 skipped", "min left"),
        *("1.02 s per step, median 1.01, predicted 1.15; waiting for data 0.01", "skip: loss nan"),
        *("10.00 GB reserved, peak 11.00 GB, predicted 11.90 GB, RTX 4090, 25.8 GB", "/output/cat.stop"),
        *("0.05 now, 0.05132 smoothed, 0.75 at the start (means of 2 steps)", "█"),
    ):
        assert part in text, printed


def test_json_has_one_object_per_run(watch, write, tmp_path):
    write("cat", end={"status": "stopped", "reason": "SIGTERM", "code": 143})
    write("dog", steps=5)
    rows = {row["name"]: row for row in json.loads(watch(tmp_path, "--json")[1])}
    assert rows["cat"]["status"] == "STOPPED"
    assert (rows["dog"]["step"], rows["dog"]["steps"], rows["dog"]["memory"]["peak_reserved"]) == (5, 100, 11 * 10**9)


def test_other_runs_have_one_line(watch, write, tmp_path):
    write("cat", end={"status": "finished"})
    write("dog", end={"status": "failed", "reason": "ValueError: bad", "code": 1, "time": time.time() + 1})
    printed = watch(tmp_path, "--once")[1]
    assert "dog  FAILED  sdxl_train_network.py  (ValueError: bad)" in printed
    (line,) = [line for line in printed.splitlines() if "cat" in line and "DONE" in line]
    assert "20 of 100 (20%)" in line


def test_defaults_are_this_folder_and_output(watch, write, tmp_path, monkeypatch):
    write("cat")
    monkeypatch.chdir(tmp_path)
    assert watch("--once")[:1] == (0,)
    (tmp_path / "output").mkdir()
    os.rename(tmp_path / f"cat{SUFFIX}", tmp_path / "output" / f"cat{SUFFIX}")
    assert "cat  RUNNING" in watch()[1]


def test_the_last_line_is_a_command_for_the_shell(write, tmp_path):
    from kohya_ext.patches.journal import _summary_lines

    written = write("my cät")
    (line,) = [line for line in _summary_lines(written, "finished", "") if line.startswith("to see losses, ")]
    assert line.endswith(f" watch {quoted_word(str(written.file))}")
    assert quoted_word(str(written.file))[-1] in "'\""


def test_files_of_another_folder_are_named_with_it(write, tmp_path):
    from kohya_ext.patches.journal import _summary_lines

    written, files = write(), [tmp_path / name for name in ("cat.safetensors", "cat-state", "saved/cat-2.safetensors")]
    (tmp_path / "saved").mkdir()
    for file in reversed(files):
        file.touch()
        written.write("save", step=20, file=str(file))
    (line,) = [line for line in _summary_lines(written, "finished", "") if line.startswith("written")]
    assert line == f"written to {tmp_path}: cat.safetensors, cat-state, {files[2]}"


def test_wrong_input_is_an_error(watch, tmp_path):
    (tmp_path / "text").write_text("text\n")
    (tmp_path / "empty").mkdir()
    for place, message in (
        ("none", "none does not exist; give an output folder or a journal"),
        ("text", "text is not a journal; give an output folder or a file NAME.journal.jsonl"),
        ("empty", "empty; give the --output_dir of a run"),
    ):
        code, printed, error = watch(tmp_path / place, "--once")
        assert (code, printed) == (2, "")
        assert error.startswith("kohya_ext: error: ")
        assert message in error
        assert error.count("\n") == 1


def test_missing_journal_is_an_error(tmp_path):
    with pytest.raises(UserError, match="cannot read the journal"):
        JournalReader(tmp_path / "none").update()


def test_live_view_follows_the_run_and_ends_with_ctrl_c(write, monkeypatch, capsys, tmp_path):
    from kohya_ext.commands import watch

    written, naps = write(steps=5), []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt
        written.write("step", step=50 + len(naps), loss=0.1, seconds=1.0)

    monkeypatch.setattr(watch.time, "sleep", sleep)
    monkeypatch.setattr(watch, "_has_textual", lambda: False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert watch.run(Namespace(places=[tmp_path], once=False, json=False)) == 0
    printed = capsys.readouterr().out
    assert naps == [1.0] * 3
    assert "51 of 100" in printed
    assert "52 of 100" in printed.rpartition("\x1b[?1049l")[2]  # the normal screen keeps the last page


CHANGES = {
    *("os.kill", "os.killpg", "os.remove", "os.rename", "os.mkdir", "os.chmod", "os.utime", "os.truncate", "os.link"),
    *("os.symlink", "os.system", "fcntl.lockf", "fcntl.flock", "subprocess.Popen", "socket.connect"),
}


def _follow_full_screen(folder):
    """Show the runs full screen, follow them and press keys, without a terminal."""
    from kohya_ext.commands import watch
    from kohya_ext.watching.screen import WatchApp

    runs = watch._Runs([folder], None)

    async def follow():
        app = WatchApp(runs.read, runs.read(), 0.01)
        async with app.run_test(size=(160, 50)) as pilot:
            for key in ("down", "c", "l", "up"):
                await pilot.press(key)
            await pilot.pause(0.1)

    asyncio.run(follow())


def test_watch_only_reads(write, watch, tmp_path):
    """Python cannot remove an audit hook, so the hook depends on a variable."""
    write("cat")
    write("dog", end={"status": "stopped"})
    watch(tmp_path, "--once")  # imports write no bytecode later
    full_screen = importlib.util.find_spec("textual") is not None
    if full_screen:
        _follow_full_screen(tmp_path)
    before = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in tmp_path.rglob("*")}
    changes, active = [], True

    def hook(event, details):
        if not active:
            return
        writes = event == "open" and details[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
        own_pair = event == "socket.connect" and details[1][0] == "127.0.0.1"  # asyncio's own, on Windows
        if (writes or event in CHANGES) and not own_pair:
            changes.append((event, *details))

    sys.addaudithook(hook)
    watch(tmp_path, "--once")
    watch(tmp_path, "--json")
    if full_screen:
        _follow_full_screen(tmp_path)
    recorded = list(changes)
    (tmp_path / "the hook works").touch()
    active = False
    assert changes
    assert recorded == []
    assert {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in before} == before


@pytest.mark.parametrize(
    ("code", "status"), [(129, "stopped"), (130, "stopped"), (143, "stopped"), (149, "stopped"), (3, "failed"), (0, "finished")]
)
def test_a_run_that_the_user_has_ended_is_stopped_and_has_not_failed(monkeypatch, code, status):
    """A closed terminal, Ctrl-C, SIGTERM or a closed window, Ctrl-Break; the NaN guard; and early stopping."""
    from kohya_ext.patches import journal as patch

    monkeypatch.setattr(patch.stop_request, "stopper", lambda: SimpleNamespace(reason="why", code=code))
    monkeypatch.setattr(patch.journal, "exit_code", lambda: code)
    recorder = SimpleNamespace(journal=SimpleNamespace(log=SimpleNamespace(total=9)), failure="", step=3)
    assert patch._Recorder._outcome(recorder) == (status, "why", code)
