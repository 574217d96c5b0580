"""Run a training command up to its first step, and write when each part of the start ended as JSON.

    python -m benchmarks.caching_worker RESULT arguments of kohya_ext...

The parts are the caching of latents and of text encoder outputs, and the whole start. Processor seconds are those of all
threads; the ``serial`` ones are the main thread's, which more threads do not shorten.
On a virtual GPU host memory holds no weights, as in :mod:`benchmarks.full_size_worker`; images and caches are real.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import wrapt

from benchmarks import full_size_worker

#: Part -> seconds.
seconds: defaultdict[str, float] = defaultdict(float)


def main() -> None:
    """Run the command and write the result, also after an error."""
    begun = time.perf_counter()
    result = Path(sys.argv[1])
    sys.argv = ["kohya_ext", *sys.argv[2:]]
    prepare()
    torch.Tensor.backward = _end
    try:
        runpy.run_module("kohya_ext", run_name="__main__", alter_sys=True)
    finally:
        seconds["start"] = time.perf_counter() - begun
        seconds["processor"] = time.process_time()
        result.write_text(json.dumps(seconds), encoding="utf-8")


def prepare() -> None:
    """Time the caching of datasets, and on a virtual GPU leave weights in host memory empty."""
    if torch.cuda.is_available():
        _leave_weights_empty()
        full_size_worker.skip_checkpoint_hashes()
    for module in ("library.dataset", "library.train_util"):
        wrapt.register_post_import_hook(_time_datasets, module)


def _end(*args: Any, **kwargs: Any) -> None:
    raise SystemExit


def _time_datasets(module: Any) -> None:
    group = getattr(module, "DatasetGroup", None)
    if group is not None and not hasattr(group.new_cache_latents, "timed"):
        group.new_cache_latents = _timed("latents", group.new_cache_latents)
        group.new_cache_text_encoder_outputs = _timed("texts", group.new_cache_text_encoder_outputs)


def _timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        global _moves_data
        _moves_data = True
        begun, processor, serial = time.perf_counter(), time.process_time(), time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[part] += time.perf_counter() - begun
            seconds[f"{part}, processor"] += time.process_time() - processor
            seconds[f"{part}, serial"] += time.thread_time() - serial
            _moves_data = False

    timed.timed = True  # type: ignore[attr-defined]
    return timed


_moves_data = False


def _leave_weights_empty() -> None:
    """Replace ``Tensor.to`` as the other worker does, except while caches are written."""
    to = torch.Tensor.to
    full_size_worker.leave_host_memory_empty()
    empty = torch.Tensor.to

    def chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (to if _moves_data else empty)(self, *args, **kwargs)

    torch.Tensor.to = chosen


if __name__ == "__main__":
    main()
