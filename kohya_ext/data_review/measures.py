"""Measure what can be wrong with an image, at the size at which it is trained. Needs Pillow, numpy and imagehash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TILE, _TILES = 128, 6
"""Pixels per side of the tiles whose spectrum is read, and how many of an image: those with the most contrast, because a
background may be out of focus on purpose."""

_COARSEST, _COARSE, _FINE = (0.02, 0.05), (0.06, 0.15), (0.4, 0.5)
"""Bands of the spectrum in cycles per pixel; 0.5 is the finest that pixels can have."""

_FALL = 0.02
"""Least power of coarse details of a sharp image, relative to the coarsest ones. A strongly enlarged image has less."""

_CONTRAST = 20.0
"""Standard deviation of brightness in these tiles, from which on fine details would be seen."""

_UNIFORM = 3.0
"""Standard deviation of a row of pixels, of 255, below which it may belong to a bar; lossy files are not exact."""

_STEP, _STRAIGHT = 8.0, 0.5
"""Difference of neighbours, of 255, and the share of a bar's inner edge that has it."""

_LEAST_BAR = 0.03
"""Share of the image's side from which on a uniform margin is a bar."""

_HASH_SIDE = 16
"""Bits per side of the perceptual hash."""

CORNER = (4, 32, 64)
"""Directions of edges, and rows and columns of the corners that are compared, in an image whose shorter side has
:data:`_CORNER_SIDE` pixels."""

_CORNER_SIDE = 192

_EDGE = 12.0
"""Gradient, of 255 per pixel, from which on a pixel of a corner belongs to an edge."""

#: Sum of the luminance table at quality 50 of the IJG's JPEG library, annex K.1 of the standard (ITU-T T.81).
_SUM_AT_50 = 3688

_ROUNDING, _SHARP = 1.4 / 12, 1e-3
"""Power of a grey pixel's rounding to a whole number; and the least power of fine details of a sharp image, relative to that
of coarse ones."""

_BLOCK, _COMPARED = 8, 1024
"""Pixels per side of a JPEG block, and of the part in the middle of an image in which blocks are looked for."""

_VISIBLE = 1.0
"""Contrast of blocks, of 255, from which on they can be seen."""


@dataclass(frozen=True)
class Measures:
    """What an image's pixels are like. Brightness is 0 to 255."""

    hash: str
    """The perceptual hash (pHash: discrete cosine transform, then the signs of its lowest frequencies) in hexadecimal."""
    detail: float
    """Power of the finest details relative to that of coarse ones, in decibels: -10 to -30 for a sharp image. 0 without the
    contrast in which they could be seen."""
    spread: float
    """Standard deviation of brightness."""
    bars: float
    """Share of the image in uniform bars at two opposite sides."""
    blocks: float
    """Contrast across the edges of 8x8 blocks relative to that inside them: 1 without compression, and if none can be seen."""
    quality: int | None
    """The quality, 1 to 100, with which a JPEG file was saved; None for other formats."""
    corners: tuple[bytes, ...]
    """For each corner the pixels that belong to an edge, as bits in the shape of :data:`CORNER`: brighter below, above, to the
    right, to the left."""


def measure(file: Path, trained: tuple[int, int]) -> Measures:
    """Measure an image that is trained at ``trained`` (width, height) pixels. Raises OSError and ValueError if it is damaged.

    Sources: detail as in no-reference measures of sharpness by the power spectrum (Field 1987: natural images fall with the
    square of the frequency); blocks by Wang, Sheikh and Bovik, "No-reference perceptual quality assessment of JPEG compressed
    images" (2002); duplicates by Zauner, "Implementation and benchmarking of perceptual image hash functions" (2010); marks by
    Dekel et al., "On the effectiveness of visible watermarks" (2017), whose first step are the edges that images share.
    """
    import imagehash
    import numpy
    from PIL import Image

    with Image.open(file) as opened:
        tables = getattr(opened, "quantization", None)
        if tables:  # a JPEG file's tables tell its quality, so it may be decoded at a smaller size
            opened.draft("RGB", trained)
        grey = opened.convert("RGB").convert("L")
    picture = _shrunk(grey, trained)
    pixels = numpy.asarray(picture, dtype=numpy.float32)
    return Measures(
        hash=str(imagehash.phash(picture, _HASH_SIDE)),
        detail=_detail(pixels),
        spread=float(pixels.std()),
        bars=max(_bars(pixels), _bars(pixels.T)),
        blocks=1.0 if tables else _blocks(grey),
        quality=_quality(tables) if tables else None,
        corners=tuple(map(_edges, _corners(picture))),
    )


def _shrunk(image: Any, trained: tuple[int, int]) -> Any:
    """Return the image as it is trained, cropped in its middle. A smaller one is not enlarged."""
    from PIL import Image

    scale = min(max(trained[0] / image.width, trained[1] / image.height), 1.0)
    width, height = max(round(image.width * scale), 1), max(round(image.height * scale), 1)
    scaled = image.resize((width, height), Image.Resampling.BOX if scale < 1 else Image.Resampling.NEAREST)
    left, top = max(width - trained[0], 0) // 2, max(height - trained[1], 0) // 2
    return scaled.crop((left, top, left + min(width, trained[0]), top + min(height, trained[1])))


def _detail(pixels: Any) -> float:
    import numpy

    side = min(_TILE, *pixels.shape)
    tiles = [
        pixels[top : top + side, left : left + side]
        for top in range(0, pixels.shape[0] - side + 1, side)
        for left in range(0, pixels.shape[1] - side + 1, side)
    ]
    tiles.sort(key=lambda tile: -float(tile.std()))
    window = numpy.hanning(side + 2)[1:-1]
    power = sum(numpy.abs(numpy.fft.rfft2((tile - tile.mean()) * window * window[:, None])) ** 2 for tile in tiles[:_TILES])
    frequency = numpy.hypot(numpy.fft.fftfreq(side)[:, None], numpy.fft.rfftfreq(side))
    bands = (_COARSEST, _COARSE, _FINE)
    coarsest, coarse, fine = (power[(frequency >= low) & (frequency < high)].mean() for low, high in bands)
    coarse = max(coarse, _FALL * coarsest)
    rounding = _ROUNDING * len(tiles[:_TILES]) * float((window**2).sum()) ** 2
    if coarse * _SHARP < rounding and tiles[0].std() < _CONTRAST:
        return 0.0
    return float(10 * numpy.log10(max(fine - rounding, 1e-9) / coarse))


def _bars(pixels: Any) -> float:
    """Return the share of rows in bars above and below; 0 unless both are bars of one colour with a straight inner edge."""
    import numpy

    uniform = pixels.std(axis=1) < _UNIFORM
    if uniform.all():
        return 0.0
    above, below = int(numpy.argmin(uniform)), int(numpy.argmin(uniform[::-1]))
    rows = len(pixels)
    if min(above, below) < _LEAST_BAR * rows or abs(pixels[0].mean() - pixels[-1].mean()) > _UNIFORM:
        return 0.0
    edges = (pixels[above] - pixels[above - 1], pixels[rows - below - 1] - pixels[rows - below])
    if any((numpy.abs(edge) > _STEP).mean() < _STRAIGHT for edge in edges):
        return 0.0
    return (above + below) / rows


def _quality(tables: Any) -> int:
    """Return the quality of the IJG's library whose luminance table has the same sum."""
    percent = 100.0 * sum(tables[0]) / _SUM_AT_50
    quality = (200 - percent) / 2 if percent <= 100 else 5000 / percent
    return int(max(1, min(100, round(quality))))


def _blocks(image: Any) -> float:
    import numpy

    left, top = (max(side - _COMPARED, 0) // 2 // _BLOCK * _BLOCK for side in image.size)
    pixels = numpy.asarray(image.crop((left, top, min(left + _COMPARED, image.width), min(top + _COMPARED, image.height))))
    ratios = []
    for each in (pixels, pixels.T):
        steps = numpy.abs(numpy.diff(each.astype(numpy.float32), axis=1)).mean(axis=0)
        at_edges = numpy.arange(len(steps)) % _BLOCK == _BLOCK - 1
        edge, inside = (float(steps[part].mean()) if part.any() else 0.0 for part in (at_edges, ~at_edges))
        ratios.append(edge / inside if inside and edge - inside > _VISIBLE else 1.0)
    return min(ratios)


def _corners(picture: Any) -> Sequence[Any]:
    """Return the four corners of the image at a common scale."""
    from PIL import Image

    scale = _CORNER_SIDE / min(picture.size)
    small = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BILINEAR)
    _, rows, columns = CORNER
    right, bottom = small.width - columns, small.height - rows
    return [small.crop((x, y, x + columns, y + rows)) for y in (0, bottom) for x in (0, right)]


def _edges(corner: Any) -> bytes:
    import numpy

    pixels = numpy.asarray(corner, dtype=numpy.float32)
    down, right = numpy.gradient(pixels)
    return numpy.packbits(numpy.stack([down, -down, right, -right]) > _EDGE).tobytes()
