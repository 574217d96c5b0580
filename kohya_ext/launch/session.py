"""Start a run with the extension: resolve options, apply patches, print and report the result."""

from __future__ import annotations

import atexit
import json
import os
import platform
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kohya_ext import __version__, preflight
from kohya_ext.config.arguments import take_over
from kohya_ext.config.command_line import CommandLine, without_secrets
from kohya_ext.config.settings import Settings, options, secrets
from kohya_ext.console import (
    drop_unwritable,
    hide_notices_of_libraries,
    is_worker,
    note,
    replace_unencodable,
    should_print,
    stop,
    warn,
)
from kohya_ext.errors import UserError, first_line
from kohya_ext.gpu.peak_memory import peak_memory
from kohya_ext.installed_gpus import first_gpu
from kohya_ext.launch import accelerate_signals
from kohya_ext.patching.patch import NEEDS_TORCH, NOT_IN_RELEASE, Patch, Patcher, moved, registry, takes
from kohya_ext.patching.training_loop import Program
from kohya_ext.planning import automatic
from kohya_ext.run import output_lock, run_record, stop_request
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.tuning import process as tuning_process

#: The engine's own hook, applied like a patch. It cannot be turned off by name, because the script would then reject presets
#: and options.
OPTIONS = "options"

#: The engine's patches whose outcomes ``doctor`` shows and a run's report leaves out.
_IN_EVERY_RUN = (OPTIONS, accelerate_signals.PATCH.name)


@dataclass
class Session:
    """The run in this process."""

    checkout: Checkout
    command: CommandLine
    patcher: Patcher
    started: float

    @classmethod
    def start(cls, checkout: Checkout, command: CommandLine) -> Session:
        """Resolve the options and arm the patches. Raises UserError for anything wrong in the command line."""
        hide_notices_of_libraries()
        engine = (_options_patch(checkout, command), accelerate_signals.PATCH, *tuning_process.patches())
        patcher = Patcher(registry(), command.settings, checkout, engine, Program(checkout, command))
        session = cls(checkout, command, patcher, time.monotonic())
        session.patcher.arm()
        if command.script is not None:
            session._announce()
            if command.settings.report is not None and should_print():
                atexit.register(session.write_report, command.settings.report)
        return session

    def _announce(self) -> None:
        for patch in self.patcher.patches.values():
            for option in patch.options:
                if self._is_on(patch) or self.command.settings[option] in (None, False):
                    continue
                origin = self.command.origin(option.name)
                if origin != "default" and not (origin == "preset" and self._needs_torch(patch)):
                    warn(f"--{option.name} does nothing: the patch {patch.name} is off ({self._why_off(patch)})")
        for name in without_secrets(self.command.words)[1]:
            variable = secrets().get(name)
            note(f"--{name} is left out of printed commands and files" + (f"; {variable} sets it, too" if variable else ""))
        presets = f"preset {self.command.presets.label}" if self.command.presets.presets else "no preset"
        age = f" ({self.checkout.age})" if self.checkout.age else ""
        note(f"{__version__}, {self.checkout.label}{age}, {presets}, {self._patch_summary()}")
        for need, patches in self._off_with_this_torch().items():
            note(f"torch {version('torch')}: {', '.join(patches)} off ({need})")

    def _patch_summary(self) -> str:
        """Return the number of patches that are on, and the names of those that an option of this run enables."""
        settings, patches = self.command.settings, self.patcher.patches.values()
        if not self.checkout.can_be_patched(settings.allow_unknown_version):
            return "no patches: unknown layout of sd-scripts (KOHYA_EXT_ALLOW_UNKNOWN_VERSION=1 tries them)"
        on = [patch for patch in patches if self._is_on(patch)]
        asked = [patch.name for patch in on if not patch.wanted(Settings())]
        failed = [outcome.patch for outcome in self.patcher.outcomes.values() if outcome.status == "failed" or outcome.surprise]
        words = f"{len(on)} patch{'es' * (len(on) != 1)} on"
        lacking = [patch for patch in patches if not self._is_on(patch) and self._why_off(patch) == NOT_IN_RELEASE]
        words += f", {len(lacking)} not in this release" if lacking else ""
        for what, some in (("with", asked), ("off:", settings.disable_patch), ("left out in part:", dict.fromkeys(failed))):
            words += f", {what} {', '.join(some)}" if some else ""
        return words

    def _off_with_this_torch(self) -> dict[str, list[str]]:
        """Return {what they need: names} of the patches that are off with the installed torch."""
        rows: dict[str, list[str]] = {}
        for patch in self.patcher.patches.values():
            if need := self._needs_torch(patch):
                rows.setdefault(need, []).append(patch.name)
        return rows

    def _needs_torch(self, patch: Patch) -> str:
        """Return why the installed torch turns a patch off; empty if it does not."""
        need = NEEDS_TORCH.format(patch.torch)
        return need if self._why_off(patch) == need else ""

    def _why_off(self, patch: Patch) -> str:
        return next(outcome.reason for outcome in self.patcher.outcomes.values() if outcome.patch == patch.name)

    def _is_on(self, patch: Patch) -> bool:
        return any(
            outcome.patch == patch.name and outcome.status in ("applied", "waiting")
            for outcome in self.patcher.outcomes.values()
        )

    def report(self) -> dict[str, Any]:
        """Return the run's settings, patches and measurements: seconds since arming, memory in bytes."""
        return {
            "kohya_ext": __version__,
            "sd_scripts": {
                "path": str(self.checkout.path),
                "version": self.checkout.version,
                "layout": self.checkout.layout,
                "commit": self.checkout.commit,
            },
            "script": self.command.name or None,
            "presets": [preset.name for preset in self.command.presets.presets],
            "settings": {key: _plain(value) for key, value in self.command.settings.values().items() if key not in secrets()},
            "origins": {name: origin for name, _ in options() if (origin := self.command.origin(name)) != "default"},
            "patches": [asdict(each) for each in self.patcher.outcomes.values() if each.patch not in _IN_EVERY_RUN],
            "facts": {patch.name: dict(patch.facts()) for patch in self.patcher.active() if patch.facts is not None},
            "seconds": round(time.monotonic() - self.started, 3),
            "memory": peak_memory(),
            "python": platform.python_version(),
            "torch": getattr(sys.modules.get("torch"), "__version__", None),
        }

    def write_report(self, file: Path) -> None:
        """Write :meth:`report` as JSON; print a note if that fails."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(self.report(), indent=1), encoding="utf-8")
        except Exception as error:  # a measurement may fail, too
            note(f"could not write the report {file}: {first_line(error)}")


def _training_script(checkout: Checkout, argv: Sequence[str]) -> Path | None:
    return checkout.trained_by(Path(argv[0]).resolve()) if argv and argv[0] else None


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def warn_if_too_large(checkout: Checkout, args: Namespace, command: CommandLine) -> None:
    """Print what would make a run fit its GPU, if it is predicted not to fit. A failure is a warning."""
    from kohya_ext.planning import too_large

    try:
        gpu = first_gpu()
        line = too_large.remark(checkout, args, command, gpu) if gpu is not None else None
    except Exception as error:  # a bug in a prediction must not stop the run
        line = f"the check of the GPU's memory failed: {type(error).__name__}: {error}"
    if line is not None:
        warn(line)


def _options_patch(checkout: Checkout, command: CommandLine) -> Patch:
    parsers: list[ArgumentParser] = []

    def check(args: Namespace) -> None:
        if (script := command.script) is None:
            return
        tuning_process.silence(args)
        run_record.begin(run_record.describe(script.name, args))
        if should_print():
            try:
                unlocked = output_lock.acquire(args)
            except UserError as error:
                stop(str(error))
            if command.settings.preflight:
                preflight.report(preflight.inspect(script, args, command.settings), command.settings.strict)
                warn_if_too_large(checkout, args, command)
            if unlocked is not None:  # not before preflight, whose error names the cause
                warn(unlocked)

    def add_options(original: Any, settings: Settings) -> Any:
        @wraps(original)
        def add_training_arguments(parser: Any, *args: Any, **kwargs: Any) -> Any:
            if take_over(parser, command, check):
                parsers.append(parser)
            return original(parser, *args, **kwargs)

        return add_training_arguments

    def restore_parsers() -> None:
        while parsers:
            parsers.pop().__class__ = ArgumentParser

    return Patch(
        name=OPTIONS,
        summary="the extension's options and presets on the script's command line and in its config file",
        targets=moved("add_training_arguments", "library.args", add_options, takes("parser"), body="runs"),
        exactness="exact",
        held_to="the script without the extension, when none of its options is given",
        idea="https://github.com/kohya-ss/sd-scripts/pull/2217",
        on_undo=restore_parsers,
    )


_current: Session | None = None


def begin(checkout: Checkout) -> Session:
    """Start the session of this process once; print a user error in one line and exit with code 2."""
    global _current
    if _current is None:
        drop_unwritable()
        replace_unencodable()  # before the script prints captions, prompts and folders
        if is_worker():
            stop_request.leave_to_parent()
        try:
            script = _training_script(checkout, sys.argv)
            _current = Session.start(checkout, CommandLine(script, sys.argv[1:], os.environ, automatic))
        except UserError as error:
            stop(str(error))
    return _current


def current() -> Session | None:
    """Return the session of this process; None before it starts."""
    return _current
