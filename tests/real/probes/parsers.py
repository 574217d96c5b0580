"""Print the defaults of every script's own parser, as JSON. Arguments: checkout, scripts."""

import json
import sys
from pathlib import Path

from kohya_ext.sdscripts.checkouts import describe
from kohya_ext.sdscripts.introspect import script_parser

checkout = describe(Path(sys.argv[1]), "given")
assert checkout is not None
defaults = {}
for script in sys.argv[2:]:
    parser = script_parser(checkout, checkout.path / script)
    defaults[script] = {action.dest: action.default for action in parser._actions if action.dest != "help"}
print("JSON" + json.dumps(defaults, default=str))
