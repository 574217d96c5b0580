"""Shrink the models. Python runs this module at startup if its folder is on PYTHONPATH."""

from kohya_ext.tiny import shrink

shrink.install()
