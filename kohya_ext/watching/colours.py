"""Colours of the full-screen view."""

from __future__ import annotations

Colour = tuple[int, int, int]

BLUE, GREY, ORANGE, GREEN, RED = (88, 166, 255), (96, 106, 122), (240, 160, 60), (80, 200, 120), (240, 90, 90)
EMPTY = (50, 56, 66)
"""The part of a bar without a value."""

BACKGROUND, FOOTER, FOREGROUND, LABEL, BORDER, SELECTED = "#0d1117", "#161b22", "#d6dde6", "#7d8590", "#30363d", "#1f3a5f"

_STATUS = {"RUNNING": GREEN, "DONE": BLUE, "STOPPED": ORANGE, "FAILED": RED, "DEAD": RED}


def style(colour: Colour) -> str:
    """Return a colour as ``#rrggbb``."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def of_status(status: object) -> str:
    """Return the colour of a run's status as ``#rrggbb``."""
    return style(_STATUS.get(str(status), GREY))
