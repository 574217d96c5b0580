"""Profile some steps with torch.profiler: a trace for Perfetto, tables of where the time goes, and the option that shortens it.

``--profile_steps 10:13`` records steps 10, 11 and 12. Blocks, the VAE and the text encoders get ranges from forward hooks,
which exist only during these steps. Kernels of a backward pass belong to the block whose forward pass created the autograd
node. A profile that fails ends with a warning, and the run continues.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from kohya_ext.config.settings import Option, Settings
from kohya_ext.console import note, warn
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage, TrainingCallback
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import journal, resume, step_profile
from kohya_ext.run.output_files import output_name
from kohya_ext.run.step_profile import DATA, PART, SAVING, STEP, DeviceEvent, HostEvent, Summary
from kohya_ext.sdscripts.families import FAMILIES
from kohya_ext.units import index_of

MOST_STEPS = 20
"""Largest number of steps of a profile: a step of SDXL has about 100 MB in the trace before compression."""

_MIN_LAPS, _LAPS = 3, 20
"""Smallest and largest number of steps before the profile in the median time of a step without the profiler."""

_WINDOW = "profiled steps"
_AFTER = "after the step"
_MEMORY = "[memory]"

#: Names of the VAE in the scripts.
_VAES = ("vae", "ae")

#: Names of variables of the scripts that hold modules without an own forward pass.
_NETWORKS = ("network", "self")


def steps(value: object) -> tuple[int, int]:
    """Read ``FIRST:END``, steps from 1 without the last one, or a single step. Raises ValueError for anything else."""
    first, colon, end = str(value).partition(":")
    try:
        numbers = int(first), int(end) if colon else int(first) + 1
    except ValueError:
        numbers = 0, 0
    if not 1 <= numbers[0] < numbers[1] <= numbers[0] + MOST_STEPS:
        raise ValueError(
            f"must be FIRST:END, for example 10:13 for steps 10 to 12, with at most {MOST_STEPS} steps, not {value!r}"
        )
    return numbers


PROFILE_STEPS = Option[tuple[int, int] | None](
    "profile_steps",
    None,
    steps,
    "profile these steps, 10:13 for steps 10, 11 and 12: a trace for Perfetto in --output_dir, where the time goes, and which "
    "option to try",
    metavar="FIRST:END",
)


@dataclass
class _Profile(TrainingCallback):
    args: Namespace
    settings: Settings
    accelerator: Accelerator
    first: int
    end: int
    steps: int = 0
    """Optimizer steps of this process."""
    began_at: int = 0
    """The first recorded step; 0 before it."""
    done: bool = False
    _profiler: Any = None
    _window: Any = None
    _range: Any = None
    """The open range of a step, or of the time after it."""
    _hooks: list[Any] = field(default_factory=list)
    _open: list[Any] = field(default_factory=list)
    """Open ranges of parts."""
    _saved: list[bool] = field(default_factory=list)
    """Whether files were written in each time after a step."""
    _files: int = 0
    _laps: list[float] = field(default_factory=list)
    """Seconds of the steps before the profile, with the wait for data."""
    _lap: tuple[int, float] = (0, 0.0)
    """Number of finished steps and time at the start of the current step."""
    _allocated: int = 0
    """Bytes of tensors at the start."""

    @property
    def is_cuda(self) -> bool:
        return bool(self.accelerator.device.type == "cuda")

    @property
    def finished(self) -> int:
        """The number of finished optimizer steps, including those before a resume."""
        position = resume.position()
        return self.steps if position is None else position.step

    # --- training loop -----------------------------------------------------------------------------------------------

    def batches(self, loader: Any, batches: Callable[[], Iterator[Any]], loop: FrameType | None) -> Iterator[Any]:
        """Yield the batches; start before the first profiled step's and stop after the last one's."""
        if not self.steps and not self.done:
            self._try(self._warm_up)
        drawn = batches()
        while True:
            if not self.done:
                self._try(self._before_draw, loop)
            waiting = self._record(DATA) if self._profiler is not None else contextlib.nullcontext()
            with waiting:
                batch = next(drawn, _END)
            if self._profiler is not None:
                self._enter(_AFTER if batch is _END else STEP + str(self.finished + 1))
            if batch is _END:
                return
            yield batch

    def after_batch(self, accelerator: Accelerator) -> None:
        """Count the step, and stop after the run's last one."""
        if not accelerator.sync_gradients:
            return
        self.steps += 1
        if self._profiler is None:
            return
        self._try(self._enter, _AFTER)
        if self.finished >= (getattr(self.args, "max_train_steps", None) or self.end):
            self._try(self._stop)

    def on_exit(self) -> None:
        """Write the steps that were recorded, or report that there are none."""
        if self._profiler is not None:
            self._try(self._stop)
        elif not self.done:
            self.done = True
            warn(f"profile: the run ended before step {self.first}; nothing was recorded")

    def on_end(self) -> None:
        self.on_exit()

    def _try(self, action: Callable[..., None], *arguments: Any) -> None:
        """Call an action; a failure ends the profile and not the run."""
        try:
            action(*arguments)
        except Exception as problem:
            self.done = True
            profiler, self._profiler = self._profiler, None
            self._remove_hooks()
            if profiler is not None:
                with contextlib.suppress(Exception):
                    profiler.stop()
            warn(f"profile: {type(problem).__name__}: {problem}; training continues without a profile")

    # --- recording ---------------------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Start and stop the profiler once: its first start takes seconds, and must precede the recording of CUDA graphs."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # no messages of the profiler's own on standard error
        if self.is_cuda:
            # Without CUPTI's tear-down, which crashes programs with CUDA graphs: github.com/pytorch/pytorch/issues/75504.
            os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
            os.environ.setdefault("TEARDOWN_CUPTI", "0")
            with self._new_profiler():
                pass

    def _new_profiler(self) -> Any:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.is_cuda else [])]
        return profile(activities=activities, profile_memory=True)

    def _record(self, name: str) -> Any:
        from torch.profiler import record_function

        return record_function(name)

    def _before_draw(self, loop: FrameType | None) -> None:
        step = self.finished + 1
        if self._profiler is None and self.steps != self._lap[0]:
            now = time.perf_counter()
            if self.steps > 1:  # without the first step, which warms up
                self._laps.append(now - self._lap[1])
            self._lap = self.steps, now
        if self._profiler is not None:
            self._leave()
            if step >= self.end:
                self._stop()
        elif step >= self.end:
            self.done = True
            warn(f"profile: the run begins after step {self.end - 1}; nothing is recorded")
        elif step >= self.first:
            self.began_at = step
            self._start(loop)

    def _start(self, loop: FrameType | None) -> None:
        self._add_hooks(_parts(loop))
        profiler = self._new_profiler()
        self._synchronize()
        self._allocated = _allocated(self.accelerator) if self.is_cuda else 0
        profiler.start()
        self._profiler = profiler
        self._window = self._record(_WINDOW)
        self._window.__enter__()

    def _enter(self, name: str) -> None:
        """Close the open range and open another one."""
        self._leave()
        self._files = journal.files_written()
        self._range = self._record(name)
        self._range.name = name
        self._range.__enter__()

    def _leave(self) -> None:
        opened, self._range = self._range, None
        if opened is not None:
            opened.__exit__(None, None, None)
            if opened.name == _AFTER:
                self._saved.append(journal.files_written() > self._files)

    def _add_hooks(self, parts: dict[int, tuple[Any, str]]) -> None:
        for module, name in parts.values():
            self._hooks.append(module.register_forward_pre_hook(self._entering(name)))
            self._hooks.append(module.register_forward_hook(self._leaving, always_call=True))

    def _entering(self, name: str) -> Callable[..., None]:
        import torch

        def enter(module: Any, inputs: Any) -> None:
            if not torch.compiler.is_compiling():
                entered = self._record(PART + name)
                entered.__enter__()
                self._open.append(entered)

        return enter

    def _leaving(self, module: Any, inputs: Any, output: Any) -> None:
        import torch

        if not torch.compiler.is_compiling() and self._open:
            self._open.pop().__exit__(None, None, None)

    def _remove_hooks(self) -> None:
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def _synchronize(self) -> None:
        if self.is_cuda:
            import torch

            torch.cuda.synchronize()

    # --- results -----------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        self.done = True
        last = self.finished
        self._leave()
        self._synchronize()
        self._window.__exit__(None, None, None)
        self._remove_hooks()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        began = time.perf_counter()
        summary = self._summary(profiler.profiler.kineto_results.events(), max(last - self.began_at + 1, 1))
        result = step_profile.verdict(summary, {**vars(self.args), **self.settings.values()})
        files = self._write(profiler, summary, result, last)
        journal.event(
            "profile",
            first=self.began_at,
            last=last,
            limit=result.limit,
            verdict=result.sentence,
            advice=result.advice,
            **files,
            **summary.as_json(),
        )
        note(f"profile of steps {self.began_at} to {last}: {result.sentence}")
        for line in result.advice:
            note(f"profile: {'try ' if line.startswith('--') else ''}{line}")
        taken = time.perf_counter() - began
        if files:
            note(f"profile: table in {files['table']}, trace for https://ui.perfetto.dev in {files['trace']} ({taken:.0f} s)")

    def _summary(self, events: Any, count: int) -> Summary:
        from torch.autograd import DeviceType

        host: list[HostEvent] = []
        device: list[DeviceEvent] = []
        memory: list[tuple[int, int]] = []
        window = (0, 0)
        saved = iter(self._saved)
        cpu = DeviceType.CPU
        measured = cpu if not self.is_cuda else DeviceType.CUDA
        after = sorted(event.start_ns() for event in events if event.name() == _AFTER and event.device_type() == cpu)
        saving = {begin for begin, wrote in zip(after, saved, strict=False) if wrote}
        # Calls of the CUDA API have other thread numbers; their operators have the right ones.
        threads = {event.correlation_id(): event.start_thread_id() for event in events if not event.linked_correlation_id()}
        for event in events:
            name, begin = event.name(), event.start_ns()
            if name == _MEMORY:
                if event.device_type() == measured:
                    memory.append((begin, event.nbytes()))
                continue
            end = begin + event.duration_ns()
            linked = event.linked_correlation_id()
            if event.device_type() != cpu:
                if not event.is_user_annotation():
                    device.append(DeviceEvent(begin, end, name, linked))
            elif name == _WINDOW:
                window = (begin, end)
            elif linked or step_profile.is_api(name):
                host.append(HostEvent(begin, end, name, threads.get(linked, 0)))
            elif not step_profile.is_overhead(name):
                if name == _AFTER:
                    name = SAVING if begin in saving else STEP
                thread, forward = event.start_thread_id(), event.fwd_thread_id()
                host.append(HostEvent(begin, end, name, thread, event.correlation_id(), event.sequence_nr(), forward))
        kind = self.accelerator.device.type
        usual = statistics.median(self._laps[-_LAPS:]) if len(self._laps) >= _MIN_LAPS else None
        return step_profile.summarize(
            host, device, window, count, "cuda" if kind == "cuda" else "cpu", memory, self._allocated, usual
        )

    def _write(self, profiler: Any, summary: Summary, result: step_profile.Verdict, last: int) -> dict[str, str]:
        """Write the trace and the tables; return their paths, none if the folder cannot be written."""
        folder = Path(getattr(self.args, "output_dir", None) or ".")
        stem = folder / f"{output_name(self.args)}.profile-{self.began_at}-{last}"
        trace, table, raw = (Path(f"{stem}{suffix}") for suffix in (".json.gz", ".txt", ".json"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file in (trace, table, raw):
                file.unlink(missing_ok=True)  # a symbolic link of that name is replaced, not followed
            table.write_text("\n".join([*step_profile.lines(summary, result), ""]), encoding="utf-8")
            profiler.export_chrome_trace(str(raw))
            with open(raw, "rb") as source, gzip.open(trace, "wb", compresslevel=3) as target:
                shutil.copyfileobj(source, target, 2**20)
        except OSError as problem:
            warn(f"profile: cannot write {problem.filename or stem}: {problem.strerror or problem}")
            return {}
        finally:
            raw.unlink(missing_ok=True)
        return {"trace": os.path.abspath(trace), "table": os.path.abspath(table)}


_END = object()


def _allocated(accelerator: Accelerator) -> int:
    import torch

    return int(torch.cuda.memory_allocated(index_of(accelerator.device)))


def _parts(loop: FrameType | None) -> dict[int, tuple[Any, str]]:
    """Return the modules of the script's models that get a range, by id, with the names of their parts."""
    import torch

    models = {family.model: "U-Net" if family.unet else "DiT" for family in FAMILIES}
    blocks = {name for family in FAMILIES for name in family.blocks.classes}
    parts: dict[int, tuple[Any, str]] = {}
    for variable, value in _variables(loop):
        if variable in _NETWORKS or not isinstance(value, torch.nn.Module):
            continue
        inside = [module for module in value.modules() if type(module).__name__ in models]
        for model in inside:
            parts[id(model)] = (model, models[type(model).__name__])
            for module in model.modules():
                if type(module).__name__ in blocks:
                    parts[id(module)] = (module, type(module).__name__)
        if not inside:
            name = "VAE" if variable in _VAES else "text encoder"
            # Scripts call the VAE's encoder, not the VAE.
            for module in (value, *value.children()) if variable in _VAES else (value,):
                parts.setdefault(id(module), (module, name))
    return parts


def _variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a frame and its caller; the elements of lists under the list's name."""
    for _ in range(2):
        if frame is None:
            return
        for name, value in list(frame.f_locals.items()):
            for each in value if isinstance(value, (list, tuple)) and len(value) < 10 else (value,):
                yield name, each
        frame = frame.f_back


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Profile | None:
    chosen = settings[PROFILE_STEPS]
    if chosen is None or not accelerator.is_main_process:
        return None
    return _Profile(args, settings, accelerator, *chosen)


PATCH = Patch(
    name="profile_steps",
    summary="--profile_steps: profile some steps, and print what limits them and which option to try",
    targets=(),
    options=(PROFILE_STEPS,),
    exactness="exact",
    held_to="the same run without the patch",
    idea="https://pytorch.org/tutorials/recipes/recipes/profiler_recipe.html",
    wanted=lambda settings: settings[PROFILE_STEPS] is not None,
    stage=Stage.OBSERVE,
    on_start=_start,
    only_trains=True,
)
