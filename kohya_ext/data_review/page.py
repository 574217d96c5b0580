"""The page of a review: one HTML file with thumbnails, the worst images first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kohya_ext import __version__
from kohya_ext.data_review.review import KINDS, Image, Review
from kohya_ext.errors import UserError
from kohya_ext.reporting.page import styles
from kohya_ext.reporting.thumbnails import Thumbnails

_SHOWN, _EDGE = 500, 160
"""The most images on a page, and pixels per side of their thumbnails."""


def html(review: Review, title: str) -> str:
    """Return the page. Raises UserError without Jinja2."""
    try:
        import jinja2
    except ImportError as error:
        raise UserError(f"the page needs Jinja2 ({error}); run `pip install jinja2`") from None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = review.worst_first[:_SHOWN]
    thumbnails = Thumbnails()
    thumbnails.add((image.file for image in shown), _EDGE)
    text: str = environment.get_template("page.html").render(
        styles=styles(),
        version=__version__,
        title=title,
        total=len(review.images),
        marked=len(review.worst_first),
        score=review.score,
        kinds=[(*KINDS[kind], count) for kind, count in review.counts.items()],
        folders=[(folder, KINDS[kind][0], details) for folder, kind, details in review.folders],
        images=[_row(image, thumbnails) for image in shown],
    )
    return text


def _row(image: Image, thumbnails: Thumbnails) -> Mapping[str, Any]:
    return {
        "file": str(image.file),
        "name": image.file.name,
        "size": "x".join(map(str, image.size or ())),
        "url": thumbnails.get(image.file, _EDGE),
        "remarks": [(*KINDS[kind], details) for kind, details in image.remarks],
    }
