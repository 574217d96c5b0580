"""The training command for a folder of images and a checkpoint."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import toml

from kohya_ext.config.command_line import CommandLine, option_words
from kohya_ext.errors import UserError
from kohya_ext.preflight.data import images_of, repeats_of
from kohya_ext.preflight.model_files import MODEL
from kohya_ext.run.safetensors_header import read_header
from kohya_ext.sdscripts import families, parts
from kohya_ext.sdscripts.families import Checkpoint, Family

PER_IMAGE, LEAST, MOST = 100, 1000, 6000
"""Times that each image is trained, and limits of all images together: a usual LoRA of a subject takes 1,500 to 3,000."""

HELD_OUT_FROM, HELD_OUT_SHARE, HELD_OUT_MOST = 20, 0.1, 16
"""Number of images from which some are held out for the validation, their share, and their largest number."""

_COMPARED, _COMPARED_FROM = 2, 8
"""Number of images that are held out of runs that are compared, and from how many."""

_VALIDATIONS, PATIENCE = 20, 5
"""About how often a run is validated, and after how many validations without an improvement it stops."""

_SAMPLER_STEPS, _MULTIPLIERS = 20, "0,0.5,1"
"""Of the samples after training, which take the time of some 80 training steps."""

_OTHER = "a photograph of a landscape"
"""The prompt that shows what a LoRA changes elsewhere, if a caption is the trigger word alone."""

_CAPTIONS = (".txt", ".caption")

_SPLIT = "validation_split"

_MINUTES = 10
"""Minutes between two saved states: the most that a kill loses."""


@dataclass(frozen=True)
class Images:
    """The images to train on."""

    folder: Path
    count: int
    captions: Counter[str]
    """Extension of caption files -> images that have one."""
    has_classes: bool
    """Whether they are in subfolders named by repeats and class."""
    with_repeats: int
    """The number of images of an epoch."""
    folders: tuple[int, ...]
    """The number of images of each folder."""
    caption: str = ""
    """The first line of the first caption."""

    @property
    def held_out(self) -> int:
        """The number of images to hold out; 0 for too few images."""
        return min(round(self.count * HELD_OUT_SHARE), HELD_OUT_MOST) if self.count >= HELD_OUT_FROM else 0

    @property
    def compared(self) -> int:
        """The number of images to hold out of runs that are compared, which can be fewer; 0 for too few images."""
        return self.held_out or (_COMPARED if self.count >= _COMPARED_FROM else 0)

    def held_out_by(self, fraction: float) -> int:
        """Return how many images upstream does not train on, which divides each folder and rounds up."""
        return sum(count - math.ceil(count * (1 - fraction)) for count in self.folders)

    def fraction(self, held_out: int) -> float | None:
        """Return the smallest fraction that holds at least some images out; None if it is many more, or all of a folder."""
        parts = {-(-number * 10_000 // count) for count in self.folders for number in range(1, min(held_out, count - 1) + 1)}
        fractions = (part / 10_000 for part in sorted(parts))
        fraction = next((each for each in fractions if self.held_out_by(each) >= held_out), None)
        return None if fraction is None or self.held_out_by(fraction) > 2 * held_out else fraction

    @property
    def extension(self) -> str:
        """The most common extension of captions."""
        return max(_CAPTIONS, key=lambda extension: self.captions[extension])


@dataclass(frozen=True)
class FolderRun:
    """A training run of a folder."""

    images: Images
    kind: Checkpoint
    command: CommandLine
    dataset: tuple[Path, str] | None
    """The file of the training set that is to be written, and its text; None for a folder of classes."""
    by_rule: bool = False
    """Whether the number of steps is not the user's."""
    prompts: tuple[Path, str] | None = None
    """The file of the prompts to sample after training, and its text; None for none, or those of the user."""

    @property
    def batch(self) -> int:
        """Images of an optimizer step."""
        values = self.command.values
        return int(values.get("train_batch_size", 1)) * int(values.get("gradient_accumulation_steps", 1))


def of(
    folder: Path,
    model: Path,
    output: Path,
    name: str,
    script: Callable[[str], Path],
    words: Sequence[str],
    automatic: Callable[[CommandLine, int], str],
    held_out: int | None = None,
    trigger: str | None = None,
) -> FolderRun:
    """Return the run that trains a LoRA; ``words`` are more arguments, which come last.

    ``held_out``: number of images for the validation; None follows the rule. ``trigger``: the caption of images without one; by
    default the name.

    ``script`` finds a script by its name, ``automatic`` the preset for a GPU. Raises UserError for a folder without images, and
    for a model that is unknown or needs files that the words do not name.
    """
    images = images_in(folder)
    family, kind = recognized(model)
    _check_files(family, model, words)
    dataset = None if images.has_classes else (output / f"{name}.dataset.toml", _dataset(images, trigger or name))
    option = {} if kind.option is None else dict([kind.option])
    options: dict[str, Any] = {
        MODEL: str(model),
        **option,
        **({"train_data_dir": str(folder)} if dataset is None else {"dataset_config": str(dataset[0])}),
        **({"caption_extension": images.extension} if dataset is None and images.captions else {}),
        "output_dir": str(output),
        "output_name": name,
        "save_state_every_n_minutes": _MINUTES,
        "resume": "auto",
    }
    own = CommandLine(script(family.lora), words, os.environ, automatic)
    preset = () if own.given.get("preset") else ("--preset", "auto")
    command = CommandLine(own.script, [*preset, *option_words(options), *words], os.environ, automatic)
    run = FolderRun(images, kind, command, dataset)
    if {"max_train_steps", "max_train_epochs"}.isdisjoint(own.given):
        steps = math.ceil(min(max(PER_IMAGE * images.count, LEAST), MOST) / run.batch)
        run = FolderRun(images, kind, command.with_({"max_train_steps": steps}), dataset, by_rule=True)
    held_out = images.held_out if held_out is None else held_out
    fraction = images.fraction(held_out) if held_out else None
    if fraction is not None and _can_validate(own.script):
        run = replace(run, command=_validated(run, fraction))
    return run


def sampled(run: FolderRun, file: Path, trigger: str) -> FolderRun:
    """Return the run that samples after training, with prompts that are to be written to a file; given prompts stay."""
    if not {"sample_prompts", "sample_multipliers"}.isdisjoint(run.command.given):
        return run
    caption = _plain(run.images.caption) or _plain(trigger)
    width, _, height = str(run.command.values.get("resolution") or 512).partition(",")
    size = f"--w {width.strip()} --h {(height or width).strip()} --s {_SAMPLER_STEPS} --d 1"
    lines = (f"{caption} {size}", f"{_without(caption, trigger) or _OTHER} {size}")
    command = run.command.with_({"sample_prompts": str(file), "sample_multipliers": _MULTIPLIERS})
    return replace(run, command=command, prompts=(file, "".join(f"{line}\n" for line in dict.fromkeys(lines))))


def _plain(text: str) -> str:
    """Return the part of a text that a line of prompts can have: no options, no comment."""
    return text.partition(" --")[0].lstrip("#").strip()


def _without(caption: str, trigger: str) -> str:
    """Return a caption without its trigger word."""
    tags = (re.sub(rf"(?i)\b{re.escape(trigger)}\b", "", tag).strip() for tag in caption.split(","))
    return ", ".join(filter(None, tags))


def _can_validate(script: Path | None) -> bool:
    """Return whether the LoRA scripts of a release hold images out."""
    try:
        return script is not None and _SPLIT in (script.parent / "train_network.py").read_text(encoding="utf-8")
    except OSError:
        return False


def _validated(run: FolderRun, fraction: float) -> CommandLine:
    """Return the command that also holds images out, validates now and then, and stops early; given options stay."""
    images, values = run.images, run.command.values
    trained = images.count - images.held_out_by(fraction)
    per_epoch = max(images.with_repeats * trained / images.count / run.batch, 1.0)
    epochs = values.get("max_train_epochs") or int(values.get("max_train_steps", 0)) / per_epoch
    options = {
        _SPLIT: fraction,
        "validation_seed": 1,  # the same images after a resume
        "validate_every_n_epochs": max(round(float(epochs) / _VALIDATIONS), 1),
        "early_stopping": PATIENCE,
    }
    return run.command.with_({name: value for name, value in options.items() if name not in run.command.given})


def images_in(folder: Path) -> Images:
    """Count the images of a folder, or of its subfolders named by repeats and class. Raises UserError without any."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder of images")
    classes = {path: images_of(path) for path in sorted(folder.iterdir()) if path.is_dir() and repeats_of(path.name)}
    in_classes = [file for each in classes.values() for file in each]
    direct = images_of(folder)
    if direct and in_classes:
        raise UserError(f"{folder} has images, and images in {next(iter(classes)).name}; move them into one or the other")
    files = direct or in_classes
    if not files:
        raise UserError(f"{folder} has no images")
    captions = Counter(extension for file in files for extension in _CAPTIONS if file.with_suffix(extension).is_file())
    folders = (len(direct),) if direct else tuple(map(len, classes.values()))
    with_repeats = len(direct) or sum(repeats_of(path.name) * len(each) for path, each in classes.items())
    caption = next(filter(None, map(_caption, files)), "")
    return Images(folder, len(files), captions, not direct, with_repeats, folders, caption)


def _caption(image: Path) -> str:
    """Return the first line of an image's caption; empty without one."""
    file = next((file for file in map(image.with_suffix, _CAPTIONS) if file.is_file()), None)
    if file is None:
        return ""
    with file.open(encoding="utf-8", errors="replace") as text:
        return text.readline(10_000).strip()


def recognized(model: Path) -> tuple[Family, Checkpoint]:
    """Return the family and kind of a checkpoint. Raises UserError if it is unknown."""
    try:
        names = read_header(model).shapes
    except (OSError, ValueError) as error:
        raise UserError(
            f"--model {model}: {getattr(error, 'strerror', None) or error}; give a checkpoint in .safetensors"
        ) from None
    if any(part in name for name in names for part in families.LORA_TENSORS):
        raise UserError(f"--model {model} is a LoRA; give the base model")
    kind = families.recognize(names)
    if kind is None:
        other = parts.recognize(names)
        raise UserError(
            f"--model {model} is {other or 'not a model that sd-scripts trains'}; give a checkpoint of a base model"
        )
    return kind


def _check_files(family: Family, model: Path, words: Sequence[str]) -> None:
    """Raise UserError if the family's scripts need files that are neither given nor in the model."""
    names = read_header(model).shapes
    flags = {word.partition("=")[0] for word in words}
    missing = [
        f"--{option} FILE ({parts.of_name(part).title})"
        for option, part in family.files.items()
        if f"--{option}" not in flags and not _includes(names, family.embedded.get(option))
    ]
    if missing:
        raise UserError(f"{family.checkpoints[0].title} needs more files; add {' '.join(missing)}")


def _includes(names: Any, prefix: str | None) -> bool:
    return prefix is not None and any(name.startswith(prefix) for name in names)


def _dataset(images: Images, name: str) -> str:
    """Return the text of a dataset's file; images without a caption get the name as theirs."""
    subset = {
        "image_dir": str(images.folder.resolve()),
        "num_repeats": 1,
        "caption_extension": images.extension,
        "class_tokens": name,
    }
    return toml.dumps({"datasets": [{"subsets": [subset]}]})
