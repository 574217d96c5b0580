"""Checks whether blocks can be compiled, and a model recorded, made before either."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from kohya_ext.kernels.triton_package import missing_triton

#: Older versions treat a block's parameters as constants of its graph, and compile every block separately.
#: https://pytorch.org/docs/stable/torch.compiler_dynamo_overview.html (``inline_inbuilt_nn_modules``)
OLDEST_TORCH = Version("2.5")

DEFAULT_BACKEND = "inductor"


def find_obstacle(device: str, backend: str = DEFAULT_BACKEND) -> str | None:
    """Return why blocks cannot be compiled on a device type (``cuda``, ``cpu``, ...) and what to do; None if they can.

    Checks only that the parts are installed. An installed compiler that fails is handled by `fallback`.
    """
    import torch

    if Version(torch.__version__) < OLDEST_TORCH:
        return f"torch {torch.__version__} is too old; install torch {OLDEST_TORCH} or newer"
    try:
        from torch._dynamo.eval_frame import check_if_dynamo_supported

        check_if_dynamo_supported()
    except RuntimeError as error:  # Python is too new, or Windows with torch before 2.4
        return f"torch {torch.__version__}: {error}"
    if backend != DEFAULT_BACKEND:
        return None
    if device in ("cuda", "xpu"):
        return _triton_obstacle()
    if device == "cpu":
        return _cpp_obstacle()
    return f"torch.compile is untested on {device}"


def _triton_obstacle() -> str | None:
    from torch.utils import _triton

    if (missing := missing_triton()) is not None:
        return missing
    if not _triton.has_triton():
        return "Triton does not support this device; an NVIDIA GPU of compute capability 7.0 or newer is required"
    # Triton compiles its launchers at run time. Its Windows package includes a compiler.
    # https://github.com/triton-lang/triton/blob/main/python/triton/runtime/build.py
    if os.name != "nt" and not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler; install gcc or clang, or set CC to one"
    return None


def _cpp_obstacle() -> str | None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # its exception classes moved between versions
        return f"no working C++ compiler; install g++ (Windows: Visual Studio's C++ tools) or set CXX to one ({error})"
    return None


def reason_not_to_compile(args: Any) -> str | None:
    """Return why blocks are not compiled with a script's arguments; None if they are."""
    if getattr(args, "torch_compile", False):
        return "--torch_compile already compiles the whole model; remove it to compile the blocks"
    if getattr(args, "compile", False):
        return "sd-scripts' --compile already compiles the blocks"
    if getattr(args, "deepspeed", False):
        return "DeepSpeed replaces the model's forward"
    if getattr(args, "split_attn", False):
        return "--split_attn slices every sample at a length read from the GPU, which breaks the graph; remove it"
    return _random_structure(args)


#: Options of the scripts that move weights or change the passes from step to step.
_NOT_RECORDED = (
    *("blocks_to_swap", "cpu_offload_checkpointing", "unsloth_offload_checkpointing"),
    *("torch_compile", "compile", "deepspeed"),
)


def reason_not_to_record(args: Any) -> str | None:
    """Return why a run with a script's arguments cannot be recorded as CUDA graphs; None if it may be."""
    if not getattr(args, "network_module", None):
        return "only networks such as LoRA are supported, not the training of a whole model"
    for name in _NOT_RECORDED:
        if getattr(args, name, None):
            return f"--{name} is not supported"
    drops = getattr(args, "network_dropout", None) or _network_args(args).get("rank_dropout", "").strip("0.")
    if drops and getattr(args, "gradient_checkpointing", None):
        return "dropout with gradient checkpointing restores random states, which cannot be recorded"
    module = getattr(args, "network_module", "")
    if module == "networks.oft_v2":
        return "networks.oft_v2 is not tested with it"
    if module.startswith(("networks.oft", "networks.boft")) or "oft" in _network_args(args).get("algo", ""):
        return "OFT inverts matrices, and the CPU checks every inverse for errors"
    return _random_structure(args)


def _network_args(args: Any) -> dict[str, str]:
    return dict(option.split("=", 1) for option in getattr(args, "network_args", None) or () if "=" in option)


def _random_structure(args: Any) -> str | None:
    """Return why the user's network cannot be traced: its structure is random in every call; None if it can."""
    given = _network_args(args)
    if getattr(args, "network_module", None) == "networks.dylora" or given.get("algo") == "dylora":
        return "DyLoRA draws a random rank in every call of every layer, which breaks the graph"
    if given.get("module_dropout", "").strip("0."):
        # A mask could be traced, but would change the results: a masked layer has a gradient of zero instead of none, and
        # Adam then still moves its weights by their momentum.
        return (
            "module_dropout skips layers at random in every call, which breaks the graph; "
            "rank_dropout and --network_dropout can be compiled"
        )
    return None


def ignored_dynamo_backend(environ: Mapping[str, str]) -> str | None:
    """Return a warning about a configured dynamo backend that sd-scripts ignores; None if none is configured.

    sd-scripts passes ``dynamo_backend="NO"`` to accelerate unless ``--torch_compile`` is set, so that the backend set in
    ``accelerate launch``, ``accelerate config`` or the GUI has no effect. https://github.com/bmaltais/kohya_ss/issues/1931
    """
    if (setting := _dynamo_backend(environ)) is None:
        return None
    return f"{setting} has no effect with sd-scripts; use --selective_torch_compile or --torch_compile"


def _dynamo_backend(environ: Mapping[str, str]) -> str | None:
    chosen = environ.get("ACCELERATE_DYNAMO_BACKEND")
    if chosen and chosen.lower() != "no":
        return f"ACCELERATE_DYNAMO_BACKEND={chosen}"
    try:
        from accelerate.commands.config.config_args import default_config_file, load_config_from_file

        choice = getattr(load_config_from_file(None), "dynamo_config", None) or {}
    except Exception:  # accelerate is not installed, or the file is missing or invalid
        return None
    backend = str(choice.get("dynamo_backend", "no"))
    return f"dynamo_backend {backend} in {default_config_file}" if backend.lower() != "no" else None
