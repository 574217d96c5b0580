"""kohya_ext: an extension of kohya-ss/sd-scripts that patches it at import time.

``kohya_ext.pth`` imports this package at every Python start. It must import neither torch nor sd-scripts, nor anything
else that Python has not imported by then.
"""

import os as _os

__version__ = "0.1.0"

_source_tree = _os.path.dirname(_os.path.dirname(_os.path.realpath(__file__)))
if _os.path.isfile(_os.path.join(_source_tree, "hatch_build.py")):
    # In a source tree (and so in an editable install) patches/ and presets/ are next to this folder.
    __path__.append(_source_tree)
