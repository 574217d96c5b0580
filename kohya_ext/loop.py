"""Where a patch can take part in the training loop, whichever script runs.

Every training script of sd-scripts makes its accelerator with ``prepare_accelerator(args)`` and puts each micro-batch into
``with accelerator.accumulate(...)``; what follows that block (counting the step, saving, sampling) reads ``args`` anew.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from types import FrameType
from typing import Any

from kohya_ext.patching import Target, takes
from kohya_ext.settings import Settings


def on_start(react: Callable[[Namespace, Any, Settings], None]) -> tuple[Target, ...]:
    """Targets by which ``react(args, accelerator, settings)`` is called once the script has made its accelerator.

    ``args`` is the very object that the script goes on reading. Models are not loaded yet.
    """

    def replace(original: Any, settings: Settings) -> Any:
        @wraps(original)
        def prepare_accelerator(args: Namespace, *rest: Any, **kwargs: Any) -> Any:
            accelerator = original(args, *rest, **kwargs)
            react(args, accelerator, settings)
            return accelerator

        return prepare_accelerator

    whole, split = "library.train_util", "library.accelerator_setup"
    return (
        Target(split, "prepare_accelerator", replace, takes("args", exactly=True), frozenset({"v0.11"}), body="runs"),
        Target(
            whole, "prepare_accelerator", replace, takes("args", exactly=True), frozenset({"v0.10", "unknown"}), body="runs"
        ),
    )


def _nothing(accelerator: Any) -> None:
    pass


def around_batch(before: Callable[[Any], None] = _nothing, after: Callable[[Any], None] = _nothing) -> Target:
    """A target by which ``before(accelerator)`` and ``after(accelerator)`` are called around every micro-batch.

    ``after`` runs when the optimizer has made its step and before the script counts it; ``accelerator.sync_gradients`` says
    whether it made one. Neither is called around a batch that raises.
    """

    def replace(original: Any, settings: Settings) -> Any:
        @wraps(original)
        @contextlib.contextmanager
        def accumulate(self: Any, *models: Any) -> Iterator[None]:
            before(self)
            with original(self, *models):
                yield
            after(self)

        return accumulate

    return Target("accelerate.accelerator", "Accelerator.accumulate", replace, takes("self"), body="runs")


def trained_weights(optimizers: Iterable[Any]) -> Iterator[Any]:
    """Yield every weight in some optimizers, in their order."""
    return (weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"])


def data_sets(accelerator: Any) -> list[Any]:
    """Return sd-scripts' data sets of the training, each with its buckets; none before the script has prepared its loader."""
    loader = next(iter(accelerator._dataloaders), None)
    group = getattr(loader, "dataset", None)
    found = getattr(group, "datasets", [group])
    return [found_one for found_one in found if getattr(found_one, "bucket_manager", None) is not None]


def current_batch() -> dict[str, Any]:
    """Return the micro-batch that the training loop holds, found in its frame; empty when there is none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        batch = _local(frame, "batch")
        if isinstance(batch, dict):
            return batch
        frame = frame.f_back
    return {}


def _local(frame: FrameType, name: str) -> object:
    """Return a local variable of a running function; None when it has none of that name."""
    variables = frame.f_locals
    found = variables.get(name)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        # A copy that the frame keeps (PEP 667), and with it every tensor that the loop's variables hold at this moment.
        variables.clear()
    return found
