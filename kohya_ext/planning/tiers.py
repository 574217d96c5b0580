"""The shipped tiers, what they need, and what would be faster. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kohya_ext.config import preset_files
from kohya_ext.config.command_line import CommandLine, option_words
from kohya_ext.estimate import cache
from kohya_ext.estimate import memory_config as choosing
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.estimate.result import CONTEXT_BYTES, Estimate
from kohya_ext.units import GIB, gigabytes

#: What is left free of a card, as a share: the estimate's own error, and a desktop's picture on the screen.
MARGIN = 0.05

#: Fewer blocks checkpointed than this share more are not worth a tier's while: 8 percent of a LoRA's operations.
PART = 1 / 4

#: Nor are fewer blocks in host memory.
BLOCKS = 2

#: Beyond it a larger batch is another recipe: the learning rate would want another value.
LARGEST_BATCH = 4


@dataclass(frozen=True)
class Tier:
    """A shipped preset for a size of card."""

    family: str
    name: str
    """``sdxl-lora/16gb``."""
    about: Mapping[str, object]
    """Its ``[preset]`` table."""
    choices: MemoryConfig
    """Of its first script, normalized."""
    found: Estimate | None
    """None where the package's table does not have it."""

    @property
    def card(self) -> int:
        """Bytes of the card: as cards are sold, in GiB."""
        return round(float(str(self.about["vram_gb"])) * GIB)


def room(card: int) -> int:
    """Return how many bytes of a card a run may take, its CUDA context among them."""
    return round(card * (1 - MARGIN))


def fits(found: Estimate, card: int) -> bool:
    """Return whether a run fits a card less the margin, by what the allocator reserves."""
    return found.on_the_card <= room(card)


def tiers(only: str | None = None) -> Iterator[Tier]:
    """Yield every shipped tier, or those of one family; families by name, tiers by size."""
    for family, stem, _ in preset_files.shipped():
        if only not in (None, family):
            continue
        name, script = f"{family}/{stem}", preset_files.scripts(family)[0]
        about = preset_files.load([name], script).presets[-1].about
        if "vram_gb" not in about:
            continue
        choices = read(script, ["--preset", name])
        row = cache.shipped(choices)
        yield Tier(family, name, about, choices, Estimate(**row) if row is not None else None)


def read(script: str, argv: list[str]) -> MemoryConfig:
    """Return the normalized choices of a command line, no environment."""
    return choosing.normalized(choosing.read(CommandLine(Path(script), argv, {}))[0])


def faster(tier: Tier) -> MemoryConfig | None:
    """Return the smallest change of a tier that makes it faster, for which it must have no room; None at the top.

    Fewer blocks in host memory, then fewer of them computed twice (one picture at a time: Lumina's step was measured to take
    as long for a picture at batch 2 as at 6, https://github.com/kohya-ss/sd-scripts/pull/2217), then a larger batch.
    """
    choices = tier.choices
    if choices.blocks_to_swap:
        return replace(choices, blocks_to_swap=max(choices.blocks_to_swap - BLOCKS, 0) or None)
    more = choices.train_batch_size < LARGEST_BATCH and choices.trains_network  # a fine-tune's batch is its recipe's
    if choices.gradient_checkpointing and not (more and choices.train_batch_size > 1):
        share = (choices.gradient_checkpointing_ratio or 1.0) - PART
        if share <= 0:
            return replace(choices, gradient_checkpointing=False, gradient_checkpointing_ratio=None)
        return replace(choices, gradient_checkpointing_ratio=share)
    return replace(choices, train_batch_size=min(2 * choices.train_batch_size, LARGEST_BATCH)) if more else None


def problem(tier: Tier) -> str | None:
    """Return what is wrong with a tier: it does not fit its card, or leaves so much unused that a faster choice would fit."""
    if tier.found is None:
        return "its figures are not in the table"
    if not fits(tier.found, tier.card):
        return f"it needs {gigabytes(tier.found.on_the_card)} GB of {gigabytes(room(tier.card))}"
    better = faster(tier)
    if better is None:
        return None
    change = " ".join(words(tier.choices, better))
    size = _reserved(tier, tier.found, better)
    if size is None:
        return f"the figures with {change} are not in the table"
    return f"it is needlessly small: {change} would fit" if size + CONTEXT_BYTES <= room(tier.card) else None


def _reserved(tier: Tier, found: Estimate, better: MemoryConfig) -> int | None:
    """Return the bytes that a tier's next faster choice reserves, or fewer if those are too many already; None if not known."""
    row = cache.shipped(better)
    if row is not None:
        return int(row["reserved"])
    if better.train_batch_size > tier.choices.train_batch_size:
        # What is saved for backward grows with the batch, and nothing becomes less; one picture less says by how much.
        picture = found.parts.get("saved activations", 0) / tier.choices.train_batch_size
        single = cache.shipped(replace(tier.choices, train_batch_size=1))
        if single is not None and tier.choices.train_batch_size > 1:
            picture = max(picture, (found.allocated - single["allocated"]) / (tier.choices.train_batch_size - 1))
        least = round(found.allocated + picture * (better.train_batch_size - tier.choices.train_batch_size))
        return least if least + CONTEXT_BYTES > room(tier.card) else None
    if tier.choices.blocks_to_swap:
        whole = max((_weights(other.found) for other in tiers(tier.family) if _same_model(other, tier)), default=0)
        block = (whole - _weights(found)) / tier.choices.blocks_to_swap
        return round(found.reserved + block * (tier.choices.blocks_to_swap - (better.blocks_to_swap or 0))) if whole else None
    # Less of it checkpointed, more is reserved.
    share = better.gradient_checkpointing_ratio if better.gradient_checkpointing else 0.0
    between = [
        part / 8 for part in range(1, 9) if (share or 0.0) < part / 8 < (tier.choices.gradient_checkpointing_ratio or 1.0)
    ]
    rows = [cache.shipped(replace(tier.choices, gradient_checkpointing_ratio=part)) for part in between]
    return max((int(row["reserved"]) for row in rows if row is not None and row["reserved"] > room(tier.card)), default=None)


def _weights(found: Estimate | None) -> int:
    return 0 if found is None else found.parts.get("weights", 0) + found.parts.get("trained weights", 0)


def _same_model(one: Tier, other: Tier) -> bool:
    """Whether two tiers have a model in the same precision, the first one with all of its blocks on the card."""
    names = ("fp8_base", "fp8_scaled", "full_bf16")
    alike = all(getattr(one.choices, name) == getattr(other.choices, name) for name in names)
    return alike and not one.choices.blocks_to_swap


def words(before: MemoryConfig, after: MemoryConfig) -> list[str]:
    """Return the words of a command line that turn one into the other."""
    changed = {name: value for name, value in vars(after).items() if value != getattr(before, name)}
    if changed.get("blocks_to_swap", 0) is None:
        changed["blocks_to_swap"] = 0
    return option_words(changed)


def speed(tier: Tier, others: Iterable[Tier]) -> float | None:
    """Return a tier's speed by its FLOPs a picture, as a share of its family's fastest at that resolution; None if not known.

    What copying blocks to and fro takes, and what a larger batch gains, is not in it: both depend on the GPU.
    """
    if tier.found is None:
        return None
    known = [
        other.found.flops_a_picture
        for other in others
        if other.found is not None and (other.family, other.choices.resolution) == (tier.family, tier.choices.resolution)
    ]
    return min(known) / tier.found.flops_a_picture
