"""Test on the user's own GPU which features make a run faster, and use only those: ``--speed``.

`switches`: the features that can be turned on and off between two steps. `self_test`: what each feature needs, tried in a
process of its own (`proof`). `trial`: the features' passes compared with eager ones, on the real model. `verdicts`: what was
found.
"""
