"""What `tune` measures: the command line without patches, as typed, and in other configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, Literal

from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate.result import CONTEXT_BYTES
from kohya_ext.estimate.tuned import OUT_OF_MEMORY, Tuned
from kohya_ext.gpu import spill

Kind = Literal["upstream", "typed", "candidate"]


@dataclass
class Row:
    """A configuration to measure."""

    name: str
    kind: Kind
    command: CommandLine
    config: Mapping[str, Any] = field(default_factory=dict)
    """What the measurement depends on."""
    predicted: float | None = None
    """Seconds of an image by the time model; None if they are not known."""
    measured: Tuned | None = None
    """None before it is measured."""

    @property
    def has_8_bit_base(self) -> bool:
        """Whether the frozen model is in 8 bits by --base_precision."""
        return self.command.settings["base_precision"] is not None


def upstream_of(command: CommandLine) -> Row:
    """Return the row of a command line without patches. What a preset sets for the script stays, so both train the same."""
    presets = command.presets.presets
    name = f"upstream, with the options of {command.presets.label}" if presets else "upstream"
    return Row(name, "upstream", command.with_({"disable_patch": "*"}))


def typed(command: CommandLine) -> Row:
    """Return the row of a command line as the user typed it."""
    return Row("as typed", "typed", command)


def read_result(config: Mapping[str, Any], result: Mapping[str, Any]) -> Tuned:
    """Return the measurement in a process's result: medians over its steps."""
    if "failed" in result:
        return Tuned(config, failed=str(result["failed"]))
    steps = result["steps"]
    seconds = [step["seconds"] / step["images"] for step in steps]
    lower, middle, upper = quantiles(seconds, n=4, method="inclusive")
    trial = result.get("facts", {}).get("speed", {})
    reserved, total = result["reserved"], result["machine"].get("memory", 0)
    if spill.may_spill() and total and reserved + CONTEXT_BYTES > total:
        return Tuned(config, failed=OUT_OF_MEMORY)  # the driver has moved a part to the host, at a fraction of the speed
    return Tuned(
        config,
        seconds=middle,
        spread=upper - lower,
        waiting=min(1.0, median(step["waiting"] / step["seconds"] for step in steps)),
        reserved=reserved,
        on_card=result["on_card"],
        features=tuple(result["features"]),
        difference=difference(trial),
    )


def difference(trial: Mapping[str, Any]) -> float | None:
    """Return by how much the gradients with the chosen features differed from eager ones in the trial of --speed."""
    chosen = trial.get("features")
    for candidate in trial.get("candidates", ()):
        if chosen and candidate["features"] == chosen and candidate["difference"] is not None:
            return float(candidate["difference"])
    return None
