"""Bytes per weight of DeepSpeed's tensors in one process: ``zero_bytes.py STAGE [optimizer] [weights]``.

Trains a stack of layers in bf16 with AdamW, the named parts in host memory. The first process prints JSON after a backward
pass.
"""

import gc
import json
import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin

WIDTH, LAYERS = 1024, 20


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def forward(self, x):
        return self.layers(x)


def bytes_per_weight():
    """Return data type -> bytes of all tensors, divided by the number of weights of the whole model."""
    tensors = [value for value in gc.get_objects() if isinstance(value, torch.Tensor)]
    tensors += [value.grad for value in tensors if value.is_leaf and value.grad is not None]
    storages = {value.untyped_storage().data_ptr(): (str(value.dtype), value.untyped_storage().nbytes()) for value in tensors}
    total = {}
    for dtype, size in storages.values():
        total[dtype] = total.get(dtype, 0) + size
    return {dtype.removeprefix("torch."): size / (LAYERS * WIDTH**2) for dtype, size in total.items()}


stage, *offloaded = sys.argv[1:]
plugin = DeepSpeedPlugin(
    zero_stage=int(stage),
    gradient_accumulation_steps=1,
    gradient_clipping=1.0,
    offload_optimizer_device="cpu" if "optimizer" in offloaded else None,
    offload_param_device="cpu" if "weights" in offloaded else None,
)
plugin.set_mixed_precision("bf16")
plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin)
model = Model()
engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for _ in range(2):  # the first step creates the optimizer's state
    engine.backward(engine(torch.randn(1, WIDTH, dtype=torch.bfloat16)).float().square().mean())
    measured = bytes_per_weight()
    engine.step()
if accelerator.is_main_process:
    print(json.dumps(measured))
