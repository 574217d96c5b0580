"""Define patches, apply them when their targets are imported, undo and report them.

Each patch is one file in ``patches/`` (installed as ``kohya_ext.patches``); this module names none of them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Literal

from kohya_ext.config.settings import Option, Settings, patch_modules
from kohya_ext.console import stop, warn
from kohya_ext.errors import UserError, did_you_mean
from kohya_ext.patching.attributes import ABSENT, Replacement, function_of, replace_attribute
from kohya_ext.patching.training_loop import OnStart, Participant, Program, Stage, TrainingLoop
from kohya_ext.sdscripts import releases
from kohya_ext.sdscripts.checkouts import PACKAGES, Checkout
from kohya_ext.sdscripts.fingerprints import Body, remember

Status = Literal["applied", "waiting", "skipped", "failed"]

TRAINING_LOOP = "training_loop"
"""The engine's patch that calls the callbacks of all others. It is on when one of them is, and has no switch."""

NOT_IN_RELEASE = "not in this release of sd-scripts"
"""The reason for a target that a checkout does not have."""

NEEDS_TORCH = "needs torch {} or newer"
"""The reason for a patch that is off with the installed torch."""

_START = "prepare_accelerator"

#: The module that v0.11 divided.
_WHOLE = "library.train_util"


@dataclass(frozen=True)
class Target:
    """One attribute that a patch replaces."""

    module: str
    """The module that holds it; the patch is applied when something imports it."""
    attribute: str
    """Its name in the module, dotted for a method: ``PreTrainedModel.gradient_checkpointing_enable``."""
    replace: Callable[[Any, Settings], Any]
    """(original, the run's settings) -> replacement. Runs once, when the module is imported.

    For a static method, a class method or a property the original is its plain function, and so must the replacement be.
    """
    body: Body = field(kw_only=True)
    """``"runs"`` if the replacement calls the original; else the fingerprints of the code that it replaces."""
    expect: Callable[[Any], str | None] = lambda original: None
    """original -> why the patch does not recognize it, or None. An unrecognized original is not replaced."""
    moved_to: str = ""
    """The module that has the attribute in newer releases. Where it exists, this target is not used."""
    wanted: Callable[[Settings], bool] = lambda settings: True
    """Whether the patch replaces it in a run with these settings."""
    without_sd_scripts: bool = False
    """Whether only a program without sd-scripts, the demo, uses it."""
    optional: bool = False
    """Whether sd-scripts works without its package (LyCORIS, for example), or some versions lack the attribute."""
    needed: Callable[[], bool] | None = None
    """Returns whether this torch needs it. Targets with the same function are then replaced together by :func:`apply_needed`
    instead of at the import of their module, and restored if torch still needs it afterwards."""

    @property
    def label(self) -> str:
        """``module:attribute``."""
        return f"{self.module}:{self.attribute}"


def moved(
    attribute: str,
    to: str,
    replace: Callable[[Any, Settings], Any],
    expect: Callable[[Any], str | None] = lambda original: None,
    *,
    body: Body,
) -> tuple[Target, Target]:
    """Return the targets for an attribute of ``library.train_util`` that is in the module ``to`` since v0.11."""
    return (
        Target(to, attribute, replace, expect, body=body),
        Target(_WHOLE, attribute, replace, expect, to, body=body),
    )


def takes(*names: str, exactly: bool = False) -> Callable[[Any], str | None]:
    """Return an ``expect`` for a function whose first parameters (``exactly``: all of them) have these names."""

    def expect(original: Any) -> str | None:
        try:
            parameters = list(inspect.signature(original).parameters)
        except ValueError:  # a compiled function without a signature: safetensors' in some releases
            return None
        known = parameters if exactly else parameters[: len(names)]
        return None if known == list(names) else f"its parameters are {parameters}"

    return expect


@dataclass(frozen=True)
class Patch:
    """A patch: its targets, options, callbacks and description."""

    name: str
    summary: str
    """One line for ``doctor``."""
    targets: tuple[Target, ...]
    exactness: Literal["exact", "close"]
    """``exact``: results are bit-identical to the reference; ``close``: within a tolerance."""
    held_to: str
    """The reference for its results, and for a close patch the tolerance."""
    idea: str
    """A link to who introduced it."""
    options: tuple[Option[Any], ...] = ()
    """Its options. Flags, variables, keys and tables of options are derived from them."""
    until: str | None = None
    """The release of sd-scripts that no longer needs it."""
    torch: str | None = None
    """The oldest release of torch that it is tested with. It is off with an older one."""
    wanted: Callable[[Settings], bool] = lambda settings: True
    """Raises UserError for settings that cannot work together."""
    problems: Callable[[str, Any, Settings], Iterable[str]] = lambda script, args, settings: ()
    """(script, its arguments, settings) -> why that run cannot use the patch, if it is wanted; for preflight."""
    facts: Callable[[], Mapping[str, object]] | None = None
    """Returns its measurements as plain JSON data, for the report of a run in which it is active."""
    stage: Stage | None = None
    """Its nesting order among the patches; required with ``on_start``. None counts as COMPUTE."""
    on_start: OnStart | None = None
    """Creates its callback when a training run starts."""
    on_undo: Callable[[], None] | None = None
    """Reverts changes of its replacements to objects of the run."""
    observes: bool = False
    """Whether a failure of its callback is a warning and never ends the run, because it only observes the run."""
    in_dry_runs: bool = True
    """Whether dry runs have it: not if it hides a failure, or asks the other processes, which do not exist there."""
    only_trains: bool = False
    """Whether it is off in processes of `tune`, which train nothing: it writes something of the run, or handles signals."""

    def __post_init__(self) -> None:
        if self.on_start is not None and self.stage is None:
            raise TypeError(f"patch {self.name} has on_start but no stage")

    @property
    def callback_label(self) -> str | None:
        """``training_loop:STAGE`` for ``doctor``; None for a patch without a callback."""
        return None if self.on_start is None or self.stage is None else f"{TRAINING_LOOP}:{self.stage.name}"


@dataclass
class Outcome:
    """The result for one target of one patch."""

    patch: str
    target: str
    status: Status
    reason: str = ""
    surprise: bool = False
    """Skipped because the patch does not recognize the target; an error with ``--strict``."""


@dataclass(eq=False)
class Patcher:
    """Applies patches to one checkout in this process, and undoes them."""

    patches: Mapping[str, Patch]
    """The patches that a user can turn off."""
    settings: Settings
    checkout: Checkout | None
    """None in a process that does not import sd-scripts: accelerate's launcher."""
    engine: tuple[Patch, ...] = ()
    """The engine's own patches, which are on in every layout."""
    program: Program = field(default_factory=Program)
    """The program of this process, for the patches' callbacks."""
    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    _loop: TrainingLoop = field(init=False)
    _applied: dict[tuple[str, str], Replacement] = field(default_factory=dict)
    _own: list[tuple[str, Any]] = field(default_factory=list)
    """(patch, its replacement): where a module re-exports it, or a subclass inherits it, it is not replaced again."""
    _hooked: set[tuple[str, str]] = field(default_factory=set)
    _armed: bool = False

    def __post_init__(self) -> None:
        self._loop = TrainingLoop(self._participants, self.program)
        if any(patch.on_start is not None for patch in self.all_patches()):
            self.engine = (*self.engine, _training_loop(self._loop, lambda settings: bool(self._taking_part())))

    def _participants(self) -> list[Participant]:
        return [
            Participant(patch.name, patch.on_start, patch.observes)
            for patch in self._taking_part()
            if patch.on_start is not None
        ]

    def all_patches(self) -> list[Patch]:
        """Return the engine's patches, then the others."""
        return [*self.engine, *self.patches.values()]

    def arm(self) -> None:
        """Hook every target: it is replaced when its module is imported, or immediately if it already is. Safe to repeat.

        Raises UserError for a name in ``disable_patch`` that no patch has.
        """
        import wrapt  # imports asyncio, which a launcher that only reads options does not need

        disabled = self._disabled()
        self._armed = True
        if self not in _armed:
            _armed.append(self)
        patches = self.all_patches()
        for patch in patches:
            off = self._reason_to_skip(patch, disabled)
            places = [(target.label, off or self._reason_to_leave(target)) for target in patch.targets]
            if patch.callback_label is not None:
                places.append((patch.callback_label, off))
            for label, reason in places:
                if (patch.name, label) not in self._applied:
                    status: Status = "waiting" if reason is None else "skipped"
                    self.outcomes[patch.name, label] = Outcome(patch.name, label, status, reason or "")
        for patch in sorted(patches, key=_stage):
            for target in patch.targets:
                key = (patch.name, target.label)
                if target.needed is not None or self.outcomes[key].status != "waiting":
                    continue
                if key not in self._hooked:
                    self._hooked.add(key)
                    wrapt.register_post_import_hook(self._hook(patch, target), target.module)
                elif target.module in sys.modules:
                    self._apply(patch, target, sys.modules[target.module])
        self._update_callback_outcomes()

    def undo(self) -> None:
        """Restore the identical original objects, end the training run and stop reacting to imports."""
        self._armed = False
        if self in _armed:
            _armed.remove(self)
        self._loop.end()
        for patch in self.all_patches():
            if patch.on_undo is not None:
                patch.on_undo()
        self._undo_applied(list(self._applied), "undone")
        self._update_callback_outcomes()

    def _undo_applied(self, keys: Sequence[tuple[str, str]], reason: str) -> None:
        for key in reversed(keys):
            self._applied.pop(key).undo()
            self.outcomes[key].status, self.outcomes[key].reason = "skipped", reason

    def apply_needed(self) -> None:
        """Replace the targets that this torch needs (:attr:`Target.needed`). Safe to repeat."""
        for patch in self.all_patches():
            probed: dict[Callable[[], bool], list[Target]] = {}
            for target in patch.targets:
                if target.needed is not None and self.outcomes[patch.name, target.label].status == "waiting":
                    probed.setdefault(target.needed, []).append(target)
            for needed, targets in probed.items():
                self._apply_needed(patch, needed, targets)

    def _apply_needed(self, patch: Patch, needed: Callable[[], bool], targets: Sequence[Target]) -> None:
        status: Status = "skipped"
        try:
            if needed():
                for target in targets:
                    self._apply(patch, target, importlib.import_module(target.module))
                if needed():
                    keys = [(patch.name, target.label) for target in targets]
                    self._undo_applied([key for key in keys if key in self._applied], "it does not fix this torch")
                return
            reason = "this torch does not need it"
        except Exception as error:  # as for any target that fails
            status, reason = "failed", f"{type(error).__name__}: {error}"
            warn(f"patch {patch.name} failed on {targets[0].label} and was not applied: {reason}")
        for target in targets:
            outcome = self.outcomes[patch.name, target.label]
            outcome.status, outcome.reason = status, reason

    def active(self) -> list[Patch]:
        """Return the patches with at least one applied target."""
        applied = {outcome.patch for outcome in self.outcomes.values() if outcome.status == "applied"}
        return [patch for patch in self.patches.values() if patch.name in applied]

    def summary(self) -> dict[str, tuple[Status, str]]:
        """Return {patch: (status, reason)} of the patches that a user can turn off. A patch is applied if one target is."""
        rows: dict[str, tuple[Status, str]] = {}
        for name in self.patches:
            outcomes = [outcome for outcome in self.outcomes.values() if outcome.patch == name]
            problems = [outcome for outcome in outcomes if outcome.status == "failed" or outcome.surprise]
            applied = [outcome for outcome in outcomes if outcome.status == "applied"]
            first = next(iter([*problems, *applied, *outcomes]), None)
            if first is not None:
                rows[name] = ("applied" if applied else first.status, first.reason)
        return rows

    def _disabled(self) -> frozenset[str]:
        wanted = self.settings.disable_patch
        for name in wanted:
            if name != "*" and name not in self.patches:
                raise UserError(
                    f"no patch {name} to disable.{did_you_mean(name, self.patches)} Patches: {', '.join(self.patches)}"
                )
        return frozenset(self.patches if "*" in wanted else wanted)

    def _reason_to_skip(self, patch: Patch, disabled: frozenset[str]) -> str | None:
        """Return why the whole patch is off, or None."""
        if patch.name in disabled:
            return "disabled by the user"
        if not patch.wanted(self.settings):
            return "not enabled"
        if patch.torch is not None and is_older_torch(patch.torch):
            return NEEDS_TORCH.format(patch.torch)
        if self.checkout is None:
            return None
        from packaging.version import Version

        theirs = self.checkout.version
        if patch.until is not None and theirs is not None and Version(theirs) >= Version(patch.until):
            return f"included in sd-scripts since v{patch.until}"
        if patch not in self.engine and not self.checkout.can_be_patched(self.settings.allow_unknown_version):
            return f"{self.checkout.label} has an unknown layout"
        return None

    def _reason_to_leave(self, target: Target) -> str | None:
        """Return why a target of an enabled patch is not replaced, known before its module is imported; or None."""
        if not target.wanted(self.settings):
            return "not enabled"
        if self.checkout is None:
            return None
        if target.without_sd_scripts and self.checkout.has("train_network"):
            return "sd-scripts does not use it"
        if target.moved_to and not self.checkout.lacks(target.moved_to):
            return f"moved to {target.moved_to}"
        return NOT_IN_RELEASE if self.checkout.lacks(target.module) else None

    def _may_lack_targets(self) -> bool:
        """Return whether the checkout is older than the tested ones, or a fork of an unknown layout."""
        checkout = self.checkout
        return checkout is not None and not checkout.is_newer_than_tested and not releases.BY_NAME[checkout.layout].tested

    def _taking_part(self) -> list[Patch]:
        """Return the enabled patches that have a callback, in the order of their stages."""
        disabled = self._disabled()
        return [
            patch
            for patch in sorted(self.all_patches(), key=_stage)
            if patch.on_start is not None and self._reason_to_skip(patch, disabled) is None
        ]

    def _update_callback_outcomes(self) -> None:
        """Copy the outcome of ``prepare_accelerator``, which creates the callbacks, to the enabled ones."""
        starts = [outcome for (name, target), outcome in self.outcomes.items() if name == TRAINING_LOOP and _START in target]
        status: Status = "waiting" if self._armed else "skipped"
        reason = "" if self._armed else "undone"
        if any(outcome.status == "applied" for outcome in starts):
            status = "applied"
        elif any(outcome.status == "failed" or outcome.surprise for outcome in starts):
            status, reason = "skipped", f"{TRAINING_LOOP} is not applied"
        for patch in self._taking_part():
            outcome = self.outcomes.get((patch.name, patch.callback_label or ""))
            if outcome is not None:
                outcome.status, outcome.reason = status, reason

    def _hook(self, patch: Patch, target: Target) -> Callable[[ModuleType], None]:
        def on_import(module: ModuleType) -> None:
            if self._armed:
                self._apply(patch, target, module)
                self._update_callback_outcomes()

        return on_import

    def _apply(self, patch: Patch, target: Target, module: ModuleType) -> None:
        key = (patch.name, target.label)
        outcome = self.outcomes[key]
        if outcome.status != "waiting":
            return
        try:
            owner, name = owner_of(module, target.attribute)
            original, as_it_was = function_of(owner, name)
            if original is ABSENT and (target.optional or self._may_lack_targets()):
                is_theirs = target.module.partition(".")[0] in PACKAGES
                missing = NOT_IN_RELEASE if is_theirs else f"this version of {target.module} does not have it"
                outcome.status, outcome.reason = "skipped", missing
                return
            if any(original is own for name, own in self._own if name == patch.name):
                outcome.status, outcome.reason = "skipped", "it is the function that the patch has replaced elsewhere"
                return
            surprise = unrecognized(target, module, original)
            if surprise is None:
                replacement = target.replace(original, self.settings)
                self._applied[key] = replace_attribute(owner, name, as_it_was(replacement))
                self._own.append((patch.name, replacement))
                remember(replacement, original)
                outcome.status = "applied"
        except Exception as error:  # a patch that fails must not end the training
            outcome.status, outcome.reason = "failed", f"{type(error).__name__}: {error}"
            warn(f"patch {patch.name} failed on {target.label} and was not applied: {outcome.reason}")
            return
        if surprise is not None:
            outcome.status, outcome.reason, outcome.surprise = "skipped", surprise, True
            message = f"patch {patch.name} does not recognize {target.label}: {surprise}"
            if self.settings.strict:
                stop(f"{message}; remove --strict to run without the patch")
            warn(f"{message}; running the original code")


@functools.cache
def is_older_torch(release: str) -> bool:
    """Return whether the installed torch is older than a release; does not import it."""
    from packaging.version import Version

    try:
        installed = Version(version("torch"))
    except PackageNotFoundError:
        return False
    return Version(installed.base_version) < Version(release)


def _stage(patch: Patch) -> Stage:
    return Stage.COMPUTE if patch.stage is None else patch.stage


def _training_loop(loop: TrainingLoop, wanted: Callable[[Settings], bool]) -> Patch:
    """Return the patch that calls the callbacks of a training loop, on every layout."""
    accelerate = "accelerate.accelerator"
    return Patch(
        TRAINING_LOOP,
        "calls the patches' training callbacks in the order of their stages",
        (
            *moved(_START, "library.accelerator_setup", loop.prepare_accelerator, takes("args", exactly=True), body="runs"),
            *moved("add_training_arguments", "library.args", loop.parse, takes("parser"), body="runs"),
            Target(accelerate, "Accelerator.accumulate", loop.accumulate, takes("self"), body="runs"),
            Target(accelerate, "Accelerator.backward", loop.backward, takes("self", "loss"), body="runs"),
            Target("accelerate.optimizer", "AcceleratedOptimizer.step", loop.optimizer_step, takes("self"), body="runs"),
            Target(
                "accelerate.data_loader", "DataLoaderShard.__iter__", loop.iterate, takes("self", exactly=True), body="runs"
            ),
        ),
        exactness="exact",
        held_to="the same run without patches",
        idea="https://huggingface.co/docs/transformers/main_classes/callback",
        wanted=wanted,
        stage=Stage.WRITE,
        on_undo=loop.restore_training_functions,
    )


def unrecognized(target: Target, module: ModuleType, original: Any) -> str | None:
    """Return why the target in a module is not what its patch knows; None if it is."""
    reason = "it does not exist" if original is ABSENT else target.expect(original)
    return target.body.surprise(module, target.attribute) if reason is None and target.body != "runs" else reason


def owner_of(module: ModuleType, attribute: str) -> tuple[Any, str]:
    """Return the object that has an attribute with a dotted name, ABSENT if there is none, and the attribute's last name."""
    *path, name = attribute.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part, ABSENT)
    return owner, name


def registry() -> dict[str, Patch]:
    """Return every patch in ``patches/`` by name. Each module there has one ``PATCH``."""
    return {module.PATCH.name: module.PATCH for module in patch_modules()}


_armed: list[Patcher] = []


def apply_needed() -> None:
    """Apply the targets of armed patches with a ``needed`` check. Call this when all of torch can be imported."""
    for patcher in _armed:
        patcher.apply_needed()


def summary() -> dict[str, tuple[Status, str]]:
    """Return :meth:`Patcher.summary` of the armed patches in this process."""
    return {name: row for patcher in _armed for name, row in patcher.summary().items()}
