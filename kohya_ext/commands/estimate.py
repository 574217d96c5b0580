"""Predict the GPU memory of a training command line, without a GPU and without weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kohya_ext import charts
from kohya_ext.config import training_command
from kohya_ext.config.command_line import CommandLine
from kohya_ext.console import note, warn
from kohya_ext.errors import UserError
from kohya_ext.estimate import memory_config as choosing
from kohya_ext.estimate.memory_config import FP8, MemoryConfig
from kohya_ext.estimate.result import CONTEXT_BYTES, Estimate, estimate
from kohya_ext.gpu.cap import FILLED, for_tensors, reason_not_to_spend
from kohya_ext.planning import automatic
from kohya_ext.planning.checkpointing_ratio import smallest_ratio
from kohya_ext.planning.tiers import room
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.units import AUTO, GB, GIB, gigabytes, label, said

NOT_CALIBRATED = "not calibrated on CUDA: no figure has been compared with a GPU yet"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    training_command.configure(parser, "its arguments, --preset among them, as for a run", _add_own)


def _add_own(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="as JSON, sizes in bytes")
    parser.add_argument(
        "--vram",
        metavar="SIZE",
        default=argparse.SUPPRESS,
        help='the GPU, by the size it is sold as: 16, 16gb and "16 GB" are the same; 15.5GiB and a number of bytes are '
        "exact; default: the GPU that the preset is for",
    )
    parser.add_argument(
        "--fresh", action="store_true", default=argparse.SUPPRESS, help="measure again, whatever is known (about 20 seconds)"
    )
    parser.add_argument(
        "--fill",
        action="store_true",
        default=argparse.SUPPRESS,
        help="find the smallest --gradient_checkpointing_ratio that fits the GPU less 5 percent, which is the fastest",
    )
    parser.add_argument("--chart", type=Path, metavar="FILE", default=argparse.SUPPRESS, help="draw the parts as a PNG")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code: 1 when the run does not fit the GPU, so that shell scripts can ask."""
    asked = training_command.read(arguments, automatic, "nothing to estimate", _add_own)
    checkout, command, own = asked.checkout, asked.command, asked.own
    figure = charts.figure(9, 2.6) if "chart" in own else None
    if "vram" in own:
        command = command.with_({"vram": own["vram"]})
    card = command.settings.vram or _presets_card(command)
    fresh = bool(own.get("fresh"))
    choices = choosing.read(command)[0]
    if (problem := choosing.unread_samples(choices)) is not None:
        warn(problem)
    budget: Budget | None = None
    if own.get("fill"):
        found, command = _fill(checkout, command, card, fresh)
    elif command.settings.vram_budget is not None:
        found, budget = _with_budget(checkout, command, choices, card, fresh)
    else:
        found = estimate(checkout, command, fresh)
    if own.get("json"):
        print(json.dumps(_as_json(found, card, budget), indent=1))
    else:
        console = Console()
        console.print(_table(found))
        for line in [*_lines(found, card), *([budget.words] if budget is not None else [])]:
            console.print(line, highlight=False, soft_wrap=True)
    if figure is not None:
        _draw(figure, found, card)
        charts.save(figure, own["chart"])
    return 0 if (card is None or found.on_the_card <= card) and (budget is None or budget.fits) else 1


def _fill(checkout: Checkout, command: CommandLine, card: int | None, fresh: bool) -> tuple[Estimate, CommandLine]:
    """Return the estimate and the arguments of the smallest share of checkpointed blocks that fits; say which it is."""
    if card is None:
        raise UserError("--fill needs the GPU's size: give --vram 16, or a preset for a size")
    if not choosing.read(command)[0].gradient_checkpointing:
        raise UserError("--fill chooses among checkpointed blocks: give --gradient_checkpointing, or a preset that has it")

    def ask(share: float) -> Estimate:
        return estimate(checkout, _at_share(command, share), fresh)

    filled = smallest_ratio(ask, room(card))
    if filled is None:
        raise UserError(f"it does not fit the {label(card)} less 5 percent, even with every block checkpointed")
    share, found = filled
    note(f"--gradient_checkpointing_ratio {share:g} is the smallest that fits the {label(card)} less 5 percent")
    return found, _at_share(command, share)


def _at_share(command: CommandLine, share: float) -> CommandLine:
    return command.with_({"gradient_checkpointing": True, "gradient_checkpointing_ratio": f"{share:g}"})


@dataclass(frozen=True)
class Budget:
    """What ``--vram_budget`` does in a run."""

    limit: int
    """Bytes that it leaves for tensors."""
    fits: bool
    gradient_checkpointing_ratio: float | None
    """Of the blocks, once it is spent; None where it spends nothing, or on compiled blocks."""
    words: str


def _with_budget(
    checkout: Checkout, command: CommandLine, choices: MemoryConfig, card: int | None, fresh: bool
) -> tuple[Estimate, Budget]:
    """Return the estimate of a run once its ``--vram_budget`` is spent, and what was spent."""
    budget = command.settings.vram_budget
    assert budget is not None, "asked with one"
    if budget == AUTO and card is None:
        raise UserError("--vram_budget auto needs the GPU's size: give --vram 16, or a preset for a size")
    limit = round(for_tensors(budget, (card or 0) - CONTEXT_BYTES, card or 0))
    room = round(FILLED * limit)

    def ask(share: float) -> Estimate:
        return estimate(checkout, _at_share(command, share), fresh)

    share: float | None = None
    if (reason := reason_not_to_spend(command.name, choices, command.settings)) is not None:
        found = estimate(checkout, command, fresh)
        does = f"nothing of it is spent: {reason}"
    elif choices.selective_torch_compile:
        found = ask(1.0)
        left = gigabytes(max(room - found.reserved, 0))
        does = (
            f"at first every block is checkpointed, as in these figures; then {left} GB are left for what compiled blocks keep"
        )
    else:
        note("--vram_budget frees blocks from checkpointing: up to 6 estimates, of which each new one takes about 20 seconds")
        share, found = smallest_ratio(ask, room + CONTEXT_BYTES) or (1.0, ask(1.0))
        does = f"about {share:.0%} of the blocks stay checkpointed, which the run chooses by what each weighs"
    fits = found.reserved <= limit
    needs = "" if fits else f", and the run needs {gigabytes(found.reserved)} GB: it would be out of memory"
    name = budget if isinstance(budget, str) else said(budget)
    return found, Budget(limit, fits, share, f"--vram_budget {name} leaves {gigabytes(limit)} GB for tensors{needs}; {does}.")


def _presets_card(command: CommandLine) -> int | None:
    """Return the card that a tier's preset is for, the last one's that says: ``vram_gb`` counts as cards are sold, in GiB."""
    said = [preset.about["vram_gb"] for preset in command.presets.presets if "vram_gb" in preset.about]
    return round(float(str(said[-1])) * GIB) if said else None


def _as_json(found: Estimate, card: int | None, budget: Budget | None) -> dict[str, Any]:
    rest = None if card is None else card - found.on_the_card
    return {
        **asdict(found),
        "context_and_workspaces": CONTEXT_BYTES,
        "on_the_card": found.on_the_card,
        "card": card,
        "margin": rest,
        **({"vram_budget": asdict(budget)} if budget is not None else {}),
        "calibrated_on_cuda": False,
    }


def _rows(found: Estimate) -> list[tuple[str, int]]:
    return [
        *found.parts.items(),
        ("allocator reserve", found.reserved - found.allocated),
        ("CUDA context + workspaces (assumed)", CONTEXT_BYTES),
    ]


def _table(found: Estimate) -> Table:
    table = Table("at the peak", "GB", title=f"{found.choices['script']}: {gigabytes(found.on_the_card)} GB on the card")
    table.columns[1].justify = "right"
    for name, size in _rows(found):
        if size < GB / 200:
            continue  # it would be 0.00
        table.add_row(name, gigabytes(size))
    table.add_section()
    table.add_row("tensors (max_memory_allocated)", gigabytes(found.allocated))
    table.add_row("reserved (max_memory_reserved)", gigabytes(found.reserved))
    table.add_row("on the card", gigabytes(found.on_the_card))
    return table


def _lines(found: Estimate, card: int | None) -> Sequence[str]:
    moments = ", ".join(f"{name} {gigabytes(size)}" for name, size in found.moments.items())
    made = found.made_with
    lines = [
        f"The peak is in: {found.moment}. Tensors at each moment (GB): {moments}.",
        f"{found.flops / 1e12:.2f} TFLOP a step, {found.trained / 1e6:.1f}M trainable parameters, for {_asked(found)}.",
    ]
    if card is not None:
        rest = card - found.on_the_card
        fits = "leaves" if rest >= 0 else "is short of"
        lines.append(f"The {label(card)} {fits} {gigabytes(abs(rest))} GB.")
        if rest < 0 <= rest + found.reserved - found.least:
            lines.append(
                f"It can still run there, more slowly: under Linux the allocator gives back what it does not use, down to "
                f"{gigabytes(found.least)} GB. Under Windows and WSL the driver would take system memory instead."
            )
    if (assumed := _assumed(found)) is not None:
        lines.append(f"Assumed, since only the model files say it: {assumed}.")
    if found.choices.get("selective_torch_compile"):
        lines.append(
            "Compiled blocks: what they keep for backward is torch's own division of their graphs; what they hold in between "
            "is approximated, from which operators inductor fuses. What compiling itself takes, once, is not in it."
        )
    elif found.choices.get("torch_compile") or found.choices.get("compile"):
        lines.append("sd-scripts' own compiling is not modelled: these are the figures without it, which mostly needs more.")
    lines.append(
        f"1 GB is 1e9 bytes; {NOT_CALIBRATED}. Made with sd-scripts {made['sd_scripts']}, torch {made['torch']}, "
        f"kohya_ext {made['kohya_ext']}. One process. "
        "Saving needs less than a step: beside the model 1 MB for a LoRA, 0.9 GB for all of SDXL in fp32."
    )
    return lines


def _assumed(found: Estimate) -> str | None:
    """Return what was taken for granted of the user's own files and captions."""
    family = MemoryConfig(**found.choices).family
    if family.name in ("flux", "chroma"):
        return (
            "T5 in fp8"
            if found.choices.get("t5xxl") == FP8
            else "T5 in 16 bits (name an fp8 file with --t5xxl to have it counted)"
        )
    if family.name == "sd3":
        return f"Stable Diffusion {found.choices.get('pretrained_model_name_or_path', '3.5 medium')}, T5 in 16 bits"
    return family.assumed or None


def _asked(found: Estimate) -> str:
    batch = found.choices.get("train_batch_size", 1)
    share = found.choices.get("gradient_checkpointing_ratio")
    covered = "" if share is None else f", {share:.0%} of the blocks checkpointed"
    return f"{str(found.choices['resolution']).replace(',', 'x')} pixels, batch {batch}{covered}"


def _draw(figure: Any, found: Estimate, card: int | None) -> None:
    axes = figure.add_subplot()
    left = 0.0
    for name, size in _rows(found):
        axes.barh([0], [size / GB], left=left, label=f"{name} {gigabytes(size)}")
        left += size / GB
    if card is not None:
        axes.axvline(card / GB, color="black", linestyle="--", label=f"card {gigabytes(card)}")
    axes.set(yticks=[], xlabel="GB (1e9 bytes), not calibrated on CUDA", title=f"{found.choices['script']}, {_asked(found)}")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
