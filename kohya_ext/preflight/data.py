"""The training set: folders, pictures, captions, and how many steps they make."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import toml

from kohya_ext.preflight import Findings, shortened

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


def look(script: Path, args: Namespace, found: Findings) -> None:
    """Check every subset and its pictures; note the steps."""
    if getattr(args, "dataset_class", None):
        return  # the user's own code
    subsets = list(_subsets(script, args, found))
    pictures = 0
    for subset in subsets:
        if not subset.folder.is_dir():
            found.errors.append(f"the data set's folder {subset.folder} does not exist")
            continue
        files = sorted(file for file in subset.folder.iterdir() if file.suffix.lower() in PICTURES and file.is_file())
        if not files and not subset.regularisation:
            found.errors.append(f"there are no pictures in {subset.folder} ({', '.join(PICTURES[:5])})")
        pictures += len(files)
        _look_at_pictures(subset, files, found)
        _look_at_captions(subset, files, found)
    if pictures and not found.errors:
        _note_steps(subsets, args, found)


# --- which folders ---------------------------------------------------------------------------------------------------


def _subsets(script: Path, args: Namespace, found: Findings) -> Iterator[Subset]:
    if getattr(args, "dataset_config", None):
        yield from _of_dataset_config(Path(args.dataset_config), args, found)
        return
    folder = getattr(args, "train_data_dir", None)
    if not folder:
        found.errors.append("no training data: give --train_data_dir or --dataset_config")
        return
    common: dict[str, Any] = {"batch_size": getattr(args, "train_batch_size", 1) or 1, "resolution": _resolution(args, found)}
    if getattr(args, "in_json", None):
        yield from _of_metadata(Path(folder), Path(args.in_json), common, found)
        return
    extension = getattr(args, "caption_extention", None) or getattr(args, "caption_extension", None) or ".caption"
    if "control_net" in script.name:
        conditions = getattr(args, "conditioning_data_dir", None)
        if not conditions or not Path(conditions).is_dir():
            found.errors.append(f"--conditioning_data_dir {conditions or ''} does not exist")
        yield Subset(Path(folder), 1, extension, **common)
        return
    yield from _in_subfolders(Path(folder), extension, common, False, found)
    if getattr(args, "reg_data_dir", None):
        yield from _in_subfolders(Path(args.reg_data_dir), extension, common, True, found)


def _in_subfolders(
    parent: Path, extension: str, common: dict[str, Any], regularisation: bool, found: Findings
) -> Iterator[Subset]:
    """Yield the folders named ``N_words`` in a folder, the only ones that sd-scripts takes: N repeats, class ``words``."""
    option = "--reg_data_dir" if regularisation else "--train_data_dir"
    if not parent.is_dir():
        found.errors.append(f"{option} {parent} does not exist" if not parent.exists() else f"{option} {parent} is no folder")
        return
    ignored = []
    none = True
    for folder in sorted(path for path in parent.iterdir() if path.is_dir()):
        number, _, words = folder.name.partition("_")
        if number.isdecimal() and int(number) > 0:
            none = False
            yield Subset(folder, int(number), extension, words or None, regularisation=regularisation, **common)
        elif _holds_pictures(folder):
            ignored.append(folder.name)
    if none and _holds_pictures(parent):
        found.errors.append(
            f"{option} {parent} holds the pictures itself, and sd-scripts wants the folder above: move them to "
            f"{parent / ('10_' + parent.name)} (10 repeats), or name the folder in a --dataset_config"
        )
    elif none:
        found.errors.append(f"{option} {parent} has no subfolder named N_name (N repeats, such as 10_cat) with pictures")
    elif ignored:
        found.warnings.append(f"{option}: {shortened(ignored)}: ignored, for the name does not begin with a number of repeats")


def _of_metadata(folder: Path, file: Path, common: dict[str, Any], found: Findings) -> Iterator[Subset]:
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        found.errors.append(f"--in_json {file}: {error.strerror or error}")
    except ValueError as error:
        found.errors.append(f"--in_json {file} is not valid JSON: {error}")
    yield Subset(folder, captions_elsewhere=True, **common)


def _of_dataset_config(file: Path, args: Namespace, found: Findings) -> Iterator[Subset]:
    try:
        subsets = list(dataset_config(file))
    except OSError as error:
        found.errors.append(f"--dataset_config {file}: {error.strerror or error}")
        return
    except (ValueError, IndexError) as error:
        found.errors.append(f"--dataset_config {file} cannot be read: {error}")
        return
    for subset in subsets:
        said = {**_defaults(args), **subset}
        folder = said.get("image_dir")
        if not folder and not said.get("metadata_file"):
            found.errors.append(f"--dataset_config {file}: a subset has neither image_dir nor metadata_file")
        elif folder:
            yield Subset(
                Path(folder),
                int(said.get("num_repeats", 1)),
                said.get("caption_extension", ".caption"),
                said.get("class_tokens"),
                "metadata_file" in said,
                _pair(said.get("resolution")),
                int(said.get("batch_size", 1)),
                bool(said.get("is_reg", False)),
            )
    if not subsets:
        found.errors.append(f"--dataset_config {file} has no [[datasets.subsets]]")


def dataset_config(file: Path) -> Iterator[dict[str, Any]]:
    """Yield what a dataset config says of each subset: its own options over the data set's over the general ones.

    Raises OSError, and ValueError or IndexError for what is neither TOML nor JSON.
    """
    text = file.read_text(encoding="utf-8")
    config = json.loads(text) if file.suffix.lower() == ".json" else toml.loads(text)
    for dataset in config.get("datasets", []):
        for subset in dataset.get("subsets", []):
            yield {**config.get("general", {}), **dataset, **subset}


def _defaults(args: Namespace) -> dict[str, Any]:
    names = {"train_batch_size": "batch_size", "caption_extension": "caption_extension", "resolution": "resolution"}
    return {name: getattr(args, key) for key, name in names.items() if getattr(args, key, None) is not None}


def _resolution(args: Namespace, found: Findings) -> tuple[int, int] | None:
    text = getattr(args, "resolution", None)
    pair = _pair(text)
    if pair is None:
        found.errors.append(
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


def _look_at_pictures(subset: Subset, files: list[Path], found: Findings) -> None:
    with ThreadPoolExecutor(8) as pool:
        looked = list(pool.map(picture_problem, files))
    small = 0
    for (problem, size), file in zip(looked, files, strict=True):
        if problem is not None:
            found.errors.append(f"{file} {problem}")
        elif size is not None and subset.resolution is not None:
            small += size[0] * size[1] < _SMALL * subset.resolution[0] * subset.resolution[1]
    if small:
        wanted = "x".join(map(str, subset.resolution or ()))
        found.warnings.append(
            f"{small} of {len(files)} pictures in {subset.folder} have less than a quarter of {wanted}'s pixels"
        )
    twice = [stem for stem, count in Counter(file.stem for file in files).items() if count > 1]
    if twice:
        found.warnings.append(f"{subset.folder}: pictures that share a name share caption and cache: {shortened(twice)}")


def picture_problem(file: Path) -> tuple[str | None, tuple[int, int] | None]:
    """Return what is wrong with a picture, or None, and its size in pixels (width, height) when that is known.

    A picture is decoded only when its end looks wrong, which costs a few milliseconds; a broken middle is not found.
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
        return "is not a picture that can be read", None
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


def _look_at_captions(subset: Subset, files: list[Path], found: Findings) -> None:
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
        found.errors.append(f"{subset.folder}: captions that are not UTF-8: {shortened(unreadable)}")
    if empty:
        found.errors.append(f"{subset.folder}: captions that are empty: {shortened(empty)}")
    if not missing:
        return
    instead = f"trained on the words {subset.class_tokens!r} alone" if subset.class_tokens else "without any words"
    others = [ext for ext in (".txt", ".caption") if ext != subset.caption_extension and files[0].with_suffix(ext).exists()]
    hint = f"; there are {others[0]} files: --caption_extension {others[0]}" if others else ""
    message = (
        f"{len(missing)} of {len(files)} pictures in {subset.folder} have no {subset.caption_extension} caption "
        f"and are {instead}{hint}"
    )
    (found.warnings if subset.class_tokens else found.errors).append(message)


def _note_steps(subsets: list[Subset], args: Namespace, found: Findings) -> None:
    def size(subset: Subset) -> int:
        return sum(file.suffix.lower() in PICTURES for file in subset.folder.iterdir())

    trained = sum(size(subset) * subset.repeats for subset in subsets if not subset.regularisation)
    batches = sum(math.ceil(size(subset) * subset.repeats / subset.batch_size) for subset in subsets)
    if any(subset.regularisation for subset in subsets):
        batches *= 2  # as many regularisation pictures are drawn as there are trained ones
    per_epoch = math.ceil(batches / (getattr(args, "gradient_accumulation_steps", 1) or 1))
    epochs = getattr(args, "max_train_epochs", None)
    steps = epochs * per_epoch if epochs else args.max_train_steps
    if steps < 1:
        found.errors.append(f"nothing to train: {steps} steps. Give --max_train_steps or --max_train_epochs of 1 or more")
    found.steps = steps
    pictures = sum(size(subset) for subset in subsets)
    found.notes.append(
        f"{pictures} pictures, {trained} with repeats, about {per_epoch} steps an epoch; {steps} steps in all, "
        f"{steps / max(per_epoch, 1):.3g} epochs"
    )
