"""A dataset of a checkout without models, for tests of caching: real images, strategies and loops, and small fake encoders.

``python -m tests.real.caching CHECKOUT FOLDER SECONDS`` caches a folder with a VAE that takes some seconds for each batch.
"""

import gc
import importlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image

from kohya_ext.config.settings import Settings
from kohya_ext.patching.attributes import replaced
from kohya_ext.patching.patch import Patcher, registry
from kohya_ext.sdscripts import checkouts

#: Family -> module, strategies of latents and texts, channels, pixels of a latent pixel's side.
FAMILIES = {
    "sd": ("sd", "SdSdxlLatentsCachingStrategy", None, 4, 8),
    "sdxl": ("sdxl", "SdSdxlLatentsCachingStrategy", "SdxlTextEncoderOutputsCachingStrategy", 4, 8),
    "sd3": ("sd3", "Sd3LatentsCachingStrategy", "Sd3TextEncoderOutputsCachingStrategy", 16, 8),
    "flux": ("flux", "FluxLatentsCachingStrategy", "FluxTextEncoderOutputsCachingStrategy", 16, 8),
    "lumina": ("lumina", "LuminaLatentsCachingStrategy", "LuminaTextEncoderOutputsCachingStrategy", 16, 8),
    "anima": ("anima", "AnimaLatentsCachingStrategy", "AnimaTextEncoderOutputsCachingStrategy", 16, 8),
    "hunyuan-image": (
        "hunyuan_image",
        "HunyuanImageLatentsCachingStrategy",
        "HunyuanImageTextEncoderOutputsCachingStrategy",
        64,
        32,
    ),
}

ACCELERATOR = SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"))


class Vae:
    """Average the pixels of each latent pixel, and add noise as VAEs do; every family's interface."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, channels, side, five_dimensions=False, noise=0.1, scale=1.0):
        self.channels, self.side, self.five_dimensions, self.noise, self.scale = channels, side, five_dimensions, noise, scale
        self.batches = []

    def encode_pixels_to_latents(self, images):
        self.batches.append(tuple(images.shape))
        latents = torch.nn.functional.avg_pool2d(images, self.side).mean(1, keepdim=True).repeat(1, self.channels, 1, 1)
        latents = latents * self.scale + self.noise * torch.randn_like(latents)
        return latents.unsqueeze(2) if self.five_dimensions else latents

    def encode(self, images):
        latents = self.encode_pixels_to_latents(images)
        # SD and SDXL take latent_dist.sample(), HunyuanImage sample(), the others the tensor.
        latents.latent_dist = latents
        latents.sample = latents.clone
        return latents


class SlowVae(Vae):
    """Without noise, so that results do not depend on the batches."""

    def __init__(self, seconds):
        super().__init__(16, 8, noise=0)
        self.seconds = seconds

    def encode(self, images):
        time.sleep(self.seconds)
        return super().encode(images)


def write_images(folder, count=7):
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for index in range(count):
        size = [(160, 128), (128, 128), (300, 260)][index % 3]
        pixels = generator.integers(0, 255, (*size, 4 if index % 2 else 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")


class Checkout:
    """The library of a checkout with the patch applied on demand."""

    def __init__(self, module, checkout):
        self.module = module
        self.checkout = checkout
        self.caption = "a caption of {}"
        module("library.train_util")
        self.data = sys.modules.get("library.dataset") or sys.modules["library.train_util"]
        self.base = sys.modules["library.strategy_base"]

    def dataset(self, folder, batch_size=2):
        """Return a dataset of a folder's images, in two buckets."""
        data = object.__new__(self.data.BaseDataset)
        subset = SimpleNamespace(flip_aug=True, alpha_mask=True, random_crop=False, caption_extension=".txt")
        data.subsets, data.batch_size, data.image_data, data.image_to_subset = [subset], batch_size, {}, {}
        for path in sorted(folder.glob("*.png")):
            info = self.data.ImageInfo(str(path), 1, self.caption.format(path.name), False, str(path))
            info.image_size = Image.open(path).size
            info.bucket_reso = (128, 128) if info.image_size[0] < 150 else (128, 192)
            width, height = info.image_size
            scale = max(info.bucket_reso[0] / width, info.bucket_reso[1] / height)
            info.resized_size = (round(width * scale), round(height * scale))
            data.image_data[info.image_key], data.image_to_subset[info.image_key] = info, subset
        return data

    def cache_latents(self, folder, family, *, to_disk=True, patched=True, vae=None, batch_size=2, **options):
        """Cache the latents of a folder's images; return the dataset and the VAE."""
        name, strategy, _, channels, side = FAMILIES[family]
        vae = vae or Vae(channels, side, family == "anima")
        kind = getattr(self.module(f"library.strategy_{'sd' if name == 'sdxl' else name}"), strategy)
        first = (family == "sd",) if strategy.startswith("SdSdxl") else ()
        data = self.dataset(folder)
        with self._strategy("LatentsCachingStrategy", kind(*first, to_disk, batch_size, False)):
            torch.manual_seed(0)
            self._run(patched, options, lambda: data.new_cache_latents(vae, ACCELERATOR))
        return data, vae

    def cache_texts(self, folder, family, *, to_disk=True, patched=True, outputs, **options):
        """Cache texts of a folder's images, where the text encoders return ``outputs(captions)``."""
        name, _, kind, *_ = FAMILIES[family]
        strategy = getattr(self.module(f"library.strategy_{name}"), kind)(to_disk, 2, False)
        data = self.dataset(folder)

        def cache(tokenize, models, encode, infos):
            for info, arrays in zip(infos, outputs([info.caption for info in infos]), strict=True):
                if to_disk:
                    np.savez(info.text_encoder_outputs_npz, **arrays)
                else:
                    info.text_encoder_outputs = list(arrays.values())

        strategy.cache_batch_outputs = cache
        with self._strategy("TextEncoderOutputsCachingStrategy", strategy):
            self._run(patched, options, lambda: data.new_cache_text_encoder_outputs([], ACCELERATOR))
        return data, strategy

    def _run(self, patched, options, cache):
        names = ("atomic_saves", "parallel_caching", *(["safetensors_caches"] if options.get("cache_format") else []))
        patches = {name: registry()[name] for name in names}
        patcher = Patcher(patches, Settings(**options), self.checkout)
        if patched:
            patcher.arm()
            assert {patch.name for patch in patcher.active()} == set(patches)
        try:
            with replaced(gc, "collect", lambda: 0):  # upstream calls it after each batch
                cache()
        finally:
            patcher.undo()

    def _strategy(self, kind, strategy):
        return replaced(getattr(self.base, kind), "_strategy", strategy)


def caches(folder):
    """Return the bytes of all cache files in a folder by name."""
    assert not list(folder.glob("*.partial"))
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix in (".npz", ".safetensors")}


if __name__ == "__main__":
    path, images, seconds_per_batch = sys.argv[1:]
    sys.path.insert(0, path)
    Checkout(importlib.import_module, checkouts.describe(Path(path), "argument")).cache_latents(
        Path(images), "flux", vae=SlowVae(float(seconds_per_batch))
    )
