"""Check the training data (folders, images, captions) and count the steps."""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kohya_ext.config.settings import Settings
from kohya_ext.config.user_files import read_dataset_config, read_toml
from kohya_ext.errors import UserError, did_you_mean
from kohya_ext.preflight import Findings, abbreviated, buckets, caches, captions, colours
from kohya_ext.preflight.buckets import Buckets
from kohya_ext.run.file_index import IMAGES, FileIndex
from kohya_ext.sdscripts import families

#: Image suffixes that sd-scripts reads; the last two only with a plug-in.
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif", ".jxl")

#: Usual extensions of captions.
_CAPTION_EXTENSIONS = (".txt", ".caption")

#: Fraction of the training resolution's area below which an image is enlarged to more than twice its size.
_SMALL_AREA = 0.25


#: Checks in the index of a folder: an image's is followed by its size and traits, a caption's by the numbers of its tokens.
#: Increase the numbers when a check changes.
_IMAGE, _CAPTION = "image3:", "caption3:"


class CheckedImage(NamedTuple):
    """An image's problem, or its properties."""

    problem: str | None
    size: tuple[int, int] | None = None
    """Width and height in pixels."""
    traits: tuple[str, ...] = ()
    """What sd-scripts ignores; see `colours`."""


@dataclass(frozen=True)
class Subset:
    """A folder of images."""

    folder: Path
    repeats: int = 1
    caption_extension: str = ".caption"
    class_tokens: str | None = None
    """The caption of images that have none."""
    has_metadata_file: bool = False
    """Whether captions are in a metadata file instead of next to the images."""
    resolution: tuple[int, int] | None = None
    batch_size: int = 1
    regularisation: bool = False
    dataset: int = 0
    """Subsets of one dataset share its buckets."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The script's arguments, overridden by the options of this subset in a dataset config."""

    def __post_init__(self) -> None:
        """Add the dot of the extension, as upstream does."""
        if self.caption_extension and not self.caption_extension.startswith("."):
            object.__setattr__(self, "caption_extension", f".{self.caption_extension}")

    @property
    def buckets(self) -> Buckets | None:
        """The training sizes of its images; None when the resolution is unknown."""
        return buckets.of(self.options, self.resolution) if self.resolution is not None else None


def check(script: Path, args: Namespace, findings: Findings, settings: Settings) -> None:
    """Check every subset and its images; add the number of steps."""
    if getattr(args, "dataset_class", None):
        return  # the user's own code reads the data
    if not any(hasattr(args, option) for option in ("train_data_dir", "dataset_config")):
        _check_prompts_file(args, findings)
        findings.steps = args.max_train_steps
        return
    folders = list(subsets(script, args, findings))
    sizes: dict[Path, list[tuple[int, int] | None]] = {}
    for subset in folders:
        if not subset.folder.is_dir():
            findings.errors.append(f"the dataset folder {subset.folder} does not exist")
            continue
        files = _images_to_train(subset, findings)
        if not files and not subset.regularisation:
            findings.errors.append(f"no images in {subset.folder} ({', '.join(IMAGE_SUFFIXES[:5])})")
        index = None
        if caches.are_written(subset.options, settings):
            index = FileIndex(IMAGES, (*IMAGE_SUFFIXES, subset.caption_extension.lower()))
        sizes[subset.folder] = _check_images(subset, files, findings, index)
        if not families.trains_control_net(script.name):
            _check_sizes(subset, sizes[subset.folder], findings)
        counts = _check_captions(subset, files, findings, index)
        if (message := captions.cut_message(subset.folder, counts, script, args)) is not None:
            findings.warnings.append(message)
        if (problem := caches.unwritable(subset.folder, files, subset.options)) is not None:
            findings.errors.append(problem)
        if caches.are_read(subset.options, settings):
            findings.errors.extend(caches.problems(subset.folder, {file.stem for file in files}))
    if "network" in script.name:  # the others split without a seed, too, always in the same way
        _check_split(folders, findings)
    if any(sizes.values()) and not findings.errors:
        _add_steps(folders, sizes, args, findings)


def _check_split(folders: Sequence[Subset], findings: Findings) -> None:
    """Warn if upstream chooses the validation images at random, so that a resume chooses others."""
    if any(
        subset.options.get("validation_split")
        and subset.options.get("validation_seed") is None
        and subset.options.get("seed") is None
        for subset in folders
    ):
        findings.warnings.append(
            "--validation_split without --validation_seed or --seed: a resumed run validates other images, on which it has "
            "trained before; add --validation_seed 1"
        )


def _check_prompts_file(args: Namespace, findings: Findings) -> None:
    """Check the file that LECO's scripts read instead of images."""
    file = getattr(args, "prompts_file", None)
    if file is None:
        return
    try:
        prompts = read_toml(Path(file), f"--prompts_file {file}")
    except UserError as error:
        findings.errors.append(str(error))
        return
    if not prompts:
        findings.errors.append(f"--prompts_file {file} is empty; add a [[prompts]] section")


# --- folders ---------------------------------------------------------------------------------------------------------


def subsets(script: Path, args: Namespace, findings: Findings) -> Iterator[Subset]:
    """Yield the folders of images that a run reads; add problems with their options to the findings."""
    if getattr(args, "dataset_config", None):
        yield from _dataset_config_subsets(Path(args.dataset_config), args, findings)
        return
    folder = getattr(args, "train_data_dir", None)
    if not folder:
        findings.errors.append("no training data: --train_data_dir or --dataset_config is required")
        return
    common: dict[str, Any] = {
        "batch_size": getattr(args, "train_batch_size", 1) or 1,
        "resolution": _resolution(args, findings),
        "options": vars(args),
    }
    if getattr(args, "in_json", None) is not None:
        common["repeats"] = getattr(args, "dataset_repeats", None) or 1
        yield from _metadata_subset(Path(folder), Path(args.in_json), common, findings)
        return
    extension = getattr(args, "caption_extention", None) or getattr(args, "caption_extension", None) or ".caption"
    if families.trains_control_net(script.name):
        conditions = getattr(args, "conditioning_data_dir", None)
        if not conditions or not Path(conditions).is_dir():
            findings.errors.append(f"--conditioning_data_dir {conditions or ''} does not exist")
        yield Subset(Path(folder), 1, extension, **common)
        return
    yield from _subfolders(Path(folder), extension, common, False, findings)
    if getattr(args, "reg_data_dir", None):
        yield from _subfolders(Path(args.reg_data_dir), extension, common, True, findings)


def _subfolders(
    parent: Path, extension: str, common: dict[str, Any], regularisation: bool, findings: Findings
) -> Iterator[Subset]:
    """Yield the subfolders named ``N_words`` (N repeats, class ``words``); sd-scripts ignores all others."""
    option = "--reg_data_dir" if regularisation else "--train_data_dir"
    if not parent.is_dir():
        problem = "is not a folder" if parent.exists() else "does not exist"
        findings.errors.append(f"{option} {parent} {problem}")
        return
    ignored = []
    is_empty = True
    for folder in sorted(path for path in parent.iterdir() if path.is_dir()):
        words = folder.name.partition("_")[2]
        if repeats := repeats_of(folder.name):
            is_empty = False
            yield Subset(folder, repeats, extension, words or None, regularisation=regularisation, **common)
        elif _has_images(folder):
            ignored.append(folder.name)
    if is_empty and _has_images(parent):
        if repeats_of(parent.resolve().name):
            remedy = f"use {option} {parent.resolve().parent}"
        else:
            remedy = f"move them to {parent / ('10_' + parent.name)} (10 repeats), or use a --dataset_config"
        findings.errors.append(f"{option} {parent} must contain folders of images, not the images themselves; {remedy}")
    elif is_empty:
        findings.errors.append(f"{option} {parent} has no subfolder of images named N_name (N repeats, such as 10_cat)")
    elif ignored:
        findings.warnings.append(
            f"{option}: ignored {abbreviated(ignored)}: folder names must start with a repeat count (10_cat)"
        )


def repeats_of(name: str) -> int:
    """Return N of a folder name ``N_words``; 0 for names that sd-scripts ignores."""
    number = name.partition("_")[0]
    return int(number) if number.isdecimal() else 0


def _metadata_subset(folder: Path, file: Path, common: dict[str, Any], findings: Findings) -> Iterator[Subset]:
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        findings.errors.append(f"--in_json {file}: {error.strerror or error}")
    except (ValueError, RecursionError) as error:
        findings.errors.append(f"--in_json {file} is not valid JSON: {error}")
    yield Subset(folder, has_metadata_file=True, **common)


def _dataset_config_subsets(file: Path, args: Namespace, findings: Findings) -> Iterator[Subset]:
    try:
        document = read_dataset_config(file)
    except UserError as error:
        findings.errors.append(str(error))
        return
    if wrong := [*_schema_problems(document)]:
        findings.errors.extend(f"--dataset_config {file}: {problem}" for problem in wrong)
        return
    is_empty = True
    for index, dataset in enumerate(document.get("datasets", [])):
        for subset in dataset.get("subsets", []):
            is_empty = False
            given = {**_defaults(args), **document.get("general", {}), **dataset, **subset}
            folder = given.get("image_dir")
            if not folder and not given.get("metadata_file"):
                findings.errors.append(f"--dataset_config {file}: a subset has neither image_dir nor metadata_file")
                continue
            metadata = given.get("metadata_file")
            if metadata and not Path(metadata).is_file():
                findings.errors.append(f"--dataset_config {file}: the metadata_file {metadata} does not exist")
            elif not metadata and not given.get("resolution"):
                findings.errors.append(f"--dataset_config {file}: no resolution; add resolution = 1024 to each [[datasets]]")
            if folder:
                yield Subset(
                    Path(folder),
                    int(given.get("num_repeats", 1)),
                    given.get("caption_extension", ".caption"),
                    given.get("class_tokens"),
                    "metadata_file" in given,
                    _pair(given.get("resolution")),
                    int(given.get("batch_size", 1)) or 1,
                    bool(given.get("is_reg", False)),
                    index,
                    {**vars(args), **given},
                )
    if is_empty:
        findings.errors.append(f"--dataset_config {file} has no [[datasets.subsets]]")


def _schema_problems(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys and values that upstream's own schema rejects, which ends a run with a traceback of its library."""
    sanitizer = getattr(sys.modules.get("library.config_util"), "ConfigSanitizer", None)
    if sanitizer is None:
        return
    schemas = [each for name, each in vars(sanitizer).items() if isinstance(each, dict) and "ARGPARSE" not in name]
    known = {"general", "datasets", "subsets", *(key for schema in schemas for key in schema if isinstance(key, str))}
    try:
        sanitizer(True, True, True, True).user_config_validator(copy.deepcopy(document))
    except Exception as error:
        for each in getattr(error, "errors", [error]):
            path, message = [str(part) for part in getattr(each, "path", ())], str(getattr(each, "msg", each))
            where = "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in path).lstrip(".")
            if "extra keys" in message:
                yield f"unknown key {where}.{did_you_mean(path[-1], known)}"
            else:
                yield f"{where}: {message.removesuffix(' for dictionary value')}{_shown(document, path)}"


def _shown(document: Any, path: Sequence[str]) -> str:
    """Return the value at a path as a part of a message; empty for a missing one and for a table."""
    try:
        for part in path:
            document = document[int(part) if isinstance(document, list) else part]
    except KeyError:
        return ""
    return "" if isinstance(document, dict) else f", not {document!r}"


def _defaults(args: Namespace) -> dict[str, Any]:
    names = {"train_batch_size": "batch_size", "resolution": "resolution"}
    names |= {"caption_extension": "caption_extension", "caption_extention": "caption_extension"}  # the latter is set last
    return {name: getattr(args, key) for key, name in names.items() if getattr(args, key, None) is not None}


def _resolution(args: Namespace, findings: Findings) -> tuple[int, int] | None:
    text = getattr(args, "resolution", None)
    pair = _pair(text)
    if pair is None:
        findings.errors.append(
            f"--resolution must be WIDTH,HEIGHT or one number, not {text!r}"
            if text
            else "no resolution: --resolution WIDTH,HEIGHT is required"
        )
    return pair


def _pair(value: Any) -> tuple[int, int] | None:
    """Read ``512``, ``"512"``, ``"512,768"`` or ``[512, 768]``."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
    try:
        numbers = [int(part) for part in parts]
    except (TypeError, ValueError):
        return None
    return (numbers[0], numbers[-1]) if len(numbers) in (1, 2) and min(numbers) > 0 else None


# --- images and captions ---------------------------------------------------------------------------------------------


def _has_images(folder: Path) -> bool:
    return any(file.suffix.lower() in IMAGE_SUFFIXES for file in folder.iterdir())


def images_of(folder: Path) -> list[Path]:
    """Return the images of a folder in the order of their names, as sd-scripts chooses them: by the name alone, not hidden.

    Takes a third of the time of ``Path.iterdir`` and a sort.
    """
    return _all_images(folder)[0]


def _all_images(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the images of a folder, and those that sd-scripts leaves out because their suffixes mix cases (``.Png``)."""
    names = sorted(name for name in os.listdir(folder) if _suffix(name) in IMAGE_SUFFIXES and not name.startswith("."))
    read = [name for name in names if _is_read(name)]
    unread = [name for name in names if not _is_read(name)] if len(read) < len(names) else []
    return [folder / name for name in read], [folder / name for name in unread]


def _images_to_train(subset: Subset, findings: Findings) -> list[Path]:
    """Return the images that a subset trains; add a warning about those that sd-scripts leaves out."""
    files, unread = _all_images(subset.folder)
    if subset.has_metadata_file:  # which names them
        return sorted([*files, *unread])
    if unread:
        suffix = unread[0].suffix
        findings.warnings.append(
            f"{subset.folder}: {len(unread)} images are not trained, because sd-scripts reads {suffix.lower()} or "
            f"{suffix.upper()}, not {suffix}: {abbreviated([file.name for file in unread])}; rename them"
        )
    return files


def _is_read(name: str) -> bool:
    """Return whether the suffix is all lower or all upper case; Python's glob ignores case on Windows only."""
    suffix = os.path.splitext(name)[1]
    return os.name == "nt" or suffix in (suffix.lower(), suffix.upper())


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _check_images(
    subset: Subset, files: list[Path], findings: Findings, index: FileIndex | None
) -> list[tuple[int, int] | None]:
    """Check every image that is not in the index; return their sizes in pixels (width, height), None where unknown."""
    passed = {file: known for file in files if (known := _known(file, index)) is not None}
    unknown = [file for file in files if file not in passed]
    with ThreadPoolExecutor(8) as pool:
        checked = dict(zip(unknown, pool.map(check_image, unknown), strict=True))
    if index is not None:
        index.add_all((str(file), line) for file, image in checked.items() if (line := _index_line(image)) is not None)
    results = [checked[file] if file in checked else passed[file] for file in files]
    small = 0
    for image, file in zip(results, files, strict=True):
        size = image.size
        if image.problem is not None:
            findings.errors.append(f"{file} {image.problem}")
        elif size is not None and subset.resolution is not None:
            small += size[0] * size[1] < _SMALL_AREA * subset.resolution[0] * subset.resolution[1]
    if small:
        resolution = "x".join(map(str, subset.resolution or ()))
        findings.warnings.append(
            f"{small} of {len(files)} images in {subset.folder} have less than a quarter of the pixels of {resolution}"
        )
    stems = Counter(os.path.normcase(file.stem) for file in files)
    duplicates = [stem for stem, count in stems.items() if count > 1]
    if duplicates:
        findings.warnings.append(
            f"{subset.folder}: images with the same name share their caption and cache: {abbreviated(duplicates)}"
        )
    traits = {file: image.traits for file, image in zip(files, results, strict=True)}
    findings.warnings.extend(colours.messages(subset.folder, traits, masks=bool(subset.options.get("alpha_mask"))))
    return [image.size for image in results]


def _index_line(image: CheckedImage) -> str | None:
    """Return the entry of a sound image in the index of its folder."""
    if image.problem is not None or image.size is None:
        return None
    return f"{_IMAGE}{image.size[0]}x{image.size[1]}:{','.join(image.traits)}"


def _known(file: Path, index: FileIndex | None) -> CheckedImage | None:
    """Return the properties of an image that has passed the check; None if the index does not have it."""
    for check in index.passed(str(file)) if index is not None else ():
        if check.startswith(_IMAGE):
            size, _, traits = check.removeprefix(_IMAGE).partition(":")
            width, _, height = size.partition("x")
            return CheckedImage(None, (int(width), int(height)), tuple(filter(None, traits.split(","))))
    return None


def _check_sizes(subset: Subset, sizes: list[tuple[int, int] | None], findings: Findings) -> None:
    """Check that sd-scripts can scale the images to their training sizes without losing many pixels."""
    options = subset.buckets
    if options is None:
        return
    if (problem := options.problem()) is not None:
        if problem not in findings.errors:
            findings.errors.append(problem)
        return
    known = [size for size in sizes if size is not None]
    width, height = options.resolution
    if options.enabled:
        vanishing = [size for size in known if 0 in options.bucket(size)]
        if vanishing:
            findings.errors.append(
                f"{len(vanishing)} of {len(sizes)} images in {subset.folder} (of {'x'.join(map(str, vanishing[0]))} pixels) "
                f"are narrower than --bucket_reso_steps {options.step}, and with --bucket_no_upscale nothing is left of them; "
                "remove them, or leave out --bucket_no_upscale"
            )
        reduced = [size for size in known if options.is_reduced(size)]
        if reduced:
            findings.warnings.append(
                f"--max_bucket_reso {options.largest} reduces {len(reduced)} of {len(sizes)} images in {subset.folder} to less "
                f"than 85 % of the pixels of {width}x{height}; use --max_bucket_reso {2 * max(width, height)}"
            )
        return
    scaled = any(subset.options.get(name) for name in ("cache_latents", "cache_latents_to_disk", "face_crop_aug_range"))
    if scaled or subset.has_metadata_file:
        return  # caching scales them to the resolution; a metadata file may name its own buckets and caches
    crops = bool(subset.options.get("random_crop"))
    wrong = [(w, h) for w, h in known if w < width or h < height or (not crops and (w > width or h > height))]
    if wrong:
        example = "x".join(map(str, wrong[0]))
        findings.errors.append(
            f"{len(wrong)} of {len(sizes)} images in {subset.folder} are not {width}x{height} (for example {example}), and "
            "sd-scripts scales images only with buckets or cached latents; use --enable_bucket or --cache_latents"
        )


def check_image(file: Path) -> CheckedImage:
    """Return an image's problem, or what its header says.

    An image is decoded only when its end is not the format's, which takes a few milliseconds. Damage in the middle is not
    detected.
    """
    from PIL import Image, UnidentifiedImageError

    if not file.is_file():
        return CheckedImage(
            "is a folder or a link to a missing file, and sd-scripts takes it for an image; rename or remove it"
        )
    if file.suffix.lower() in (".avif", ".jxl"):
        return CheckedImage(None if file.stat().st_size else "is empty (0 bytes)")
    try:
        if file.stat().st_size == 0:
            return CheckedImage("is empty (0 bytes)")
        with Image.open(file) as image:
            if not _has_valid_end(file, image.format):
                image.load()
            return CheckedImage(None, image.size, colours.traits_of(image))
    except UnidentifiedImageError:
        return CheckedImage("is not a readable image")
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        return CheckedImage(f"is damaged: {error}")
    except Image.DecompressionBombError:
        return CheckedImage(
            f"has more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels, which Pillow refuses to read; shrink it"
        )


def _has_valid_end(file: Path, kind: str | None) -> bool:
    with file.open("rb") as stream:
        head = stream.read(12)
        size = stream.seek(0, 2)
        stream.seek(max(size - 12, 0))
        tail = stream.read()
    if kind == "PNG":
        return tail[-8:-4] == b"IEND"
    if kind == "JPEG":
        return tail.endswith(b"\xff\xd9")
    if kind == "WEBP":
        return size >= 8 + int.from_bytes(head[4:8], "little")
    return False


def _check_captions(subset: Subset, files: list[Path], findings: Findings, index: FileIndex | None) -> list[tuple[int, int]]:
    """Check every caption; return the numbers of tokens of each one that can be read."""
    if subset.has_metadata_file or subset.regularisation:
        return []
    missing: list[str] = []
    unreadable: list[str] = []
    empty: list[Path] = []
    blank: list[str] = []
    counts: list[tuple[int, int]] = []
    read: list[tuple[str, str]] = []
    for file in files:
        caption = Path(os.path.splitext(file)[0] + subset.caption_extension)
        if (known := _known_tokens(caption, index)) is not None:
            counts.append(known)
            continue
        try:
            text = caption.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            unreadable.append(caption.name)
        except OSError:
            missing.append(file.name)
        else:
            if text and not captions.trained_text(text, wildcards=bool(subset.options.get("enable_wildcard"))):
                blank.append(caption.name)
            elif text:
                clip, words = captions.count_tokens(text)
                counts.append((clip, words))
                read.append((str(caption), f"{_CAPTION}{clip}:{words}"))
            else:
                empty.append(caption)
    if index is not None:
        index.add_all(read)
    if unreadable:
        findings.errors.append(f"{subset.folder}: captions that are not UTF-8: {abbreviated(unreadable)}")
    if empty:
        findings.errors.append(f"{subset.folder}: empty captions: {abbreviated([caption.name for caption in empty])}")
    if blank:
        findings.warnings.append(
            f"{subset.folder}: {len(blank)} captions train as empty ones, because sd-scripts reads the first line alone, and "
            f"it is blank: {abbreviated(blank)}"
        )
    if missing:
        _report_missing(subset, files, missing, findings)
    return counts


def _known_tokens(caption: Path, index: FileIndex | None) -> tuple[int, int] | None:
    """Return the numbers of tokens of a caption that has passed the check; None if the index does not have it."""
    for check in index.passed(str(caption)) if index is not None else ():
        if check.startswith(_CAPTION):
            clip, _, words = check.removeprefix(_CAPTION).partition(":")
            return int(clip), int(words)
    return None


def _report_missing(subset: Subset, files: list[Path], missing: list[str], findings: Findings) -> None:
    """Add a warning about images without captions, or an error if the folder names no caption for them."""
    fallback = f"the caption {subset.class_tokens!r}" if subset.class_tokens else "an empty caption"
    stems = [os.path.splitext(subset.folder / name)[0] for name in missing]
    usual = [ext for ext in _CAPTION_EXTENSIONS if ext != subset.caption_extension]
    others = [ext for ext in usual if any(os.path.exists(f"{stem}{ext}") for stem in stems)]
    option = 'caption_extension = "{0}"' if subset.options.get("dataset_config") else "--caption_extension {0}"
    hint = f"; for the {others[0]} files use {option.format(others[0])}" if others else ""
    message = (
        f"{len(missing)} of {len(files)} images in {subset.folder} have no {subset.caption_extension} caption "
        f"and train with {fallback}{hint}"
    )
    (findings.warnings if subset.class_tokens else findings.errors).append(message)


def _add_steps(
    subsets: list[Subset], sizes: Mapping[Path, list[tuple[int, int] | None]], args: Namespace, findings: Findings
) -> None:
    images = sum(len(sizes[subset.folder]) for subset in subsets)
    trained = sum(len(sizes[subset.folder]) * subset.repeats for subset in subsets if not subset.regularisation)
    batches = 0
    for dataset in {subset.dataset for subset in subsets}:
        members = [subset for subset in subsets if subset.dataset == dataset]
        counts = _bucket_counts(members, sizes)
        batches += sum(math.ceil(count / members[0].batch_size) for count in counts.values())
    per_epoch = math.ceil(batches / (getattr(args, "gradient_accumulation_steps", 1) or 1))
    epochs = getattr(args, "max_train_epochs", None)
    steps = args.max_train_steps if epochs is None else epochs * per_epoch
    if steps < 1:
        findings.errors.append(f"nothing to train: {steps} steps; use --max_train_steps or --max_train_epochs of 1 or more")
    findings.steps = steps
    _check_first_step(args, steps, per_epoch, findings)
    findings.notes.append(
        f"{images} images, {trained} with repeats, about {per_epoch} steps per epoch; {steps} steps in total, "
        f"{steps / max(per_epoch, 1):.3g} epochs"
    )


def _check_first_step(args: Namespace, steps: int, per_epoch: int, findings: Findings) -> None:
    """Warn if a LoRA script begins after its last step, or skips epochs whose steps it does not count.

    :mod:`numbers` compares a first step with a number of steps, and a first epoch with a number of epochs.
    """
    step, epoch = getattr(args, "initial_step", None), getattr(args, "initial_epoch", None)
    in_epochs = getattr(args, "max_train_epochs", None) is not None
    first = step if step is not None else ((epoch or 1) - 1) * per_epoch
    if first >= max(steps, 1) and in_epochs == (step is not None):
        findings.warnings.append(
            "--initial_step or --initial_epoch is about the end of the run, or after it: the script then ends with an "
            f"AssertionError; use fewer than {steps} steps, or {math.ceil(steps / max(per_epoch, 1))} epochs at most"
        )
    if getattr(args, "skip_until_initial_step", False) and step is not None and step >= per_epoch > 0:
        findings.warnings.append(
            f"--skip_until_initial_step begins at step {step}, but numbers it {step % per_epoch}, because sd-scripts counts "
            f"from the start of its epoch: up to {step - step % per_epoch} steps more than the rest are trained. To resume a "
            "run, use --resume without --initial_step"
        )


def _bucket_counts(
    subsets: list[Subset], sizes: Mapping[Path, list[tuple[int, int] | None]]
) -> Counter[tuple[int, int] | None]:
    """Return the images that an epoch draws from each bucket of a dataset, including repeats.

    The number of regularisation images equals that of training images. The first round draws each with its repeats, every
    later round once.
    """
    counts: Counter[tuple[int, int] | None] = Counter()
    regularisation: list[tuple[tuple[int, int] | None, int]] = []
    for subset in subsets:
        options = subset.buckets
        for size in sizes[subset.folder]:
            bucket = options.bucket(size) if options is not None and size is not None else None
            if subset.regularisation:
                regularisation.append((bucket, subset.repeats))
            else:
                counts[bucket] += subset.repeats
    missing, first = counts.total(), True
    while missing > 0 and regularisation:
        for bucket, repeats in regularisation:
            drawn = repeats if first else 1
            counts[bucket] += drawn
            missing -= drawn
            if missing <= 0:
                break
        first = False
    return counts
