"""Let every process take part in what sd-scripts does in the first process alone.

sd-scripts saves models and states in the first process, after all have met in ``wait_for_everyone``. With DeepSpeed every
process holds a part of the optimizer, and with ZeRO-3 of the weights, so the first one would wait for the others forever. The
others run on to their next batch or to the end of training. There they read from the run's key-value store what the first one
has begun, take part in it, and continue when it does.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

from kohya_ext.patching.training_loop import TrainingCallback
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import log_links

#: What the first process publishes instead of a task.
_CONTINUE, _END = "continue", "end"

#: How long a process waits for the first one, which may write a large file to a slow disk. It ends earlier if that one fails.
_PATIENCE = timedelta(days=1)


@dataclass
class Leader(TrainingCallback):
    """The agreement of this process with the others."""

    accelerator: Accelerator
    connection: Any
    """The run's key-value store; see :func:`kohya_ext.run.ranks.store`."""
    tasks: Mapping[str, Callable[[Any], None]] = field(default_factory=dict)
    """Name -> what the other processes do with the argument that the first one publishes."""
    is_together: bool = False
    """Whether all processes are in a task."""
    has_ended: bool = False
    """Whether training has ended, so that the other processes may exit."""
    is_last: bool = False
    """Whether the first process runs its last tasks, and exits when they are done."""
    _may_follow: bool = False
    """Whether the first process may have begun a task since the processes last met."""
    _messages: int = 0

    @contextlib.contextmanager
    def together(self, task: str, argument: Any) -> Iterator[None]:
        """Make the other processes take part in what the first one does inside the block."""
        self._publish(task, argument)
        self.is_together = True
        try:
            yield
        finally:
            self.is_together = False

    def expect(self) -> None:
        """Note that the first process may begin a task before the processes meet again. All must call this."""
        self._may_follow = True

    def meet(self) -> None:
        """Take part in the tasks of the first process until it meets the others, too. All must call this."""
        if not self._may_follow or self.is_together or self.has_ended:
            return
        self._may_follow = False
        if self.accelerator.is_main_process:
            self._publish(_CONTINUE)
        else:
            self._follow()

    def join(self, task: str, argument: Any) -> None:
        """Take part in the tasks of the first process up to this one, which all processes have reached."""
        if not self.has_ended:
            self._follow([task, argument])

    def end(self) -> None:
        """Take part in the tasks of the first process until it exits. It must call this, too."""
        if self.accelerator.is_main_process:
            self.meet()
            self.is_last = True
        else:
            self.meet()
            self._follow()
            self.has_ended = True

    def batches(self, loader: Any, batches: Callable[[], Iterator[Any]], loop: FrameType | None) -> Iterator[Any]:
        """Meet the other processes before each batch."""
        self.meet()
        for batch in batches():
            yield batch
            self.meet()

    def on_exit(self) -> None:
        """Let the other processes exit after the last tasks; a failure before them ends them in another way."""
        if self.is_last:
            self._end_all()

    def on_end(self) -> None:
        """Let the other processes exit."""
        if self.accelerator.is_main_process:
            self._end_all()

    def _end_all(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self._publish(_END)

    def _publish(self, task: str, argument: Any = None) -> None:
        self.connection.set(self._next_key(), json.dumps([task, argument]))

    def _next_key(self) -> str:
        self._messages += 1
        return f"lead/{self._messages}"

    def _follow(self, last: list[Any] | None = None) -> None:
        """Take part in tasks until the first process continues, or until the ``last`` one is done."""
        while True:
            key = self._next_key()
            try:
                self.connection.wait([key], _PATIENCE)
                task, argument = json.loads(self.connection.get(key))
            except RuntimeError:  # the first process held the store, and has exited
                return
            if task in (_CONTINUE, _END):
                return
            before, links = random.getstate(), log_links.remembered()  # rich draws random numbers for logged lines
            self.is_together = True
            try:
                self.tasks[task](argument)
            finally:
                self.is_together = False
                log_links.remember(links)
                random.setstate(before)
            if [task, argument] == last:
                return
