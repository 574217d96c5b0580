"""Find images that sd-scripts trains otherwise than viewers show them: in other colours, or turned.

sd-scripts reads pixels as sRGB of 8 bits, as they are stored, and drops alpha channels. Only headers are read, and a few images
with an alpha channel are decoded, because many such channels are opaque.
"""

from __future__ import annotations

import contextlib
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

ALPHA, TURNED, DEEP = "alpha", "turned", "16-bit"
"""Traits of an image: an alpha channel or a transparent colour; pixels that viewers turn or mirror; grey of 16 bits.

Another trait is the colour space of an image that is not sRGB, in one word.
"""

_ORIENTATION = 0x0112
"""The EXIF tag that says how a camera was held."""


def traits_of(image: Any) -> tuple[str, ...]:
    """Return the traits of an opened image."""
    traits = {
        ALPHA: image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info,
        TURNED: _is_turned(image),
        DEEP: image.mode.startswith("I"),
        _profile_of(image): True,
    }
    return tuple(trait for trait, has in traits.items() if trait and has)


def _is_turned(image: Any) -> bool:
    if "exif" not in image.info:  # of a PNG file, getexif would then decode the image
        return False
    with contextlib.suppress(Exception):  # viewers ignore damaged metadata, too
        return image.getexif().get(_ORIENTATION, 1) in range(2, 9)
    return False


def _profile_of(image: Any) -> str:
    """Return the colour space of an opened image if it is known not to be sRGB, in one word; else an empty text."""
    profile: bytes = image.info.get("icc_profile") or b""
    if image.mode == "CMYK" or profile[_CMYK] == b"CMYK":
        return "CMYK"
    # The description is ASCII in older profiles, and UTF-16 in newer ones.
    plain = profile.replace(b"\0", b"")
    return next((space for text, space in _PROFILES.items() if text in plain), "")


def messages(folder: Path, images: Mapping[Path, Sequence[str]], masks: bool) -> list[str]:
    """Return warnings about a folder's images: file -> traits. ``masks``: the run trains with alpha channels as masks."""
    warnings = []
    total = len(images)

    def having(trait: str) -> list[Path]:
        return [file for file, traits in images.items() if trait in traits]

    with_alpha = having(ALPHA)
    if with_alpha and not masks and any(map(_is_transparent, _sample(with_alpha))):
        warnings.append(
            f"{len(with_alpha)} of {total} images in {folder} have an alpha channel, which sd-scripts drops: transparent areas "
            "become the colour stored in them, often black. Put them on a background, or use --alpha_mask to ignore the areas"
        )
    if turned := having(TURNED):
        warnings.append(
            f"{len(turned)} of {total} images in {folder} ({turned[0].name}) are stored turned, with a note for viewers (EXIF "
            "orientation) that sd-scripts ignores, so they train lying on their side or upside down; save them upright"
        )
    if deep := having(DEEP):
        warnings.append(
            f"{len(deep)} of {total} images in {folder} ({deep[0].name}) have 16 bits of grey, which sd-scripts reads as "
            "almost white; save them with 8 bits"
        )
    profiles = [trait for traits in images.values() for trait in traits if trait not in (ALPHA, TURNED, DEEP)]
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
