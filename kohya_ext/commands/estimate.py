"""Predict memory and seconds of a command line, without a GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from kohya_ext import charts
from kohya_ext.config import training_command
from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.preset_files import FAMILIES
from kohya_ext.console import note, warn
from kohya_ext.dry_run import estimation
from kohya_ext.errors import UserError
from kohya_ext.estimate import cache, machine, memory_config, step_time
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.estimate.result import BYTES_PER_RECORDED_KERNEL, CONTEXT_BYTES, Estimate
from kohya_ext.estimate.seconds import Prediction
from kohya_ext.gpu.cap import USABLE_FRACTION, reason_unused, tensor_limit
from kohya_ext.output import Console
from kohya_ext.planning import automatic, chosen_speed
from kohya_ext.planning.checkpointing_ratio import smallest_ratio
from kohya_ext.planning.tiers import fits, usable_bytes
from kohya_ext.preflight.models import problems_of_model
from kohya_ext.sdscripts import families, networks
from kohya_ext.units import AUTO, GB, GIB, format_size, gigabytes, label

#: Returns the estimates of command lines.
Estimator = Callable[[Sequence[CommandLine]], Sequence[Estimate]]

NO_GPU = 'For seconds per step, give --gpu with the name of a GPU: --gpu "RTX 4070".'

#: Measured: benchmarks/README.md.
BUCKETS = (
    "This is for images of one size. With accumulated gradients, several sizes (--enable_bucket) can reserve 3% more. Under "
    "Linux, --expandable_segments prevents it."
)

ACCURACY = "compared with PyTorch's CUDA allocator on a virtual GPU and an H100, not on a GeForce GPU"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    training_command.configure(parser, "its arguments as for a run, including --preset", _add_own)


def _add_own(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON, sizes in bytes")
    parser.add_argument(
        "--vram",
        metavar="SIZE",
        default=argparse.SUPPRESS,
        help='the advertised size of the GPU: 16, 16gb and "16 GB" are the same; 15.5GiB and a number of bytes are exact; '
        "default: the size that the preset is for",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        default=argparse.SUPPRESS,
        help='the GPU for the seconds per step, and for --vram if that is not given: "RTX 4070", "RTX 3080 12GB"; default: '
        "the one of this machine",
    )
    machine.add_gpu_host(parser)
    parser.add_argument(
        "--fresh",
        action="store_true",
        default=argparse.SUPPRESS,
        help="ignore known estimates and run the script dry: for forks and for scripts that you have changed (20 to 60 s)",
    )
    parser.add_argument(
        "--fit",
        action="store_true",
        default=argparse.SUPPRESS,
        help="find the smallest, and so fastest, --gradient_checkpointing_ratio that fits the GPU less 5 percent",
    )
    parser.add_argument(
        "--chart", type=Path, metavar="FILE", default=argparse.SUPPRESS, help="write a chart of the parts as a PNG"
    )


def warn_of_model(command: CommandLine) -> None:
    """Warn if the model that is given cannot be trained, so that another one is estimated."""
    kind = families.checkpoint_of(command.name, command.values)
    for problem in problems_of_model(Path(command.name), command.values):
        warn(f"{problem}. This estimate is for a usual checkpoint{f' of {kind.title}' if kind is not None else ''}")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code, 1 if the run does not fit the GPU."""
    request = training_command.read(arguments, automatic, "nothing to estimate", _add_own)
    checkout, command, own = request.checkout, request.command, request.own
    warn_of_model(command)
    figure = charts.figure(9, 2.6) if "chart" in own else None
    if "vram" in own:
        command = command.with_({"vram": own["vram"]})
    gpu = machine.chosen(own) or machine.gpu()
    if gpu is not None:
        command = replace(command, has_bf16=gpu.has_bf16)
    card = command.settings.vram or (gpu.memory if gpu is not None and "gpu" in own else _preset_card(command))
    estimate = partial(estimation.estimate_all, checkout, fresh=bool(own.get("fresh")), timed=gpu is not None)
    config = memory_config.any_script(command)
    if (problem := memory_config.sample_size_problem(config)) is not None:
        warn(problem)
    budget: Budget | None = None
    if own.get("fit"):
        prediction, command = _fit(estimate, command, card)
    elif command.settings["vram_budget"] is not None:
        prediction, budget = _with_budget(estimate, command, config, card)
    else:
        prediction = estimate([command])[0]
    time = step_time.predict(prediction, command, gpu) if gpu is not None else None
    if own.get("json"):
        print(json.dumps(_as_json(prediction, card, budget, time), indent=1))
    else:
        console = Console()
        console.print(_table(prediction))
        if time is not None and gpu is not None:
            seconds = step_time.lines(time, gpu)
            if command.name in FAMILIES:  # the features that --speed chooses are weighed by other estimates
                look_up = partial(cache.find, checkout, disabled_patches=command.settings.disable_patch, timed=True)
                seconds += chosen_speed.lines(command, gpu, card or gpu.memory, look_up)
        else:
            seconds = [(gpu.reason_without_kernels(config.base_precision) if gpu is not None else None) or NO_GPU]
        accumulates = config.gradient_accumulation_steps > 1 and config.enable_bucket
        fragments = accumulates and not config.expandable_segments
        more = [*([BUCKETS] if fragments else []), *([budget.words] if budget is not None else [])]
        for line in [*_lines(prediction, card), *seconds, *more]:
            console.print(line, highlight=False, soft_wrap=True)
    if figure is not None:
        _draw(figure, prediction, card)
        charts.save(figure, own["chart"])
    return 0 if (card is None or fits(prediction, card)) and (budget is None or budget.fits) else 1


def _fit(estimate: Estimator, command: CommandLine, card: int | None) -> tuple[Estimate, CommandLine]:
    """Return the estimate and the arguments with the smallest ratio of checkpointed blocks that fits."""
    if card is None:
        raise UserError("--fit needs the GPU's size; give --vram 16 or a preset for a size")
    if not memory_config.any_script(command).gradient_checkpointing:
        raise UserError("--fit reduces the checkpointed blocks; give --gradient_checkpointing or a preset with it")

    def ask(ratios: Sequence[float]) -> Sequence[Estimate]:
        return estimate([_with_ratio(command, ratio) for ratio in ratios])

    fitted = smallest_ratio(ask, usable_bytes(card), estimation.together())
    if fitted is None:
        raise UserError(
            f"the run does not fit the {label(card)} less 5 percent, even with every block checkpointed; see `plan`"
        )
    ratio, prediction = fitted
    note(f"--gradient_checkpointing_ratio {ratio:g} is the smallest that fits the {label(card)} less 5 percent")
    return prediction, _with_ratio(command, ratio)


def _with_ratio(command: CommandLine, ratio: float) -> CommandLine:
    return command.with_({"gradient_checkpointing": True, "gradient_checkpointing_ratio": f"{ratio:g}"})


@dataclass(frozen=True)
class Budget:
    """The effect of ``--vram_budget`` on a run."""

    limit: int
    """Bytes for tensors."""
    fits: bool
    gradient_checkpointing_ratio: float | None
    """The ratio that the run arrives at; None with compiled blocks, or if the budget frees no blocks."""
    words: str


def _with_budget(estimate: Estimator, command: CommandLine, config: MemoryConfig, card: int | None) -> tuple[Estimate, Budget]:
    """Return the estimate of a run with its ``--vram_budget``, and the budget's effect."""
    budget = command.settings["vram_budget"]
    assert budget is not None, "called with a budget"
    if budget == AUTO and card is None:
        raise UserError("--vram_budget auto needs the GPU's size; give --vram 16 or a preset for a size")
    limit = round(tensor_limit(budget, (card or 0) - CONTEXT_BYTES, card or 0))
    usable = round(USABLE_FRACTION * limit)

    def ask(ratios: Sequence[float]) -> Sequence[Estimate]:
        return estimate([_with_ratio(command, ratio) for ratio in ratios])

    ratio: float | None = None
    if (reason := reason_unused(command.name, config, command.settings)) is not None:
        prediction = estimate([command])[0]
        effect = f"no blocks are freed: {reason}"
    elif config.selective_torch_compile:
        prediction = ask([1.0])[0]
        left = gigabytes(max(usable - prediction.reserved, 0))
        effect = f"every block is checkpointed at first, as estimated here; then compiled blocks may save {left} GB more"
    else:
        note("estimating the blocks that --vram_budget frees: up to 6 dry runs of 20 to 60 seconds")
        fitted = smallest_ratio(ask, usable + CONTEXT_BYTES, estimation.together())
        ratio, prediction = fitted or (1.0, ask([1.0])[0])
        effect = f"about {ratio:.0%} of the blocks stay checkpointed, which the run selects by their measured size"
    fits = prediction.reserved <= limit
    needs = "" if fits else f", but the run needs {gigabytes(prediction.reserved)} GB and would be out of memory"
    name = budget if isinstance(budget, str) else format_size(budget)
    return prediction, Budget(
        limit, fits, ratio, f"--vram_budget {name} leaves {gigabytes(limit)} GB for tensors{needs}; {effect}."
    )


def _preset_card(command: CommandLine) -> int | None:
    """Return the GPU size of the last tier among the presets: ``vram_gb`` is the advertised size, which is in GiB."""
    sizes = [preset.about["vram_gb"] for preset in command.presets.presets if "vram_gb" in preset.about]
    return round(float(str(sizes[-1])) * GIB) if sizes else None


def _as_json(prediction: Estimate, card: int | None, budget: Budget | None, time: Prediction | None) -> dict[str, Any]:
    rest = None if card is None else card - prediction.total
    return {
        **{name: value for name, value in asdict(prediction).items() if name != "work"},
        "context_and_workspaces": CONTEXT_BYTES,
        "cuda_graphs_in_the_driver": prediction.recordings,
        "nccl": prediction.communication,
        "total": prediction.total,
        "card": card,
        "margin": rest,
        **({"vram_budget": asdict(budget)} if budget is not None else {}),
        **({"time": step_time.as_json(time)} if time is not None else {}),
        "calibrated_on_cuda": False,
    }


def _rows(prediction: Estimate) -> list[tuple[str, int]]:
    return [
        *prediction.parts.items(),
        ("allocator reserve", prediction.reserved - prediction.allocated),
        ("CUDA context + workspaces (assumed)", CONTEXT_BYTES),
        ("CUDA graphs in the driver (assumed)", prediction.recordings),
        ("NCCL (assumed)", prediction.communication),
    ]


def _table(prediction: Estimate) -> Table:
    table = Table("at the peak", "GB", title=f"{prediction.config['script']}: {gigabytes(prediction.total)} GB in total")
    table.columns[1].justify = "right"
    for name, size in _rows(prediction):
        if size < GB / 200:
            continue  # would print as 0.00
        table.add_row(name, gigabytes(size))
    table.add_section()
    table.add_row("tensors (max_memory_allocated)", gigabytes(prediction.allocated))
    table.add_row("reserved (max_memory_reserved)", gigabytes(prediction.reserved))
    table.add_row("total (nvidia-smi)", gigabytes(prediction.total))
    if prediction.host:
        table.add_section()
        for name, size in prediction.host.items():
            table.add_row(f"host: {name}", gigabytes(size))
        table.add_row("host memory of DeepSpeed", gigabytes(sum(prediction.host.values())))
    return table


def _lines(prediction: Estimate, card: int | None) -> Sequence[str]:
    phase_peaks = ", ".join(f"{name} {gigabytes(size)}" for name, size in prediction.phase_peaks.items())
    versions = prediction.versions
    lines = [
        f"Peak phase: {prediction.peak_phase}. Peak of tensors in each phase (GB): {phase_peaks}.",
        f"{prediction.flops / 1e12:.2f} TFLOP per step, {prediction.trainable_parameters / 1e6:.1f}M trainable parameters, "
        f"for {_workload(prediction)}.",
    ]
    if card is not None:
        rest = card - prediction.total
        balance = f"has {gigabytes(rest)} GB left" if rest >= 0 else f"lacks {gigabytes(-rest)} GB"
        if rest >= 0 and not fits(prediction, card):
            balance += f", less than the 5 percent ({gigabytes(card - usable_bytes(card))} GB) that a run needs free"
        lines.append(f"The {label(card)} {balance}.")
        if not fits(prediction, card):
            lines.append(_way_out(prediction))
        if rest < 0 <= rest + prediction.reserved - prediction.minimum_reserved:
            lines.append(
                f"It can still run, more slowly: under Linux the allocator frees unused segments, down to "
                f"{gigabytes(prediction.minimum_reserved)} GB. On Windows and WSL the driver spills to system memory."
            )
    lines += _of_dry_run(prediction)
    meaning = networks.meaning_of_dim(prediction.config.get("network_module"), prediction.config.get("network_args"))
    if meaning is not None:
        name, dimension = prediction.config["network_module"], prediction.config["network_dim"]
        lines.append(f"--network_dim {dimension} is not a rank, but {meaning} with {name}, and is counted as that.")
    lines += _of_processes(prediction)
    if prediction.recorded_kernels:
        lines.append(
            f"CUDA graphs: {prediction.recorded_kernels:,} kernels are recorded for one image size, as estimated here; each "
            f"further one takes {gigabytes(prediction.recordings)} GB of the driver's memory (assumed: "
            f"{BYTES_PER_RECORDED_KERNEL / 1000:g} KB per kernel). A run in which they do not fit continues without them."
        )
    if prediction.config.get("base_precision"):
        lines.append(
            "The 8-bit base is experimental. Its memory is for a GPU that has the kernels, and seconds are less certain."
        )
    if prediction.config.get("selective_torch_compile"):
        lines.append(
            "Compiled blocks: inductor's generated code, run on tensors without data. The memory of compiling is not included."
        )
    elif prediction.config.get("torch_compile") or prediction.config.get("compile"):
        lines.append("sd-scripts' own compiling is not included: this estimate is without it, which usually needs more memory.")
    lines.append(
        f"1 GB is 1e9 bytes; {ACCURACY}. Versions: sd-scripts {versions['sd_scripts']}, torch {versions['torch']}, "
        f"kohya_ext {versions['kohya_ext']}. "
        "Saving needs less than a step: 1 MB more than the model for a LoRA, 0.9 GB for all of SDXL in fp32."
    )
    return lines


def _of_dry_run(prediction: Estimate) -> Iterator[str]:
    """Yield what a dry run is, and what it assumes and leaves out of the user's command line."""
    yield f"By a dry run: three steps of {prediction.config['script']} itself, on tensors without data."
    if prediction.config["script"] in FAMILIES and (assumed := MemoryConfig(**prediction.config).assumed):
        yield f"Assumed, since it depends on the model files: {assumed}."
    elif prediction.missing:
        yield f"Assumed, since these files are missing: the usual ones of {prediction.missing}."
    if prediction.left_out:
        yield f"Not included: {', '.join(prediction.left_out)}."


def _way_out(prediction: Estimate) -> str:
    script, config = prediction.config["script"], prediction.config
    if not config.get("gradient_checkpointing"):
        fewer = "--gradient_checkpointing --fit checkpoints as few blocks as necessary; "
    elif config.get("gradient_checkpointing_ratio"):
        fewer = "--fit checkpoints as few blocks as necessary; "
    else:
        fewer = ""  # every block is checkpointed already
    return f"To make it fit: {fewer}`python -m kohya_ext plan {script}` with your other options finds the fastest settings."


def _of_processes(prediction: Estimate) -> Iterator[str]:
    """Yield what the figures of one of several processes mean."""
    processes = prediction.config.get("num_processes") or 1
    if prediction.config.get("deepspeed"):
        stage = prediction.config.get("zero_stage", 2)
        yield f"Per GPU: one of {processes} processes with DeepSpeed's ZeRO-{stage}. Compared with DeepSpeed 0.19.8."
    elif processes > 1:
        yield "Per GPU: each process has the same memory, with any number of GPUs."
    if prediction.host:
        every = gigabytes(processes * sum(prediction.host.values()))
        yield f"Host memory is per process: {processes} need {every} GB. At the start each process reads the model, too."


def _workload(prediction: Estimate) -> str:
    batch = prediction.config.get("train_batch_size", 1)
    ratio = prediction.config.get("gradient_checkpointing_ratio")
    covered = "" if ratio is None else f", {ratio:.0%} of the blocks checkpointed"
    size = str(prediction.config.get("resolution", "the prompts' sizes in")).replace(",", "x")
    return f"{size} pixels, batch {batch}{covered}"


def _draw(figure: Any, prediction: Estimate, card: int | None) -> None:
    axes = figure.add_subplot()
    left = 0.0
    for name, size in _rows(prediction):
        axes.barh([0], [size / GB], left=left, label=f"{name} {gigabytes(size)}")
        left += size / GB
    if card is not None:
        axes.axvline(card / GB, color="black", linestyle="--", label=f"GPU {gigabytes(card)}")
    axes.set(
        yticks=[],
        xlabel="GB (1e9 bytes), not compared with a GeForce GPU",
        title=f"{prediction.config['script']}, {_workload(prediction)}",
    )
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
