"""Run by Python at its start when this folder is on PYTHONPATH; Python carries on, with a message, if it fails."""

from kohya_ext.tiny import shrink

shrink.install()
