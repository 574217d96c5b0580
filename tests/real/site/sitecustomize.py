"""Runs at the start of every real script: shrinks the models, counts calls of torch's checkpoint by their kind, and where the
environment asks for it, weighs every step, notes every loss and what was compiled so far, and breaks something.

SPY_OUT_OF_MEMORY_AT lets blocks run out of memory. BREAK breaks, on purpose, what compiling needs: the age of ``torch``,
the ``layout`` of Lumina's blocks, the ``backend`` in the middle of the first step.
"""

import atexit
import collections
import contextlib
import functools
import json
import os
import sys
import types

import wrapt

from kohya_ext.tiny import shrink

shrink.install()
calls = collections.Counter()
steps = []
left = []
losses = []
graphs = []

#: At the N-th training batch of the process, every block that is not checkpointed is out of memory in forward.
OUT_OF_MEMORY = int(os.environ.get("SPY_OUT_OF_MEMORY_AT", 0))


def spy(module):
    original = module.checkpoint
    if hasattr(original, "spied"):
        return

    def checkpoint(function, *args, use_reentrant=None, **kwargs):
        calls["reentrant" if use_reentrant is not False else "non-reentrant"] += 1
        return original(function, *args, use_reentrant=use_reentrant, **kwargs)

    checkpoint.spied = True
    module.checkpoint = checkpoint


def weigh(module):
    """Peak bytes and FLOPs of every batch, its optimizer step included, and the bytes it leaves to the next one's beginning."""
    original = module.Accelerator.accumulate
    scales = []

    @contextlib.contextmanager
    def accumulate(self, *models):
        from kohya_ext.estimate.tracker import Allocations
        from kohya_ext.gpu.memory_meter import HostMemoryMeter

        gauge, scale = HostMemoryMeter(), Allocations()
        gauge.begin()
        if scales:
            left.append(scales.pop().alive)
        scales.append(scale)
        with original(self, *models), scale:
            yield
        steps.append((gauge.end(), scale.flops))

    module.Accelerator.accumulate = accumulate


def note_losses(module):
    original = module.Accelerator.backward

    @functools.wraps(original)
    def backward(self, loss, **kwargs):
        losses.append(loss.item())
        original(self, loss, **kwargs)
        dynamo = sys.modules.get("torch._dynamo.utils")
        graphs.append(dynamo.counters["stats"]["unique_graphs"] if dynamo else 0)

    module.Accelerator.backward = backward


def run_out(module):
    batches = 0
    body = module.BasicTransformerBlock.forward_body
    forward = module.SdxlUNet2DConditionModel.forward

    @functools.wraps(body)
    def forward_body(self, *args, **kwargs):
        import torch

        result = body(self, *args, **kwargs)
        if batches == OUT_OF_MEMORY and not self.gradient_checkpointing and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return result

    @functools.wraps(forward)
    def count(self, *args, **kwargs):
        nonlocal batches
        batches += 1
        return forward(self, *args, **kwargs)

    module.BasicTransformerBlock.forward_body = forward_body
    module.SdxlUNet2DConditionModel.forward = count


def write():
    if calls or steps or losses:
        lists = {"steps": steps, "left": left, "losses": losses, "graphs": graphs}
        weighed = {name: found for name, found in lists.items() if found}
        with open(os.environ["SPY_FILE"], "w") as file:
            json.dump({**calls, **weighed}, file)


def age_torch(version):
    version.__version__ = "2.4.1"


def change_layout(models):
    """The method is an attribute of each block, not of its class."""
    block = models.JointTransformerBlock
    init, method = block.__init__, block._forward
    del block._forward

    @functools.wraps(init)
    def init_with_method(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self._forward = types.MethodType(method, self)

    block.__init__ = init_with_method


def add_broken_backend(registry):
    """Compiles one graph and no more."""
    compiled = []

    def broken(graph_module, inputs):
        compiled.append(graph_module)
        if len(compiled) > 1:
            raise RuntimeError("the compiler has had enough")
        return registry.lookup_backend("aot_eager")(graph_module, inputs)

    registry.register_backend(broken, "broken")


BREAKAGES = {
    "backend": ("torch._dynamo.backends.registry", add_broken_backend),
    "torch": ("torch.version", age_torch),
    "layout": ("library.lumina_models", change_layout),
}

if "BREAK" in os.environ:
    name, break_it = BREAKAGES[os.environ["BREAK"]]
    wrapt.register_post_import_hook(break_it, name)
wrapt.register_post_import_hook(spy, "torch.utils.checkpoint")
# Which has it by name, and is there already in a forked run.
wrapt.register_post_import_hook(spy, "transformers.modeling_utils")
if "SPY_MEMORY" in os.environ:
    wrapt.register_post_import_hook(weigh, "accelerate.accelerator")
if "SPY_LOSSES" in os.environ:
    wrapt.register_post_import_hook(note_losses, "accelerate.accelerator")
if OUT_OF_MEMORY:
    wrapt.register_post_import_hook(run_out, "library.sdxl_original_unet")
atexit.register(write)
