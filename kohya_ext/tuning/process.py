"""Let a training process measure for `tune` if its environment says so. Costs a training run one look at a variable."""

from __future__ import annotations

from argparse import Namespace

from kohya_ext.console import is_worker
from kohya_ext.patching.patch import Patch
from kohya_ext.tuning import task as tasks


def patches() -> tuple[Patch, ...]:
    """Return the patches of this process's task; none in a training run."""
    task = tasks.current()
    if task is None:
        return ()
    if not is_worker():
        tasks.watch_parent(task)
    from kohya_ext.tuning import loss_record, step_measurement

    if task.kind == "losses":
        return loss_record.patch(), tasks.patch(task, loss_record.start)
    return (tasks.patch(task, step_measurement.start),)


def silence(args: Namespace) -> None:
    """Change a script's final arguments so that a process with a task writes nothing of the user's run."""
    task = tasks.current()
    if task is not None:
        tasks.quiet(args, task)
