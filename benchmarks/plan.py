"""What one call of ``benchmarks.run`` was asked to do, and how much time it has."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.families import FAMILIES, RECIPES, Family, Recipe, arguments
from benchmarks.processes import Bench, available
from benchmarks.results import Variant
from kohya_ext.errors import UserError


@dataclass(frozen=True)
class Plan:
    """A suite's parameters."""

    bench: Bench
    family_name: str
    variants: tuple[str, ...]
    """Chosen by name; empty for the suite's own."""
    more: tuple[str, ...]
    """Arguments of the script on top of the family's, for every variant."""
    rounds: int
    steps: int
    """Samples a round."""
    deadline: float
    """No round is begun after it; a time of ``time.monotonic``."""
    patience: float = 600.0
    """Seconds that a bucket may take before its compiler is given up: a bound is an answer too."""
    full_depth: bool = False
    """Whether reduced models have every block of the real ones where only `compile` can afford it."""
    save: Callable[[], None] = field(default=lambda: None)

    @property
    def family(self) -> Family:
        """What is trained."""
        return FAMILIES[self.family_name]

    @property
    def out_of_time(self) -> bool:
        """Whether to begin nothing more."""
        return time.monotonic() > self.deadline

    def turns(self) -> Iterator[int]:
        """Yield the numbers of the rounds, from 1, as long as there is time."""
        for number in range(1, self.rounds + 1):
            if self.out_of_time:
                return
            yield number

    def arguments(self, recipe: Recipe | None = None) -> list[str]:
        """Return a variant's command line."""
        return arguments(self.family, self.bench.reduced, recipe, *self.more)

    def said(self, name: str, default: str) -> str:
        """Return an option's value on every variant's command line: the last one counts."""
        words = self.arguments()
        places = [index for index, word in enumerate(words) if word == f"--{name}"]
        return words[places[-1] + 1] if places else default

    def recipes(self, default: tuple[str, ...]) -> list[tuple[Recipe, Variant]]:
        """Return the chosen variants; those that this tree has no patch for are marked as left out. Raises UserError."""
        chosen = self.variants or default
        for name in chosen:
            if name not in RECIPES:
                raise UserError(f"no variant {name}: there are {', '.join(RECIPES)}")
        made = []
        for name in chosen:
            recipe = RECIPES[name]
            variant = Variant(name, recipe.meaning, list(recipe.arguments))
            if (missing := available(recipe.patches)) is not None:
                variant.status, variant.reason = "left out", missing
            made.append((recipe, variant))
        return made
