"""Sample and train FLUX with swapped blocks; print counters as JSON: ``swapped_sampling.py CHECKOUT [patch]``."""

import json
import sys
from pathlib import Path

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patcher, registry
from kohya_ext.sdscripts.checkouts import describe

checkout = describe(Path(sys.argv[1]), "named")
sys.path.insert(0, str(checkout.path))
patcher = Patcher({name: registry()[name] for name in sys.argv[2:]}, Settings(), checkout)
patcher.arm()

import torch  # noqa: E402
from library import flux_models, flux_train_utils  # noqa: E402

import virtual_gpu  # noqa: E402

DEVICE = torch.device("cuda")
SIZES = {"in_channels": 16, "vec_in_dim": 32, "context_in_dim": 32, "hidden_size": 128, "mlp_ratio": 4.0, "num_heads": 2}
params = flux_models.FluxParams(
    **SIZES, depth=6, depth_single_blocks=10, axes_dim=[16, 24, 24], theta=10_000, qkv_bias=True,
    guidance_embed=True,
)  # fmt: skip
model = flux_models.Flux(params)
model.enable_block_swap(8, DEVICE)
model.move_to_device_except_swap_blocks(DEVICE)
model.prepare_block_swap_before_forward()

image, text = torch.randn(1, 16, 16, device=DEVICE), torch.randn(1, 8, 32, device=DEVICE)
inputs = {
    "img": image,
    "img_ids": torch.zeros(1, 16, 3, device=DEVICE),
    "txt": text,
    "txt_ids": torch.zeros(1, 8, 3, device=DEVICE),
}
vector = torch.randn(1, 32, device=DEVICE)


def places():
    return [str(weight.device) for weight in model.parameters()]


before, free = places(), torch.cuda.memory_allocated()
virtual_gpu.reset()
with torch.no_grad():
    flux_train_utils.denoise(model, **inputs, vec=vector, timesteps=[1.0, 0.75, 0.5, 0.25, 0.0])
torch.cuda.synchronize()
counters = virtual_gpu.counters()
after = places()

image.requires_grad_()
guidance = torch.ones(1, device=DEVICE)
model(**inputs, y=vector, timesteps=torch.ones(1, device=DEVICE), guidance=guidance).sum().backward()
wanted = ("bytes_to_device", "bytes_to_host", "syncs", "frees")
print("JSON", json.dumps({**{name: counters[name] for name in wanted}, "same places": before == after}), sep="")
