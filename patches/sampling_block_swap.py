"""Rotate swapped blocks during sampling, instead of moving them all back before each denoising step.

With --blocks_to_swap a forward pass ends with its first blocks on the host, and backward moves them back. Sampling has no
backward, so upstream moves all of them back before each denoising step of FLUX, Chroma, SD3 and Lumina 2. It waits for that,
collects garbage and empties PyTorch's cache (sd-scripts#2056). Upstream's offloader can rotate the blocks instead, as it does
for Anima and HunyuanImage: while a block runs, the next ones are copied, and at the end the first ones are on the GPU again.

Fewer swapped blocks than half are left to upstream, which copies fewer bytes then. A block runs on the same weights in both
cases.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.sdscripts.families import rotates

_PREPARE = "prepare_block_swap_before_forward"


@contextlib.contextmanager
def rotating(model: Any) -> Iterator[None]:
    """Rotate a model's swapped blocks inside the block, in which its method to move them back does nothing."""
    offloaders = [value for value in vars(model).values() if hasattr(value, "set_forward_only")]
    swapped, blocks = (sum(getattr(each, name) for each in offloaders) for name in ("blocks_to_swap", "num_blocks"))
    if not rotates(swapped, blocks):
        yield
        return
    prepare = getattr(model, _PREPARE)
    prepare()
    for offloader in offloaders:
        offloader.set_forward_only(True)
    setattr(model, _PREPARE, lambda: None)
    try:
        yield
    finally:
        delattr(model, _PREPARE)
        for offloader in offloaders:
            offloader.set_forward_only(False)
        prepare()


def _sampling(original: Any, settings: Settings) -> Any:
    import inspect

    names = list(inspect.signature(original).parameters)
    name = next(name for name in ("model", "mmdit") if name in names)
    position = names.index(name)

    @wraps(original)
    def sample(*args: Any, **kwargs: Any) -> Any:
        with rotating(kwargs[name] if name in kwargs else args[position]):
            return original(*args, **kwargs)

    return sample


PATCH = Patch(
    name="sampling_block_swap",
    summary="with --blocks_to_swap, copy blocks during sampling while others run, instead of moving all back before each step",
    targets=(
        Target("library.flux_train_utils", "denoise", _sampling, takes("model", "img"), body="runs"),
        Target("library.sd3_train_utils", "do_sample", _sampling, body="runs"),
        Target("library.lumina_train_util", "denoise", _sampling, takes("scheduler", "model"), body="runs"),
    ),
    exactness="exact",
    held_to="the samples without it: every block runs on the same weights",
    idea="https://github.com/kohya-ss/sd-scripts/issues/2056",
)
