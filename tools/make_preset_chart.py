"""Draw the chart of presets: every family at every GPU memory size, with the predicted memory.

    python tools/make_preset_chart.py

Writes benchmarks/results/cards.png. Run it after tools/make_estimate_table.py.
"""

from __future__ import annotations

from pathlib import Path

from kohya_ext.planning import tiers
from kohya_ext.planning.tiers import Tier
from kohya_ext.units import GIB, gigabytes

CHART = Path(__file__).parent.parent / "benchmarks" / "results" / "cards.png"


def draw(file: Path) -> None:
    """Draw families against memory sizes; a cell names the settings, its color the speed relative to the fastest preset."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    known = [tier for tier in tiers.tiers() if tier.found is not None]
    families = sorted({tier.family for tier in known})
    sizes = sorted({tier.card // GIB for tier in known})
    figure, axes = pyplot.subplots(figsize=(1.6 * len(sizes) + 1.6, 0.8 * len(families) + 1.4), layout="constrained")
    colours = matplotlib.colormaps["YlGn"]
    for row, family in enumerate(families):
        for column, size in enumerate(sizes):
            fitting = [tier for tier in known if tier.family == family and tier.card <= size * GIB]
            if not fitting:
                continue
            tier = max(fitting, key=lambda candidate: candidate.card)
            share = tiers.speed(tier, known)
            assert share is not None, "only tiers with figures are drawn"
            own = tier.card == size * GIB
            colour = colours(0.1 + 0.5 * max(share - 0.65, 0) / 0.35)
            axes.add_patch(pyplot.Rectangle((column, row), 0.96, 0.92, color=colour, alpha=1.0 if own else 0.35, linewidth=0))
            axes.text(column + 0.48, row + 0.46, _words(tier, share) if own else f"as {tier.card // GIB}", fontsize=8,
                      ha="center", va="center", color="black" if own else "dimgray")  # fmt: skip
    axes.set_xlim(0, len(sizes))
    axes.set_ylim(len(families), 0)
    axes.set_xticks([column + 0.48 for column in range(len(sizes))], [f"{size} GB" for size in sizes])
    axes.set_yticks([row + 0.46 for row in range(len(families))], families)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel(
        "The preset for each size of GPU memory: its settings, predicted memory in GB (1e9 bytes), and speed by FLOPs relative "
        "to the family's fastest preset at that resolution.\nPredicted, not measured on a GPU. Empty: no preset fits.",
        fontsize=8,
    )
    # No date and no version inside: the same figures give the same file.
    figure.savefig(file, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _words(tier: Tier, share: float) -> str:
    assert tier.found is not None
    choices = tier.choices
    side = str(choices.resolution).partition(",")[0]
    lines = [f"{side} px, batch {choices.train_batch_size}"]
    base = "fp8, " if choices.fp8_base or choices.fp8_scaled else ""
    if choices.blocks_to_swap:
        lines.append(f"{base}{choices.blocks_to_swap} blocks swapped")
    elif not choices.gradient_checkpointing:
        lines.append(f"{base}no checkpointing")
    else:
        part = (
            f" of {choices.gradient_checkpointing_ratio:.0%}" if choices.gradient_checkpointing_ratio not in (None, 1.0) else ""
        )
        lines.append(f"{base}checkpointing{part}")
    lines.append(f"{gigabytes(tier.found.on_the_card)} GB, {share:.0%}")
    return "\n".join(lines)


if __name__ == "__main__":
    draw(CHART)
