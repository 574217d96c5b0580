"""Train a LoRA without sd-scripts, for a demo where it is unavailable: ``python -m kohya_ext.launch.demo_training``.

The model is a tiny random U-Net and text encoder with SDXL's structure, from diffusers and transformers, with LoRA layers
on its attention. Options, presets and patches work as in sd-scripts. It learns to predict noise on very small images instead
of latents: the loss is real, but the trained model is useless.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from kohya_ext.config.arguments import take_over
from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.preset_files import Overlay
from kohya_ext.console import stop
from kohya_ext.errors import UserError
from kohya_ext.launch.session import Session
from kohya_ext.planning import automatic
from kohya_ext.sdscripts.checkouts import Checkout

#: The script whose presets are used.
STANDS_FOR = "sdxl_train_network.py"

LATENT = 16
"""Height and width of the images that replace latents, in pixels."""
CONTEXT = 64
POOLED = 32


def setup_parser() -> argparse.ArgumentParser:
    """Return a parser for the options of this loop, named as in sd-scripts."""
    parser = argparse.ArgumentParser(prog="python -m kohya_ext.launch.demo_training", description=__doc__)
    for name in ("train_data_dir", "output_dir", "output_name", "logging_dir"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--max_train_steps", type=int, default=60)
    parser.add_argument("--train_batch_size", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--network_dim", type=int, default=4)
    parser.add_argument("--network_alpha", type=float, default=1.0)
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--optimizer_type", choices=["AdamW"], default="AdamW")
    parser.add_argument("--network_module", choices=["networks.lora"], default="networks.lora")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    return parser


def accept_presets(parser: argparse.ArgumentParser, presets: Overlay) -> None:
    """Add every key of the presets to the parser. Keys that this loop does not support have no effect."""
    known = {action.dest for action in parser._actions}
    for key, preset in presets.values.items():
        if key in known:
            continue
        if isinstance(preset.value, bool):
            parser.add_argument(f"--{key}", action="store_true")
        else:
            parser.add_argument(f"--{key}", type=type(preset.value))


def main() -> None:
    """Parse the command line, apply the patches, train and save."""
    own = Checkout(Path(__file__).parent, None, "unknown", "embedded")
    argv = [*sys.argv[1:], "--allow-unknown-version"]
    try:
        session = Session.start(own, CommandLine(Path(STANDS_FOR), argv, os.environ, automatic))
    except UserError as error:
        stop(str(error))
    parser = setup_parser()
    accept_presets(parser, session.command.presets)
    take_over(parser, session.command)
    train(parser.parse_args())


def train(args: argparse.Namespace) -> None:
    """Train LoRA layers for ``max_train_steps`` steps and save them as safetensors."""
    import torch
    from diffusers import DDPMScheduler
    from safetensors.torch import save_file
    from torch.utils.tensorboard import SummaryWriter
    from tqdm import tqdm

    torch.manual_seed(args.seed)
    unet, text_encoder = _models()
    latents, tokens = _dataset(Path(args.train_data_dir))
    if args.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
        text_encoder.gradient_checkpointing_enable()
    unet.requires_grad_(False)
    text_encoder.requires_grad_(False)
    loras = _add_lora(unet, args.network_dim, args.network_alpha)
    unet.train()
    optimizer = torch.optim.AdamW([weight for pair in loras.values() for weight in pair], lr=args.learning_rate)
    schedule = DDPMScheduler()
    precision = torch.autocast("cpu", torch.bfloat16, enabled=args.mixed_precision == "bf16")
    times = torch.tensor([[LATENT, LATENT, 0, 0, LATENT, LATENT]], dtype=torch.float32)
    with SummaryWriter(args.logging_dir) as writer:
        for step in tqdm(range(args.max_train_steps), desc="steps"):
            chosen = torch.randint(len(latents), (args.train_batch_size,))
            noise = torch.randn_like(latents[chosen])
            timesteps = torch.randint(schedule.config.num_train_timesteps, (args.train_batch_size,))
            noisy = schedule.add_noise(latents[chosen], noise, timesteps)
            with precision:
                encoded = text_encoder(tokens[chosen])
                added = {"text_embeds": encoded.text_embeds, "time_ids": times.expand(args.train_batch_size, -1)}
                predicted = unet(noisy, timesteps, encoded.last_hidden_state, added_cond_kwargs=added).sample
            loss = torch.nn.functional.mse_loss(predicted.float(), noise)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            writer.add_scalar("loss/current", loss.item(), step + 1)
    flat = {
        f"lora_unet_{name.replace('.', '_')}.{part}.weight": weight.detach().contiguous()
        for name, pair in loras.items()
        for part, weight in zip(("lora_down", "lora_up"), pair, strict=True)
    }
    save_file(flat, str(Path(args.output_dir) / f"{args.output_name}.safetensors"))


def _models() -> tuple[Any, Any]:
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    unet = UNet2DConditionModel(
        sample_size=LATENT,
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 2),
        layers_per_block=1,
        cross_attention_dim=CONTEXT,
        attention_head_dim=(2, 4, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=16,
        projection_class_embeddings_input_dim=POOLED + 6 * 16,
    )
    text = CLIPTextConfig(
        vocab_size=256,
        hidden_size=CONTEXT,
        intermediate_size=2 * CONTEXT,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=POOLED,
        max_position_embeddings=77,
        bos_token_id=0,
        eos_token_id=255,
        pad_token_id=1,
    )
    return unet, CLIPTextModelWithProjection(text)


def _dataset(folder: Path) -> tuple[Any, Any]:
    """Return latents (images, 4, LATENT, LATENT) in [-1, 1] and caption bytes (images, 77)."""
    import numpy
    import torch
    from PIL import Image

    latents, tokens = [], []
    for file in sorted(folder.rglob("*.png")):
        pixels = numpy.asarray(Image.open(file).convert("RGB").resize((LATENT, LATENT)), dtype=numpy.float32) / 127.5 - 1
        colour = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
        latents.append(torch.cat([colour, colour.mean(0, keepdim=True)]))
        caption = file.with_suffix(".txt").read_bytes()[:75]
        tokens.append(torch.tensor([0, *caption, 255, *[1] * (75 - len(caption))]))
    return torch.stack(latents), torch.stack(tokens)


def _add_lora(unet: Any, rank: int, alpha: float) -> dict[str, tuple[Any, Any]]:
    """Add a low-rank update to every attention projection; return name -> (down, up), the trainable weights."""
    import torch

    loras: dict[str, tuple[Any, Any]] = {}
    for name, module in unet.named_modules():
        if isinstance(module, torch.nn.Linear) and "attn" in name:
            down = torch.nn.Parameter(torch.randn(rank, module.in_features) / rank)
            up = torch.nn.Parameter(torch.zeros(module.out_features, rank))
            loras[name] = (down, up)

            def add(module: Any, inputs: Any, output: Any, down: Any = down, up: Any = up) -> Any:
                return output + (inputs[0] @ down.T.to(output.dtype) @ up.T.to(output.dtype)) * (alpha / rank)

            module.register_forward_hook(add)
    return loras


if __name__ == "__main__":
    main()
