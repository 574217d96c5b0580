"""Train on images of several sizes with and without one segment for all; print the reserved bytes after each step as JSON."""

import json
import sys
from functools import partial
from types import SimpleNamespace

import torch
from kohya_ext.patches import bucket_memory

from kohya_ext.config.settings import Settings

MIB = 2**20
SIZES = ((1024, 1024), (832, 1216), (1216, 832), (1344, 768))
manager = SimpleNamespace(resos=SIZES, buckets=[["image"]] * len(SIZES))
dataset = SimpleNamespace(bucket_manager=manager, batch_size=1)
accelerator = SimpleNamespace(
    device=torch.device("cuda:0"),
    sync_gradients=True,
    _dataloaders=[SimpleNamespace(dataset=SimpleNamespace(datasets=[dataset]))],
)


def step(width: int, height: int) -> None:
    """Keep activations of several layers, as a forward pass, and free them from the last to the first."""
    layers, pixels = [], width * height
    for layer in range(30):
        layers.append(torch.empty(pixels * (3 + layer % 5) * 2, dtype=torch.uint8, device="cuda"))
        torch.empty(width * 4096 * (1 + layer % 3), dtype=torch.uint8, device="cuda")
        torch.empty(height * 8192, dtype=torch.uint8, device="cuda")
    while layers:
        torch.empty(pixels * 5, dtype=torch.uint8, device="cuda")
        layers.pop()


weights = [torch.empty(size * MIB, dtype=torch.uint8, device="cuda") for size in (3, 14, 60, 7) * 5]
callback = bucket_memory._start(SimpleNamespace(), accelerator, Settings()) if sys.argv[1] == "with" else None
if callback is None:
    callback = SimpleNamespace(before_batch=lambda accelerator: None, after_batch=lambda accelerator: None)
reserved, state = [], None
for number in range(12):
    size = SIZES[(number * 7 + 1) % len(SIZES)]
    latents = torch.empty(1, 4, size[1] // 8, size[0] // 8, device="cuda")
    bucket_memory.current_batch = partial(dict, latents=latents)
    callback.before_batch(accelerator)
    step(*size)
    state = state or [torch.empty(9 * MIB, dtype=torch.uint8, device="cuda") for _ in weights]
    callback.after_batch(accelerator)
    reserved.append(torch.cuda.memory_reserved())
    if number == 7:  # as before sample images
        torch.cuda.empty_cache()
print(json.dumps({"reserved": reserved, "peak": torch.cuda.max_memory_allocated()}))
