"""What the extension costs where it does nothing: a Python start, a script's start, the guards of compiled blocks."""

from __future__ import annotations

import resource
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.plan import Plan
from benchmarks.processes import ROOT, last_line
from benchmarks.results import Comparison, Result, Variant
from benchmarks.suites import step
from kohya_ext.tiny import arguments

#: A start is 20 ms: many are needed for a median that holds.
STARTS = 20

_REACHED = "import sys; print('kohya_ext.launch.autoload' in sys.modules)"


def measure(plan: Plan, result: Result) -> None:
    """Measure all three."""
    done = [_python_start(plan, result), _launcher(plan, result)]
    guards = step.compare(plan, result, ("patched", "traced"), "guards")
    result.complete = all(done) and guards


def _python_start(plan: Plan, result: Result) -> bool:
    """An unrelated ``python -c pass``: in an environment without the start-up file, with it, and with it switched on."""
    rows = [
        Variant("bare", "Python start without kohya_ext.pth"),
        Variant("off", "with kohya_ext.pth, no variable set"),
        Variant("on", "with kohya_ext.pth, KOHYA_EXT=1", ["KOHYA_EXT=1"]),
    ]
    about = {"command": "python -c pass", "starts_a_round": STARTS}
    both = _Both("python start", "a start", about, rows, result)
    bare, armed = (_environment(plan.bench.scratch / name, name == "armed") for name in ("bare", "armed"))
    environment = plan.bench.environment()
    del environment["PYTHONPATH"]  # it would bring a sitecustomize of its own
    ways = [(bare, {}), (armed, {}), (armed, {"KOHYA_EXT": "1"})]
    for row, (python, variables) in zip(rows, ways, strict=True):
        told = subprocess.run([str(python), "-c", _REACHED], check=True, env={**environment, **variables}, capture_output=True)
        row.facts = {"kohya_ext_imported": told.stdout.strip() == b"True"}
        if row.facts["kohya_ext_imported"] is not (row.name == "on"):
            row.status, row.reason = "failed", "the start-up file did not do what this measures"
            return False
    for _ in plan.turns():
        both.begin_round()
        for _ in range(STARTS):
            for row, (python, variables) in zip(rows, ways, strict=True):
                with both.timed(row):
                    subprocess.run([str(python), "-c", "pass"], check=True, env={**environment, **variables})
        plan.save()
    return both.wall.is_whole(plan.rounds)


class _Both:
    """Two comparisons of the same processes: the seconds on the clock, and those of a processor, which hardly depend on
    what else the machine does.
    """

    def __init__(self, title: str, what: str, about: dict[str, Any], rows: list[Variant], result: Result) -> None:
        self.wall = Comparison(title, f"seconds {what}", about, rows)
        self.processor = Comparison(
            f"{title}, processor time",
            f"processor seconds {what}",
            about,
            [Variant(row.name, row.meaning, row.arguments) for row in rows],
        )
        result.comparisons += [self.wall, self.processor]

    def begin_round(self) -> None:
        """Let every variant have a next round."""
        for row in (*self.wall.variants, *self.processor.variants):
            if row.status == "measured":
                row.rounds.append([])

    @contextmanager
    def timed(self, row: Variant) -> Iterator[None]:
        """Add what is run, and waited for, inside the block to the row's last round."""
        twin = self.processor.variants[self.wall.variants.index(row)]
        start, used = time.perf_counter(), _processor_seconds()
        yield
        row.rounds[-1].append(time.perf_counter() - start)
        twin.rounds[-1].append(_processor_seconds() - used)


def _processor_seconds() -> float:
    """Of all child processes that have ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _environment(folder: Path, armed: bool) -> Path:
    """Make an environment that sees this one's packages and our source; with the start-up file when ``armed``."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    (site,) = folder.rglob("site-packages")
    # Read in the order of their names: the packages must be found by the time the start-up file looks for them.
    (site / "a_paths.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    if armed:
        (site / "kohya_ext.pth").write_bytes((ROOT / "kohya_ext.pth").read_bytes())
    return python


def _launcher(plan: Plan, result: Result) -> bool:
    """The real script from start to end, a few tiny steps: plainly, and through the launcher without any patch."""
    rows = [
        Variant("plain", "python script.py"),
        Variant("launcher", "python -m kohya_ext --disable_patch '*' script.py", ["--disable_patch", "*"]),
    ]
    title = f"launcher: {plan.family.script}"
    about = {**step.configuration(plan), "samples_a_round": 1, "warm_up_steps": 0}
    both = _Both(title, "a run", about, rows, result)
    models.prepare(plan)
    script, checkout = plan.family.script, plan.bench.checkout.path
    starts = [[str(checkout / script)], ["-m", "kohya_ext", "--sd-scripts", str(checkout), "--disable_patch", "*", script]]
    for number in plan.turns():
        both.begin_round()
        for row, start in zip(rows, starts, strict=True):
            if row.status != "measured":
                continue
            output = plan.bench.scratch / "runs" / f"{row.name}-{number}"
            output.mkdir(parents=True, exist_ok=True)
            tiny = arguments.training_arguments(script, models.of(plan), models.pictures(plan), output)
            log = output / "log.txt"
            with log.open("w", encoding="utf-8") as file, both.timed(row):
                ended = subprocess.run(
                    [plan.bench.python, *start, *tiny, *plan.arguments()],
                    cwd=output,
                    env=plan.bench.environment(**models.variables(plan)),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                )
            if ended.returncode:
                row.status, row.reason = "failed", f"exit code {ended.returncode}: {last_line(log)}"
            plan.save()
    return both.wall.is_whole(plan.rounds)
