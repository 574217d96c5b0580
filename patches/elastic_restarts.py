"""Let torchrun's processes find each other after a restart (``--max-restarts``).

Since torch 2.6 each restart is to have a new key-value store. torchrun's static rendezvous, its default, keeps the store of the
first start, so that processes read the addresses of ended ones: the restart fails with "Connection refused" or waits forever.
Here the keys of each restart have their own prefix, as before torch 2.6. With several machines torchrun needs
``--rdzv_backend c10d``, which creates a store for each restart.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.run import ranks


def _create_store(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def _create_c10d_store(*args: Any, **kwargs: Any) -> Any:
        from torch.distributed import PrefixStore

        store = original(*args, **kwargs)
        attempt = ranks.attempt(os.environ)
        return store if attempt == 0 else PrefixStore(f"attempt_{attempt}", store)

    return _create_c10d_store


PATCH = Patch(
    name="elastic_restarts",
    summary="let the processes of torchrun --max-restarts find each other after a restart",
    targets=(
        Target(
            "torch.distributed.rendezvous",
            "_create_c10d_store",
            _create_store,
            takes("hostname", "port", "rank", "world_size", "timeout"),
            body="runs",
        ),
    ),
    exactness="exact",
    held_to="a run without a restart",
    idea="https://github.com/pytorch/pytorch/pull/135957",
)
