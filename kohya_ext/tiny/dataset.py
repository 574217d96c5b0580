"""A small dataset: coloured shapes on gradients, with captions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

_COLOURS = {
    "red": (214, 48, 49),
    "yellow": (253, 203, 110),
    "green": (0, 184, 148),
    "purple": (108, 92, 231),
    "white": (245, 246, 250),
}
_BACKGROUNDS = {"blue": (9, 64, 130), "orange": (225, 112, 45), "grey": (99, 110, 114)}
_SHAPES = ("circle", "square", "triangle", "diamond")

CLASS = "2_sks"
"""Image folder in sd-scripts' layout: two repeats per epoch, class token "sks"."""

METADATA = "metadata.json"
"""File with all captions by file name, for --in_json of fine_tune.py."""


PROMPTS = "prompts.toml"
"""File with a prompt for --prompts_file of LECO's scripts."""


def write(folder: Path, count: int, size: int) -> None:
    """Write `count` images with captions (.txt) to the subfolder `CLASS` of `folder`, and `METADATA` and `PROMPTS` to `folder`.

    Even images are `size` x `size` pixels and odd ones `size` x 3/4 `size`, which gives two buckets. The same arguments
    give the same images.
    """
    target = folder / CLASS
    target.mkdir(parents=True, exist_ok=True)
    captions = {}
    for index in range(count):
        shape = _SHAPES[index % len(_SHAPES)]
        colour = list(_COLOURS)[index % len(_COLOURS)]
        background = list(_BACKGROUNDS)[index % len(_BACKGROUNDS)]
        image = _gradient(size, size if index % 2 == 0 else size * 3 // 4, _BACKGROUNDS[background])
        _draw(image, shape, _COLOURS[colour])
        path = target / f"{index:03}.png"
        image.save(path)
        caption = f"a {colour} {shape} on {_article(background)} {background} background, sks style"
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
        captions[path.name] = {"caption": caption}
    (folder / METADATA).write_text(json.dumps(captions, indent=2), encoding="utf-8")
    (folder / PROMPTS).write_text('[[prompts]]\ntarget = "a red circle"\nresolution = 64\n', encoding="utf-8")


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _gradient(width: int, height: int, colour: tuple[int, int, int]) -> Image.Image:
    from PIL import Image  # constants of this module are also used without Pillow

    light = tuple((part + 255) // 2 for part in colour)
    blend = Image.linear_gradient("L").resize((width, height))
    return Image.composite(Image.new("RGB", (width, height), colour), Image.new("RGB", (width, height), light), blend)


def _draw(image: Image.Image, shape: str, colour: tuple[int, int, int]) -> None:
    from PIL import ImageDraw

    x, y = image.width / 2, image.height / 2
    radius = min(x, y) * 0.7
    canvas = ImageDraw.Draw(image)
    if shape == "circle":
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
        return
    corners = {
        "square": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
        "triangle": [(0.0, -1.0), (0.9, 0.7), (-0.9, 0.7)],
        "diamond": [(0.0, -1.0), (0.7, 0.0), (0.0, 1.0), (-0.7, 0.0)],
    }
    canvas.polygon([(x + radius * right, y + radius * down) for right, down in corners[shape]], fill=colour)
