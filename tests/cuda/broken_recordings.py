"""Break recordings of a model on the virtual GPU in several ways; print the results as JSON."""

import json

import torch

from kohya_ext.compiling.cuda_recorder import CudaRecorder
from kohya_ext.compiling.graphs import RecordedModel

layer = torch.nn.Linear(512, 512, device="cuda")
weights = [*layer.parameters()]
optimizer = torch.optim.AdamW(weights)


def train(recorded, body):
    torch.randn(8, device="cuda")
    x = torch.randn(4, 512, device="cuda")
    output = recorded(lambda x: body(torch.nn.functional.dropout(layer(x))), (x,), {})
    output.sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def fail(x):
    raise ValueError("of the model")


def in_capture(function):
    return lambda x: function(x) if torch.cuda.is_current_stream_capturing() else x


WAYS = {
    "none": lambda x: x,
    "read": lambda x: x * x.sum().item(),
    "read while capturing": in_capture(lambda x: x * x.sum().item()),
    "copy while capturing": in_capture(lambda x: x + torch.ones(512).to("cuda")),
    "error while capturing": in_capture(fail),
    "memory while capturing": in_capture(lambda x: x + torch.empty(2**40, dtype=torch.uint8, device="cuda")[0]),
}

results = {}
train(lambda forward, args, kwargs: forward(*args), WAYS["none"])  # creates the optimizer's state and workspaces
for name, body in WAYS.items():
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    lines = []
    recorded = RecordedModel(CudaRecorder(torch.device("cuda")), [layer], weights, lines.append)
    for _ in range(3):
        train(recorded, body)
    counts = dict(recorded.counts)
    recorded.release()
    del recorded
    torch.cuda.empty_cache()
    left = torch.cuda.memory_reserved() - before
    results[name] = {"lines": lines, "counts": counts, "left": left, "capturing": torch.cuda.is_current_stream_capturing()}
print(json.dumps(results))
