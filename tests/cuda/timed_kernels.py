"""Print what PyTorch measures on a virtual GPU whose kernels take time."""

import json
import time

import torch

value = torch.ones(8, device="cuda")
torch.cuda.synchronize()


def measured(work):
    """Return the host's seconds of launching, of waiting as well, and the GPU's."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun = time.perf_counter()
    start.record()
    work()
    end.record()
    launched, is_done = time.perf_counter() - begun, end.query()
    end.synchronize()
    return {
        "launched": launched,
        "is_done": is_done,
        "waited": time.perf_counter() - begun,
        "on_gpu": start.elapsed_time(end) / 1e3,
        "is_done_then": end.query(),
    }


def additions(count=100):
    for _ in range(count):
        torch.add(value, 1)


def on_two_streams():
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        additions(50)
    additions(50)
    torch.cuda.current_stream().wait_stream(other)


graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    additions(20)
torch.cuda.synchronize()
works = {
    "eager": additions,
    "streams": on_two_streams,
    "graph": graph.replay,
    "products": lambda: value.view(2, 4) @ value.view(4, 2),
}
print(json.dumps({name: measured(work) for name, work in works.items()}))
