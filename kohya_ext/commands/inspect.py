"""Describe a LoRA or a checkpoint, compare two, or judge one.

Reads safetensors files and files of torch.save (.ckpt, .pt), tensor by tensor. The exit code is 1 if a file is damaged, has
values that are not finite, or does not change the model.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from kohya_ext.config.settings import fraction
from kohya_ext.console import progress
from kohya_ext.errors import UserError
from kohya_ext.output import Console
from kohya_ext.preflight import abbreviated
from kohya_ext.run.journal import finite
from kohya_ext.units import format_size

if TYPE_CHECKING:
    from kohya_ext.weights.comparison import Comparison, Difference
    from kohya_ext.weights.judgement import Block, Judgement
    from kohya_ext.weights.report import Report

_NAMES = 3
"""Number of modules to name in a message."""

_IN_EVERY_RUN = re.compile(r"_hash$|_hash_|^sshs_|session_id|_at$|\.date$")
"""Metadata that differ in every run, which only ``--json`` shows."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a LoRA or a checkpoint; two files are compared")
    parser.add_argument(
        "--against", type=Path, metavar="BASE", help="judge the file: how far it moves the weights of this model"
    )
    parser.add_argument(
        "--journal", type=Path, metavar="FILE", help="journal of the file's run, for --against; default: one in its folder"
    )
    parser.add_argument(
        "--max_change",
        "--max-change",
        type=fraction,
        metavar="SHARE",
        help="with --against, fail if a block moved by more than this share of its weights' norm, such as 0.2",
    )
    parser.add_argument(
        "--strict", action="store_true", help="with --against, also fail for outliers and for an over-trained file"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with every module and all metadata")


def run(arguments: argparse.Namespace) -> int:
    """Describe a file or compare two; return 1 if one is unusable. Raises UserError if a file cannot be opened."""
    from kohya_ext.weights import comparison, report
    from kohya_ext.weights.tensor_file import TensorFile

    if len(arguments.files) > 2:
        raise UserError(f"inspect compares at most two files, not {len(arguments.files)}")
    if arguments.against is not None:
        return _judge(arguments)
    try:
        with ExitStack() as opened, progress(f"reading {' and '.join(path.name for path in arguments.files)}"):
            files = [opened.enter_context(TensorFile(path)) for path in arguments.files]
            reports = [report.describe(file) for file in files]
            compared = comparison.compare(*files) if len(files) == 2 else None
    except ValueError as problem:
        return _unreadable(str(problem), arguments.json)
    except OSError as problem:
        raise UserError(f"{problem.filename or arguments.files[0]} cannot be read: {problem.strerror or problem}") from None
    if arguments.json:
        print(json.dumps(_plain([_as_json(each) for each in reports], compared), indent=1))
    else:
        console = Console(highlight=False)
        for line in _lines(reports, compared):
            console.print(line)
    return 1 if any(each.problems for each in reports) else 0


def _judge(arguments: argparse.Namespace) -> int:
    """Judge a file; return 1 if it fails."""
    if len(arguments.files) > 1:
        raise UserError("--against judges one file")
    (path,) = arguments.files
    try:
        report, judged = judged_file(path, arguments.against, arguments.journal)
    except ValueError as problem:
        return _unreadable(str(problem), arguments.json)
    failures = _failures(report, judged, arguments.max_change, arguments.strict)
    if arguments.json:
        data = {"judgement": judged.text(report), "failures": failures, **asdict(judged), "file": _as_json(report)}
        print(json.dumps(finite(data), indent=1))
    else:
        console = Console(highlight=False)
        console.print(f"[bold]{escape(path.name)}[/]  {escape(report.summary())}")
        console.print(_block_table(judged.blocks))
        console.print(escape(judged.text(report)))
        for failure in failures:
            console.print(f"[bold red]error[/]  {escape(failure)}")
    return 1 if failures else 0


def judged_file(path: Path, base: Path, journal: Path | None = None) -> tuple[Report, Judgement]:
    """Describe and judge a file. Raises UserError if a file cannot be opened, ValueError for a damaged one."""
    from kohya_ext.reporting import file_training
    from kohya_ext.weights import judgement, report
    from kohya_ext.weights.tensor_file import TensorFile

    try:
        with TensorFile(path) as file, TensorFile(base) as model, progress(f"comparing {path.name} with {base.name}"):
            described = report.describe(file)
            training = file_training.of_file(path, file.metadata, journal)
            return described, judgement.judge(file, model, described, training)
    except OSError as problem:
        raise UserError(f"{problem.filename or path} cannot be read: {problem.strerror or problem}") from None


def _failures(report: Report, judged: Judgement, max_change: float | None, strict: bool) -> list[str]:
    failures = [*report.problems, *judged.problems]
    moved = judged.largest
    if max_change is not None and moved is not None and moved.relative > max_change:
        failures.append(f"{moved.component} {moved.label} moved by {moved.relative:.2%}, more than --max_change {max_change:g}")
    if strict and judged.outliers:
        failures.append(f"{len(judged.outliers):,} modules moved much farther than the others")
    if strict and judged.training is not None and judged.training.is_over:
        failures.append(f"over-trained: its validation loss is {judged.training.rise:.1%} above the lowest")
    return failures


def _block_table(blocks: Sequence[Block]) -> Table:
    """Return a row for each kind of block: how far all of its blocks moved, and which one moved farthest."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("part")
    for title in ("modules", "least", "most", "most in"):
        table.add_column(title, justify="right")
    families: dict[tuple[str, str], list[Block]] = {}
    for block in blocks:
        families.setdefault((block.component, block.family), []).append(block)
    for (component, family), members in families.items():
        members.sort(key=lambda block: block.relative)
        indices = sorted(block.index for block in members if block.index is not None)
        where = members[-1].label if len(members) > 1 else ""
        cells = (
            f"{sum(block.count for block in members):,}",
            f"{members[0].relative:.2%}",
            f"{members[-1].relative:.2%}",
            where,
        )
        table.add_row(escape(_part(component, family, indices)), *map(escape, cells))
    return table


def _unreadable(problem: str, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"problems": [problem]}, indent=1))
    else:
        Console(highlight=False).print(f"[bold red]error[/]  {escape(problem)}")
    return 1


# --- JSON ------------------------------------------------------------------------------------------------------------


def _as_json(report: Report) -> dict[str, Any]:
    data = asdict(report)
    data["modules"] = [{**each, **each.pop("place")} for each in data["modules"]]
    return {**data, "file": str(report.file), "metadata": dict(report.metadata)}


def _plain(files: Sequence[Mapping[str, Any]], compared: Comparison | None) -> Any:
    """Return the output as plain data; norms that are not finite are null."""
    if compared is None:
        return finite(files[0])
    groups = [{**asdict(each), "relative": each.relative, "cosine": each.cosine} for each in compared.groups]
    return finite({"files": files, "identical": compared.identical, "differences": {**asdict(compared), "groups": groups}})


# --- text ------------------------------------------------------------------------------------------------------------


def _lines(reports: Sequence[Report], compared: Comparison | None) -> Iterator[str | Table]:
    for index, report in enumerate(reports):
        label = ("first file: ", "second file: ")[index] if compared is not None else ""
        yield f"{label}[bold]{escape(report.file.name)}[/]  {escape(report.summary())}"
        if compared is None:
            yield _facts(report)
            yield _groups(report)
        for problem in report.problems:
            yield f"[bold red]error[/]  {escape(problem)}"
        for note in report.notes:
            yield f"[yellow]note[/]  {escape(note)}"
    if compared is not None:
        yield from _difference_lines(compared)


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _facts(report: Report) -> Table:
    grid = _grid()
    total = sum(report.dtypes.values()) or 1
    dtypes = [f"{dtype or 'unknown'} {count / total:.0%}" for dtype, count in report.dtypes.items()]
    size = f"{format_size(report.bytes)}, {report.tensors:,} tensors, {report.parameters:,} values"
    grid.add_row("size", f"{size} ({', '.join(dtypes) if len(dtypes) > 1 else next(iter(report.dtypes))})")
    if report.model and not report.run.get("architecture"):
        grid.add_row("model", escape(report.model))
    for topic, text in report.run.items():
        grid.add_row(topic, escape(text))
    return grid


def _groups(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    adapters = bool(report.modules)
    table.add_column("part")
    if adapters:
        table.add_column("kind")
    for title in ("rank", "alpha", "modules", "norm", "largest") if adapters else ("tensors", "values", "norm", "largest"):
        table.add_column(title, justify="right")
    for group in report.groups:
        cells = [_part(group.component, group.family, group.blocks)]
        if adapters:
            kind = f"{group.kind}, convolution" if group.convolution else group.kind
            rank = "" if group.rank is None else str(group.rank)
            alpha = "" if group.alpha is None else f"{group.alpha:g}"
            cells += [kind, rank, alpha, f"{group.count:,}"]
        else:
            cells += [f"{group.count:,}", f"{group.parameters:,}"]
        table.add_row(*map(escape, cells), *("" if size is None else f"{size:.3g}" for size in (group.norm, group.largest)))
    return table


def _part(component: str, family: str, blocks: Sequence[int] = ()) -> str:
    """Return the name of a group: ``U-Net input_blocks 4-8``."""
    if not blocks:
        return f"{component} {family}".rstrip()
    ranges: list[list[int]] = []
    for block in blocks:
        if ranges and block == ranges[-1][-1] + 1:
            ranges[-1][1:] = [block]
        else:
            ranges.append([block])
    return f"{component} {family} {','.join('-'.join(map(str, each)) for each in ranges)}"


def _difference_lines(compared: Comparison) -> Iterator[str | Table]:
    if compared.identical:
        yield "[bold]both files have the same weights[/]"
    else:
        yield "[bold]difference[/]"
        yield _difference_table(compared.groups)
    for names, where in ((compared.only_first, "first"), (compared.only_second, "second")):
        if names:
            yield f"only in the {where} file: {len(names):,} ({escape(abbreviated(names, _NAMES))})"
    if compared.reshaped:
        changes = dict.fromkeys(f"{ours} and {theirs}" for ours, theirs in compared.reshaped.values())
        yield f"of another kind or size: {len(compared.reshaped):,} ({escape(abbreviated([*changes], _NAMES))})"
    if compared.unread:
        yield f"not compared: {len(compared.unread):,} ({escape(abbreviated(compared.unread, _NAMES))})"
    pairs = {key: pair for key, pair in compared.metadata.items() if not _IN_EVERY_RUN.search(key)}
    lacking = [where for index, where in enumerate(("first", "second")) if not any(pair[index] for pair in pairs.values())]
    if pairs and lacking:
        yield f"metadata: none in the {lacking[0]} file"
    elif pairs:
        grid = _grid()
        for key, pair in pairs.items():
            ours, theirs = (_short(value) for value in pair)
            grid.add_row(escape(key), escape(f"{ours} -> {theirs}"))
        yield "[bold]metadata[/]"
        yield grid


def _difference_table(groups: Sequence[Difference]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("part")
    for title in ("compared", "differing", "relative difference", "cosine"):
        table.add_column(title, justify="right")
    for group in groups:
        cosine = "" if group.cosine is None else f"{group.cosine:.4f}"
        cells = (f"{group.count:,}", f"{group.differing:,}", f"{group.relative:.3g}", cosine)
        table.add_row(escape(_part(group.component, group.family)), *cells)
    return table


def _short(value: str | None) -> str:
    if value is None:
        return "(none)"
    return value if len(value) <= 60 else f"{value[:57]}..."
