"""``python -m benchmarks.capped BYTES ...``: ``python -m kohya_ext ...`` in a process that may take so much of the GPU.

PyTorch's allocator stops at the cap as it stops at a card's end, so that a large card stands for a small one. On a machine
without a GPU there is nothing to cap, and the run goes on without.
"""

from __future__ import annotations

import sys

import torch

from kohya_ext.__main__ import main

if __name__ == "__main__":
    limit = int(sys.argv[1])
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.get_device_properties(0).total_memory))
    sys.argv[1:] = sys.argv[2:]
    sys.exit(main())
