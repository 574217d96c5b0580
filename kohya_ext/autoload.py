"""What the environment-gated ``kohya_ext.pth`` starts, and the launcher too: wait for sd-scripts to be imported.

Scripts of sd-scripts import its ``library`` package first. Until something does, all that has happened in this process is
one entry in the table of import hooks; and a ``library`` of another program is none of our business.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import wrapt

_watching = False


def watch_if_switched_on() -> None:
    """Watch when the environment says so. Runs at every Python start of the environment, sometimes twice."""
    from kohya_ext import launching
    from kohya_ext.settings import switched_on

    if switched_on(os.environ):
        watch()
        launching.watch()


def watch() -> None:
    """Begin the session of this process when ``library`` of an sd-scripts checkout is imported. Safe to repeat."""
    global _watching
    if not _watching:
        _watching = True
        wrapt.register_post_import_hook(_on_library, "library")


def _on_library(module: ModuleType) -> None:
    from kohya_ext.sdscripts import describe
    from kohya_ext.session import begin

    folder = next(iter(getattr(module, "__path__", [])), None)
    checkout = describe(Path(folder).parent, "imported by this process") if folder else None
    if checkout is not None:
        begin(checkout)
