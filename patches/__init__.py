"""What is changed in sd-scripts: one module a patch, each with one ``PATCH`` (see :class:`kohya_ext.patching.patch.Patch`).

A new file here is found by itself. It must import neither torch nor sd-scripts at its own import: both are there when a
target's ``replace`` runs.
"""
