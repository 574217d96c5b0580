"""The shipped tiers, their memory, and faster alternatives. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kohya_ext.config import preset_files
from kohya_ext.config.command_line import CommandLine, option_words
from kohya_ext.estimate import cache, memory_config
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.estimate.result import CONTEXT_BYTES, Estimate
from kohya_ext.units import GIB, gigabytes

#: Fraction of a GPU that is left free, for the estimate's error and the desktop.
MARGIN = 0.05

#: Smallest drop in the ratio of checkpointed blocks that justifies a change: 8 percent of a LoRA's operations.
MIN_RATIO_STEP = 1 / 4

#: Smallest drop in the number of swapped blocks that justifies a change.
MIN_BLOCKS_STEP = 2

#: Larger batches would need a retuned learning rate.
MAX_BATCH = 4


@dataclass(frozen=True)
class Tier:
    """A shipped preset for one GPU size."""

    family: str
    name: str
    """``sdxl-lora/16gb``."""
    about: Mapping[str, object]
    """Its ``[preset]`` table."""
    config: MemoryConfig
    """The normalized configuration of its first script."""
    estimate: Estimate | None
    """None if the package's table lacks it."""

    @property
    def card(self) -> int:
        """Bytes of the GPU, sold in GB but with GiB of memory."""
        return round(float(str(self.about["vram_gb"])) * GIB)


def usable_bytes(card: int) -> int:
    """Return the bytes of a GPU that a run may use, including its CUDA context."""
    return round(card * (1 - MARGIN))


def fits(estimate: Estimate, card: int) -> bool:
    """Return whether a run's reserved memory and context fit a GPU less the margin."""
    return estimate.total <= usable_bytes(card)


def tiers(only: str | None = None, experimental: bool = False) -> Iterator[Tier]:
    """Yield every shipped tier, or those of one family; families by name, tiers by size.

    Yields the ``experimental`` ones instead if asked, which are not chosen unless named.
    """
    for family, stem, _ in preset_files.shipped():
        if only not in (None, family):
            continue
        name, script = f"{family}/{stem}", preset_files.scripts(family)[0]
        about = preset_files.load([name], script).presets[-1].about
        if "vram_gb" not in about or bool(about.get("experimental")) != experimental:
            continue
        config = read(script, ["--preset", name])
        row = cache.shipped(config)
        yield Tier(family, name, about, config, Estimate(**row) if row is not None else None)


def read(script: str, argv: list[str]) -> MemoryConfig:
    """Return the normalized configuration of a command line, without environment variables, for a GPU with bf16.

    Its memory is that of a GPU without (:func:`memory_config.with_bf16`).
    """
    return memory_config.normalized(memory_config.read(CommandLine(Path(script), argv, {}, has_bf16=True))[0])


def faster(tier: Tier) -> MemoryConfig | None:
    """Return the smallest change that makes a tier faster, None if there is none; the tier's GPU must be too small for it.

    The order is fewer swapped blocks, then attention that a transformer keeps, then fewer checkpointed blocks while the batch
    size is 1, then a larger batch. Lumina's step takes as long per image at batch 2 as at 6
    (https://github.com/kohya-ss/sd-scripts/pull/2217).
    """
    config = tier.config
    if config.blocks_to_swap:
        return replace(config, blocks_to_swap=max(config.blocks_to_swap - MIN_BLOCKS_STEP, 0) or None)
    if config.gradient_checkpointing and not config.family.unet and not config.keep_attention:
        return replace(config, keep_attention=True)
    more = config.train_batch_size < MAX_BATCH and config.trains_network  # a fine-tune's batch is part of its recipe
    if config.gradient_checkpointing and not (more and config.train_batch_size > 1):
        ratio = (config.gradient_checkpointing_ratio or 1.0) - MIN_RATIO_STEP
        if ratio <= 0:
            return replace(config, gradient_checkpointing=False, gradient_checkpointing_ratio=None, keep_attention=False)
        return replace(config, gradient_checkpointing_ratio=ratio)
    return replace(config, train_batch_size=min(2 * config.train_batch_size, MAX_BATCH)) if more else None


def problem(tier: Tier) -> str | None:
    """Return why a tier is wrong: it does not fit its GPU, or a faster change would fit too; None if it is right."""
    if tier.estimate is None:
        return "its estimate is not in the table"
    if not fits(tier.estimate, tier.card):
        return f"it needs {gigabytes(tier.estimate.total)} GB of {gigabytes(usable_bytes(tier.card))}"
    better = faster(tier)
    if better is None:
        return None
    change = " ".join(words(tier.config, better))
    size = _reserved(tier, tier.estimate, better)
    if size is None:
        return f"the estimate with {change} is not in the table"
    return f"it is smaller than necessary: {change} would fit" if size + CONTEXT_BYTES <= usable_bytes(tier.card) else None


def _reserved(tier: Tier, estimate: Estimate, better: MemoryConfig) -> int | None:
    """Return the reserved bytes of a tier's faster change, or a lower bound that is too large already; None if not known."""
    row = cache.shipped(better)
    if row is not None:
        return int(row["reserved"])
    if better.train_batch_size > tier.config.train_batch_size:
        # Saved activations grow with the batch and nothing shrinks; a smaller batch shows by how much.
        image = estimate.parts.get("saved activations", 0) / tier.config.train_batch_size
        single = cache.shipped(replace(tier.config, train_batch_size=1))
        if single is not None and tier.config.train_batch_size > 1:
            image = max(image, (estimate.allocated - single["allocated"]) / (tier.config.train_batch_size - 1))
        bound = round(estimate.allocated + image * (better.train_batch_size - tier.config.train_batch_size))
        return bound if bound + CONTEXT_BYTES > usable_bytes(tier.card) else None
    if tier.config.blocks_to_swap:
        whole = max((_weights(other.estimate) for other in tiers(tier.family) if _same_model(other, tier)), default=0)
        block = (whole - _weights(estimate)) / tier.config.blocks_to_swap
        return round(estimate.reserved + block * (tier.config.blocks_to_swap - (better.blocks_to_swap or 0))) if whole else None
    # Fewer checkpointed blocks reserve more.
    ratio = better.gradient_checkpointing_ratio if better.gradient_checkpointing else 0.0
    between = [
        part / 8 for part in range(1, 9) if (ratio or 0.0) < part / 8 < (tier.config.gradient_checkpointing_ratio or 1.0)
    ]
    rows = [cache.shipped(replace(tier.config, gradient_checkpointing_ratio=part)) for part in between]
    sizes = [int(row["reserved"]) for row in rows if row is not None]
    return max((size for size in sizes if size > usable_bytes(tier.card)), default=None)


def _weights(estimate: Estimate | None) -> int:
    return 0 if estimate is None else estimate.parts.get("weights", 0) + estimate.parts.get("trained weights", 0)


def _same_model(whole: Tier, other: Tier) -> bool:
    """Return whether two tiers have a model in the same precision, the first one without swapped blocks."""
    names = ("fp8_base", "fp8_scaled", "full_bf16")
    alike = all(getattr(whole.config, name) == getattr(other.config, name) for name in names)
    return alike and not whole.config.blocks_to_swap


def words(before: MemoryConfig, after: MemoryConfig) -> list[str]:
    """Return the flags that change one configuration into the other."""
    changed = {name: value for name, value in vars(after).items() if value != getattr(before, name)}
    if changed.get("blocks_to_swap", 0) is None:
        changed["blocks_to_swap"] = 0
    if changed.get("gradient_checkpointing") is False:
        changed.pop("keep_attention", None)  # does nothing without it
    return option_words(changed)
