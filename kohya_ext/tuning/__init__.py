"""Measure a training command and its alternatives on this machine, each in a process of its own: ``python -m kohya_ext tune``.

In the processes: `process` and `task` (what each is started for), `step_measurement` and `loss_record`. In the parent: `child`
(starts and ends a process), `rows` (the configurations), `base_judgement` (whether an 8-bit base is good enough), `tuner` (all
of it, within a time) and `cards` (files to hand on). `kohya_ext.estimate.tuned` keeps the measurements.
"""
