"""Whether torch.compile can work here, asked before anything is compiled."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from packaging.version import Version

#: Below it, parameters of blocks are constants of their graphs, and every block would be compiled for itself.
#: https://pytorch.org/docs/stable/torch.compiler_dynamo_overview.html (``inline_inbuilt_nn_modules``)
OLDEST_TORCH = Version("2.5")

DEFAULT_BACKEND = "inductor"


def find_obstacle(device: str, backend: str = DEFAULT_BACKEND) -> str | None:
    """Return why blocks cannot be compiled on a kind of device (``cuda``, ``cpu``, ...), with what to do; None if they can.

    Only what is certain beforehand: a compiler that is there and fails is dealt with when it does.
    """
    import torch

    if Version(torch.__version__) < OLDEST_TORCH:
        return f"torch {torch.__version__} is too old for it, {OLDEST_TORCH} is the oldest"
    try:
        from torch._dynamo.eval_frame import check_if_dynamo_supported

        check_if_dynamo_supported()
    except RuntimeError as error:  # a Python that is too new, Windows before torch 2.4
        return f"torch {torch.__version__}: {error}"
    if backend != DEFAULT_BACKEND:
        return None
    if device in ("cuda", "xpu"):
        return _triton_obstacle()
    if device == "cpu":
        return _cpp_obstacle()
    return f"torch.compile is not proven on {device}"


def _triton_obstacle() -> str | None:
    from torch.utils import _triton

    if not _triton.has_triton_package():
        package = "triton-windows" if os.name == "nt" else "triton"
        return f"Triton is not installed: pip install {package}"
    if not _triton.has_triton():
        return "Triton does not know this device (an NVIDIA card of compute capability 7.0 or newer is needed)"
    # Triton builds its launchers at run time; its Windows build brings a compiler along.
    # https://github.com/triton-lang/triton/blob/main/python/triton/runtime/build.py
    if os.name != "nt" and not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler: install gcc or clang, or name one in the variable CC"
    return None


def _cpp_obstacle() -> str | None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # its own kinds of exception moved between versions
        return f"no working C++ compiler: install g++ (Windows: Visual Studio's C++ tools) or name one in CXX ({error})"
    return None


def reason_to_stand_aside(args: Any) -> str | None:
    """Return why a script's arguments leave nothing to compile block by block; None where they do."""
    if getattr(args, "torch_compile", False):
        return "--torch_compile compiles the whole model already; leave it out to compile the blocks"
    if getattr(args, "compile", False):
        return "sd-scripts' own --compile compiles the blocks already"
    if getattr(args, "deepspeed", False):
        return "DeepSpeed takes the model's forward over"
    if getattr(args, "split_attn", False):
        return "--split_attn cuts every sample at a length that is read from the GPU, which torch.compile cannot follow"
    return _chance_in_the_network(args)


def _chance_in_the_network(args: Any) -> str | None:
    """Why the network given by the user cannot be traced: what runs of it is drawn anew in every call."""
    given = dict(option.split("=", 1) for option in getattr(args, "network_args", None) or () if "=" in option)
    if getattr(args, "network_module", None) == "networks.dylora" or given.get("algo") == "dylora":
        return "DyLoRA draws the rank that it trains in every call of every layer, which cannot be compiled in one piece"
    if given.get("module_dropout", "").strip("0."):
        # As a mask it could be traced, but a layer that is left out has no gradient, a masked one a gradient of zero, and
        # Adam moves its weights by their momentum.
        return (
            "module_dropout draws in every call of every layer whether it is left out, which cannot be compiled in one piece "
            "(rank_dropout and --network_dropout can)"
        )
    return None


def ignored_dynamo_backend(environ: Mapping[str, str]) -> str | None:
    """Return a sentence about a dynamo backend that is set where sd-scripts overrules it; None when there is none.

    sd-scripts hands ``dynamo_backend="NO"`` to accelerate unless ``--torch_compile`` is given, so that the choice made in
    ``accelerate launch``, ``accelerate config`` or the GUI does nothing. https://github.com/bmaltais/kohya_ss/issues/1931
    """
    where = _dynamo_backend(environ)
    if where is None:
        return None
    return f"{where} does nothing: sd-scripts overrules it. Use --selective_torch_compile, or sd-scripts' own --torch_compile"


def _dynamo_backend(environ: Mapping[str, str]) -> str | None:
    chosen = environ.get("ACCELERATE_DYNAMO_BACKEND")
    if chosen and chosen.lower() != "no":
        return f"ACCELERATE_DYNAMO_BACKEND={chosen}"
    try:
        from accelerate.commands.config.config_args import default_config_file, load_config_from_file

        choice = getattr(load_config_from_file(None), "dynamo_config", None) or {}
    except Exception:  # no accelerate, no such file, or one that accelerate itself cannot read
        return None
    backend = str(choice.get("dynamo_backend", "no"))
    return f"dynamo_backend {backend} in {default_config_file}" if backend.lower() != "no" else None
