"""The sizes of a dataset's batches. Activations grow with them."""

from __future__ import annotations

import torch

from kohya_ext.patching.training_loop import data_sets
from kohya_ext.patching.types import Accelerator, Batch


def image_sizes(accelerator: Accelerator) -> set[tuple[int, int]]:
    """Return the width and height, in pixels, of each bucket of the dataset that has images."""
    return {
        size
        for dataset in data_sets(accelerator)
        for size, bucket in zip(dataset.bucket_manager.resos, dataset.bucket_manager.buckets, strict=True)
        if bucket
    }


def pixels_of(batch: Batch, accelerator: Accelerator) -> int:
    """Return the pixels of all images of an sd-scripts batch; 0 if unknown.

    Cached latents are smaller by a factor that depends on the VAE: the right factor leads to a bucket of the dataset.
    """
    for name, factors in (("images", (1,)), ("latents", (8, 16, 32))):
        values = batch.get(name)
        if isinstance(values, torch.Tensor) and values.dim() >= 4:
            height, width = values.shape[-2:]
            sizes = {size for dataset in data_sets(accelerator) for size in dataset.bucket_manager.resos}
            factor = next((factor for factor in factors if (width * factor, height * factor) in sizes), 0)
            return int(values.shape[0] * width * height * factor**2)
    return 0


def largest_batch(accelerator: Accelerator) -> int:
    """Return the pixels of the largest batch of the dataset; 0 if unknown."""
    sizes = [
        width * height * min(int(dataset.batch_size), len(bucket))
        for dataset in data_sets(accelerator)
        for (width, height), bucket in zip(dataset.bucket_manager.resos, dataset.bucket_manager.buckets, strict=True)
    ]
    return max(sizes, default=0)
