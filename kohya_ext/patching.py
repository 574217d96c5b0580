"""The mechanism of patches: what one is, how it is applied when its target is imported, undone and reported.

The patches themselves are one file each in ``patches/`` (installed as ``kohya_ext.patches``); this module knows none of
them by name.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import wrapt

from kohya_ext.bodies import Body, remember
from kohya_ext.console import stop, warn
from kohya_ext.errors import UserError, did_you_mean
from kohya_ext.sdscripts import KNOWN_LAYOUTS, Checkout, Layout
from kohya_ext.settings import Settings

Status = Literal["applied", "waiting", "skipped", "failed"]

_ABSENT = object()


@dataclass(frozen=True)
class Target:
    """One attribute that a patch replaces."""

    module: str
    """The module that holds it; the patch is applied when something imports it."""
    attribute: str
    """Its name in the module, dotted for a method: ``PreTrainedModel.gradient_checkpointing_enable``."""
    replace: Callable[[Any, Settings], Any]
    """(original, the run's settings) -> replacement. Runs once, when the module is imported."""
    body: Body = field(kw_only=True)
    """``"runs"`` when the replacement runs the original, whatever its code is; else the code that it was written for."""
    expect: Callable[[Any], str | None] = lambda original: None
    """original -> why it is not what the patch knows, or None when it is. A surprise is skipped, never guessed at."""
    layouts: frozenset[Layout] = KNOWN_LAYOUTS
    """The layouts of sd-scripts that have it."""
    optional: bool = False
    """Whether its package is one that sd-scripts can do without (LyCORIS, say)."""

    @property
    def label(self) -> str:
        """``module:attribute``."""
        return f"{self.module}:{self.attribute}"


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
    """What a patch is, in data."""

    name: str
    summary: str
    """One line for ``doctor``."""
    targets: tuple[Target, ...]
    exactness: Literal["exact", "close"]
    """``exact``: results stay bit-identical to what they are held to; ``close``: within ``tolerance``."""
    held_to: str
    """What its results are compared with, and for a close one the tolerance."""
    idea: str
    """A link to who introduced it."""
    wanted: Callable[[Settings], bool] = lambda settings: True
    """Raises UserError for settings that cannot work together."""
    facts: Callable[[], Mapping[str, object]] | None = None
    """What it found out while the run went on, as plain JSON data; asked for the report of a run in which it is active."""
    outermost: bool = False
    """Applied after the others: what it replaces, and falls back to, may be theirs."""


@dataclass
class Outcome:
    """What became of one target of one patch."""

    patch: str
    target: str
    status: Status
    reason: str = ""
    surprise: bool = False
    """Skipped because the target looks different from what the patch knows: an error under ``--strict``."""


@dataclass
class _Applied:
    owner: Any
    name: str
    original: Any
    """What the owner's own namespace held; _ABSENT when the attribute was inherited."""


@dataclass
class Patcher:
    """Applies patches to one checkout in this process, and keeps what it needs to undo them."""

    patches: Mapping[str, Patch]
    settings: Settings
    checkout: Checkout
    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    _applied: dict[tuple[str, str], _Applied] = field(default_factory=dict)
    _hooked: set[tuple[str, str]] = field(default_factory=set)
    _armed: bool = False

    def arm(self) -> None:
        """Hook every target: it is replaced when its module is imported, at once if it already is. Safe to repeat.

        Raises UserError for a name in ``disable_patch`` that no patch has.
        """
        disabled = self._disabled()
        self._armed = True
        for patch in sorted(self.patches.values(), key=lambda patch: patch.outermost):
            for target in patch.targets:
                key = (patch.name, target.label)
                if key in self._applied:
                    continue
                reason = self._reason_to_skip(patch, target, disabled)
                self.outcomes[key] = Outcome(*key, "waiting" if reason is None else "skipped", reason or "")
                if reason is not None:
                    continue
                if key not in self._hooked:
                    self._hooked.add(key)
                    wrapt.register_post_import_hook(self._hook(patch, target), target.module)
                elif target.module in sys.modules:
                    self._apply(patch, target, sys.modules[target.module])

    def undo(self) -> None:
        """Put the identical original objects back and stop answering imports."""
        self._armed = False
        for key, applied in reversed(self._applied.items()):
            if applied.original is _ABSENT:
                delattr(applied.owner, applied.name)
            else:
                setattr(applied.owner, applied.name, applied.original)
            self.outcomes[key].status, self.outcomes[key].reason = "skipped", "undone"
        self._applied.clear()

    def active(self) -> list[Patch]:
        """The patches of which at least one target is applied."""
        applied = {outcome.patch for outcome in self.outcomes.values() if outcome.status == "applied"}
        return [patch for patch in self.patches.values() if patch.name in applied]

    def _disabled(self) -> frozenset[str]:
        wanted = self.settings.disable_patch
        for name in wanted:
            if name != "*" and name not in self.patches:
                raise UserError(
                    f"no patch {name} to disable: there are {', '.join(self.patches)}.{did_you_mean(name, self.patches)}"
                )
        return frozenset(self.patches if "*" in wanted else wanted)

    def _reason_to_skip(self, patch: Patch, target: Target, disabled: frozenset[str]) -> str | None:
        if patch.name in disabled:
            return "disabled by the user"
        if not patch.wanted(self.settings):
            return "not asked for"
        layout = self.checkout.layout
        if layout == "unknown":
            return None if self.settings.allow_unknown_version else f"{self.checkout.label} has a layout it does not know"
        return None if layout in target.layouts else f"nothing to do there in layout {layout}"

    def _hook(self, patch: Patch, target: Target) -> Callable[[ModuleType], None]:
        def on_import(module: ModuleType) -> None:
            if self._armed:
                self._apply(patch, target, module)

        return on_import

    def _apply(self, patch: Patch, target: Target, module: ModuleType) -> None:
        key = (patch.name, target.label)
        outcome = self.outcomes[key]
        if outcome.status != "waiting":
            return
        try:
            owner, name = _owner(module, target.attribute)
            original = getattr(owner, name, _ABSENT)
            surprise = "it is not there" if original is _ABSENT else target.expect(original)
            if surprise is None and target.body != "runs":
                surprise = target.body.surprise(module, target.attribute)
            if surprise is None:
                own = vars(owner).get(name, _ABSENT)
                setattr(owner, name, target.replace(original, self.settings))
                remember(getattr(owner, name), original)
                self._applied[key] = _Applied(owner, name, own)
                outcome.status = "applied"
        except Exception as error:  # a patch that fails must not take the training down with it
            outcome.status, outcome.reason = "failed", f"{type(error).__name__}: {error}"
            warn(f"patch {patch.name} failed on {target.label} and is left out: {outcome.reason}")
            return
        if surprise is not None:
            outcome.status, outcome.reason, outcome.surprise = "skipped", surprise, True
            message = f"patch {patch.name} does not know this {target.label}: {surprise}"
            if self.settings.strict:
                stop(f"{message}. Without --strict the patch is left out")
            warn(f"{message}; left as it is")


def _owner(module: ModuleType, attribute: str) -> tuple[Any, str]:
    *path, name = attribute.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part)
    return owner, name


def registry() -> dict[str, Patch]:
    """Every patch in ``patches/``, by name: each of its modules has one ``PATCH``."""
    package = importlib.import_module("kohya_ext.patches")
    modules = (importlib.import_module(f"{package.__name__}.{info.name}") for info in _modules(package.__path__))
    return {module.PATCH.name: module.PATCH for module in modules}


def _modules(path: Iterable[str]) -> list[pkgutil.ModuleInfo]:
    return sorted(pkgutil.iter_modules(path), key=lambda info: info.name)
