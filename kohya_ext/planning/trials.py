"""The runs of a sweep: the combinations of values of --try."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kohya_ext.errors import UserError

_MOST = 50
"""Largest number of runs."""


@dataclass(frozen=True)
class Trial:
    """A run of a sweep, or a run without one."""

    name: str
    """Names the run's folder in the output folder; empty without a sweep."""
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """The words of the command line."""
        return [word for option, value in self.values.items() for word in (f"--{option}", value)]


def trials(choices: Sequence[str]) -> list[Trial]:
    """Return the combinations of ``OPTION=VALUE,VALUE,...``; one trial without values for no choices.

    Raises UserError for a choice of another form, for a name that would be given twice, and for too many runs.
    """
    if not choices:
        return [Trial("")]
    options: dict[str, list[str]] = {}
    for choice in choices:
        flag, _, text = choice.partition("=")
        option = flag.strip().removeprefix("--").replace("-", "_")
        values = list(dict.fromkeys(value.strip() for value in text.split(",") if value.strip()))
        if not re.fullmatch(r"\w+", option) or not values:
            raise UserError(f"--try {choice}: must be OPTION=VALUE,VALUE,..., such as learning_rate=5e-5,1e-4")
        if option in options:
            raise UserError(f"--try {option} is given twice; separate its values by commas")
        options[option] = values
    for option, values in options.items():
        if len({_name({option: value}).lower() for value in values}) < len(values):
            raise UserError(
                f"--try {option}: the values would be trained in the same folder, because their names are too alike"
            )
    combinations = [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
    if len(combinations) > _MOST:
        raise UserError(f"--try makes {len(combinations)} runs, more than {_MOST}; give fewer values")
    return [Trial(_name(values), values) for values in combinations]


def _name(values: Mapping[str, str]) -> str:
    """Return a folder's name for values, which every system allows."""
    return re.sub(r"[^\w.+=-]+", "_", "-".join(f"{option}={value}" for option, value in values.items()))
