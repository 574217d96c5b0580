"""Print whether the batches of a loader with a worker are pinned, with and without the callback of --auto_data_loader."""

import json
from functools import partial

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from kohya_ext.patching.training_loop import TrainingCallback
from patches.automatic_data_loader import _PinnedBatches

accelerator = Accelerator()
pinned = {}
for name, callback in (("upstream", TrainingCallback()), ("ours", _PinnedBatches())):
    loader = accelerator.prepare_data_loader(DataLoader(list(torch.ones(3, 4)), num_workers=1))
    # accelerate's own iterator also moves each batch to the GPU.
    batches = callback.batches(loader, partial(iter, loader.base_dataloader), None)
    pinned[name] = [batch.is_pinned() for batch in batches]
print(json.dumps(pinned))
