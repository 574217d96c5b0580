"""torch's own settings for compiled blocks, and where compiled code is kept."""

from __future__ import annotations

import gc
import os
import re
import threading
from pathlib import Path
from typing import Any

from kohya_ext import cache
from kohya_ext.compiling.tracing import take_einops_whole, take_group_norm_whole
from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import apply_needed

#: SDXL's ResnetBlock2D alone has 12 variants by its channels; torch's 8 would leave the rest eager without a word. With a
#: memory budget of 0 a reduced SDXL then kept 1.6 times what checkpointing keeps; with all of them compiled, less than it.
DEFAULT_RECOMPILE_LIMIT = 64

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class SettingNotSeenError(RuntimeError):
    """A setting of torch cannot be made to hold on every thread."""


def set_everywhere(config: Any, name: str, value: Any) -> None:
    """Set one of torch's ``config`` modules' settings for this thread and for every thread that starts later.

    Since torch 2.12 an assignment holds on its own thread only, and blocks are also compiled on autograd's threads: the
    recompute of gradient checkpointing, and every backward graph. There the default is what counts, so it is changed too.
    https://github.com/pytorch/pytorch/pull/173568

    Raises SettingNotSeenError when a new thread still sees another value.
    """
    setattr(config, name, value)
    if _seen_by_a_new_thread(config, name) != value:
        entry = config._config[_real_name(config, name)]
        entry.default = value
        if _seen_by_a_new_thread(config, name) != value:
            raise SettingNotSeenError(f"{config.__name__}.{name}")


def _real_name(config: Any, name: str) -> str:
    alias = getattr(config._config[name], "alias", None)
    return str(alias).rpartition(".")[2] if alias else name


def _seen_by_a_new_thread(config: Any, name: str) -> Any:
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(getattr(config, name)))
    thread.start()
    thread.join()
    return seen[0]


def prepare_torch(recompile_limit: int | None) -> None:
    """Set what compiled blocks need, once, before the first of them is compiled. Raises SettingNotSeenError."""
    import torch
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    _collect_no_garbage_while_compiling()
    apply_needed()
    take_einops_whole()
    take_group_norm_whole()
    limit = recompile_limit or DEFAULT_RECOMPILE_LIMIT
    # torch 2.7 renamed it and kept the old name as an alias.
    set_everywhere(dynamo, "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit", limit)
    # DistributedDataParallel splits graphs at its buckets while its forward runs, and not in the recompute of
    # checkpointing, which would then save other tensors. Blocks are small: their gradients are ready early anyway.
    # https://pytorch.org/docs/stable/notes/ddp.html#torchdynamo-ddpoptimizer
    set_everywhere(dynamo, "optimize_ddp", False)
    # Tensors that are attributes of a module (the conditioning image of LLLite) would be static, one graph a bucket.
    if hasattr(dynamo, "force_nn_module_property_static_shapes"):
        set_everywhere(dynamo, "force_nn_module_property_static_shapes", False)
    # Recompute must take the graph that forward took; the LRU order of dynamo's cache lets a more general one overtake it.
    # https://github.com/pytorch/pytorch/issues/166926
    set_lru_cache = getattr(torch._C._dynamo.eval_frame, "_set_lru_cache", None)
    if set_lru_cache is not None:
        set_lru_cache(False)
    # Padding is decided for each graph by timing it: forward and recompute may decide differently. Same issue.
    set_everywhere(inductor, "shape_padding", False)


def _collect_no_garbage_while_compiling() -> None:
    """Spare the fifth of tracing's time that Python's collector takes: every object of the run is looked at again and again."""
    from torch._dynamo.callback import callback_handler

    if not gc.isenabled():
        return
    callback_handler.register_start_callback(lambda *about: gc.disable())
    callback_handler.register_end_callback(lambda *about: gc.enable())


def time_no_guards(original: Any, settings: Settings) -> Any:
    """Spare the emptying of the processor's caches with which newer versions time every graph's guards, for their statistics.

    https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/guards.py (``guard_latency_us``)
    """
    return lambda *about: 0.0


def keep_compiled_code(device: str, commit: str | None) -> Path:
    """Point torch's caches of compiled code to a folder that lasts, and return it; the user's own choice of one wins.

    ``commit`` is that of sd-scripts, whose code is compiled.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    import torch

    kind = torch.cuda.get_device_name() if device == "cuda" else device
    name = f"{(commit or 'unversioned')[:8]}-torch{torch.__version__}-{kind}"
    root = cache.folder()
    folder = root / "compiled" / re.sub(r"[^\w.+-]+", "_", name)
    os.environ[CACHE_VARIABLE] = str(folder)
    return folder
