"""kohya_ext: an extension of kohya-ss/sd-scripts that patches it at import time.

Importing this package imports neither torch nor sd-scripts, and nothing else that Python has not imported before its
start-up files run: ``kohya_ext.pth`` imports it at every Python start.
"""

import os as _os

__version__ = "0.1.0"

_source_tree = _os.path.dirname(_os.path.dirname(_os.path.realpath(__file__)))
if _os.path.isfile(_os.path.join(_source_tree, "hatch_build.py")):
    # In a source tree (and so in an editable install) patches/ and presets/ are the live folders beside this one.
    __path__.append(_source_tree)
