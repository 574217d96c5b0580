"""Notify the user when a run ends, fails, skips steps or spills to system memory.

Messages come from the lines of the journal. Started before the journal, so that the last message, which the end of the journal
causes, is delivered after it.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from urllib.parse import urlsplit

from kohya_ext.config.settings import Option, Settings
from kohya_ext.errors import UserError
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage, TrainingCallback
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import journal
from kohya_ext.run.notifications import Notifier, is_url


def _target(value: object) -> str:
    """Read a command or a URL. Raises ValueError, without the value, for anything else."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a command or a URL")
    if is_url(value) and not urlsplit(value).netloc:
        raise ValueError("must be a command, or a URL with a host")
    return value.strip()


NOTIFY = Option[str | None](
    "notify",
    None,
    _target,
    "when the run ends, fails, skips steps or spills to system memory, run this command with JSON on standard input, or "
    "POST JSON to this URL; in KOHYA_EXT_NOTIFY it is not visible in the list of processes",
    metavar="COMMAND|URL",
    secret=True,
    in_files=False,
)


@dataclass
class _Notifications(TrainingCallback):
    notifier: Notifier

    def close(self) -> None:
        """Deliver the last messages, after the journal's last line."""
        journal.stop_listening(self.notifier.on_line)
        self.notifier.close()

    def on_exit(self) -> None:
        self.close()

    def on_end(self) -> None:
        self.close()


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Notifications | None:
    vars(args).pop(NOTIFY.name, None)  # upstream's --log_config sends all arguments to the trackers
    target = settings[NOTIFY]
    if target is None or not accelerator.is_main_process:
        return None
    callback = _Notifications(Notifier(target))
    callback.notifier.open()
    journal.listen(callback.notifier.on_line)
    return callback


def _wanted(settings: Settings) -> bool:
    if settings[NOTIFY] is not None and (not settings["journal"] or "journal" in settings.disable_patch):
        raise UserError("--notify needs the journal; remove --no-journal, or --disable_patch for the journal")
    return settings[NOTIFY] is not None


PATCH = Patch(
    name="notify",
    summary="run a command or POST JSON when the run ends, fails, skips steps or spills to system memory",
    targets=(),
    options=(NOTIFY,),
    exactness="exact",
    held_to="the same run without the patch",
    idea="https://docs.python.org/3/library/urllib.request.html",
    wanted=_wanted,
    stage=Stage.WRITE,
    on_start=_start,
    observes=True,
    only_trains=True,
)
