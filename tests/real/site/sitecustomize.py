"""Runs at the start of every real script: shrinks the models, counts calls of torch's checkpoint by their kind, and where the
environment asks for it, weighs every step and lets a block run out of memory."""

import atexit
import collections
import contextlib
import json
import os

import wrapt

from kohya_ext.tiny import shrink

shrink.install()
calls = collections.Counter()
steps = []

#: At the N-th training batch of the process, every block that is not checkpointed is out of memory in forward.
OUT_OF_MEMORY = int(os.environ.get("SPY_OUT_OF_MEMORY_AT", 0))


def spy(module):
    original = module.checkpoint

    def checkpoint(function, *args, use_reentrant=None, **kwargs):
        calls["reentrant" if use_reentrant is not False else "non-reentrant"] += 1
        return original(function, *args, use_reentrant=use_reentrant, **kwargs)

    module.checkpoint = checkpoint


def weigh(module):
    """Peak bytes and FLOPs of every batch, its optimizer step included."""
    original = module.Accelerator.accumulate

    @contextlib.contextmanager
    def accumulate(self, *models):
        from kohya_ext.vram.gauge import HostGauge
        from kohya_ext.vram.track import Allocations

        gauge, scale = HostGauge(), Allocations()
        gauge.begin()
        with original(self, *models), scale:
            yield
        steps.append((gauge.end(), scale.flops))

    module.Accelerator.accumulate = accumulate


def run_out(module):
    batches = 0
    body = module.BasicTransformerBlock.forward_body
    forward = module.SdxlUNet2DConditionModel.forward

    def forward_body(self, *args, **kwargs):
        import torch

        result = body(self, *args, **kwargs)
        if batches == OUT_OF_MEMORY and not self.gradient_checkpointing and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return result

    def count(self, *args, **kwargs):
        nonlocal batches
        batches += 1
        return forward(self, *args, **kwargs)

    module.BasicTransformerBlock.forward_body = forward_body
    module.SdxlUNet2DConditionModel.forward = count


def write():
    if calls or steps:
        with open(os.environ["SPY_FILE"], "w") as file:
            json.dump({**calls, **({"steps": steps} if steps else {})}, file)


wrapt.register_post_import_hook(spy, "torch.utils.checkpoint")
if "SPY_MEMORY" in os.environ:
    wrapt.register_post_import_hook(weigh, "accelerate.accelerator")
if OUT_OF_MEMORY:
    wrapt.register_post_import_hook(run_out, "library.sdxl_original_unet")
atexit.register(write)
