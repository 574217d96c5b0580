"""What upstream caches: the datasets of a group, the strategy in use, and the size of one image's text encoder outputs."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.attributes import replaced


def current_strategy(name: str) -> Any:
    """Return upstream's caching strategy of a base class; None if the run does not cache with it."""
    return getattr(importlib.import_module("library.strategy_base"), name).get_strategy()


def datasets_of(group: Any) -> list[Any]:
    """Return the datasets whose images are cached; those of ControlNet scripts are in a dataset of their own."""
    return [getattr(dataset, "dreambooth_dataset_delegate", dataset) for dataset in getattr(group, "datasets", ())]


def outputs_path(strategy: Any, image: Any) -> str:
    """Return the path of an image's text encoder outputs on disk, which may not exist."""
    return str(strategy.get_outputs_npz_path(image.absolute_path))


def bytes_per_value(settings: Settings) -> int:
    """Return the bytes of a value of float32 in new cache files."""
    return 2 if settings["cache_format"] == "safetensors" and settings["cache_dtype"] != "fp32" else 4


@contextlib.contextmanager
def only(datasets: Sequence[Any], keys: Sequence[set[str]]) -> Iterator[None]:
    """Leave only the images with these keys in each dataset inside the block."""
    with contextlib.ExitStack() as stack:
        for dataset, some in zip(datasets, keys, strict=True):
            images = {key: info for key, info in dataset.image_data.items() if key in some}
            stack.enter_context(replaced(dataset, "image_data", images))
        yield


def in_memory(strategy: Any) -> contextlib.AbstractContextManager[None]:
    """Let a strategy cache in host memory inside the block."""
    return replaced(strategy, "_cache_to_disk", False)


def encoded(example: Any, datasets: Sequence[Any], strategy: Any, cache: Callable[[], None]) -> Any:
    """Return the text encoder outputs of one image of the datasets, of which ``cache()`` caches all. Writes nothing."""
    owner = next(dataset for dataset in datasets if example.image_key in dataset.image_data)
    with only(datasets, [{example.image_key} if data is owner else set() for data in datasets]), in_memory(strategy):
        cache()
    outputs, example.text_encoder_outputs = example.text_encoder_outputs, None
    return outputs
