"""Presets as lines for the "Train script" that fluxgym shows and runs.

The script has options of its own, which later ones override. Its dataset file sets resolution and batch size.

Source: ``gen_sh`` in app.py of https://github.com/cocktailpeanut/fluxgym, 886250e8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kohya_ext.config.command_line import option_words, quoted

#: Switches that the script always has, and that change memory or speed: off where the preset leaves them out.
_ON = ("fp8_base", "gradient_checkpointing")

#: Options that sd-scripts ignores with a dataset file.
_OF_DATA = frozenset({"enable_bucket", "max_bucket_reso", "resolution", "train_batch_size"})


def lines(values: Mapping[str, object], line_end: str) -> Iterator[str]:
    """Yield a line for each option of a preset's values, with ``line_end``: a backslash, or a caret on Windows."""
    changes = {**dict.fromkeys(_ON, False), **values}
    for key, value in changes.items():
        if key not in _OF_DATA:
            yield f"  {quoted(option_words({key: value}))} {line_end}"
