"""The parameters of one call of ``benchmarks.run``, and its deadline."""

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
    """Names of the chosen variants; empty for the suite's default."""
    more: tuple[str, ...]
    """Additional arguments of the script, for every variant."""
    rounds: int
    steps: int
    """Samples a round."""
    deadline: float
    """No round starts after this ``time.monotonic`` time."""
    patience: float = 600.0
    """Seconds after which a bucket's compiler is stopped."""
    full_depth: bool = False
    """Whether ``compile`` runs reduced models with every block of the real ones."""
    save: Callable[[], None] = field(default=lambda: None)

    @property
    def family(self) -> Family:
        """The family that is trained."""
        return FAMILIES[self.family_name]

    @property
    def out_of_time(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline

    def turns(self) -> Iterator[int]:
        """Yield the round numbers from 1 until the deadline."""
        for number in range(1, self.rounds + 1):
            if self.out_of_time:
                return
            yield number

    def arguments(self, recipe: Recipe | None = None) -> list[str]:
        """Return a variant's command line."""
        return arguments(self.family, self.bench.reduced, recipe, *self.more)

    def value(self, name: str, default: str) -> str:
        """Return an option's value on every variant's command line; the last one counts."""
        words = self.arguments()
        places = [index for index, word in enumerate(words) if word == f"--{name}"]
        return words[places[-1] + 1] if places else default

    def recipes(self, default: tuple[str, ...]) -> list[tuple[Recipe, Variant]]:
        """Return the chosen variants; those without their patch in this tree are left out. Raises UserError."""
        chosen = self.variants or default
        for name in chosen:
            if name not in RECIPES:
                raise UserError(f"unknown variant {name}; choose from {', '.join(RECIPES)}")
        chosen_recipes = []
        for name in chosen:
            recipe = RECIPES[name]
            variant = Variant(name, recipe.meaning, list(recipe.arguments))
            if (missing := available(recipe.patches)) is not None:
                variant.status, variant.reason = "left out", missing
            chosen_recipes.append((recipe, variant))
        return chosen_recipes
