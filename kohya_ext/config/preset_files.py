"""Presets: partial overlays in TOML that fill what the user left open.

A preset is a file of sd-scripts' own keys, in sections of any name (sections are flattened one level, as upstream
flattens its config files), and a ``[preset]`` table that says what it is. The comment behind a key says why it is there.
The shipped ones lie in ``presets/<family>/<name>.toml``; a family stands for the scripts that share its presets. A preset
that says ``extends = ["base"]`` is laid over that one, which need not be named: what the tiers of a family share stands in
its ``base.toml`` once.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tomlkit
from tomlkit import TOMLDocument
from tomlkit.container import OutOfOrderTableProxy
from tomlkit.exceptions import ParseError
from tomlkit.items import Item, Table

from kohya_ext.config.preset_conflicts import Reason
from kohya_ext.config.user_files import read_text
from kohya_ext.errors import UserError, did_you_mean
from kohya_ext.sdscripts import families

#: The table that describes the preset; every other table holds arguments.
ABOUT = "preset"

#: Script -> its folder of presets, for the model that it trains without further options.
FAMILIES: Mapping[str, str] = {
    script: folder for family, script, folder in families.with_presets() if not family.is_chosen_by_option
}

#: Folder of presets for a model that a script trains with an option -> the script. Named in full: ``chroma-lora/16gb``.
SIBLINGS: Mapping[str, str] = {
    folder: script for family, script, folder in families.with_presets() if family.is_chosen_by_option
}

#: The folder of presets that go with every script.
ANY = "any"

#: What the presets of a family share; it is no choice of its own.
BASE = "base"


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
    """The ``[preset]`` table: ``summary``, ``traded``, ``extends``, and for a tier ``vram_gb``."""
    values: Mapping[str, Value]


@dataclass(frozen=True)
class Overlay:
    """Presets laid over one another, the later one on top."""

    presets: tuple[Preset, ...] = ()
    label: str = ""
    """For messages, those that were named: ``sdxl-lora/16gb + sdxl-lora/quality``."""
    held_back: Mapping[str, Reason] = field(default_factory=dict)
    """Keys that are left out because they contradict what the user set."""

    @property
    def values(self) -> dict[str, Value]:
        """The values that they set together."""
        return {key: value for preset in self.presets for key, value in self.values_of(preset).items()}

    def values_of(self, preset: Preset) -> dict[str, Value]:
        """Return the values of one of them, without those that are held back."""
        return {key: value for key, value in preset.values.items() if key not in self.held_back}

    @property
    def assumed(self) -> dict[str, object]:
        """What they take for granted of the user's own files, for figures alone: a text encoder in fp8."""
        tables = (preset.about.get("assumes") for preset in self.presets)
        return {key: value for table in tables if isinstance(table, dict) for key, value in table.items()}


def shipped() -> Iterator[tuple[str, str, Path]]:
    """Yield (family, name, file) for every preset that comes with the package; families by name, tiers by size."""
    found = [file for folder in _folders() for file in folder.glob("*/*.toml") if file.stem != BASE]
    for file in sorted(found, key=lambda file: (file.parent.name, _tier(file.stem) or math.inf, file.stem)):
        yield file.parent.name, file.stem, file


def scripts(family: str) -> list[str]:
    """Return the scripts that a family of presets goes with."""
    return [script for script, its in FAMILIES.items() if family in (its, ANY) or SIBLINGS.get(family) == script]


def base(family: str) -> Preset | None:
    """Return what the presets of a family share; None when they share nothing."""
    file = file_of(family, BASE)
    return None if file is None else _read(file)


def load(names: Iterable[str], script: str) -> Overlay:
    """Load presets for a script (its file name), each over what it extends.

    A tier without a file of its own is the next smaller one. Raises UserError for an unknown one or one of another family.
    """
    named = [_named(name, script) for name in names]
    laid: dict[str, Preset] = {}
    for top in named:
        for preset in _with_bases(top):
            laid.setdefault(preset.name, preset)
    return Overlay(tuple(laid.values()), " + ".join(preset.name for preset in named))


def _with_bases(preset: Preset) -> Iterator[Preset]:
    for name in _bases(preset):
        family, _, stem = name.rpartition("/")
        file = file_of(family or preset.family or "", stem)
        if file is None:
            raise UserError(f"preset {preset.name} extends {name}, which is not there: `presets list` shows what is")
        yield from _with_bases(_read(file))
    yield preset


def _bases(preset: Preset) -> list[str]:
    said = preset.about.get("extends", [])
    if not isinstance(said, list) or not all(isinstance(name, str) for name in said):
        raise UserError(f'preset {preset.name}: extends must be a list of names: extends = ["sdxl-lora/16gb"]')
    return said


def _named(name: str, script: str) -> Preset:
    if name.endswith(".toml") and Path(name).expanduser().is_file():
        preset = parse(read_text(Path(name).expanduser(), f"preset {name}"), name, None)
    else:
        preset = _shipped(name, script)
    if preset.family is not None and script not in scripts(preset.family):
        mine = _choices(script)
        raise UserError(
            f"preset {preset.name} is for {', '.join(scripts(preset.family)) or preset.family}, not for {script}."
            + (f" {script} has: {mine}" if mine else "")
        )
    return preset


def _shipped(name: str, script: str) -> Preset:
    family, _, stem = name.lower().rpartition("/")
    size = _tier(stem)
    stem = stem if size is None else f"{size}gb"
    folders = [family] if family else [FAMILIES.get(script, ""), ANY]
    file = next((file for its in folders if (family or stem != BASE) and (file := file_of(its, stem)) is not None), None)
    if file is None and size is not None:
        smaller = [(its, file) for its, file in _tiers(folders[0]) if its < size]
        file = max(smaller)[1] if smaller else None
    if file is not None:
        return _read(file)
    if name.endswith(".toml"):
        raise UserError(f"no preset file {name}: check the path")
    mine = ", ".join(its for its_family, its, _ in shipped() if its_family == family) if family else _choices(script)
    if not mine:
        raise UserError(f"no preset {name}: `presets list` shows what there is; or give a TOML file of your own")
    if _tier(stem) is not None and (there := _tiers(folders[0])):
        raise UserError(f"no preset {name} for {script}: there are {mine}; {min(there)[1].stem} is the smallest tier")
    raise UserError(f"no preset {name} for {script}: there are {mine}.{did_you_mean(stem, mine.split(', '))}")


def _choices(script: str) -> str:
    """What may be named for a script: tiers and overlays by their names, siblings in full."""
    own = [name for family, name, _ in shipped() if family == FAMILIES.get(script)]
    others = [f"{family}/{name}" for family, name, _ in shipped() if SIBLINGS.get(family) == script]
    every = [name for family, name, _ in shipped() if family == ANY and name not in own and script in scripts(ANY)]
    return ", ".join([*own, *others, *every])


def _folders() -> list[Path]:
    return [Path(folder) for folder in importlib.import_module("kohya_ext.presets").__path__]


def file_of(family: str, name: str) -> Path | None:
    """Return the file of a shipped preset, a base among them; None when there is none."""
    return next((file for folder in _folders() if (file := folder / family / f"{name}.toml").is_file()), None)


def _tiers(family: str) -> list[tuple[int, Path]]:
    return [(size, file) for its, name, file in shipped() if its == family and (size := _tier(name)) is not None]


def _tier(name: str) -> int | None:
    match = re.fullmatch(r"(\d+)\s*(?:g|gb)?", name)  # as --vram reads the size of a GPU
    return int(match.group(1)) if match else None


@functools.cache
def _read(file: Path) -> Preset:
    return parse(file.read_text(encoding="utf-8"), f"{file.parent.name}/{file.stem}", file.parent.name)


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
