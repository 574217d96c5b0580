"""Use two virtual GPUs in every way that the tests check; print the results as JSON."""

import json

import torch

import virtual_gpu

GIB = 2**30

first_free, total = torch.cuda.mem_get_info(0)
on_second = torch.empty(GIB, dtype=torch.uint8, device="cuda:1")
results = {
    "gpus": torch.cuda.device_count(),
    "name": torch.cuda.get_device_name(1),
    "total": total,
    "left": [torch.cuda.mem_get_info(index)[0] - first_free for index in (0, 1)],
    "peer": torch.cuda.can_device_access_peer(0, 1),
    "moved": str(on_second[:1].to("cuda:0").device),
}
try:
    on_second[:1] + torch.ones(1, device="cuda:0").expand(2)
except RuntimeError as error:
    results["mixed"] = str(error)
try:
    torch.empty(total, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    results["too_large"] = str(error)

weight = torch.nn.Parameter(torch.randn(8, 8, device="cuda"))
virtual_gpu.reset()
loss = torch.nn.functional.conv2d(weight[None, None], torch.ones(1, 1, 3, 3, device="cuda")).sum()
loss.backward()
results["launches"] = virtual_gpu.launches()
results["by_kernel"] = sum(virtual_gpu.counters()["kernels"].values())
results["convolutions"] = sum(count for name, count in virtual_gpu.counters()["kernels"].items() if name.startswith("cudnn"))
results["syncs"] = [virtual_gpu.syncs()]
results["loss"] = loss.item()
results["gradient_is_finite"] = weight.grad.isfinite().all().item()
results["syncs"].append(virtual_gpu.syncs())
virtual_gpu.set_finite(False)
results["loss_is_nan"] = str(loss.item())
results["gradient_is_finite_then"] = weight.grad.isfinite().all().item()
virtual_gpu.set_finite(True)

graph, captured = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
with torch.cuda.graph(graph):
    captured += 1
    captured *= 2
virtual_gpu.reset()
graph.replay()
results["replayed"] = virtual_gpu.launches()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        captured.sum().item()
except RuntimeError as error:
    results["captured_sync"] = str(error)

try:
    torch.linalg.eigvals(torch.zeros(4, 4, device="cuda"))
except RuntimeError:
    results["unknown"] = virtual_gpu.counters()["unknown_calls"]
print(json.dumps(results))
