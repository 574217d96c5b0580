"""GPU memory of a training run, known before it starts: measured on the real model classes, without a GPU or weights.

``choices`` reads what determines the figures from a command line; ``models`` builds the family's models as fake tensors;
``step`` runs sd-scripts' own training step on them under ``track``; ``estimate`` reads the figures from the log; ``store``
keeps them.
"""
