"""Torch settings for compiled blocks, and the folder of compiled code."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import re
import tempfile
import threading
from pathlib import Path, PurePath
from typing import Any

from kohya_ext import cache
from kohya_ext.compiling.tracing import allow_einops_in_graph, register_group_norm_shapes
from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import apply_needed

#: SDXL's ResnetBlock2D alone has 12 variants of channels. With torch's default of 8, the others silently run eager: with a
#: memory budget of 0, a reduced SDXL then kept 1.6 times as much as checkpointing, and less with all variants compiled.
RECOMPILE_LIMIT = 64

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class ThreadSettingError(RuntimeError):
    """A torch setting could not be applied to new threads."""


def set_everywhere(config: Any, name: str, value: Any) -> None:
    """Set an option of one of torch's ``config`` modules for this thread and for all threads that start later.

    Since torch 2.12 an assignment affects only its own thread. Autograd's threads compile blocks too: for the recompute of
    gradient checkpointing and for backward graphs. They read the default value, so this changes the default as well.
    https://github.com/pytorch/pytorch/pull/173568

    Raises ThreadSettingError if a new thread still reads another value.
    """
    setattr(config, name, value)
    if _value_in_new_thread(config, name) != value:
        entry = config._config[_real_name(config, name)]
        entry.default = value
        if _value_in_new_thread(config, name) != value:
            raise ThreadSettingError(f"{config.__name__}.{name}")


def _real_name(config: Any, name: str) -> str:
    alias = getattr(config._config[name], "alias", None)
    return str(alias).rpartition(".")[2] if alias else name


def _value_in_new_thread(config: Any, name: str) -> Any:
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(getattr(config, name)))
    thread.start()
    thread.join()
    return seen[0]


def prepare_torch() -> None:
    """Apply the settings that compiled blocks need, before the first one is compiled. Raises ThreadSettingError."""
    import torch
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    _disable_gc_while_compiling()
    apply_needed()
    allow_einops_in_graph()
    register_group_norm_shapes()
    # torch 2.7 renamed this setting and kept the old name as an alias.
    set_everywhere(dynamo, "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit", RECOMPILE_LIMIT)
    # DistributedDataParallel splits graphs at its buckets in forward but not in the recompute of checkpointing, which would
    # then save different tensors. Blocks are small, so their gradients are ready early without the split.
    # https://pytorch.org/docs/stable/notes/ddp.html#torchdynamo-ddpoptimizer
    set_everywhere(dynamo, "optimize_ddp", False)
    # Otherwise tensor attributes of a module (LLLite's conditioning image) are static and need one graph per bucket.
    if hasattr(dynamo, "force_nn_module_property_static_shapes"):
        set_everywhere(dynamo, "force_nn_module_property_static_shapes", False)
    # The recompute must use the same graph as forward. With LRU order, dynamo's cache may return a more general one.
    # https://github.com/pytorch/pytorch/issues/166926
    set_lru_cache = getattr(torch._C._dynamo.eval_frame, "_set_lru_cache", None)
    if set_lru_cache is not None:
        set_lru_cache(False)
    # Padding is chosen by timing each graph, so forward and recompute may choose differently. Same issue.
    set_everywhere(inductor, "shape_padding", False)
    # Kernels that sum rows and columns together, since torch 2.10, can leave gradients of a modulation's shift and scale
    # unwritten, which SD3's, FLUX's and Anima's blocks have. https://github.com/pytorch/pytorch/issues/193061
    if hasattr(inductor.triton, "mix_order_reduction"):
        set_everywhere(inductor, "triton.mix_order_reduction", False)
    if os.name == "nt":
        shorten_kernel_names()


def shorten_kernel_names() -> None:
    """Name kernels by their category and number, without the operators that they fuse.

    Triton's files have the kernel's name, which can be 100 characters long. On Windows a path has at most 259 characters.
    https://github.com/pytorch/pytorch/issues/167891
    """
    import torch._inductor.config as inductor

    set_everywhere(inductor, "triton.descriptive_names", False)


def _disable_gc_while_compiling() -> None:
    """Disable Python's garbage collector while compiling. It would take a fifth of the tracing time."""
    from torch._dynamo.callback import callback_handler

    if not gc.isenabled():
        return
    callback_handler.register_start_callback(lambda *about: gc.disable())
    callback_handler.register_end_callback(lambda *about: gc.enable())


def skip_guard_timing(original: Any, settings: Settings) -> Any:
    """Disable the timing of guards. Newer versions flush the CPU caches for it, only to collect statistics.

    https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/guards.py (``guard_latency_us``)
    """
    return lambda *about: 0.0


def autotune_in_own_memory(original: Any, settings: Settings) -> Any:
    """Time a kernel's variants on a GPU in a memory pool that is returned to the driver after it.

    For it inductor allocates a tensor of the size of the L2 cache (72 MiB on an RTX 4090; 256 MiB in torch 2.6) and copies of
    what the kernel writes, all in the middle of the first step. Later tensors would split their memory, so that it could never
    be used as a whole. The buffer: ``benchmark_gpu`` in
    https://github.com/pytorch/pytorch/blob/main/torch/_inductor/runtime/benchmarking.py.
    """
    import torch

    def benchmark_all_configs(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Recordings have their own stream and pool, whose unused memory is returned before they begin.
        if self.device_props.type != "cuda" or torch.cuda.current_stream() != torch.cuda.default_stream():
            return original(self, *args, **kwargs)
        if torch.cuda.get_allocator_backend() != "native":  # others have no pools
            return original(self, *args, **kwargs)
        # On a full GPU, torch 2.6 cannot return unused memory outside the pool to the driver, and fails.
        with contextlib.suppress(torch.OutOfMemoryError), torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            return original(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return benchmark_all_configs


def keep_compiled_code(device: str, commit: str | None) -> Path:
    """Return the folder of compiled code. Unless the user has set one, point torch to a persistent folder.

    ``commit`` is the commit of sd-scripts, whose code is compiled.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen and not _is_torchs(Path(chosen)):
        return Path(chosen)
    import torch

    kind = torch.cuda.get_device_name() if device == "cuda" else device
    name = f"{(commit or 'unversioned')[:8]}-torch{torch.__version__}-{kind}"
    folder = Path(folder_of_code(cache.folder(), name, os.name == "nt"))
    os.environ[CACHE_VARIABLE] = str(folder)
    return folder


def _is_torchs(folder: Path) -> bool:
    """Return whether PyTorch has chosen a folder, in which the system deletes files: it does when torch._dynamo is imported."""
    return folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("torchinductor_")


def folder_of_code(root: PurePath, name: str, on_windows: bool) -> PurePath:
    """Return the folder in the cache for compiled code that ``name`` describes: a short one on Windows.

    Triton adds up to 130 characters and the kernel's name to it, and a path on Windows has at most 259.
    """
    if on_windows:
        return root / "c" / hashlib.sha256(name.encode()).hexdigest()[:8]
    return root / "compiled" / re.sub(r"[^\w.+-]+", "_", name)
