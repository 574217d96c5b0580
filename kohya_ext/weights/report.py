"""Describe the weights of a file: modules, ranks, norms, dtypes, and values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kohya_ext.preflight import abbreviated
from kohya_ext.run.scaled_checkpoints import UnreadableError, stored_weights
from kohya_ext.sdscripts import families
from kohya_ext.units import format_size
from kohya_ext.weights import deltas, names, training_metadata
from kohya_ext.weights.names import AdaptedModule, Place
from kohya_ext.weights.tensor_file import TensorFile

_EXAMPLES = 3
"""Number of tensors or modules to name in a message."""

_LIMIT = 65504.0
"""The largest number of float16."""

_NETWORKS = {"dylora": "DyLoRA", "lora_fa": "LoRA-FA"}
"""End of ``ss_network_module`` -> networks whose tensors have a LoRA's names."""


@dataclass(frozen=True)
class Values:
    """The values of a tensor."""

    largest: float
    """The largest absolute value; infinite if a value is not finite."""
    not_finite: int
    """The number of values that are infinite or NaN."""
    squares: float
    """The sum of the squares of all values; 0 if it was not computed."""


@dataclass(frozen=True)
class Module:
    """An adapted module."""

    name: str
    place: Place
    kind: str
    rank: int | None
    alpha: float | None
    convolution: bool
    """Whether the kernel has more than 1x1 weights."""
    moved: bool
    """Whether the module changes the model."""
    norm: float | None
    """Frobenius norm of the change of the weight; None if it was not computed."""


@dataclass(frozen=True)
class Group:
    """Modules, or tensors of a checkpoint, in the same repeated blocks of a component. Modules also have the same rank."""

    component: str
    family: str
    """The repeated blocks; empty for all others."""
    blocks: tuple[int, ...]
    """The numbers of the blocks."""
    kind: str
    """The kind of adapter; empty for a checkpoint."""
    rank: int | None
    alpha: float | None
    convolution: bool
    count: int
    """The number of modules, or of a checkpoint's tensors."""
    parameters: int
    norm: float | None
    """The Frobenius norm of all changes, or of all values."""
    largest: float | None
    """The largest norm of a module's change, or the largest absolute value."""


@dataclass
class Report:
    """The description of a file."""

    file: Path
    bytes: int
    kind: str
    """``LoRA``, ``LoHa and LoCon``, ``checkpoint``, ``textual inversion``, ..."""
    model: str
    """The base model's family; empty if it is unknown."""
    tensors: int
    parameters: int
    dtypes: dict[str, int]
    """dtype -> number of values."""
    groups: list[Group] = field(default_factory=list)
    modules: list[Module] = field(default_factory=list)
    """Empty for a checkpoint."""
    not_finite: dict[str, int] = field(default_factory=dict)
    """Tensor -> number of values that are not finite."""
    saturated: list[str] = field(default_factory=list)
    """Tensors in float16 with a value at its limit."""
    incomplete: list[str] = field(default_factory=list)
    """Modules that lack a tensor, or whose tensors do not fit together."""
    problems: list[str] = field(default_factory=list)
    """Reasons why the file is unusable."""
    notes: list[str] = field(default_factory=list)
    metadata: Mapping[str, str] = field(default_factory=dict)
    run: dict[str, str] = field(default_factory=dict)
    """The run that wrote the file, by topic."""

    def summary(self) -> str:
        """Return the description in one line."""
        ranks = sorted({module.rank for module in self.modules if module.rank is not None})
        alphas = sorted({module.alpha for module in self.modules if module.alpha is not None})
        enough = sum(self.dtypes.values()) / 20  # an alpha may be an integer
        dtypes = " and ".join(
            sorted((d for d, count in self.dtypes.items() if count >= enough), key=self.dtypes.__getitem__)[::-1]
        )
        parts = [
            f"{len(self.modules):,} modules" if self.modules else f"{self.tensors:,} tensors",
            f"rank {span(ranks)}" if ranks else "",
            f"alpha {span(alphas)}" if alphas else "",
            dtypes,
            f"{still:,} never moved" if (still := len(self.unmoved())) else "",
            "" if self.not_finite else "all values finite",
        ]
        return f"{self.kind}: {', '.join(filter(None, parts))}"

    def unmoved(self) -> list[Module]:
        """Return the modules that do not change the model, without those of an :meth:`unused_layer`."""
        unused = {module.name for component in self.components() for module in self.unused_layer(component)}
        return [module for module in self.modules if not module.moved and module.name not in unused]

    def unused_layer(self, component: str) -> list[Module]:
        """Return the modules of a text encoder's last layer if only they have not moved, because the model does not use it."""
        members = [module for module in self.modules if module.place.component == component]
        still = [module for module in members if not module.moved]
        last = max((module.place.index for module in members if module.place.index is not None), default=None)
        whole = {module.name for module in members if module.place.index == last} == {module.name for module in still}
        return still if component.startswith("text encoder") and whole and len(still) < len(members) else []

    def components(self) -> list[str]:
        """Return the components in order."""
        return list(dict.fromkeys(group.component for group in self.groups))


def span(numbers: Sequence[float]) -> str:
    """Return sorted numbers as text: a few of them, or the first and the last."""
    return ", ".join(f"{number:g}" for number in numbers) if len(numbers) < 4 else f"{numbers[0]:g} to {numbers[-1]:g}"


def describe(file: TensorFile, norms: bool = True) -> Report:
    """Describe a file; reads every value once or twice, and at most one module at a time.

    ``norms``: also compute norms. Raises ValueError if the file is damaged, and OSError.
    """
    modules, others = names.adapted_modules(file.specs)
    values = {name: _read(file, name, norms and not modules) for name in file.specs}
    report = Report(
        file.path, file.size, "", _model(file), len(file.specs), sum(spec.count for spec in file.specs.values()), _dtypes(file)
    )
    report.metadata, report.run = file.metadata, training_metadata.describe(file.metadata)
    report.not_finite = {name: each.not_finite for name, each in values.items() if each.not_finite}
    report.saturated = [name for name, each in values.items() if file.specs[name].dtype == "float16" and each.largest == _LIMIT]
    if modules:
        places = names.places(modules)
        report.modules = [
            _describe_module(file, modules[name], places[name], values, report, norms)
            for name in sorted(modules, key=lambda name: places[name].order)
        ]
        report.groups = _groups_of_modules(file, report.modules, modules)
    else:
        report.groups = _groups_of_tensors(file, names.places(others), values)
    report.kind = _kind(file, report.modules, others)
    report.problems, report.notes = _problems(report), [*_storage(file.path), *_notes(report)]
    others = [name for name in others if not name.startswith(names.SHARED)]
    if modules and others:
        report.notes.append(f"{len(others)} tensors of no known adapter: {abbreviated(others, _EXAMPLES)}")
    return report


def _read(file: TensorFile, name: str, squares: bool) -> Values:
    largest, not_finite, total = 0.0, 0, 0.0
    for chunk in file.chunks(name):
        low, high = (float(bound) for bound in torch.aminmax(chunk))
        if math.isfinite(low) and math.isfinite(high):  # NaN is a bound, too
            largest = max(largest, -low, high)
            total += float(torch.linalg.vector_norm(chunk)) ** 2 if squares else 0.0
        else:
            not_finite += int((~chunk.isfinite()).sum())
    return Values(math.inf if not_finite else largest, not_finite, total)


def _describe_module(
    file: TensorFile, module: AdaptedModule, place: Place, values: Mapping[str, Values], report: Report, norms: bool
) -> Module:
    products, sums = deltas.factors(module), deltas.summands(module)
    moved = all(values[name].largest > 0 for name in products) and any(values[name].largest > 0 for name in products + sums)
    name = module.tensors.get("alpha")
    alpha = float(file.tensor(name).flatten()[0]) if name is not None else None
    kernel = any(len(spec) == 4 and spec[2:] != (1, 1) for spec in (file.specs[each].shape for each in module.tensors.values()))
    norm = None
    if deltas.missing_part(module):
        report.incomplete.append(module.name)
    elif norms and all(values[each].not_finite == 0 for each in module.tensors.values()):
        try:
            norm = deltas.delta(file, module).norm()
        except ValueError:
            report.incomplete.append(module.name)
    return Module(module.name, place, module.kind, deltas.rank_of(file, module), alpha, kernel, moved, norm)


def _dtypes(file: TensorFile) -> dict[str, int]:
    counts: dict[str, int] = {}
    for spec in file.specs.values():
        counts[spec.dtype] = counts.get(spec.dtype, 0) + spec.count
    return counts


def _model(file: TensorFile) -> str:
    """Return the family of the base model, by metadata or by the names of a checkpoint's tensors."""
    stored = file.metadata.get("modelspec.architecture", "").split("/")[0] or file.metadata.get("ss_base_model_version", "")
    if stored:
        return stored
    recognized = (
        None if any(part in name for name in file.specs for part in families.LORA_TENSORS) else families.recognize(file.specs)
    )
    return "" if recognized is None else recognized[1].title


def _kind(file: TensorFile, modules: Sequence[Module], others: Sequence[str]) -> str:
    if not modules:
        embedding = any(name in ("emb_params", "clip_l", "clip_g", "t5xxl") or "string_to_param" in name for name in others)
        unknown = any(name.startswith(("lora_", "lycoris_")) for name in others)
        return "textual inversion" if embedding else "network of an unknown kind" if unknown else "checkpoint"
    network = file.metadata.get("ss_network_module", "").rpartition(".")[2]
    kinds = dict.fromkeys("LoCon" if module.kind == "LoRA" and module.convolution else module.kind for module in modules)
    if "LoCon" in kinds:  # a LoRA with convolutions
        kinds.pop("LoRA", None)
    if "LLLite" in kinds:
        return "ControlNet-LLLite"
    return " and ".join(_NETWORKS.get(network, kind) if kind == "LoRA" else kind for kind in kinds)


# --- groups ----------------------------------------------------------------------------------------------------------


def _groups_of_modules(file: TensorFile, modules: Iterable[Module], adapted: Mapping[str, AdaptedModule]) -> list[Group]:
    members: dict[tuple[object, ...], list[Module]] = {}
    for module in modules:
        key = (module.place.component, module.place.family, module.kind, module.rank, module.alpha, module.convolution)
        members.setdefault(key, []).append(module)
    groups = []
    for group in members.values():
        first, norms = group[0], [module.norm for module in group if module.norm is not None]
        groups.append(
            Group(
                first.place.component,
                first.place.family,
                _blocks(module.place for module in group),
                first.kind,
                first.rank,
                first.alpha,
                first.convolution,
                len(group),
                sum(file.specs[tensor].count for module in group for tensor in adapted[module.name].tensors.values()),
                math.hypot(*norms) if norms else None,
                max(norms, default=None),
            )
        )
    return groups


def _groups_of_tensors(file: TensorFile, places: Mapping[str, Place], values: Mapping[str, Values]) -> list[Group]:
    members: dict[tuple[str, str], list[str]] = {}
    for name, place in sorted(places.items(), key=lambda item: item[1].order):
        members.setdefault((place.component, place.family), []).append(name)
    return [
        Group(
            *(component, family, _blocks(places[name] for name in group), "", None, None, False, len(group)),
            sum(file.specs[name].count for name in group),
            math.sqrt(sum(values[name].squares for name in group)),
            max(values[name].largest for name in group),
        )
        for (component, family), group in members.items()
    ]


def _blocks(places: Iterable[Place]) -> tuple[int, ...]:
    return tuple(sorted({place.index for place in places if place.index is not None}))


# --- messages --------------------------------------------------------------------------------------------------------


def _problems(report: Report) -> list[str]:
    problems = []
    if report.not_finite:
        problems.append(
            f"{len(report.not_finite):,} of {report.tensors:,} tensors have values that are infinite or NaN "
            f"({abbreviated([*report.not_finite], _EXAMPLES)}); use an earlier file, and train with a lower learning rate"
        )
    if report.incomplete:
        problems.append(
            f"{len(report.incomplete):,} of {len(report.modules):,} modules lack a tensor, or their shapes do not fit together "
            f"({abbreviated(report.incomplete, _EXAMPLES)})"
        )
    if report.modules and not any(module.moved for module in report.modules):
        problems.append(
            "the file does not change the model, because no module has moved from its start; "
            "check that the learning rates are above 0 and that steps were trained"
        )
    for component in report.components():
        if not report.modules and all(group.largest == 0 for group in report.groups if group.component == component):
            problems.append(f"all values of the {component} are 0")
    return problems


def _storage(file: Path) -> list[str]:
    try:
        stored = stored_weights(file)
    except UnreadableError as error:
        return [str(error)]
    except ValueError:  # not a safetensors file
        return []
    return [] if stored is None else [f"{stored}; the values shown are those of the 8 bits, without scales"]


def _notes(report: Report) -> list[str]:
    notes = []
    if report.saturated:
        notes.append(
            f"{len(report.saturated):,} tensors have values at the limit of float16 "
            f"({abbreviated(report.saturated, _EXAMPLES)}), which may have been larger; save in bf16"
        )
    unmoved = report.unmoved() if any(module.moved for module in report.modules) else []
    for component in report.components():
        members = sum(module.place.component == component for module in report.modules)
        if unused := report.unused_layer(component):
            notes.append(
                f"{component}: the {len(unused)} modules of the last layer never moved, "
                "because the model uses the output of the layer before"
            )
        elif still := [module.name for module in unmoved if module.place.component == component]:
            what = "none has moved" if len(still) == members else f"{len(still):,} never moved"
            notes.append(f"{component}: {what} of {members:,} modules ({abbreviated(still, _EXAMPLES)})")
    return notes


# --- the end of a run ------------------------------------------------------------------------------------------------

_LARGEST = 10**9
"""Size in bytes of the largest file whose values are checked at the end of a run."""


def check(path: Path) -> tuple[list[str], str]:
    """Return the problems of a file and its summary, quickly: of a large file only the header is read. Raises nothing."""
    try:
        with TensorFile(path) as file:
            if file.size > _LARGEST:
                return [], f"{len(file.specs):,} tensors, {format_size(file.size)}; values were not checked"
            report = describe(file, norms=False)
            return report.problems, report.summary()
    except (OSError, ValueError) as problem:
        return [str(problem)], ""
