"""Decide whether a cache file can be trained on: upstream's own check, then its own reader and a look at the numbers.

Upstream opens each file at each start and looks for the names of its arrays. It ends with an error for a truncated file, and
trains on arrays of another model, of another size or with values that are not finite.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from kohya_ext.caching import sources
from kohya_ext.preflight import abbreviated
from kohya_ext.run.file_index import FileIndex, check_id
from kohya_ext.sdscripts.fingerprints import fingerprint

_VERSION = 1
"""Increase when a check here changes, so that files in an index are checked again."""

#: Held while a file is read. NumPy parses each array's header with ``ast``, which fails at random in several threads of Python
#: 3.11.0 to 3.11.7 (https://github.com/python/cpython/issues/106905).
_READING: contextlib.AbstractContextManager[object] = (
    threading.Lock() if (3, 11) <= sys.version_info < (3, 11, 8) else contextlib.nullcontext()
)

NOT_FINITE = "values that are not finite"

#: Latents caching strategy -> (channels, pixels of a latent pixel's side). Other strategies' shapes are not checked.
LATENT_SIZES = {
    "SdSdxlLatentsCachingStrategy": (4, 8),
    "Sd3LatentsCachingStrategy": (16, 8),
    "FluxLatentsCachingStrategy": (16, 8),
    "LuminaLatentsCachingStrategy": (16, 8),
    "AnimaLatentsCachingStrategy": (16, 8),
    "HunyuanImageLatentsCachingStrategy": (64, 32),
}


@dataclass
class Check:
    """One kind of check of cache files, remembered in an index."""

    index: FileIndex
    is_expected: Callable[..., bool]
    """Upstream's check; its result may depend on the arguments."""
    problem: Callable[..., str]
    """Reads a file as training does and returns why it cannot be trained on; empty if it can. Takes the same arguments."""
    state: tuple[object, ...]
    """Everything else on which the results depend."""
    position: int
    """Index of the path in the arguments."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Path -> of what the file has to be made; see :mod:`kohya_ext.caching.sources`. A file without a record is accepted."""
    outdated: Collection[str] = ()
    """Paths of files without a record that are older than what they were made of."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Path -> why the file is written again."""
    unusable: list[str] = field(default_factory=list)
    """Paths of truncated or damaged files, and of those of another source: nothing in them may be kept."""
    _ids: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def is_known(self, *args: Any) -> bool:
        """Return whether the index has the result: the file has passed, or it did not exist."""
        path: str = args[self.position]
        return not self.index.exists(path) or self.index.passed(path) >= self._entries(*args)

    def __call__(self, *args: Any) -> bool:
        """Return whether training can use a file. Reads the file only if the index does not have the result."""
        path: str = args[self.position]
        if self.is_known(*args):
            return self.index.exists(path)
        passed = self.index.passed(path)
        problem: str | None = self._other_source(path)
        if problem:
            self.unusable.append(path)
        elif self.id(*args) not in passed:
            try:
                problem = self.read(*args)
            except Exception as error:  # zipfile, zlib and numpy raise many kinds for a damaged file
                problem = f"damaged: {type(error).__name__}"
                self.unusable.append(path)
        if problem is None:
            return False
        if problem:
            self.rejected[path] = problem
            return False
        self.index.add_all((path, entry) for entry in self._entries(*args) - passed)
        return True

    def record(self, *args: Any) -> None:
        """Record that a new file has passed, and of what it was made."""
        self.index.add_all((args[self.position], entry) for entry in self._entries(*args))

    def _entries(self, *args: Any) -> set[str]:
        """Return the entries that the index has for a file that has passed."""
        path = args[self.position]
        return {self.id(*args), *([self.sources[path]] if path in self.sources else [])}

    def _other_source(self, path: str) -> str:
        """Return why a file is of another source; empty if it is not, or if that is not known."""
        recorded = sources.recorded(self.index.passed(path))
        is_other = path in self.sources and self.sources[path] not in recorded if recorded else path in self.outdated
        return sources.OTHER if is_other else ""

    def read(self, *args: Any) -> str | None:
        """Return why a file cannot be trained on, empty if it can; None if upstream's check finds that it must be created."""
        with _READING:
            return self.problem(*args) if self.is_expected(*args) else None

    def id(self, *args: Any) -> str:
        """Return the name in the index of a check with these arguments."""
        others = (*args[: self.position], *args[self.position + 1 :])
        if others not in self._ids:
            self._ids[others] = check_id(_VERSION, *self.state, *others)
        return self._ids[others]

    def summary(self) -> str:
        """Return one line about the rejected files; empty without any."""
        if not self.rejected:
            return ""
        reasons = sorted(set(self.rejected.values()))
        return f"caches to be created again ({'; '.join(reasons)}): {abbreviated(sorted(self.rejected))}"


def state_of(strategy: Any, function: str) -> tuple[object, ...]:
    """Return what decides the result of a strategy's check, besides its arguments: its code and options."""
    options = sorted((name, value) for name, value in vars(strategy).items() if isinstance(value, (bool, int, str)))
    # The batch size does not change a file, and the warning's flag changes during a run.
    options = [(name, value) for name, value in options if name != "_batch_size" and not name.startswith("warn")]
    base = next((cls for cls in type(strategy).__mro__ if hasattr(cls, f"_default_{function}")), None)
    shared = fingerprint(getattr(base, f"_default_{function}")) if base is not None else None
    return type(strategy).__name__, options, fingerprint(getattr(type(strategy), function)), shared


def latents_problem(strategy: Any, bucket: tuple[int, int], path: str, flip: bool, mask: bool) -> str:
    """Return why cached latents cannot be trained on; empty if they can. ``bucket``: (width, height) in pixels."""
    latents, original_size, crop, flipped, alpha = strategy.load_latents_from_disk(path, bucket)
    known = LATENT_SIZES.get(type(strategy).__name__)
    for array in (latents, *([flipped] if flip else [])):
        if known is not None:
            channels, side = known
            expected = (channels, bucket[1] // side, bucket[0] // side)
            if (array.shape[0], *array.shape[-2:]) != expected:
                return f"shape {'x'.join(map(str, array.shape))}, not {'x'.join(map(str, expected))}"
        if not is_finite(array):
            return NOT_FINITE
    if mask and (alpha.shape != (bucket[1], bucket[0]) or not is_finite(alpha)):
        return "unusable alpha mask"
    return "" if len(original_size) == 2 and len(crop) == 4 else "unusable original size or crop"


def outputs_problem(strategy: Any, path: str) -> str:
    """Return why cached text encoder outputs cannot be trained on; empty if they can."""
    return "" if all(map(is_finite, strategy.load_outputs_npz(path))) else NOT_FINITE


def is_finite(array: Any) -> bool:
    """Return whether an array has no NaN and no infinity."""
    import numpy as np

    return array is None or array.dtype.kind != "f" or bool(np.isfinite(array).all())
