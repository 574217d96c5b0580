"""Time a kernel as compiled blocks do, and ask for CUDA graphs, with the allocator that the environment names; print JSON."""

import json
from types import SimpleNamespace

import torch

from kohya_ext.compiling.configuration import autotune_in_own_memory
from kohya_ext.compiling.cuda_recorder import CudaRecorder
from kohya_ext.config.settings import Settings

torch.zeros(1, device="cuda")
kernel = SimpleNamespace(device_props=SimpleNamespace(type="cuda"))
timed = autotune_in_own_memory(lambda self: "timed", Settings())(kernel)
print(json.dumps([torch.cuda.get_allocator_backend(), timed, CudaRecorder.obstacle(torch.device("cuda"))]))
