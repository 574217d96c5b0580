"""Break recordings of a model on the virtual GPU in several ways; print the results as JSON."""

import json
import signal

import torch

from kohya_ext.compiling.cuda_recorder import CudaRecorder
from kohya_ext.compiling.graphs import RecordedModel

layer = torch.nn.Linear(512, 512, device="cuda")
weights = [*layer.parameters()]
optimizer = torch.optim.AdamW(weights)


def train(recorded, body, rows=4):
    torch.randn(8, device="cuda")
    x = torch.randn(rows, 512, device="cuda")
    output = recorded(lambda x: body(torch.nn.functional.dropout(layer(x))), (x,), {})
    output.sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def fail(x):
    raise ValueError("of the model")


def interrupt(x):
    raise KeyboardInterrupt


def signal_itself(x):
    signal.raise_signal(signal.SIGTERM)
    return x


def in_capture(function):
    return lambda x: function(x) if torch.cuda.is_current_stream_capturing() else x


WAYS = {
    "none": lambda x: x,
    "read": lambda x: x * x.sum().item(),
    "read while capturing": in_capture(lambda x: x * x.sum().item()),
    "copy while capturing": in_capture(lambda x: x + torch.ones(512).to("cuda")),
    "error while capturing": in_capture(fail),
    "interrupt while capturing": in_capture(interrupt),
    "signal while capturing": in_capture(signal_itself),
    "larger size": lambda x: x + torch.empty(max(x.shape[0] - 4, 0) * 2**40 + 1, dtype=torch.uint8, device="cuda")[0],
    "memory while capturing": in_capture(lambda x: x + torch.empty(2**40, dtype=torch.uint8, device="cuda")[0]),
}

results = {}
signals = []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
train(lambda forward, args, kwargs: forward(*args), WAYS["none"])  # creates the optimizer's state and workspaces
for name, body in WAYS.items():
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    lines = []
    recorded = RecordedModel(CudaRecorder(torch.device("cuda")), [layer], weights, lines.append)
    interrupted = False
    for number in range(3):
        try:
            train(recorded, body, 8 if (name, number) == ("larger size", 1) else 4)
        except KeyboardInterrupt:
            interrupted = True
            break
        except torch.OutOfMemoryError:  # as without recordings
            optimizer.zero_grad()
    counts = dict(recorded.counts)
    recorded.release()
    del recorded
    torch.cuda.empty_cache()
    left = torch.cuda.memory_reserved() - before
    results[name] = {"lines": lines, "counts": counts, "left": left, "capturing": torch.cuda.is_current_stream_capturing()}
    if name in ("interrupt while capturing", "signal while capturing"):
        results[name] |= {"interrupted": interrupted, "signals": len(signals)}
print(json.dumps(results))
