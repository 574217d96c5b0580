"""Show what --activation_memory_budget saves and what it recomputes, block by block, without a GPU and without weights."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kohya_ext import charts
from kohya_ext.config import training_command
from kohya_ext.console import progress
from kohya_ext.estimate import memory_config as choosing
from kohya_ext.planning import automatic
from kohya_ext.units import GB, gigabytes

if TYPE_CHECKING:
    from kohya_ext.estimate.activation_budgets import Cost, Graph

MB = 10**6

#: Of the table in a file or a pipe, in characters.
WIDTH = 132


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    training_command.configure(parser, "its arguments, --preset among them, as for a run", _add_own)


def _add_own(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="as JSON, sizes in bytes")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", default=argparse.SUPPRESS, help="draw memory against work as a PNG"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    asked = training_command.read(arguments, automatic, "it has no blocks to compile", _add_own)
    command, script, own = asked.command, asked.command.name, asked.own
    figure = charts.figure(7, 4.5) if "plot" in own else None
    choosing.read(command)  # refuses a script that is not modelled, before torch is imported
    with progress(f"tracing the compiled blocks of {script} (1 to 3 minutes)"):
        from kohya_ext.estimate.measurement import make_budgets

        graphs = make_budgets(asked.checkout, command)
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
    "Kept for backward beside weights and what enters or leaves a block, without --gradient_checkpointing. Work is the FLOPs",
    "of all blocks' forward and backward, against eager. Speed is another matter: fused kernels move less memory.",
)


def _ways(graphs: Sequence[Graph]) -> dict[str, Callable[[Graph], Cost]]:
    """Every way of running the blocks that is compared, by its name."""
    ways: dict[str, Callable[[Graph], Cost]] = {"eager": lambda graph: graph.eager}
    for budget in graphs[0].budgets:
        ways[f"{budget:g}"] = lambda graph, budget=budget: graph.budgets[budget]  # type: ignore[misc]
    ways["checkpointing"] = lambda graph: graph.checkpointed
    return ways


def _totals(graphs: Sequence[Graph]) -> dict[str, Cost]:
    from kohya_ext.estimate.activation_budgets import total

    return {name: total(graphs, way) for name, way in _ways(graphs).items()}


def _as_json(graphs: Sequence[Graph]) -> dict[str, Any]:
    ways = _ways(graphs)

    def described(cost: Cost) -> dict[str, int]:
        return {"kept": cost.kept, "flops": cost.flops}

    return {
        "blocks": [
            {
                "class": graph.block,
                "enters": list(graph.enters),
                "calls": graph.calls,
                **{name: described(way(graph)) for name, way in ways.items()},
            }
            for graph in graphs
        ],
        "total": {name: described(cost) for name, cost in _totals(graphs).items()},
    }


def _table(graphs: Sequence[Graph]) -> Table:
    ways, totals = _ways(graphs), _totals(graphs)
    table = Table(title="kept for each block, MB (1e6 bytes), by --activation_memory_budget", title_justify="left")
    table.add_column("block")
    table.add_column("of them", justify="right")
    table.add_column("enters")
    for name in ways:
        table.add_column(name, justify="right")
    for graph in graphs:
        sizes = (f"{way(graph).kept / MB:.1f}" for way in ways.values())
        table.add_row(graph.block, str(graph.calls), "x".join(map(str, graph.enters)), *sizes)
    table.add_section()
    table.add_row(
        "all of them, GB", str(sum(graph.calls for graph in graphs)), "", *(gigabytes(one.kept) for one in totals.values())
    )
    eager = totals["eager"].flops
    table.add_row("their work", "", "", *(f"{one.flops / eager:.2f}x" for one in totals.values()))
    return table


def _draw(figure: Any, script: str, graphs: Sequence[Graph]) -> None:
    totals = _totals(graphs)
    axes = figure.add_subplot()
    eager = totals["eager"].flops
    places = {name: (cost.kept / GB, cost.flops / eager) for name, cost in totals.items()}
    curve = [place for name, place in places.items() if name[0].isdigit()]
    axes.plot(*zip(*curve, strict=True), "-o", color="tab:blue", label="compiled, by budget")
    for name in ("eager", "checkpointing"):
        axes.plot(*places[name], "s", color="tab:gray")
    for name, place in places.items():
        axes.annotate(name, place, textcoords="offset points", xytext=(5, 5), fontsize="small")
    axes.set(
        xlabel="kept by all blocks, GB (1e9 bytes)",
        ylabel="their FLOPs, against eager",
        title=f"{script}: activation memory budget",
    )
    axes.legend()
