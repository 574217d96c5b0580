"""Show what each activation memory budget saves and recomputes.

The blocks are traced at full size, without a GPU and without weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kohya_ext import charts
from kohya_ext.config import training_command
from kohya_ext.console import progress
from kohya_ext.dry_run import estimation
from kohya_ext.estimate import memory_config
from kohya_ext.output import Console
from kohya_ext.planning import automatic
from kohya_ext.units import GB, gigabytes

if TYPE_CHECKING:
    from kohya_ext.dry_run.activation_budgets import Cost, Graph

MB = 10**6

#: Width of the table in a file or a pipe, in characters.
WIDTH = 132


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    training_command.configure(parser, "its arguments as for a run, including --preset", _add_own)


def _add_own(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON, sizes in bytes")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", default=argparse.SUPPRESS, help="write a chart of memory against FLOPs as a PNG"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    request = training_command.read(arguments, automatic, "it has no blocks to compile", _add_own)
    command, script, own = request.command, request.command.name, request.own
    figure = charts.figure(7, 4.5) if "plot" in own else None
    memory_config.read(command)  # rejects an unsupported script before torch is imported
    with progress(f"tracing the compiled blocks of {script} (1 to 3 minutes)"):
        rows = estimation.budgets(request.checkout, command)
    from kohya_ext.dry_run.activation_budgets import from_row  # imports torch

    graphs = [from_row(row) for row in rows]
    if own.get("json"):
        print(json.dumps(_as_json(graphs), indent=1))
    else:
        console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
        console.print(_table(graphs))
        for line in _LINES:
            console.print(line, highlight=False, soft_wrap=True)
    if figure is not None:
        _draw(figure, script, graphs)
        charts.save(figure, own["plot"])
    return 0


_LINES = (
    "Bytes saved for backward, without weights and block inputs and outputs, and without --gradient_checkpointing. Work is the",
    "FLOPs of all blocks' forward and backward, relative to eager. It does not predict speed: fused kernels move less memory.",
)


def _modes(graphs: Sequence[Graph]) -> dict[str, Callable[[Graph], Cost]]:
    """Return the compared modes of running the blocks, by name."""
    modes: dict[str, Callable[[Graph], Cost]] = {"eager": lambda graph: graph.eager}
    for budget in graphs[0].budgets:
        modes[f"{budget:g}"] = _with(budget)
    modes["checkpointing"] = lambda graph: graph.checkpointed
    return modes


def _with(budget: float) -> Callable[[Graph], Cost]:
    return lambda graph: graph.budgets[budget]


def _totals(graphs: Sequence[Graph]) -> dict[str, Cost]:
    from kohya_ext.dry_run.activation_budgets import total

    return {name: total(graphs, mode) for name, mode in _modes(graphs).items()}


def _as_json(graphs: Sequence[Graph]) -> dict[str, Any]:
    modes = _modes(graphs)

    def row(cost: Cost) -> dict[str, int]:
        return {"kept": cost.kept, "flops": cost.flops}

    return {
        "blocks": [
            {
                "class": graph.block,
                "enters": list(graph.enters),
                "calls": graph.calls,
                **{name: row(mode(graph)) for name, mode in modes.items()},
            }
            for graph in graphs
        ],
        "total": {name: row(cost) for name, cost in _totals(graphs).items()},
    }


def _table(graphs: Sequence[Graph]) -> Table:
    modes, totals = _modes(graphs), _totals(graphs)
    table = Table(title="saved for backward per block, MB (1e6 bytes), by --activation_memory_budget", title_justify="left")
    table.add_column("block")
    table.add_column("count", justify="right")
    table.add_column("input")
    for name in modes:
        table.add_column(name, justify="right")
    for graph in graphs:
        sizes = (f"{mode(graph).kept / MB:.1f}" for mode in modes.values())
        table.add_row(graph.block, str(graph.calls), "x".join(map(str, graph.enters)), *sizes)
    table.add_section()
    table.add_row(
        "all blocks, GB", str(sum(graph.calls for graph in graphs)), "", *(gigabytes(cost.kept) for cost in totals.values())
    )
    eager = totals["eager"].flops
    table.add_row("work", "", "", *(f"{cost.flops / eager:.2f}x" for cost in totals.values()))
    return table


def _draw(figure: Any, script: str, graphs: Sequence[Graph]) -> None:
    totals = _totals(graphs)
    axes = figure.add_subplot()
    eager = totals["eager"].flops
    points = {name: (cost.kept / GB, cost.flops / eager) for name, cost in totals.items()}
    curve = [point for name, point in points.items() if name[0].isdigit()]
    axes.plot(*zip(*curve, strict=True), "-o", color="tab:blue", label="compiled, by budget")
    for name in ("eager", "checkpointing"):
        axes.plot(*points[name], "s", color="tab:gray")
    for name, point in points.items():
        axes.annotate(name, point, textcoords="offset points", xytext=(5, 5), fontsize="small")
    axes.set(
        xlabel="saved for backward by all blocks, GB (1e9 bytes)",
        ylabel="FLOPs of all blocks, relative to eager",
        title=f"{script}: activation memory budget",
    )
    axes.legend()
