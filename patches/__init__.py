"""Patches to sd-scripts: each module defines one ``PATCH`` (see :class:`kohya_ext.patching.patch.Patch`).

New modules are discovered automatically. A module must not import torch or sd-scripts at import time: both are available when
a target's ``replace`` runs.
"""
