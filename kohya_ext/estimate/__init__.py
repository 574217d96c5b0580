"""GPU memory of one training step, predicted before the run: measured on the real model classes, without a GPU or weights.

``memory_config`` reads what determines the figures from a command line. ``models`` builds the family's models as fake tensors.
``step`` runs sd-scripts' own training step on them under ``tracker``. ``result`` returns the figures, and ``cache`` keeps them.
"""
