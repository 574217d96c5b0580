"""``python -m benchmarks.worker``: run one variant's model step in its own process, as its parent commands.

The command line holds the variant as one JSON object, each line of standard input one command, and each line of standard output
one answer. Everything that scripts and libraries print goes to standard error.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.counting import count
from benchmarks.profiling import profile
from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate import measurement
from kohya_ext.estimate.memory_config import size
from kohya_ext.estimate.models import build
from kohya_ext.estimate.step import Training, configure, forward, make_batch, prepare, step_in_backward
from kohya_ext.gpu.peak_memory import peak_memory
from kohya_ext.patching.patch import Patcher, registry
from kohya_ext.patching.types import Batch
from kohya_ext.sdscripts.checkouts import Checkout, describe
from kohya_ext.tiny import shrink


@dataclass
class Step:
    """A training that is ready on a real device, and its next step."""

    training: Training
    scheduler: Any
    batch: Batch
    patcher: Patcher | None
    by_size: dict[tuple[int, int], Batch] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device of the step."""
        device: torch.device = self.training.accelerator.device
        return device

    def take(self) -> float:
        """Take one step as the training loop does, including reading the loss; return its seconds."""
        start = time.perf_counter()
        training = self.training
        accelerator, choices = training.accelerator, training.config
        with accelerator.accumulate(training.network or training.models.unet):
            loss = forward(training, self.batch.copy(), self.scheduler)
            accelerator.backward(loss)
            if training.network is not None:
                training.trainer.all_reduce_network(accelerator, training.network)
            if not choices.fused_backward_pass:
                if training.arguments.max_grad_norm:
                    accelerator.clip_grad_norm_(training.trained, training.arguments.max_grad_norm)
                training.optimizer.step()
                training.optimizer.zero_grad(set_to_none=True)
        value = loss.detach().item()
        if value != value:
            raise FloatingPointError("the loss is NaN")
        return time.perf_counter() - start

    def resize(self, width: int, height: int) -> None:
        """Use another size, in pixels, for the next steps."""
        if (width, height) not in self.by_size:
            self.training.config = replace(self.training.config, resolution=f"{width},{height}")
            with torch.device(self.device):
                self.by_size[width, height] = make_batch(self.training)
        self.batch = self.by_size[width, height]


def ready(spec: dict[str, Any]) -> Step:
    """Build the training of a variant with random weights.

    ``spec``: script, arguments, patched, sd_scripts. For a reduced SDXL U-Net also ``width`` (channels at the first resolution)
    and ``every_block`` (as many transformer layers as the real one); for a reduced FLUX ``flux_blocks`` (double, single).
    """
    shrink.UNET_WIDTH = spec.get("width", shrink.UNET_WIDTH)
    if spec.get("every_block"):
        shrink.UNET_DEPTHS.update({depth: depth for depth in shrink.UNET_DEPTHS})
    if "flux_blocks" in spec:
        shrink.FLUX_TRANSFORMER["depth"], shrink.FLUX_TRANSFORMER["depth_single_blocks"] = spec["flux_blocks"]
    checkout = _checkout(spec)
    command = _command(spec)
    patcher = Patcher(registry(), command.settings, checkout) if spec["patched"] else None
    if patcher is not None:
        patcher.arm()
    sys.path.insert(0, str(checkout.path))
    choices, arguments, trainer = measurement.read(checkout, command)
    configure(choices, arguments, trainer)
    accelerator = _accelerator(arguments)
    with torch.device(accelerator.device):
        # Build in the weights' final dtype, so that twelve billion of them never need more memory.
        torch.set_default_dtype(torch.float32 if choices.mixed_precision == "no" else torch.bfloat16)
        models = build(choices)
        torch.set_default_dtype(torch.float32)
        training = prepare(choices, arguments, trainer, models, accelerator)
        for module, _ in training.resident:
            if module is not training.network:
                _initialize(module)
        batch = make_batch(training)
    _take_away(training)
    if choices.fused_backward_pass:
        step_in_backward(training)
    else:
        if accelerator.device.type == "cpu":
            # The estimate's choice for a GPU; torch's own for a CPU is a loop.
            for group in training.optimizer.param_groups:
                if "foreach" in group:
                    group["foreach"] = None
        training.optimizer = accelerator.prepare(training.optimizer)
    scheduler = trainer.get_noise_scheduler(arguments, accelerator.device)
    _clear()
    return Step(training, scheduler, batch, patcher, {size(training.config): batch})


def _checkout(spec: dict[str, Any]) -> Checkout:
    checkout = describe(Path(spec["sd_scripts"]), "named by the benchmark")
    assert checkout is not None, "the parent process has checked it"
    return checkout


def _command(spec: dict[str, Any]) -> CommandLine:
    return CommandLine(_checkout(spec).script(spec["script"]), spec["arguments"], {})


def _accelerator(arguments: Any) -> Any:
    """Return sd-scripts' accelerator, from the module where its generation has it."""
    try:
        module = importlib.import_module("library.accelerator_setup")
    except ImportError:
        module = importlib.import_module("library.train_util")
    return module.prepare_accelerator(arguments)


def _initialize(module: Any) -> None:
    """Set random weights that keep activations finite; some builders leave memory uninitialized."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dtype.itemsize == 1:
                continue
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _take_away(training: Training) -> None:
    """Free the models that the script moves off the GPU before its first step, because their outputs are cached."""
    kept = [module for module, _ in training.resident]
    for module in (*training.models.text_encoders, training.models.vae):
        if all(module is not other for other in kept):
            module.to("meta")


def _clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# --- commands --------------------------------------------------------------------------------------------------------


def take_steps(
    step: Step, count: int, size: list[int] | None = None, clear: bool = False, without: list[str] | None = None
) -> dict[str, Any]:
    """Take steps; return the wall and processor seconds of each, memory peaks in bytes, and the graphs compiled so far.

    With ``clear`` the allocator first frees its cache, because compiling reserves more than the steps after it.
    ``without`` names patches to turn off from now on.
    """
    if without is not None:
        _rearm(step, without)
    if clear:
        _clear()
    if size is not None:
        step.resize(*size)
    if step.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, processor = [], []
    for _ in range(count):
        used = time.process_time()
        seconds.append(step.take())
        processor.append(time.process_time() - used)
    peaks = peak_memory()
    names = {"host_resident": "host_resident", "cuda_allocated": "allocated", "cuda_reserved": "reserved"}
    memory = {names[name]: peak for name, peak in peaks.items()}
    return {"seconds": seconds, "processor_seconds": processor, "memory": memory, "compiled": _compiled()}


def _rearm(step: Step, without: list[str]) -> None:
    patcher = step.patcher
    assert patcher is not None, "an upstream step has no patches"
    patcher.undo()
    step.patcher = Patcher(patcher.patches, patcher.settings.with_(disable_patch=tuple(without)), patcher.checkout)
    step.patcher.arm()


def _compiled() -> dict[str, int]:
    """Return the graphs and graph breaks of this process, whatever compiled them."""
    if "torch._dynamo" not in sys.modules:
        return {"graphs": 0, "breaks": 0}
    counters = importlib.import_module("torch._dynamo.utils").counters
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def bucket_set(step: Step, aspects: list[float]) -> dict[str, Any]:
    """Return sd-scripts' buckets for some aspect ratios (width / height), and use them from now on."""
    arguments, (width, height) = step.training.arguments, size(step.training.config)
    steps = arguments.bucket_reso_steps or 64
    make = importlib.import_module("library.model_util").make_bucket_resolutions
    buckets = make((width, height), min(arguments.min_bucket_reso, min(width, height) // 2), 2 * max(width, height), steps)
    nearest = [min(buckets, key=lambda side, aspect=aspect: abs(side[0] / side[1] - aspect)) for aspect in aspects]  # type: ignore[misc]
    chosen = list(dict.fromkeys(map(tuple, nearest)))
    # A substitute for the data loader: patches read only the buckets of its dataset.
    buckets_of_run = SimpleNamespace(resos=chosen, buckets=[["image"]] * len(chosen))
    data_set = SimpleNamespace(bucket_manager=buckets_of_run, batch_size=1)
    step.training.accelerator._dataloaders.append(SimpleNamespace(dataset=data_set))
    return {"buckets": chosen}


def profile_step(step: Step) -> dict[str, Any]:
    """Return the profile of one step."""
    training = step.training
    modules = [module for module, _ in training.resident]
    state = (value for values in training.optimizer.state.values() for value in values.values())
    alive = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    alive += [value for value in (*state, *step.batch.values()) if isinstance(value, torch.Tensor)]
    return profile(step.take, alive, step.device.type == "cuda")


def describe_facts(step: Step) -> dict[str, Any]:
    """Return the facts that the patches report."""
    if step.patcher is None:
        return {"patches": []}
    active = step.patcher.active()
    return {
        "patches": [patch.name for patch in active],
        "facts": {patch.name: dict(patch.facts()) for patch in active if patch.facts is not None},
    }


def describe_device() -> dict[str, Any]:
    """Describe the device that ``accelerate`` would use."""
    if os.environ.get("ACCELERATE_USE_CPU") or not torch.cuda.is_available():
        torch.set_num_threads(1)  # as its steps run: see processes.Bench.environment
        return {"device": "cpu", "threads": torch.get_num_threads()}
    about = torch.cuda.get_device_properties(0)
    driver = Path("/proc/driver/nvidia/version")
    return {
        "device": "cuda",
        "gpu": about.name,
        "gpu_memory": about.total_memory,
        "compute_capability": f"{about.major}.{about.minor}",
        "cuda": torch.version.cuda,
        "driver": driver.read_text(encoding="utf-8").splitlines()[0] if driver.is_file() else None,
    }


#: Side of the matrices whose product gives the FLOP/s of a device.
MATMUL = {"cuda": 8192, "cpu": 1024}


def matmul_rate(device: str, count: int = 20) -> dict[str, Any]:
    """Return the FLOP/s of square bf16 products: the median of ``count``, after as many for warm-up."""
    size = MATMUL[device]
    first, second = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    wait = torch.cuda.synchronize if device == "cuda" else torch.cpu.synchronize
    seconds = []
    for _ in range(2 * count):
        wait()
        start = time.perf_counter()
        first @ second
        wait()
        seconds.append(time.perf_counter() - start)
    return {"flops_per_second": 2 * size**3 / median(seconds[count:]), "dtype": "bfloat16", "size": size}


def count_flops(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the FLOPs of one step, from the estimate's run on fake tensors."""
    return {"flops": measurement.measure(_checkout(spec), _command(spec)).flops}


def count_work(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the kernels, bytes and FLOPs of one step."""
    return count(_checkout(spec), _command(spec), spec["without"])


def main() -> None:
    """Prepare the step, and answer commands until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    spec = json.loads(sys.argv[1])

    def answer(work: Callable[[], dict[str, Any]]) -> bool:
        try:
            answers.write(json.dumps(work()) + "\n")
            return True
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines()
            answers.write(json.dumps({"error": f"{type(error).__name__}: {lines[0] if lines else ''}"}) + "\n")
            return False

    once = {"flops": count_flops, "count": count_work}.get(spec["work"])
    if once is not None:
        answer(lambda: once(spec))
        return
    if spec["work"] == "device":
        about = describe_device()
        answer(lambda: {**about, "matmul": matmul_rate(about["device"])})
        return
    start = time.perf_counter()
    steps: list[Step] = []

    def start_up() -> dict[str, Any]:
        steps.append(ready(spec))
        return {"prepared_seconds": time.perf_counter() - start}

    if not answer(start_up):
        return
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "steps": take_steps,
        "facts": describe_facts,
        "buckets": bucket_set,
        "profile": profile_step,
    }
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        answer(lambda name=name, command=command: commands[name](steps[0], **command))  # type: ignore[misc]


if __name__ == "__main__":
    main()
