"""Presets: partial overlays in TOML that fill what the user left open.

A preset is a file of sd-scripts' own keys, in sections of any name (sections are flattened one level, as upstream
flattens its config files), and a ``[preset]`` table that says what it is. The comment behind a key says why it is there.
The shipped ones lie in ``presets/<family>/<name>.toml``; a family stands for the scripts that share its presets.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import tomlkit
from tomlkit import TOMLDocument
from tomlkit.container import OutOfOrderTableProxy
from tomlkit.exceptions import ParseError
from tomlkit.items import Item, Table

from kohya_ext.errors import UserError, did_you_mean

#: The table that describes the preset; every other table holds arguments.
ABOUT = "preset"

#: Which family of presets a script uses.
FAMILIES: Mapping[str, str] = {
    "sdxl_train_network.py": "sdxl-lora",
    "sdxl_train.py": "sdxl-finetune",
    "train_network.py": "sd15-lora",
    "train_db.py": "sd15-finetune",
    "fine_tune.py": "sd15-finetune",
    "flux_train_network.py": "flux-lora",
    "flux_train.py": "flux-finetune",
    "sd3_train_network.py": "sd3-lora",
    "sd3_train.py": "sd3-finetune",
    "lumina_train_network.py": "lumina-lora",
    "lumina_train.py": "lumina-finetune",
    "anima_train_network.py": "anima-lora",
    "anima_train.py": "anima-finetune",
    "hunyuan_image_train_network.py": "hunyuan-image-lora",
}


@dataclass(frozen=True)
class Value:
    """One key of a preset."""

    value: object
    why: str
    preset: str
    """The preset that sets it, as ``family/name`` or a path."""


@dataclass(frozen=True)
class Preset:
    """One preset file."""

    name: str
    family: str | None
    """None for a user's own file that does not say: it goes with any script."""
    about: Mapping[str, object]
    """The ``[preset]`` table: ``summary``, and for a tier ``vram``, ``peak``, ``traded``."""
    values: Mapping[str, Value]


@dataclass(frozen=True)
class Overlay:
    """Presets laid over one another, the later one on top."""

    presets: tuple[Preset, ...] = ()

    @property
    def values(self) -> dict[str, Value]:
        """What they set together."""
        return {key: value for preset in self.presets for key, value in preset.values.items()}

    @property
    def label(self) -> str:
        """For messages: ``sdxl-lora/16gb + sdxl-lora/quality``."""
        return " + ".join(preset.name for preset in self.presets)


def shipped() -> Iterator[tuple[str, str, Path]]:
    """Yield (family, name, file) for every preset that comes with the package; families by name, tiers by size."""
    folders = [Path(folder) for folder in importlib.import_module("kohya_ext.presets").__path__]
    found = [file for folder in folders for file in folder.glob("*/*.toml")]
    for file in sorted(found, key=lambda file: (file.parent.name, len(file.stem), file.stem)):
        yield file.parent.name, file.stem, file


def load(names: Iterable[str], script: str) -> Overlay:
    """Load presets for a script (its file name). Raises UserError for an unknown one or one of another family."""
    return Overlay(tuple(_load(name, script) for name in names))


def _load(name: str, script: str) -> Preset:
    if name.endswith(".toml") and Path(name).expanduser().is_file():
        preset = parse(Path(name).expanduser().read_text(encoding="utf-8"), name, None)
    else:
        preset = _shipped(name, script)
    family = FAMILIES.get(script)
    if preset.family is not None and preset.family != family:
        theirs = ", ".join(other for other, its in FAMILIES.items() if its == preset.family)
        raise UserError(
            f"preset {preset.name} is for {theirs or preset.family}, not for {script}."
            + (f" {script} has: {_choices(family)}" if _choices(family) else "")
        )
    return preset


def _shipped(name: str, script: str) -> Preset:
    family, _, tier = name.lower().rpartition("/")
    wanted = family or FAMILIES.get(script, "")
    for its_family, its_name, file in shipped():
        if (its_family, its_name) == (wanted, tier):
            return parse(file.read_text(encoding="utf-8"), f"{its_family}/{its_name}", its_family)
    if name.endswith(".toml"):
        raise UserError(f"no preset file {name}: check the path")
    mine = _choices(wanted)
    if not mine:
        families = sorted({its_family for its_family, _, _ in shipped()})
        raise UserError(
            f"no preset {name} for {script}: there are presets for {', '.join(families)} only; give a TOML file of your own"
        )
    raise UserError(f"no preset {name} for {script}: there are {mine}.{did_you_mean(tier, mine.split(', '))}")


def _choices(family: str | None) -> str:
    return ", ".join(name for its_family, name, _ in shipped() if its_family == family)


def parse(text: str, name: str, family: str | None) -> Preset:
    """Read a preset from TOML text. Raises UserError when it is broken, nested too deep or says one key twice."""
    try:
        document = tomlkit.parse(text)
    except ParseError as error:
        raise UserError(f"preset {name} is not valid TOML: {error}") from None
    about: Mapping[str, object] = {}
    values: dict[str, Value] = {}
    for key, item in _arguments(document, name):
        if key == ABOUT and isinstance(item, Table):
            about = item.unwrap()
            continue
        if key in values:
            raise UserError(f"preset {name} says {key} twice")
        values[key] = Value(item.unwrap(), item.trivia.comment.lstrip("# ").strip(), name)
    its_family = family or about.get("family")
    return Preset(name, str(its_family) if its_family else None, about, values)


def _arguments(document: TOMLDocument, name: str) -> Iterator[tuple[str, Item]]:
    for key in document:
        item = document.item(key)
        if isinstance(item, OutOfOrderTableProxy):
            raise UserError(f"preset {name}: [{key}] stands in two places: put its keys together")
        if isinstance(item, Table) and key != ABOUT:
            # Iterating over items would hand out bare booleans, which have lost their comments.
            for inner in item:
                content = item.value.item(inner)
                if isinstance(content, (Table, OutOfOrderTableProxy)):
                    raise UserError(f"preset {name}: [{key}.{inner}] is nested too deep; sd-scripts flattens one level")
                yield inner, content
        else:
            yield key, item
