"""Find images whose colours are not those that sd-scripts trains: transparent ones, and ones with a colour profile.

sd-scripts reads pixels as sRGB and drops alpha channels. Only headers are read, and a few images with an alpha channel are
decoded, because many such channels are opaque.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Text in an ICC profile -> its colour space. Other profiles are sRGB or similar.
_PROFILES: Mapping[bytes, str] = {
    b"Display P3": "Display_P3",
    b"Adobe RGB": "Adobe_RGB",
    b"ProPhoto": "ProPhoto_RGB",
    b"ROMM RGB": "ProPhoto_RGB",
    b"Rec2020": "Rec._2020",
    b"Rec. 2020": "Rec._2020",
    b"BT.2020": "Rec._2020",
    b"Wide Gamut": "Wide_Gamut_RGB",
    b"eciRGB": "eciRGB",
}

_CMYK = slice(16, 20)
"""The bytes of a profile with its kind of colours."""

_SAMPLES = 8
"""The number of images with an alpha channel that are decoded in a folder."""


def profile_of(image: Any) -> str:
    """Return the colour space of an opened image if it is known not to be sRGB, in one word; else an empty text."""
    profile: bytes = image.info.get("icc_profile") or b""
    if image.mode == "CMYK" or profile[_CMYK] == b"CMYK":
        return "CMYK"
    # The description is ASCII in older profiles, and UTF-16 in newer ones.
    plain = profile.replace(b"\0", b"")
    return next((space for text, space in _PROFILES.items() if text in plain), "")


def has_alpha(image: Any) -> bool:
    """Return whether an opened image has an alpha channel or a transparent colour."""
    return image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info


def messages(folder: Path, with_alpha: Sequence[Path], profiles: Sequence[str], total: int, masks: bool) -> list[str]:
    """Return warnings about a folder's images. ``masks``: the run trains with alpha channels as masks (--alpha_mask)."""
    warnings = []
    if with_alpha and not masks and any(map(_is_transparent, _sample(with_alpha))):
        warnings.append(
            f"{len(with_alpha)} of {total} images in {folder} have an alpha channel, which sd-scripts drops: transparent areas "
            "become the colour stored in them, often black. Put them on a background, or use --alpha_mask to ignore the areas"
        )
    if profiles:
        spaces = ", ".join(f"{count} {space.replace('_', ' ')}" for space, count in Counter(profiles).most_common())
        warnings.append(
            f"{len(profiles)} of {total} images in {folder} are not sRGB ({spaces}), and sd-scripts ignores colour profiles, "
            "so their colours change; convert them to sRGB"
        )
    return warnings


def _sample(files: Sequence[Path]) -> Sequence[Path]:
    return files[:: max(len(files) // _SAMPLES, 1)][:_SAMPLES]


def _is_transparent(file: Path) -> bool:
    from PIL import Image

    try:
        with Image.open(file) as image:
            lowest, _ = image.convert("RGBA").getchannel("A").getextrema()
            return bool(lowest < 255)
    except (OSError, ValueError, SyntaxError, EOFError):
        return False
