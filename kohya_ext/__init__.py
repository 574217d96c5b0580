"""kohya_ext: an extension of kohya-ss/sd-scripts that patches it at import time.

Importing this package imports neither torch nor sd-scripts.
"""

from pathlib import Path as _Path

__version__ = "0.1.0"

_source_tree = _Path(__file__).resolve().parent.parent
if (_source_tree / "hatch_build.py").is_file():
    # In a source tree (and so in an editable install) patches/ and presets/ are the live folders beside this one.
    __path__.append(str(_source_tree))
