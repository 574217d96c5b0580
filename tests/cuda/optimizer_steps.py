"""Count the syncs and launches of optimizer steps with and without optimizer_syncs on the virtual GPU; print them as JSON."""

import json
from pathlib import Path

import bitsandbytes
import prodigyopt
import torch
from kohya_ext.patches.optimizer_syncs import PATCH

import virtual_gpu
from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patcher
from kohya_ext.sdscripts.checkouts import Checkout

OPTIMIZERS = (
    bitsandbytes.optim.AdamW8bit,
    bitsandbytes.optim.PagedAdamW8bit,
    bitsandbytes.optim.Lion8bit,
    prodigyopt.Prodigy,
)
PARAMETERS = 20


def count(kind: type[torch.optim.Optimizer]) -> tuple[int, int]:
    """Return the syncs and launches of the second step."""
    parameters = [torch.nn.Parameter(torch.zeros(96, 64, device="cuda")) for _ in range(PARAMETERS)]
    # torch wraps the step of a class when the first optimizer of it is created.
    optimizer = type("Optimizer", (kind,), {})(parameters, lr=1e-3)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        virtual_gpu.reset()
        optimizer.step()
    return virtual_gpu.syncs(), virtual_gpu.launches()


theirs = {kind.__name__: count(kind) for kind in OPTIMIZERS}
patcher = Patcher({PATCH.name: PATCH}, Settings(), Checkout(Path(), None, "v0.11", "test"))
patcher.arm()
ours = {kind.__name__: count(kind) for kind in OPTIMIZERS}
print(json.dumps({"theirs": theirs, "ours": ours, "parameters": PARAMETERS}))
