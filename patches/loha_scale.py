"""Keep the scale of each LoHa layer on the GPU instead of copying it there in every pass.

``networks.loha`` creates a tensor of one number on the GPU in every forward pass of every layer, and again when checkpointing
recomputes it. The host waits for each of these copies, and a CUDA graph cannot record them.
"""

from __future__ import annotations

import importlib
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.sdscripts.fingerprints import known_bodies

_MODULE = "networks.loha"


def _scale_like(module: Any, weight: Any) -> Any:
    """Return the module's scale as a tensor of a weight's precision and device, which it keeps."""
    import torch

    key = (module.scale, weight.dtype, weight.device)
    if getattr(module, "_kohya_ext_scale", (None,))[0] != key:
        module._kohya_ext_scale = key, torch.tensor(module.scale, dtype=weight.dtype, device=weight.device)
    return module._kohya_ext_scale[1]


def _keep_scale(original: Any, settings: Settings) -> Any:
    import torch

    functions = importlib.import_module(_MODULE)

    @wraps(original)
    def get_diff_weight(self: Any) -> Any:
        if torch.compiler.is_compiling():  # compiled code fills the tensor on the GPU
            return original(self)
        scale = _scale_like(self, self.hada_t1 if self.tucker else self.hada_w1_a)
        if self.tucker:
            first, second = (self.hada_t1, self.hada_w1_b, self.hada_w1_a), (self.hada_t2, self.hada_w2_b, self.hada_w2_a)
            return functions.HadaWeightTucker.apply(*first, *second, scale)
        change = functions.HadaWeight.apply(self.hada_w1_a, self.hada_w1_b, self.hada_w2_a, self.hada_w2_b, scale)
        return change.reshape(self.out_dim, self.in_dim, *self.kernel_size) if self.conv_mode == "flat" else change

    return get_diff_weight


PATCH = Patch(
    name="loha_scale",
    summary="keep the scales of LoHa layers on the GPU instead of copying them there in every pass",
    targets=(
        Target(
            _MODULE,
            "LoHaModule.get_diff_weight",
            _keep_scale,
            takes("self", exactly=True),
            body=known_bodies({"4d9a68b859b9": "since v0.10.4"}),
        ),
    ),
    exactness="exact",
    held_to="layers without it, bit for bit",
    idea="https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization",
)
