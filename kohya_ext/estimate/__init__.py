"""GPU memory of one training step, predicted before the run: measured on the real model classes, without a GPU or weights.

``memory_config`` reads the options that change memory. ``models`` builds the family's models as fake tensors, and
``step`` runs sd-scripts' own training step on them under ``tracker``. ``predict`` returns the estimate, ``cache`` keeps it.
"""
