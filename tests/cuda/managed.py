"""Allocate and free managed and pinned memory on the virtual GPU; print CUDA's error codes as JSON."""

import ctypes
import json

import torch

torch.cuda.init()
runtime = ctypes.CDLL("libcuda.so.1")
managed, pinned = ctypes.c_void_p(), ctypes.c_void_p()
codes = {
    "allocate": runtime.cudaMallocManaged(ctypes.byref(managed), ctypes.c_size_t(4096), 1),
    "free": runtime.cudaFree(managed),
    "pinned": runtime.cudaHostAlloc(ctypes.byref(pinned), ctypes.c_size_t(4096), 0),
    "pinned freed as device memory": runtime.cudaFree(pinned),
}
print(json.dumps(codes))
