"""The training set: folders, pictures, captions, and how many steps they make."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kohya_ext.config.user_files import read_dataset_config
from kohya_ext.errors import UserError
from kohya_ext.preflight import Findings, buckets, caches, shortened
from kohya_ext.preflight.buckets import Buckets

#: What sd-scripts takes for pictures; the last two with a plug-in only.
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif", ".jxl")

#: A picture of less than this share of the training resolution's area is scaled up to more than twice its size.
_SMALL = 0.25


@dataclass(frozen=True)
class Subset:
    """One folder of pictures."""

    folder: Path
    repeats: int = 1
    caption_extension: str = ".caption"
    class_tokens: str | None = None
    """What a picture without a caption is trained on."""
    captions_elsewhere: bool = False
    """In a metadata file instead of beside the pictures."""
    resolution: tuple[int, int] | None = None
    batch_size: int = 1
    regularisation: bool = False
    dataset: int = 0
    """Subsets of one dataset share its buckets."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The script's arguments, with what a dataset config sets for this subset over them."""

    @property
    def buckets(self) -> Buckets | None:
        """The sizes its images are trained at; None when the resolution is not known."""
        return buckets.of(self.options, self.resolution) if self.resolution is not None else None


def check(script: Path, args: Namespace, findings: Findings) -> None:
    """Check every subset and its pictures; note the steps."""
    if getattr(args, "dataset_class", None):
        return  # the user's own code
    subsets = list(_subsets(script, args, findings))
    sizes: dict[Path, list[tuple[int, int] | None]] = {}
    for subset in subsets:
        if not subset.folder.is_dir():
            findings.errors.append(f"the data set's folder {subset.folder} does not exist")
            continue
        files = sorted(file for file in subset.folder.iterdir() if file.suffix.lower() in PICTURES and file.is_file())
        if not files and not subset.regularisation:
            findings.errors.append(f"there are no images in {subset.folder} ({', '.join(PICTURES[:5])})")
        sizes[subset.folder] = _check_pictures(subset, files, findings)
        if "control_net" not in script.name:
            _check_sizes(subset, sizes[subset.folder], findings)
        _check_captions(subset, files, findings)
        if caches.are_read(subset.options):
            findings.errors.extend(caches.problems(subset.folder, {file.stem for file in files}))
    if any(sizes.values()) and not findings.errors:
        _note_steps(subsets, sizes, args, findings)


# --- which folders ---------------------------------------------------------------------------------------------------


def _subsets(script: Path, args: Namespace, findings: Findings) -> Iterator[Subset]:
    if getattr(args, "dataset_config", None):
        yield from _of_dataset_config(Path(args.dataset_config), args, findings)
        return
    folder = getattr(args, "train_data_dir", None)
    if not folder:
        findings.errors.append("no training data: give --train_data_dir or --dataset_config")
        return
    common: dict[str, Any] = {
        "batch_size": getattr(args, "train_batch_size", 1) or 1,
        "resolution": _resolution(args, findings),
        "options": vars(args),
    }
    if getattr(args, "in_json", None):
        common["repeats"] = getattr(args, "dataset_repeats", None) or 1
        yield from _of_metadata(Path(folder), Path(args.in_json), common, findings)
        return
    extension = getattr(args, "caption_extention", None) or getattr(args, "caption_extension", None) or ".caption"
    if "control_net" in script.name:
        conditions = getattr(args, "conditioning_data_dir", None)
        if not conditions or not Path(conditions).is_dir():
            findings.errors.append(f"--conditioning_data_dir {conditions or ''} does not exist")
        yield Subset(Path(folder), 1, extension, **common)
        return
    yield from _in_subfolders(Path(folder), extension, common, False, findings)
    if getattr(args, "reg_data_dir", None):
        yield from _in_subfolders(Path(args.reg_data_dir), extension, common, True, findings)


def _in_subfolders(
    parent: Path, extension: str, common: dict[str, Any], regularisation: bool, findings: Findings
) -> Iterator[Subset]:
    """Yield the folders named ``N_words`` in a folder, the only ones that sd-scripts takes: N repeats, class ``words``."""
    option = "--reg_data_dir" if regularisation else "--train_data_dir"
    if not parent.is_dir():
        findings.errors.append(
            f"{option} {parent} does not exist" if not parent.exists() else f"{option} {parent} is no folder"
        )
        return
    ignored = []
    none = True
    for folder in sorted(path for path in parent.iterdir() if path.is_dir()):
        words = folder.name.partition("_")[2]
        if repeats := _repeats(folder.name):
            none = False
            yield Subset(folder, repeats, extension, words or None, regularisation=regularisation, **common)
        elif _holds_pictures(folder):
            ignored.append(folder.name)
    if none and _holds_pictures(parent):
        if _repeats(parent.resolve().name):
            way_out = f"give {option} {parent.resolve().parent}"
        else:
            way_out = f"move them to {parent / ('10_' + parent.name)} (10 repeats), or name the folder in a --dataset_config"
        findings.errors.append(f"{option} {parent} holds the images itself, and sd-scripts wants the folder above: {way_out}")
    elif none:
        findings.errors.append(f"{option} {parent} has no subfolder named N_name (N repeats, such as 10_cat) with pictures")
    elif ignored:
        findings.warnings.append(
            f"{option}: {shortened(ignored)}: ignored, for the name does not begin with a number of repeats"
        )


def _repeats(name: str) -> int:
    """Return N of a folder's name ``N_words``; 0 for one that sd-scripts does not take."""
    number = name.partition("_")[0]
    return int(number) if number.isdecimal() else 0


def _of_metadata(folder: Path, file: Path, common: dict[str, Any], findings: Findings) -> Iterator[Subset]:
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        findings.errors.append(f"--in_json {file}: {error.strerror or error}")
    except ValueError as error:
        findings.errors.append(f"--in_json {file} is not valid JSON: {error}")
    yield Subset(folder, captions_elsewhere=True, **common)


def _of_dataset_config(file: Path, args: Namespace, findings: Findings) -> Iterator[Subset]:
    try:
        document = read_dataset_config(file)
    except UserError as error:
        findings.errors.append(str(error))
        return
    none = True
    for index, dataset in enumerate(document.get("datasets", [])):
        for subset in dataset.get("subsets", []):
            none = False
            given = {**_defaults(args), **document.get("general", {}), **dataset, **subset}
            folder = given.get("image_dir")
            if not folder and not given.get("metadata_file"):
                findings.errors.append(f"--dataset_config {file}: a subset has neither image_dir nor metadata_file")
            elif folder:
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
    if none:
        findings.errors.append(f"--dataset_config {file} has no [[datasets.subsets]]")


def _defaults(args: Namespace) -> dict[str, Any]:
    names = {"train_batch_size": "batch_size", "caption_extension": "caption_extension", "resolution": "resolution"}
    return {name: getattr(args, key) for key, name in names.items() if getattr(args, key, None) is not None}


def _resolution(args: Namespace, findings: Findings) -> tuple[int, int] | None:
    text = getattr(args, "resolution", None)
    pair = _pair(text)
    if pair is None:
        findings.errors.append(
            f"--resolution must be WIDTH,HEIGHT or one number, not {text!r}" if text else "no --resolution: give WIDTH,HEIGHT"
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


# --- pictures and captions -------------------------------------------------------------------------------------------


def _holds_pictures(folder: Path) -> bool:
    return any(file.suffix.lower() in PICTURES for file in folder.iterdir())


def _check_pictures(subset: Subset, files: list[Path], findings: Findings) -> list[tuple[int, int] | None]:
    """Check every image; return their sizes."""
    with ThreadPoolExecutor(8) as pool:
        looked = list(pool.map(picture_problem, files))
    small = 0
    for (problem, size), file in zip(looked, files, strict=True):
        if problem is not None:
            findings.errors.append(f"{file} {problem}")
        elif size is not None and subset.resolution is not None:
            small += size[0] * size[1] < _SMALL * subset.resolution[0] * subset.resolution[1]
    if small:
        wanted = "x".join(map(str, subset.resolution or ()))
        findings.warnings.append(
            f"{small} of {len(files)} images in {subset.folder} have less than a quarter of {wanted}'s pixels"
        )
    twice = [stem for stem, count in Counter(file.stem for file in files).items() if count > 1]
    if twice:
        findings.warnings.append(f"{subset.folder}: images that share a name share caption and cache: {shortened(twice)}")
    return [size for _, size in looked]


def _check_sizes(subset: Subset, sizes: list[tuple[int, int] | None], findings: Findings) -> None:
    """Check that the images can be brought to the sizes that are trained at, and that they keep their pixels."""
    its = subset.buckets
    if its is None:
        return
    if (problem := its.problem()) is not None:
        if problem not in findings.errors:
            findings.errors.append(problem)
        return
    known = [size for size in sizes if size is not None]
    width, height = its.resolution
    if its.enabled:
        cut = [size for size in known if its.is_cut(size)]
        if cut:
            findings.warnings.append(
                f"{len(cut)} of {len(sizes)} images in {subset.folder} would have less than 85 % of {width}x{height}'s pixels: "
                f"--max_bucket_reso {its.largest} is too small for their shape. Give --max_bucket_reso {2 * max(width, height)}"
            )
        return
    scaled = any(subset.options.get(name) for name in ("cache_latents", "cache_latents_to_disk", "face_crop_aug_range"))
    if scaled or subset.captions_elsewhere:
        return  # to the resolution, for the cache; a metadata file may name buckets and caches of its own
    crops = bool(subset.options.get("random_crop"))
    wrong = [(w, h) for w, h in known if w < width or h < height or (not crops and (w > width or h > height))]
    if wrong:
        one = "x".join(map(str, wrong[0]))
        findings.errors.append(
            f"{len(wrong)} of {len(sizes)} images in {subset.folder} are not {width}x{height} (one is {one}), "
            "and without buckets and cached latents sd-scripts does not scale images: give --enable_bucket or --cache_latents"
        )


def picture_problem(file: Path) -> tuple[str | None, tuple[int, int] | None]:
    """Return what is wrong with a picture, or None, and its size in pixels (width, height) when that is known.

    A picture is decoded only when its end looks wrong, which costs a few milliseconds; damage in the middle is not found.
    """
    from PIL import Image, UnidentifiedImageError

    if file.suffix.lower() in (".avif", ".jxl"):
        return (None, None) if file.stat().st_size else ("is empty (0 bytes)", None)
    try:
        if file.stat().st_size == 0:
            return "is empty (0 bytes)", None
        with Image.open(file) as picture:
            if not _ends_well(file, picture.format):
                picture.load()
            return None, picture.size
    except UnidentifiedImageError:
        return "is not an image that can be read", None
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        return f"is broken: {error}", None
    except Image.DecompressionBombError:
        return None, None


def _ends_well(file: Path, kind: str | None) -> bool:
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


def _check_captions(subset: Subset, files: list[Path], findings: Findings) -> None:
    if subset.captions_elsewhere or subset.regularisation:
        return
    missing, empty, unreadable = [], [], []
    for file in files:
        caption = file.with_suffix(subset.caption_extension)
        try:
            text = caption.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            unreadable.append(caption.name)
        except OSError:
            missing.append(file.name)
        else:
            if not text:
                empty.append(caption.name)
    if unreadable:
        findings.errors.append(f"{subset.folder}: captions that are not UTF-8: {shortened(unreadable)}")
    if empty:
        findings.errors.append(f"{subset.folder}: captions that are empty: {shortened(empty)}")
    if not missing:
        return
    instead = f"trained on the words {subset.class_tokens!r} alone" if subset.class_tokens else "without any words"
    others = [ext for ext in (".txt", ".caption") if ext != subset.caption_extension and files[0].with_suffix(ext).exists()]
    hint = f"; there are {others[0]} files: --caption_extension {others[0]}" if others else ""
    message = (
        f"{len(missing)} of {len(files)} images in {subset.folder} have no {subset.caption_extension} caption "
        f"and are {instead}{hint}"
    )
    (findings.warnings if subset.class_tokens else findings.errors).append(message)


def _note_steps(
    subsets: list[Subset], sizes: Mapping[Path, list[tuple[int, int] | None]], args: Namespace, findings: Findings
) -> None:
    images = sum(len(sizes[subset.folder]) for subset in subsets)
    trained = sum(len(sizes[subset.folder]) * subset.repeats for subset in subsets if not subset.regularisation)
    batches = 0
    for dataset in {subset.dataset for subset in subsets}:
        its = [subset for subset in subsets if subset.dataset == dataset]
        filled = _fill_buckets(its, sizes)
        batches += sum(math.ceil(count / its[0].batch_size) for count in filled.values())
    per_epoch = math.ceil(batches / (getattr(args, "gradient_accumulation_steps", 1) or 1))
    epochs = getattr(args, "max_train_epochs", None)
    steps = args.max_train_steps if epochs is None else epochs * per_epoch
    if steps < 1:
        findings.errors.append(f"nothing to train: {steps} steps. Give --max_train_steps or --max_train_epochs of 1 or more")
    findings.steps = steps
    findings.notes.append(
        f"{images} images, {trained} with repeats, about {per_epoch} steps an epoch; {steps} steps in all, "
        f"{steps / max(per_epoch, 1):.3g} epochs"
    )


def _fill_buckets(subsets: list[Subset], sizes: Mapping[Path, list[tuple[int, int] | None]]) -> Counter[tuple[int, int] | None]:
    """Return how many images of a dataset an epoch draws from each bucket, repeats counted.

    As many regularisation images are drawn as there are trained ones: at first each as often as it is repeated, then once more
    in every round.
    """
    filled: Counter[tuple[int, int] | None] = Counter()
    regularisation: list[tuple[tuple[int, int] | None, int]] = []
    for subset in subsets:
        its = subset.buckets
        for size in sizes[subset.folder]:
            bucket = its.bucket(size) if its is not None and size is not None else None
            if subset.regularisation:
                regularisation.append((bucket, subset.repeats))
            else:
                filled[bucket] += subset.repeats
    missing, first = filled.total(), True
    while missing > 0 and regularisation:
        for bucket, repeats in regularisation:
            drawn = repeats if first else 1
            filled[bucket] += drawn
            missing -= drawn
            if missing <= 0:
                break
        first = False
    return filled
