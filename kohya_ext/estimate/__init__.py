"""Known estimates of a run's memory, and the time of its steps. Nothing here imports torch.

``memory_config`` reads the options that change memory, the key of known estimates: those of the shipped presets
(``table.json``) and of earlier dry runs (``cache``, ``whole_runs``). ``seconds`` predicts the time of a step from its counted
kernels and from the rates of GPUs (``gpus``, ``machine``), ``communication`` that of several GPUs. ``kohya_ext.dry_run`` makes
new estimates.
"""
