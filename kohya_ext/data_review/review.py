"""Look at every image and caption that a run would train on, and say what may be wrong with them."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kohya_ext.data_review import likeness, texts
from kohya_ext.data_review.measured import MeasuredImages
from kohya_ext.data_review.measures import Measures
from kohya_ext.errors import UserError
from kohya_ext.preflight import Findings
from kohya_ext.preflight.captions import count_tokens, limit_of
from kohya_ext.preflight.data import CheckedImage, Subset, check_image, images_of, subsets
from kohya_ext.sdscripts import families

_SOFT, _FLAT, _COMPRESSED, _BLOCKS = -34.0, 2.0, 40, 1.25
"""Detail in decibels and spread of brightness below which an image is soft or of one colour; quality of a JPEG file and
contrast of blocks at which compression is seen."""

_SMALL, _CROPPED = 0.25, 0.25
"""Share of the trained pixels that a small image has, and share of an image that its bucket leaves out."""

_CLASSES = 5.0
"""Ratio of two folders' images with repeats from which on the smaller one may be learned badly."""

#: Kind -> what it is, and what to do. In the order of the page.
KINDS: Mapping[str, tuple[str, str]] = {
    "damaged": ("cannot be read", "replace it; sd-scripts ends there"),
    "duplicate": ("near duplicates", "keep the best one of each group, or they count several times"),
    "soft": ("blurred or enlarged", "leave it out, or use a larger original"),
    "small": ("much smaller than it is trained", "leave it out, or use a larger original"),
    "compressed": ("strong compression", "use the original; a model learns the blocks"),
    "flat": ("one colour", "leave it out"),
    "bars": ("bars at two sides", "crop them off"),
    "mark": ("the same mark in a corner", "crop or paint it out; a model learns it"),
    "cropped": ("more than a quarter is cropped away", "crop it yourself, or use --enable_bucket"),
    "empty": ("empty caption", "describe the image, or remove the file for the folder's caption"),
    "trigger": ("trigger missing", "begin the caption with it, as the others do"),
    "language": ("caption in another script than Latin", "translate it; the text encoder knows English"),
    "cut": ("caption is cut", "shorten it, or raise the limit"),
    "same captions": ("all captions are the same", "describe what differs, or it is learned with the subject"),
    "tags": ("tags of almost all images", "they are learned with the subject; remove those that describe it"),
    "classes": ("folders out of balance", "change their repeats (the number before _)"),
}

_ENGLISH = ("sd15", "sdxl", "sd3", "flux", "chroma")
"""Families whose text encoders are CLIP and T5."""

_CORNERS = ("top left", "top right", "bottom left", "bottom right")


@dataclass
class Image:
    """An image and the remarks on it."""

    file: Path
    size: tuple[int, int] | None
    remarks: list[tuple[str, str]] = field(default_factory=list)
    """(kind, details)."""


@dataclass(frozen=True)
class Review:
    """All images of a run, and remarks on their folders."""

    images: Sequence[Image]
    folders: Sequence[tuple[str, str, str]]
    """(folder, kind, details)."""

    @property
    def worst_first(self) -> list[Image]:
        """Images with remarks: those with the most first, then by kind."""
        order = list(KINDS)
        with_remarks = [image for image in self.images if image.remarks]
        return sorted(with_remarks, key=lambda image: (-len(image.remarks), order.index(image.remarks[0][0]), image.file))

    @property
    def counts(self) -> dict[str, int]:
        """Kind -> the number of images or folders with it."""
        kinds = [kind for image in self.images for kind, _ in image.remarks] + [kind for _, kind, _ in self.folders]
        return {kind: kinds.count(kind) for kind in KINDS if kind in kinds}

    @property
    def score(self) -> float:
        """Share of images without a remark."""
        return 1 - len(self.worst_first) / max(len(self.images), 1)


def of(script: Path, args: Namespace, looked_at: Callable[[int, int], None]) -> Review:
    """Review the data of a run. ``looked_at`` is called with the number of images so far and of all.

    Raises UserError without imagehash, and if the script reads no images.
    """
    try:
        import imagehash  # noqa: F401
    except ImportError as error:
        raise UserError(f"--images needs imagehash ({error}); run `pip install imagehash`") from None
    # A dataset's file may name a folder several times, for several resolutions.
    unique = {subset.folder.resolve(): subset for subset in reversed([*subsets(script, args, Findings())])}
    folders = [subset for subset in reversed(unique.values()) if subset.folder.is_dir()]
    if not folders:
        raise UserError("--images: no folder of images is given, or none of them exists")
    images: list[Image] = []
    remarks: list[tuple[str, str, str]] = []
    measured: list[tuple[Image, Measures]] = []
    total, done = sum(len(images_of(subset.folder)) for subset in folders), 0
    for subset in folders:
        in_folder = []
        for image, measures in _looked_at(subset):
            in_folder.append(image)
            measured.extend([(image, measures)] if measures is not None else [])
            done += 1
            looked_at(done, total)
        images += in_folder
        remarks += [(str(subset.folder), *remark) for remark in _texts(script, args, subset, in_folder)]
    _compare(measured)
    for image in images:
        image.remarks.sort(key=lambda remark: list(KINDS).index(remark[0]))
    return Review(images, [*remarks, *_classes(folders)])


def _looked_at(subset: Subset) -> Iterator[tuple[Image, Measures | None]]:
    """Yield the images of a folder with remarks on each alone."""
    known = MeasuredImages(subset.folder)

    def examine(file: Path) -> tuple[Image, Measures | None]:
        checked = check_image(file)
        image = Image(file, checked.size)
        if checked.problem is not None or checked.size is None:
            image.remarks += [("damaged", checked.problem or "")] if checked.problem is not None else []
            return image, None
        try:
            measures = known.measure(file, _trained(subset, checked.size))
        except (OSError, ValueError, SyntaxError, EOFError) as error:
            image.remarks.append(("damaged", str(error)))
            return image, None
        image.remarks += _of_pixels(measures)
        image.remarks += _of_size(subset, checked)
        return image, measures

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(examine, images_of(subset.folder))
    known.keep()


def _trained(subset: Subset, size: tuple[int, int]) -> tuple[int, int]:
    return subset.buckets.bucket(size) if subset.buckets is not None else size


def _of_pixels(measures: Measures) -> Iterator[tuple[str, str]]:
    if measures.spread < _FLAT:
        yield "flat", ""
        return
    if measures.detail < _SOFT:
        yield "soft", ""
    if measures.quality is not None and measures.quality <= _COMPRESSED:
        yield "compressed", f"JPEG quality {measures.quality}"
    elif measures.blocks > _BLOCKS:
        yield "compressed", f"blocks of 8x8 pixels, contrast {measures.blocks:.2f}"
    if measures.bars:
        yield "bars", f"{measures.bars:.0%} of the image"


def _of_size(subset: Subset, checked: CheckedImage) -> Iterator[tuple[str, str]]:
    assert checked.size is not None
    (width, height), trained = checked.size, _trained(subset, checked.size)
    if width * height < _SMALL * trained[0] * trained[1]:
        yield "small", f"{width}x{height}, trained at {trained[0]}x{trained[1]}"
    scale = max(trained[0] / width, trained[1] / height)
    lost = 1 - trained[0] * trained[1] / (width * height * scale**2)
    if lost > _CROPPED:
        yield "cropped", f"{lost:.0%} of {width}x{height} at {trained[0]}x{trained[1]}"


def _compare(measured: Sequence[tuple[Image, Measures]]) -> None:
    """Add the remarks that need several images."""
    for group in likeness.duplicates([measures.hash for _, measures in measured]):
        for index in group:
            others = [measured[other][0].file.name for other in group if other != index]
            measured[index][0].remarks.append(("duplicate", ", ".join(others[:3]) + (" ..." if len(others) > 3 else "")))
    alone = [pair for pair in measured if all(kind != "duplicate" for kind, _ in pair[0].remarks)]
    for corner, name in enumerate(_CORNERS):
        for group in likeness.marked([measures.corners[corner] for _, measures in alone]):
            for index in group:
                alone[index][0].remarks.append(("mark", f"{name}, in {len(group)} images"))


def _texts(script: Path, args: Namespace, subset: Subset, images: Sequence[Image]) -> Iterator[tuple[str, str]]:
    """Add remarks to images by their captions; yield those on the folder."""
    if subset.has_metadata_file or subset.regularisation:
        return
    captions = [_caption(image.file, subset.caption_extension) for image in images]
    family = families.of(script.name, vars(args))
    name = family.name if family is not None else ""
    part = 0 if family is not None and family.unet else 1
    count = {text: count_tokens(text)[part] for text in captions if text}
    of_captions = texts.remarks(captions, name in _ENGLISH, limit_of(script, args), count)
    for index, remarks in of_captions.of_images.items():
        images[index].remarks += remarks
    yield from of_captions.of_folder


def _caption(file: Path, extension: str) -> str | None:
    try:
        return Path(os.path.splitext(file)[0] + extension).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None  # the checks of every start report them


def _classes(folders: Sequence[Subset]) -> Iterator[tuple[str, str, str]]:
    sizes = {subset.folder: subset.repeats * len(images_of(subset.folder)) for subset in folders if not subset.regularisation}
    largest = max(sizes.values(), default=0)
    for folder, size in sizes.items():
        if 0 < size * _CLASSES < largest:
            yield str(folder), "classes", f"{size} images with repeats; the largest folder has {largest}"
