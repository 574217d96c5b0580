"""`watch`: the state of GPUs from NVML, and the full-screen view."""

import asyncio
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from kohya_ext.commands import watch
from kohya_ext.run.journal_reader import RunLog
from kohya_ext.watching import nvml, page
from kohya_ext.watching.nvml import GpuProcess, Gpus, GpuStatus
from kohya_ext.watching.page import View
from tests.unit.test_journal import START, write  # noqa: F401

GB = 10**9

STATUS = GpuStatus(
    name="RTX 4090",
    utilization=0.97,
    memory_used=13_400_000_000,
    memory_total=25_757_220_864,
    temperature=67,
    power=412.0,
    power_limit=450.0,
    throttling=("power limit",),
    others=(GpuProcess(1, "chrome", 1_300_000_000), GpuProcess(2, "Xorg", 400_000_000)),
)


class Library:
    """A stand-in for pynvml with two GPUs. Functions in ``missing`` are not supported."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, *missing, names=("RTX 3060", "RTX 4090"), pid=0):
        self.missing, self.names, self.pid = missing, names, pid

    def __getattribute__(self, name):
        if name.startswith("nvml") and name in self.missing:
            raise_error = Library.NVMLError
            return lambda *arguments: (_ for _ in ()).throw(raise_error())
        return object.__getattribute__(self, name)

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return f"GPU-{handle}".encode()

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return self.names[handle]

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(used=12 * GB, total=25 * GB)

    def nvmlDeviceGetTemperature(self, handle, sensor):  # noqa: N802
        return 60 + handle

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802
        return 412_000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):  # noqa: N802
        return 450_000

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):  # noqa: N802
        return 0x1 | 0x4 | 0x20

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        own = [SimpleNamespace(pid=self.pid, usedGpuMemory=10 * GB)] if handle == 0 else []
        return [*own, SimpleNamespace(pid=2**30, usedGpuMemory=GB)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):  # noqa: N802
        # The second is a process of which WDDM does not report the memory.
        return [SimpleNamespace(pid=2**30 + 1, usedGpuMemory=2 * GB), SimpleNamespace(pid=2**30 + 2, usedGpuMemory=None)]


def started(**gpu):
    return {**START, "run": "cat", "gpu": {"name": "RTX 4090", "memory": 25 * GB, **gpu}}


def test_state_of_the_gpu_of_a_run():
    status = Gpus(Library()).status(started(uuid="1"))
    assert (status.name, status.utilization, status.temperature) == ("RTX 4090", 0.97, 61)
    assert (status.power, status.power_limit) == (412.0, 450.0)
    assert (status.memory_used, status.memory_total) == (12 * GB, 25 * GB)
    assert status.throttling == ("power limit", "temperature")  # not idle
    assert [process.memory for process in status.others] == [2 * GB, GB, 0]
    assert status.others[0].name == f"process {2**30 + 1}"
    assert status.others_memory == 3 * GB


def test_run_without_a_uuid_is_known_by_its_process_or_its_gpus_name():
    assert Gpus(Library(pid=os.getpid())).status(started()).temperature == 60
    assert Gpus(Library()).status(started()).temperature == 61
    assert Gpus(Library(names=("RTX 4090", "RTX 4090"))).status(started()) is None
    assert [process.memory for process in Gpus(Library(pid=os.getpid())).status(started()).others] == [2 * GB, GB, 0]


def test_runs_on_other_machines_or_without_a_gpu_have_no_state():
    gpus = Gpus(Library())
    assert gpus.status({**started(uuid="1"), "host": "another"}) is None
    assert gpus.status({**started(uuid="1"), "gpu": None}) is None


def test_values_that_the_driver_does_not_report_are_none():
    names = [name for name in dir(Library) if name.startswith("nvmlDeviceGet")]
    kept = {"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"}
    status = Gpus(Library(*(set(names) - kept))).status(started(uuid="1"))
    assert status == GpuStatus(name="RTX 4090")
    assert page.gpu(status) == ""


def test_without_nvml_there_are_no_gpus(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert nvml.connect() is None


def test_driver_that_does_not_start_is_no_error(monkeypatch):
    def fail():
        raise OSError("no driver")

    monkeypatch.setitem(__import__("sys").modules, "pynvml", SimpleNamespace(nvmlInit=fail))
    assert nvml.connect() is None


def test_page_and_json_have_the_state_of_running_runs_only(write, monkeypatch, capsys, tmp_path):  # noqa: F811
    monkeypatch.setattr(nvml, "connect", lambda: Gpus(Library()))
    monkeypatch.setenv("COLUMNS", "120")
    write("cat", gpu={"name": "RTX 4090", "memory": 25 * GB, "uuid": "1"})
    write("dog", gpu={"name": "RTX 4090", "memory": 25 * GB, "uuid": "1"}, end={"status": "finished"})
    from kohya_ext.__main__ import main

    assert main(["watch", str(tmp_path), "--once"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "GPU 97% busy, 61 °C, 412 of 450 W, 12.00 GB used, 3.00 GB of it by process" in text
    assert "slowed by power limit and temperature" in text
    assert main(["watch", str(tmp_path), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["cat"]["gpu_now"]["utilization"] == 0.97
    assert rows["dog"]["gpu_now"] is None


# --- full screen -----------------------------------------------------------------------------------------------------


def view_of(name="cat", steps=1000, status="RUNNING", state=STATUS, **changes):
    """Return a view of a run, whose loss is halved and whose step 500 was skipped."""
    log = RunLog(name)
    log.add({"kind": "start", **START, "run": name, "name": name, "time": time.time() - steps, **changes})
    log.add({"kind": "training", "steps": 2000, "epochs": 4, "images": 10})
    for step in range(1, steps + 1):
        line = {"kind": "step", "time": time.time(), "step": step, "epoch": 1, "loss": 0.2 - step / 10000, "seconds": 1.0}
        memory = {"reserved": 10 * GB, "peak_reserved": 11 * GB} if changes.get("gpu", True) else {}
        log.add({**line, "data": 0.1, "outside": 0.0, "learning_rates": [1e-4], **memory})
        if step == 500:
            log.add({"kind": "skip", "time": time.time(), "step": step, "problem": "loss nan"})
    if status != "RUNNING":
        log.add({"kind": "end", "time": time.time(), "status": status})
    return View(Path(name), log, log.summary(), state)


def with_profile(view):
    advice = ["--cuda_graphs replays the passes", "--fused_operations launches fewer kernels"]
    view.log.add(
        {"kind": "profile", "first": 10, "last": 12, "limit": "host", "verdict": "the host is the limit", "advice": advice}
    )
    return view


def shown(views, *keys, size=(100, 30), more=None):
    """Return the text of the full screen after pressing keys; ``more`` are the views of the later reads."""
    pytest.importorskip("textual")
    from kohya_ext.watching.screen import WatchApp

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("kohya_ext.watching.screen._REST", 0.0)

    async def run():
        app = WatchApp(lambda: views if more is None else more, views, 0.01)
        async with app.run_test(size=size) as pilot:
            await pilot.pause(0.05)
            for key in keys:
                await pilot.press(key)
            await pilot.pause(0.1)
            console = Console(width=size[0], height=size[1], record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
            console.print(app.screen._compositor)
            return console.export_text()

    try:
        return asyncio.run(run())
    finally:
        monkeypatch.undo()


def test_full_screen_shows_progress_memory_gpu_events_and_advice():
    text = shown([with_profile(view_of())])
    assert max(map(len, text.splitlines())) <= 100
    for part in (
        *("RUNNING", "cat", "sdxl_train_network.py", "1,000 of 2,000 (50%)", "50%", "min left, until"),
        *("10.00 GB", "11.00 GB", "11.90 GB", "25.76 GB", "median 1 s", "1.15 s", "■ step 90%", "■ data 10%"),
        *("97%", "67 °C", "412 of 450 W", "1.70 GB by others: chrome, Xorg", "slowed by power limit"),
        *("step 500  skip: loss nan", "profile: limited by host; try --cuda_graphs, --fused_operations"),
    ):
        assert part in text, f"{part!r} is not in\n{text}"
    assert "Next run" not in text


def test_wide_full_screen_has_all_charts_and_the_command():
    text = shown([with_profile(view_of())], size=(200, 50))
    for part in ("loss", "seconds per step", "reserved memory, GB", "━ predicted", "started", "the host is the limit"):
        assert part in text, f"{part!r} is not in\n{text}"
    assert "to save and stop: Ctrl-C in its terminal, or create /output/cat.stop" in text
    assert text.count("⠁") + text.count("⠉") + text.count("⠒") > 5  # curves


def test_keys_switch_the_chart_and_the_scale():
    views = [view_of()]
    assert "─ loss ─" in shown(views)
    assert "─ loss, logarithmic ─" in shown(views, "l")
    assert "─ seconds per step ─" in shown(views, "c")
    assert "─ reserved memory, GB ─" in shown(views, "c", "c")


def test_keys_select_another_run():
    views = [view_of("cat"), view_of("dog", 10, "failed", None), view_of("owl", 2000, "finished", None)]
    first = shown(views)
    assert all(text in first for text in ("cat", "dog", "owl", "FAILED", "DONE", "1,000 of 2,000", "Next run"))
    assert "10 of 2,000" in shown(views, "down")
    assert "2,000 of 2,000" in shown(views, "up")
    assert "to start it again: python -m kohya_ext sdxl_train_network.py" in shown(views, "down")


def test_full_screen_follows_new_lines_and_runs():
    later = [view_of("dog", 30), view_of("cat", 1001)]
    text = shown([view_of("cat")], more=later)
    assert "1,001 of 2,000" in text  # the selected run stays
    assert "dog" in text


def test_run_without_steps_gpu_or_losses_is_shown():
    assert "loading models and data" in shown([view_of(steps=0, state=None)])
    text = shown([view_of(steps=20, state=None, gpu=None, predicted={})], size=(200, 50))
    assert "20 of 2,000" in text
    assert "busy" not in text


def test_error_while_following_is_shown(monkeypatch):
    pytest.importorskip("textual")
    from kohya_ext.errors import UserError
    from kohya_ext.watching.screen import WatchApp

    monkeypatch.setattr("kohya_ext.watching.screen._REST", 0.0)

    def fail():
        raise UserError("cannot read the journal cat")

    async def run():
        app = WatchApp(fail, [view_of()], 0.01)
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.pause(0.1)
            return str(app.query_one("#hint").render())

    assert "cannot read the journal cat" in asyncio.run(run())


def test_smoothed_losses_ignore_unknown_ones():
    pytest.importorskip("textual")
    from kohya_ext.watching import charts

    assert charts.smoothed([1.0, float("nan"), 3.0], 2) == [1.0, 1.0, 3.0]
    assert charts.limits([]) is None
    low, high = charts.limits([*range(100), 10**6])
    assert -20 < low < 5
    assert 95 < high < 120
    assert charts.buckets(view_of(steps=7).log, 3) == [(0, 2), (2, 4), (4, 7)]


def test_command_uses_the_full_screen_where_it_can_be_shown(monkeypatch, tmp_path, write):  # noqa: F811
    """It needs Textual, and a console that interprets escape sequences."""
    write("cat")
    calls = []
    monkeypatch.setattr(watch, "_show_full_screen", lambda *arguments: calls.append("full screen"))
    monkeypatch.setattr(watch, "_show_pages", lambda *arguments: calls.append("pages"))
    monkeypatch.setenv("FORCE_COLOR", "1")
    for available, escapes in ((True, True), (False, True), (True, False)):
        monkeypatch.setattr(watch, "_has_textual", lambda available=available: available)
        monkeypatch.setattr(watch, "turn_on_escape_sequences", lambda escapes=escapes: escapes)
        watch.run(SimpleNamespace(places=[tmp_path], once=False, json=False))
    assert calls == ["full screen", "pages", "pages"]
