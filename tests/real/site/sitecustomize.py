"""Runs at the start of every real script: shrinks the models, and counts calls of torch's checkpoint by their kind.

The variable BREAK breaks, on purpose, what compiling needs: the ``backend`` from its third graph on, the age of ``torch``, the
``layout`` of Lumina's blocks.
"""

import atexit
import collections
import functools
import json
import os
import types

import wrapt

from kohya_ext.tiny import shrink

shrink.install()
calls = collections.Counter()


def spy(module):
    original = module.checkpoint

    def checkpoint(function, *args, use_reentrant=None, **kwargs):
        calls["reentrant" if use_reentrant is not False else "non-reentrant"] += 1
        return original(function, *args, use_reentrant=use_reentrant, **kwargs)

    module.checkpoint = checkpoint


def write():
    if calls:
        with open(os.environ["SPY_FILE"], "w") as file:
            json.dump(calls, file)


def break_backend(registry):
    lookup, tried = registry.lookup_backend, []

    def lookup_backend(name):
        backend = lookup(name)

        def compile_graph(graph, inputs):
            tried.append(graph)
            if len(tried) > 2:
                raise RuntimeError("no such instruction")
            return backend(graph, inputs)

        return compile_graph

    registry.lookup_backend = lookup_backend


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


BREAKAGES = {
    "backend": ("torch._dynamo.backends.registry", break_backend),
    "torch": ("torch.version", age_torch),
    "layout": ("library.lumina_models", change_layout),
}

if "BREAK" in os.environ:
    name, break_it = BREAKAGES[os.environ["BREAK"]]
    wrapt.register_post_import_hook(break_it, name)
wrapt.register_post_import_hook(spy, "torch.utils.checkpoint")
atexit.register(write)
