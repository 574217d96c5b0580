"""Train a model of 5 GiB on a virtual GPU with CUDA graphs, next to work that needs memory; print the results as JSON.

The argument is the way of training: ``eager`` or ``graphs``. Each case has the memory of work in a step before the model's
forward pass (the VAE of latents that are not cached), that of work between steps (sample images), how often it comes, and the
rows of the batches.
"""

import json
import sys
from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import torch
from kohya_ext.patches import cuda_graphs

from kohya_ext.gpu import peak_memory

GIB = 2**30
WIDTH, LAYERS = 4096, 40

CASES = {
    "samples": (0, 3.5 * GIB, 12, [6000] * 26),
    "frequent samples": (0, 3.5 * GIB, 2, [6000] * 10),
    "small samples": (0, GIB // 2, 2, [6000] * 12),
    "images in each step": (2.5 * GIB, 0, 1, [6000] * 8),
    "small images in each step": (0.5 * GIB, 0, 1, [6000] * 8),
    "sizes near the limit": (0, 0, 1, [5000, 9800] * 4),
    "a size at the limit": (0, 0, 1, [9800] * 6),
}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False, device="cuda") for _ in range(4))
        self.layers.requires_grad_(False)

    def forward(self, x, weight):
        x = x * weight
        for index in range(LAYERS):
            x = torch.nn.functional.gelu(self.layers[index % 4](x))
        return x


def _with_network(network, model, x):
    return model(x, network.weight[:, 0])


def use(size):
    with torch.no_grad():
        torch.empty(int(size), dtype=torch.uint8, device="cuda")


def train(recorded, in_step, between, every, batches):
    model, network = Model(), torch.nn.Linear(1, WIDTH, bias=False, device="cuda")
    forward = partial(_with_network, network)
    optimizer = torch.optim.AdamW(network.parameters())
    accelerator = SimpleNamespace(
        device=torch.device("cuda", 0),
        sync_gradients=True,
        _models=[model, network],
        _optimizers=[optimizer],
        _dataloaders=[],
        unwrap_model=lambda each: each,
    )
    callback = cuda_graphs._Graphs(Namespace(), accelerator, always=True)
    for number, rows in enumerate(batches):
        callback.before_batch(accelerator)
        use(in_step)
        inputs = (torch.zeros(rows, WIDTH, device="cuda"),)
        output = callback.forward(forward, model, inputs, {}) if recorded else forward(model, *inputs)
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        del output
        callback.after_batch(accelerator)
        if between and number % every == every - 1:
            with torch.no_grad():
                if recorded:
                    callback.forward_without_gradients(model)
                torch.cuda.empty_cache()  # as the scripts do before sampling
                use(between)
    result = {"counts": dict(callback.recorded.counts), "off": callback.recorded.off} if recorded else {}
    callback.on_end()
    return result


if __name__ == "__main__":
    results = {}
    for name, case in CASES.items():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        peak_memory._earlier.clear()
        try:
            results[name] = train(sys.argv[1] == "graphs", *case)
        except torch.OutOfMemoryError as error:
            results[name] = {"failed": str(error).splitlines()[0]}
        results[name]["reserved"] = peak_memory.of_device(0)[1] / GIB
    print(json.dumps(results))
