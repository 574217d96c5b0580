"""Overhead of the idle extension: at the start of Python and of a script, and in the guards of compiled blocks."""

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

from benchmarks.plan import Plan
from benchmarks.processes import ROOT, last_line
from benchmarks.results import Comparison, Result, Variant
from benchmarks.suites import step
from kohya_ext.errors import UserError
from kohya_ext.tiny import arguments, checkpoints, dataset

#: A start takes 20 ms, so a stable median needs many.
STARTS = 20

IMAGES = 4

_REACHED = "import sys; print('kohya_ext.launch.autoload' in sys.modules)"


def measure(plan: Plan, result: Result) -> None:
    """Measure all three."""
    if not plan.bench.reduced:
        raise UserError("overhead runs reduced models only; add --device cpu")
    done = [_python_start(plan, result), _launcher(plan, result)]
    guards = step.compare(plan, result, ("patched", "traced"), "guards")
    result.complete = all(done) and guards


def _python_start(plan: Plan, result: Result) -> bool:
    """Measure ``python -c pass`` without the start-up file, with it, and with KOHYA_EXT=1."""
    rows = [
        Variant("bare", "Python start without kohya_ext.pth"),
        Variant("off", "with kohya_ext.pth, no variable set"),
        Variant("on", "with kohya_ext.pth, KOHYA_EXT=1", ["KOHYA_EXT=1"]),
    ]
    about = {"command": "python -c pass", "starts_a_round": STARTS}
    both = _Both("python start", "a start", about, rows, result)
    bare, armed = (_environment(plan.bench.scratch / name, name == "armed") for name in ("bare", "armed"))
    environment = plan.bench.environment()
    del environment["PYTHONPATH"]  # it has a folder with a sitecustomize
    ways = [(bare, {}), (armed, {}), (armed, {"KOHYA_EXT": "1"})]
    for row, (python, variables) in zip(rows, ways, strict=True):
        done = subprocess.run([str(python), "-c", _REACHED], check=True, env={**environment, **variables}, capture_output=True)
        row.facts = {"kohya_ext_imported": done.stdout.strip() == b"True"}
        if row.facts["kohya_ext_imported"] is not (row.name == "on"):
            row.status, row.reason = "failed", "the startup file had no effect"
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
    """Return two comparisons of the same processes: wall time, and processor time, which depends little on other load."""

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
        """Start the next round of every variant."""
        for row in (*self.wall.variants, *self.processor.variants):
            if row.status == "measured":
                row.rounds.append([])

    @contextmanager
    def timed(self, row: Variant) -> Iterator[None]:
        """Add the time of the processes that the block runs to the row's last round."""
        twin = self.processor.variants[self.wall.variants.index(row)]
        start, used = time.perf_counter(), _processor_seconds()
        yield
        row.rounds[-1].append(time.perf_counter() - start)
        twin.rounds[-1].append(_processor_seconds() - used)


def _processor_seconds() -> float:
    """Return the processor seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _environment(folder: Path, armed: bool) -> Path:
    """Create an environment with this one's packages and our source, and with the start-up file when ``armed``."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    (site,) = folder.rglob("site-packages")
    # Python reads .pth files by name: the paths must come before the start-up file, which imports packages.
    (site / "a_paths.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    if armed:
        (site / "kohya_ext.pth").write_bytes((ROOT / "kohya_ext.pth").read_bytes())
    return python


def _launcher(plan: Plan, result: Result) -> bool:
    """Measure a script with a few tiny steps: started directly, and by the launcher without patches."""
    rows = [
        Variant("plain", "python script.py"),
        Variant("launcher", "python -m kohya_ext --disable_patch '*' script.py", ["--disable_patch", "*"]),
    ]
    title = f"launcher: {plan.family.script}"
    about = {**step.configuration(plan), "samples_a_round": 1, "warm_up_steps": 0}
    both = _Both(title, "a run", about, rows, result)
    script, checkout, scratch = plan.family.script, plan.bench.checkout.path, plan.bench.scratch
    models = checkpoints.locate(plan.family.models, scratch / "tiny")
    if not all(file.is_file() for file in models.files.values()):
        checkpoints.write(plan.family.models, checkout, scratch / "tiny", plan.bench.python)
    if not (scratch / "images" / dataset.METADATA).is_file():
        dataset.write(scratch / "images", IMAGES, int(plan.value("resolution", "1024").partition(",")[0]))
    starts = [[str(checkout / script)], ["-m", "kohya_ext", "--sd-scripts", str(checkout), "--disable_patch", "*", script]]
    for number in plan.turns():
        both.begin_round()
        for row, start in zip(rows, starts, strict=True):
            if row.status != "measured":
                continue
            output = scratch / "runs" / f"{row.name}-{number}"
            output.mkdir(parents=True, exist_ok=True)
            tiny = arguments.training_arguments(script, models, scratch / "images", output)
            log = output / "log.txt"
            with log.open("w", encoding="utf-8") as file, both.timed(row):
                ended = subprocess.run(
                    [plan.bench.python, *start, *tiny, *plan.arguments()],
                    cwd=output,
                    env=plan.bench.environment(HF_HUB_CACHE=str(models.tokenizers)),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                )
            if ended.returncode:
                row.status, row.reason = "failed", f"exit code {ended.returncode}: {last_line(log)}"
            plan.save()
    return both.wall.is_whole(plan.rounds)
