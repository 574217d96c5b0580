"""Presets: TOML files of defaults for options that the user does not set.

A preset holds sd-scripts' keys in sections of any name, which are flattened one level like upstream's config files. Its
``[preset]`` table describes the preset. The comment after a key gives the reason for the value.

Shipped presets are in ``presets/<family>/<name>.toml``, where a family is a group of scripts that share presets. A preset
with ``extends = ["base"]`` overrides the values of ``base.toml``, which the tiers of a family share.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import tomlkit
from tomlkit import TOMLDocument
from tomlkit.container import OutOfOrderTableProxy
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Item, Table

from kohya_ext.config.preset_conflicts import Reason
from kohya_ext.config.settings import reject_in_file
from kohya_ext.config.user_files import backslash_advice, read_text, reject_escapes
from kohya_ext.errors import UserError, did_you_mean
from kohya_ext.sdscripts import families

#: The table that describes the preset; every other table holds arguments.
ABOUT = "preset"

#: Script -> folder of presets, for the model that it trains by default.
FAMILIES: Mapping[str, str] = {
    script: folder for family, script, folder in families.with_presets() if not family.is_chosen_by_option
}

#: Folder of presets for a model that needs an option of the script -> script. Users give the full name, ``chroma-lora/16gb``.
SIBLINGS: Mapping[str, str] = {
    folder: script for family, script, folder in families.with_presets() if family.is_chosen_by_option
}

#: The folder of presets for every script.
ANY = "any"

#: The preset that the others of a family extend; users cannot choose it.
BASE = "base"

#: The preset that a GPU without bf16 adds to others.
FP16 = "fp16"


class NotForScriptError(UserError):
    """A preset exists, but not for this script."""


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
    """None for a user's file without one, which is for any script."""
    about: Mapping[str, object]
    """The ``[preset]`` table: ``summary``, ``traded``, ``extends``, and ``vram_gb`` for a tier."""
    values: Mapping[str, Value]

    @property
    def is_shipped(self) -> bool:
        """Whether it belongs to the extension."""
        return not self.name.endswith(".toml")


@dataclass(frozen=True)
class Overlay:
    """A stack of presets, of which later ones override earlier ones."""

    presets: tuple[Preset, ...] = ()
    label: str = ""
    """The presets that the user named, for messages: ``sdxl-lora/16gb + sdxl-lora/quality``."""
    held_back: Mapping[str, Reason] = field(default_factory=dict)
    """Keys that are not applied because they contradict the user's options, or because the script lacks them."""
    remarks: tuple[str, ...] = ()
    """Presets from the environment that are not applied, with the reasons."""

    @property
    def values(self) -> dict[str, Value]:
        """The combined values of all presets."""
        return {key: value for preset in self.presets for key, value in self.values_of(preset).items()}

    def values_of(self, preset: Preset) -> dict[str, Value]:
        """Return the values of one preset, without those that are held back."""
        return {key: value for key, value in preset.values.items() if key not in self.held_back}

    @property
    def assumed(self) -> dict[str, object]:
        """Assumptions about the user's files, used only for estimates: for example, a text encoder in fp8."""
        tables = (preset.about.get("assumes") for preset in self.presets)
        return {key: value for table in tables if isinstance(table, dict) for key, value in table.items()}


def shipped() -> Iterator[tuple[str, str, Path]]:
    """Yield (family, name, file) for every shipped preset: tiers by kind and size, then the others by name."""
    files = [file for folder in _folders() for file in folder.glob("*/*.toml") if file.stem != BASE]
    for file in sorted(files, key=lambda file: (file.parent.name, tier_of(file.stem) or _LAST, file.stem)):
        yield file.parent.name, file.stem, file


def scripts(family: str) -> list[str]:
    """Return the scripts that a family of presets is for; those with presets of their own first."""
    if family == ANY:
        return list(dict.fromkeys([*FAMILIES, *(script for each in families.FAMILIES for script in each.scripts)]))
    return [script for script, folder in FAMILIES.items() if family == folder or SIBLINGS.get(family) == script]


def base(family: str) -> Preset | None:
    """Return the base preset of a family, or None."""
    file = file_of(family, BASE)
    return None if file is None else _read(file)


def load(names: Iterable[str], script: str) -> Overlay:
    """Load presets for a script (its file name), each after those that it extends.

    For a tier without a file the next smaller one of its kind is loaded. A tier replaces earlier ones. Raises UserError for an
    unknown preset, and NotForScriptError for one of other scripts.
    """
    named = [_load_one(name, script) for name in names]
    stack: dict[str, Preset] = {}
    for top in named:
        for preset in _with_bases(top):
            stack.setdefault(preset.name, preset)
    replaced = [preset.name for preset in stack.values() if "vram_gb" in preset.about][:-1]
    label = " + ".join(preset.name for preset in named if preset.name not in replaced)
    return Overlay(tuple(preset for preset in stack.values() if preset.name not in replaced), label)


def _with_bases(preset: Preset) -> Iterator[Preset]:
    for name in _bases(preset):
        family, _, stem = name.rpartition("/")
        file = file_of(family or preset.family or "", stem)
        if file is None:
            raise UserError(f"preset {preset.name} extends {name}, which does not exist; `presets list` shows all presets")
        yield from _with_bases(_read(file))
    yield preset


def _bases(preset: Preset) -> list[str]:
    names = preset.about.get("extends", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f'preset {preset.name}: extends must be a list of names, such as extends = ["sdxl-lora/16gb"]')
    return names


def _load_one(name: str, script: str) -> Preset:
    if name.endswith(".toml") and Path(name).expanduser().is_file():
        preset = parse(read_text(Path(name).expanduser(), f"preset {name}"), name, None)
    else:
        preset = _shipped(name, script)
    if preset.family not in (None, ANY) and script not in scripts(str(preset.family)):
        choices = _choices(script)
        raise NotForScriptError(
            f"preset {preset.name} is for {', '.join(scripts(str(preset.family))) or preset.family}, not for {script}."
            + (f" Presets for {script}: {choices}" if choices else "")
        )
    return preset


def _shipped(name: str, script: str) -> Preset:
    family, _, stem = name.lower().rpartition("/")
    tier = tier_of(stem)
    stem = stem if tier is None else f"{tier.gb}gb{tier.kind}"
    folders = [family] if family else [FAMILIES.get(script, ""), ANY]
    file = next((file for folder in folders if (family or stem != BASE) and (file := file_of(folder, stem)) is not None), None)
    if file is None and tier is not None:
        smaller = [(other, file) for other, file in _tiers(folders[0]) if other.kind == tier.kind and other.gb < tier.gb]
        file = max(smaller)[1] if smaller else None
    if file is not None:
        return _read(file)
    if name.endswith(".toml"):
        raise UserError(f"preset file {name} does not exist; check the path")
    choices = ", ".join(other for folder, other, _ in shipped() if folder == family) if family else _choices(script)
    if not choices:
        raise UserError(f"no preset {name}; `presets list` shows all presets, or give the path of a TOML file")
    if tier is not None and (tiers := [each for each in _tiers(folders[0]) if each[0].kind == tier.kind]):
        raise NotForScriptError(f"no preset {name} for {script}; use {choices} ({min(tiers)[1].stem} is the smallest tier)")
    if not family and (tier is not None or any(other == stem for _, other, _ in shipped())):
        raise NotForScriptError(f"no preset {name} for {script}; use {choices}")
    raise UserError(f"no preset {name} for {script}; use {choices}.{did_you_mean(stem, choices.split(', '))}")


def _choices(script: str) -> str:
    """Return the preset names for a script, separated by commas; those of its other models with their family."""
    own = [name for family, name, _ in shipped() if family == FAMILIES.get(script)]
    others = [f"{family}/{name}" for family, name, _ in shipped() if SIBLINGS.get(family) == script]
    common = [name for family, name, _ in shipped() if family == ANY and name not in own]
    return ", ".join([*own, *others, *common])


def _folders() -> list[Path]:
    return [Path(folder) for folder in importlib.import_module("kohya_ext.presets").__path__]


def file_of(family: str, name: str) -> Path | None:
    """Return the file of a shipped preset, including ``base``, or None."""
    return next((file for folder in _folders() if (file := folder / family / f"{name}.toml").is_file()), None)


class Tier(NamedTuple):
    """The size of a GPU that a preset's name has, and its kind, such as ``-int8``; sorted by kind, then size."""

    kind: str
    gb: int


#: Sorts after every tier.
_LAST = Tier("~", 0)


def _tiers(family: str) -> list[tuple[Tier, Path]]:
    return [(tier, file) for folder, name, file in shipped() if folder == family and (tier := tier_of(name)) is not None]


def tier_of(name: str) -> Tier | None:
    """Return the tier that a preset's name means; None for another preset."""
    match = re.fullmatch(r"(\d+)\s*(?:g|gb)?(-int8|)", name)  # the formats of --vram
    return Tier(match.group(2), int(match.group(1))) if match else None


@functools.cache
def _read(file: Path) -> Preset:
    return parse(file.read_text(encoding="utf-8"), f"{file.parent.name}/{file.stem}", file.parent.name)


def parse(text: str, name: str, family: str | None) -> Preset:
    """Parse a preset from TOML text.

    Raises UserError for invalid TOML, nested tables, duplicate keys, and keys that no preset may have.
    """
    try:
        document = tomlkit.parse(text)
    except (TOMLKitError, ValueError, RecursionError) as error:
        problem = str(error) or type(error).__name__
        raise UserError(f"preset {name} is not valid TOML: {problem}{backslash_advice(text)}") from None
    about: Mapping[str, object] = {}
    values: dict[str, Value] = {}
    for key, item in _arguments(document, name):
        if key == ABOUT and isinstance(item, Table):
            about = item.unwrap()
            continue
        if key in values:
            raise UserError(f"preset {name}: duplicate key {key}; remove one")
        values[key] = Value(item.unwrap(), item.trivia.comment.lstrip("# ").strip(), name)
    reject_in_file(values, f"preset {name}", shared=True)
    reject_escapes({key: value.value for key, value in values.items()}, f"preset {name}")
    family = family or str(about.get("family") or "") or None
    return Preset(name, family, about, values)


def _arguments(document: TOMLDocument, name: str) -> Iterator[tuple[str, Item]]:
    for key in document:
        item = document.item(key)
        if isinstance(item, OutOfOrderTableProxy):
            raise UserError(f"preset {name}: table [{key}] is split; put all of its keys in one place")
        if isinstance(item, Table) and key != ABOUT:
            # Iterating over item would yield plain booleans without their comments.
            for inner in item:
                content = item.value.item(inner)
                if isinstance(content, (Table, OutOfOrderTableProxy)):
                    raise UserError(f"preset {name}: [{key}.{inner}] is nested too deep; sd-scripts flattens one level")
                yield inner, content
        else:
            yield key, item
