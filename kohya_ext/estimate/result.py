"""The figures of one run: asked for, answered from what is known already, or made. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.settings import flags, negated_flags, options
from kohya_ext.console import progress
from kohya_ext.estimate import cache
from kohya_ext.estimate import memory_config as choosing
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.sdscripts.introspect import option_names

#: Bytes on the card that no tensor shows: the CUDA context with its kernels, cuBLAS's and cuDNN's workspaces. A round figure
#: for recent cards and torch 2.x, until benchmarks/vram_calibration.py has been run on one.
CONTEXT_BYTES = 600_000_000


@dataclass(frozen=True)
class Estimate:
    """What a run needs, in bytes unless said otherwise."""

    choices: Mapping[str, Any]
    """What was asked: :meth:`MemoryConfig.key` of the normalized choices."""
    allocated: int
    """Tensors at most, at the moment that reserves the most: ``torch.cuda.max_memory_allocated`` of it."""
    reserved: int
    """What the caching allocator holds for them at most: ``torch.cuda.max_memory_reserved``."""
    least: int
    """What it can hold them in, to 32 MiB: reserved memory in which nothing lies goes back when the card has no more. Not under
    Windows and WSL, where the driver takes system memory instead, many times slower."""
    moment: str
    """When the peak is: forward, backward, optimizer step, caching latents, caching text encoder outputs, sampling."""
    parts: Mapping[str, int]
    """What lies on the card at that moment, by its purpose; adds up to ``allocated``."""
    moments: Mapping[str, int]
    """The most tensors at each moment."""
    flops: int
    """Floating-point operations of one optimizer step; a multiply-add is two."""
    trained: int
    """Numbers that are trained."""
    made_with: Mapping[str, str]
    """Versions of kohya_ext, sd-scripts and torch."""
    layout: str
    """The generation of sd-scripts it was made on."""

    @property
    def on_the_card(self) -> int:
        """Reserved memory and the CUDA context: what ``nvidia-smi`` shows for the process."""
        return self.reserved + CONTEXT_BYTES

    @property
    def flops_a_picture(self) -> float:
        """Floating-point operations for one picture: the measure of speed that needs no GPU."""
        pictures = self.choices.get("train_batch_size", 1) * self.choices.get("gradient_accumulation_steps", 1)
        return float(self.flops / pictures)


def estimate(checkout: Checkout, command: CommandLine, fresh: bool = False) -> Estimate:
    """Return the figures of a command line: the package's own, those kept from before, or newly made ones (about 20 s).

    With ``fresh`` they are made in any case. Raises UserError for arguments the script does not take, and for a run that is
    not modelled.
    """
    choices, others = choosing.read(command)
    asked = choosing.normalized(choices)
    if not fresh and not _unknown(checkout.script(command.name), others):
        known = cache.find(checkout, asked, command.settings.disable_patch)
        if known is not None:
            return Estimate(**known)
    with progress(f"estimating the memory of {command.name} (usually 10 to 60 s)"):
        from kohya_ext.estimate.measurement import make

        made = make(checkout, command)
    cache.keep(checkout, made, command.settings.disable_patch)
    return made


def _unknown(script: Path, given: Sequence[str]) -> bool:
    """Return whether a flag is not in the script's text. The script's own parser, seconds away, then has the last word."""
    ours = {flag for name, _ in options() for flag in [*flags(name), *negated_flags(name)]}
    theirs = {flag for name in option_names(script) for flag in [f"--{name}", *negated_flags(name)]}
    return not ours | theirs >= set(given)
