"""Build hook: where patches/, presets/ and the start-up file go in the wheel."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

STARTUP_FILE = "kohya_ext.pth"


class Layout(BuildHookInterface):
    """Puts the folders that stand at the top of the source tree below the package.

    An editable install gets the start-up file alone: it uses the live folders (see ``kohya_ext/__init__.py``), and copies
    of them in site-packages would go stale.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Fill hatchling's ``force_include`` maps (source path -> path in the wheel)."""
        build_data["force_include_editable"][STARTUP_FILE] = STARTUP_FILE
        build_data["force_include"].update(
            {"patches": "kohya_ext/patches", "presets": "kohya_ext/presets", STARTUP_FILE: STARTUP_FILE}
        )
