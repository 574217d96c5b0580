"""Real scripts at full size on the virtual GPU reserve the memory that is predicted for their command lines."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LORA = "--network_dim 16 --mixed_precision bf16 --sdpa --gradient_checkpointing --cache_latents"

SAMPLES = "--sample_prompts {prompts} --sample_every_n_steps 1"

#: Each differs from the presets in what its memory depends on: order of loading, trained text encoders and their embeddings,
#: odd shapes in batches, copies of inputs, text encoders in 8 bits, quantizing on the GPU, upstream's block swap, fp16, a
#: paged optimizer, blocks that differ, images that a fine-tune encodes, also over several micro-steps, OFT's constants, an
#: average of 16-bit weights, variables of a fine-tune's script, also with swapped blocks, sampling with decoding under
#: autocast, with blocks that move back, and with the VAE in memory, an 8-bit base, also with swapped blocks, and with text
#: encoders in 8 bits, and trained text encoders whose family caches T5, also recorded as CUDA graphs.
COMMANDS = (
    f"sdxl_train_network.py --network_module networks.lora {LORA} --optimizer_type AdamW8bit --train_batch_size 3 "
    "--resolution 832,1216 --network_train_unet_only",
    f"sdxl_train_network.py --network_module networks.lora {LORA} --optimizer_type AdamW8bit --train_batch_size 3 "
    "--resolution 832,1216",
    f"flux_train_network.py --network_module networks.lora_flux {LORA} --optimizer_type AdamW --train_batch_size 2 "
    "--resolution 640,960 --fp8_base",
    f"flux_train_network.py --network_module networks.lora_flux {LORA} --optimizer_type Prodigy --train_batch_size 2 "
    "--resolution 768 --cache_text_encoder_outputs --network_train_unet_only --blocks_to_swap 10",
    "train_network.py --network_module networks.lora --network_dim 32 --network_args conv_dim=8 --optimizer_type Lion "
    "--train_batch_size 5 --resolution 640,512 --mixed_precision bf16 --sdpa",
    "hunyuan_image_train_network.py --preset hunyuan-image-lora/8gb",
    "train_network.py --preset sd15-lora/base --mixed_precision fp16 --resolution 1152,896 --network_dim 128",
    "sdxl_train_network.py --preset sdxl-lora/base --gradient_checkpointing --optimizer_type PagedAdamW8bit --network_dim 24",
    "sd3_train_network.py --preset sd3-lora/base --resolution 640,960 --optimizer_type AdamW8bit --blocks_to_swap 8",
    "flux_train.py --preset flux-finetune/base --no-cache_latents --train_batch_size 3 --resolution 512 --optimizer_type Lion",
    "sdxl_train.py --preset sdxl-finetune/base --no-cache_latents --train_batch_size 2 --gradient_accumulation_steps 3 "
    "--resolution 768 --optimizer_type AdamW8bit --gradient_checkpointing --full_bf16 --max_grad_norm 0",
    "sdxl_train_network.py --preset sdxl-lora/base --network_module networks.oft --network_dim 4",
    "lumina_train.py --sdpa --mixed_precision bf16 --full_bf16 --gradient_checkpointing --cache_latents --resolution 768 "
    "--cache_text_encoder_outputs --optimizer_type Adafactor --ema --ema_device gpu",
    "anima_train.py --mixed_precision bf16 --cache_text_encoder_outputs --resolution 1024 --train_batch_size 3 --ema "
    "--ema_device gpu --gradient_checkpointing --optimizer_type Adafactor --optimizer_args scale_parameter=False "
    "relative_step=False warmup_init=False --blocks_to_swap 10 --fused_backward_pass",
    "sd3_train.py --mixed_precision bf16 --cache_text_encoder_outputs --cache_latents --resolution 832,1216 --max_grad_norm 1 "
    "--gradient_checkpointing --optimizer_type Adafactor --optimizer_args scale_parameter=False relative_step=False "
    "warmup_init=False",
    f"anima_train_network.py --preset anima-lora/12gb {SAMPLES}",
    f"flux_train_network.py --preset flux-lora/12gb {SAMPLES}",
    f"sdxl_train_network.py --preset sdxl-lora/8gb {SAMPLES}",
    "sdxl_train_network.py --preset sdxl-lora/12gb-int8 --no-cache_text_encoder_outputs",
    "flux_train_network.py --preset flux-lora/base --gradient_checkpointing --base_precision int8 --blocks_to_swap 10",
    "flux_train_network.py --preset flux-lora/24gb-int8 --no-cache_text_encoder_outputs",
    "flux_train_network.py --preset flux-lora/base --no-network_train_unet_only --gradient_checkpointing --fp8_base "
    "--resolution 512 --network_dim 4 --optimizer_type AdamW8bit",
    "sd3_train_network.py --preset sd3-lora/base --no-network_train_unet_only",
    "flux_train_network.py --preset flux-lora/base --no-network_train_unet_only --gradient_checkpointing --cuda_graphs",
)

#: The generated code of a GPU's blocks differs a little from that of the estimate: dynamic shapes, other kernels of attention.
COMPILED = (
    "sdxl_train_network.py --preset sdxl-lora/base --no-gradient_checkpointing --selective_torch_compile",
    "flux_train_network.py --preset flux-lora/base --gradient_checkpointing --selective_torch_compile --cuda_graphs",
    "lumina_train_network.py --preset lumina-lora/base --gradient_checkpointing --selective_torch_compile",
    "flux_train_network.py --preset flux-lora/base --gradient_checkpointing --selective_torch_compile --base_precision int8",
)


#: Those of about a minute that CI runs, each with one generation: they hold estimates to what PyTorch's allocator reserves.
IN_CI = {COMMANDS[4]: pytest.mark.oldest, COMMANDS[7]: pytest.mark.newest}


def _rows():
    for command, percent in [*((each, 0.5) for each in COMMANDS), *((each, 2) for each in COMPILED)]:
        marks = [pytest.mark.thorough, IN_CI[command]] if command in IN_CI else pytest.mark.slow
        yield pytest.param(command, percent, marks=marks)


@pytest.mark.parametrize(("command", "percent"), list(_rows()))
def test_predicted_reserved_memory_is_near(gpu_environment, checkout, tmp_path, command, percent):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat --w 1024 --h 1024 --s 3 --d 1", encoding="utf-8")
    words = ["-m", "benchmarks.full_size", "--sd-scripts", str(checkout.path), "--scratch", str(tmp_path), "--fresh"]
    done = subprocess.run(
        [sys.executable, *words, "--command", command.format(prompts=prompts)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    row = json.loads(done.stdout[done.stdout.index("{") :])
    assert "failed" not in row["used"]
    assert abs(row["error_percent"]["reserved"]) < percent


FINE_TUNE = "sdxl_train.py --num_processes 2 --preset sdxl-finetune"

#: One of two processes -> percent of reserved memory. ZeRO-3 reduces gradients in memory of another stream, whose pieces have
#: slightly different sizes, so that PyTorch reserves up to three of them.
PARALLEL = {
    f"{FINE_TUNE}/base --ddp_gradient_as_bucket_view": 1,
    f"{FINE_TUNE}/base --full_bf16": 1,
    f"{FINE_TUNE}/zero3 --zero_stage 1": 1,
    f"{FINE_TUNE}/zero3 --zero_stage 2": 1,
    f"{FINE_TUNE}/zero2-offload": 5,
    f"{FINE_TUNE}/zero3": 5,
    f"{FINE_TUNE}/zero3 --offload_optimizer_device cpu --offload_param_device cpu": 20,
    "sdxl_train_network.py --num_processes 2 --preset sdxl-lora/16gb": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize(("command", "percent"), PARALLEL.items())
def test_predicted_memory_of_one_of_two_processes_is_near(gpu_environment, checkout, tmp_path, command, percent):
    if "zero" in command:
        pytest.importorskip("deepspeed")
    words = ["-m", "benchmarks.full_size", "--sd-scripts", str(checkout.path), "--scratch", str(tmp_path), "--fresh"]
    done = subprocess.run(
        [sys.executable, *words, "--gpu_memory", "80", "--command", command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    row = json.loads(done.stdout[done.stdout.index("{") :])
    assert "failed" not in row["used"]
    assert abs(row["error_percent"]["allocated"]) < 2
    assert abs(row["error_percent"]["reserved"]) < percent


#: With swapped blocks, little memory is left on 16 GB for the layers in fp32 with which a trial compares.
WITH_TRIAL = {
    "sdxl_train_network.py --preset 16gb": "16",
    "flux_train_network.py --preset 16gb": "16",
    "train_network.py --preset 8gb": "8",
}


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize(("command", "gpu"), WITH_TRIAL.items())
def test_a_trial_reserves_no_more_than_eager_passes(gpu_environment, checkout, tmp_path, command, gpu):
    words = ["-m", "benchmarks.host_time", "--sd-scripts", str(checkout.path), "--scratch", str(tmp_path), "--rounds", "1"]
    machine = {"VIRTUAL_GPU_LAUNCH_NS": "11000", "VIRTUAL_GPU_KERNEL_NS": "10000"}

    def measured(options):
        done = subprocess.run(
            [sys.executable, *words, "--variants", "default", "--gpu_memory", gpu, "--command", command + options],
            cwd=ROOT,
            env={**os.environ, **machine},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return ast.literal_eval(done.stderr.splitlines()[-1].partition(" default: ")[2])

    eager, tried = measured(" --speed off"), measured("")
    assert tried["launches"] < 0.7 * eager["launches"], "a feature was chosen"
    assert tried["reserved"] < 1.01 * eager["reserved"]
