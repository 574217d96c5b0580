"""What of the fast paths runs on a GPU of compute capability 7.5, the virtual one, as JSON."""

import json

import torch

from kohya_ext.kernels.fused import elementwise_kernels
from kohya_ext.quantization.support import find_products

if __name__ == "__main__":
    products, obstacle = find_products(torch.device("cuda", 0), torch.int8)
    kernels = elementwise_kernels("cuda", torch.float16)
    print(json.dumps({"products": products, "obstacle": obstacle, "has_kernels": kernels is not None}))
