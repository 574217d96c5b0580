"""The process of a dry run: a script, started by the launcher with its patches, on tensors without data.

    python -m kohya_ext.dry_run.process FOLDER

FOLDER has the request (``request``); the result is written next to it. The process ends after a few steps, or with its parent.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import importlib
import os
import runpy
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kohya_ext.dry_run.request import RESULT, Request, end
from kohya_ext.errors import UserError


def main(folder: Path) -> None:
    """Run a request. Never returns."""
    end_with_parent(folder)
    request = Request.read(folder)
    try:
        _run(request, folder)
        print(f"{request.script} ended before {request.passes} backward passes", file=sys.stderr)
    except SystemExit as stop:
        print("" if isinstance(stop.code, int) else stop.code or "", file=sys.stderr)
    except UserError as error:
        print(error, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    end(1)


def end_with_parent(folder: Path) -> None:
    """End the process, and delete its folder, when the parent has closed standard input: however it ends."""

    def wait() -> None:
        wait_for_end_of_input()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def wait_for_end_of_input() -> None:
    """Return when the other end of standard input, a pipe, is closed.

    Windows is asked every half second: while a thread reads from a pipe there, libraries that are loaded wait for it, because
    they ask what kind of file it is.
    """
    if sys.platform != "win32":
        sys.stdin.buffer.read()
        return
    import ctypes
    import msvcrt

    handle = ctypes.c_void_p(msvcrt.get_osfhandle(0))
    while ctypes.windll.kernel32.PeekNamedPipe(handle, None, 0, None, None, None):
        time.sleep(0.5)


def _run(request: Request, folder: Path) -> None:
    steps = _install(request, folder)
    mode = steps.tracker.values.mode = _fake_tensors(request.compiled)
    sys.argv = ["kohya_ext", "--sd-scripts", request.sd_scripts, request.script, *request.words]
    with contextlib.ExitStack() as stack:
        for part in _as_on_gpu(request, steps.tracker, mode):
            stack.enter_context(part)
        if request.compiled:
            from kohya_ext.dry_run.compiling import budgets_of_blocks, compiled_blocks

            if request.budgets:
                steps.graphs = stack.enter_context(budgets_of_blocks(mode))
            else:
                steps.check = stack.enter_context(compiled_blocks(steps.tracker))
        runpy.run_module("kohya_ext", run_name="__main__", alter_sys=True)


def _fake_tensors(compiled: bool) -> Any:
    if compiled:
        from kohya_ext.dry_run.inductor import traceable

        return traceable()
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def _as_on_gpu(request: Request, tracker: Any, mode: Any) -> Iterator[Any]:
    """Yield the contexts in which operators run as a GPU's."""
    from kohya_ext.dry_run.autocast import EIGHT_BITS, LOWER, cuda_rules
    from kohya_ext.dry_run.cuda_operators import bias_in_place, bitsandbytes_without_kernels, functions_as_on_cuda
    from kohya_ext.dry_run.triton_kernels import counted_kernels

    yield from (cuda_rules((*LOWER, *EIGHT_BITS)), bias_in_place(), functions_as_on_cuda())
    yield from (bitsandbytes_without_kernels(tracker), mode, tracker)
    if request.kernels:
        yield counted_kernels(eight_bits=request.eight_bits)


def _install(request: Request, folder: Path) -> Any:
    """Replace what would need a GPU, data or more time; return the steps of the run."""
    from kohya_ext.dry_run import cuda_functions, device, recording, several_processes, weights, zero_run
    from kohya_ext.dry_run.gpu_tracker import GpuTracker
    from kohya_ext.dry_run.steps import Steps
    from kohya_ext.patching import kept_attention

    tracker = GpuTracker()
    tracker.values.integer = request.integer
    if request.compiled:
        from kohya_ext.dry_run import compiling

        compiling.prepare()
    weights.install()
    device.install()
    cuda_functions.install(tracker.release_unused)
    divided = zero_run.ZeroRun(tracker, request.processes) if request.deepspeed else None
    if divided is not None:
        divided.install()
    elif request.processes > 1:
        several_processes.pretend(request.processes)
    _run_in_this_thread()
    _keep_the_order_of_images()
    _shorten_captions()
    _spare_time()
    if request.recorded:
        recording.install(tracker)
    _use_own_kernels(request)
    kept_attention.kernel_of = lambda *_: kept_attention.ON_CPU  # whose memory is that of a GPU's here
    _try_optimizers_with_data()
    steps = Steps(tracker, request, folder / RESULT, divided)
    steps.install()
    return steps


def _use_own_kernels(request: Request) -> None:
    """Let the extension run its own kernels."""
    if request.eight_bits:
        setattr(importlib.import_module("kohya_ext.quantization.support"), "kernels_obstacle", lambda *_: None)  # noqa: B010


def _try_optimizers_with_data() -> None:
    """Let the steps of small weights, which decide how the run's are stepped, compute on the host."""
    from torch.utils._python_dispatch import _disable_current_modes

    setattr(importlib.import_module("kohya_ext.optimizers.probes"), "_on_the_host", _disable_current_modes)  # noqa: B010


def _run_in_this_thread() -> None:
    """Let thread pools run their tasks in this thread, for which the modes hold."""

    def submit(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        future: Any = concurrent.futures.Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    concurrent.futures.ThreadPoolExecutor.submit = submit  # type: ignore[method-assign,assignment]


def _keep_the_order_of_images() -> None:
    """Let samplers return the order of the images: random numbers would be read from tensors."""
    import torch.utils.data

    torch.utils.data.RandomSampler.__iter__ = lambda self: iter(range(len(self.data_source)))


def _spare_time() -> None:
    """Leave weights without first values, and the imported modules to no search for unused objects."""
    import accelerate
    import torch

    initialize = (name for name in vars(torch.nn.init) if name.endswith("_") and not name.startswith("_"))
    for name in initialize:
        setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)
    create = accelerate.Accelerator.__init__

    def freeze_and_create(*args: Any, **kwargs: Any) -> None:
        gc.freeze()  # a script loads its models later
        create(*args, **kwargs)

    accelerate.Accelerator.__init__ = freeze_and_create


def _shorten_captions() -> None:
    """Cut HunyuanImage's captions, which have the length of the longest in a batch, to the one that estimates assume."""
    import wrapt

    from kohya_ext.estimate.memory_config import HUNYUAN_CAPTION_TOKENS

    def shorten(module: Any) -> None:
        module.TOKENIZER_MAX_LENGTH = HUNYUAN_CAPTION_TOKENS

    wrapt.register_post_import_hook(shorten, "library.hunyuan_image_text_encoder")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
