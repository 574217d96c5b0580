"""Show packages, GPU, sd-scripts and patches, for a bug report."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from kohya_ext import __version__
from kohya_ext.compiling.support import find_obstacle, ignored_dynamo_backend
from kohya_ext.config.settings import flags, switched_on, variables
from kohya_ext.console import progress
from kohya_ext.gpu import attention
from kohya_ext.kernels.triton_package import mismatched_triton
from kohya_ext.launch.session import begin
from kohya_ext.output import Console
from kohya_ext.patching.patch import Outcome, Patch, Patcher, Target, apply_needed
from kohya_ext.sdscripts.checkouts import UPSTREAM, Checkout, candidates, find
from kohya_ext.sdscripts.introspect import importable

#: Packages that sd-scripts and the patches depend on, by their pip name.
PACKAGES = (
    "torch",
    "torchvision",
    "accelerate",
    "diffusers",
    "transformers",
    "huggingface-hub",
    "safetensors",
    "xformers",
    "bitsandbytes",
    "triton",
    "triton-windows",
    "lycoris-lora",
    "deepspeed",
    "wrapt",
    "toml",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON, with every target of every patch")
    parser.add_argument("--verbose", action="store_true", help="show every target of every patch, with reasons")
    parser.add_argument(
        *flags("sd_scripts"), type=Path, metavar="FOLDER", help="the sd-scripts checkout to examine; default: search for one"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the report; return 1 without a checkout, or if a patch failed or did not recognize its target; else 0."""
    checkout = find(arguments.sd_scripts)
    with progress("importing torch and sd-scripts, and trying every patch"):
        report = examine(checkout)
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        console = Console(highlight=False)
        _show_facts(console, report)
        (_show_targets if arguments.verbose else _show_patches)(console, report["patches"])
    return 0 if _is_healthy(report) else 1


def examine(checkout: Checkout | None) -> dict[str, Any]:
    """Return the report as plain data, memory in bytes."""
    device = _device()
    return {
        "kohya_ext": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "device": device,
        "attention": _attention() if device["kind"] == "cuda" else {},
        "compile": _compile(device["kind"]),
        "environment": _environment(),
        "sd_scripts": _checkout(checkout),
        "patches": _patches(checkout) if checkout is not None else [],
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device() -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        return {"kind": "none", "why": "torch is not installed"}
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        major, minor = torch.cuda.get_device_capability()
        return {
            "kind": "cuda",
            "name": torch.cuda.get_device_name(),
            "count": torch.cuda.device_count(),
            "compute_capability": f"{major}.{minor}",
            "cuda": torch.version.cuda,
            "memory_total": total,
            "memory_free": free,
            "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
        }
    if getattr(torch.backends, "mps", None) is not None and torch.backends.mps.is_available():
        return {"kind": "mps"}
    built = f"built for CUDA {torch.version.cuda}, no usable GPU" if torch.version.cuda else "a CPU build"
    return {"kind": "cpu", "why": f"torch {torch.__version__} is {built}"}


def _attention() -> dict[str, dict[str, str]]:
    """Return {dtype: {head dimension, with and without a mask: kernel}}."""
    import torch

    shapes = [attention.Shape(head, masked) for head in sorted({*chain(*attention.HEADS.values())}) for masked in (False, True)]
    return {
        dtype: {
            f"{shape.head}{' with a mask' * shape.masked}": attention.kernel(shape, getattr(torch, dtype), "cuda")
            for shape in shapes
        }
        for dtype in ("bfloat16", "float16", "float32")
    }


def _compile(device: str) -> dict[str, Any]:
    compiler = next((path for name in ("cl", "cc", "gcc", "clang") if (path := shutil.which(name))), None)
    return {
        "compiler": compiler,
        "triton": importlib.util.find_spec("triton") is not None,
        "mismatch": mismatched_triton() if device != "none" else None,
        "obstacle": _obstacle(device) if device != "none" else "torch is not installed",
        "ignored_dynamo_backend": ignored_dynamo_backend(os.environ),
    }


def _obstacle(device: str) -> str | None:
    if (obstacle := find_obstacle(device)) is not None or device != "cuda":
        return obstacle
    from kohya_ext.kernels.support import unsupported_gpu

    return unsupported_gpu()


def _environment() -> dict[str, Any]:
    return {
        "variables": {name: os.environ[name] for name in variables() if name in os.environ},
        "arms_plain_starts": switched_on(os.environ),
    }


def _checkout(checkout: Checkout | None) -> dict[str, Any] | None:
    if checkout is None:
        return None
    return {
        "path": str(checkout.path),
        "source": checkout.source,
        "version": checkout.version,
        "layout": checkout.layout,
        "age": checkout.age,
        "commit": checkout.commit,
    }


def _patches(checkout: Checkout) -> list[dict[str, Any]]:
    session = begin(checkout)
    patches = {patch.name: patch for patch in session.patcher.all_patches()}
    outcomes = list(session.patcher.outcomes.values())
    targets = {target.label: target for patch in patches.values() for target in patch.targets}
    with importable(checkout):
        for outcome in outcomes:
            if outcome.status == "waiting" and outcome.target in targets:
                _import(targets[outcome.target], outcome)
        apply_needed()
    return [{**asdict(outcome), **_about(patches[outcome.patch], session.patcher)} for outcome in outcomes]


def _about(patch: Patch, patcher: Patcher) -> dict[str, Any]:
    return {
        "summary": patch.summary,
        "exactness": patch.exactness,
        "held_to": patch.held_to,
        "engine": patch in patcher.engine,
        "options": [option.name for option in patch.options],
        "until": patch.until,
    }


def _import(target: Target, outcome: Outcome) -> None:
    """Import a target's module, which applies the patch."""
    package = target.module.partition(".")[0]
    if target.optional and importlib.util.find_spec(package) is None:
        outcome.status, outcome.reason = "skipped", f"{package} is not installed"
        return
    try:
        importlib.import_module(target.module)
    except Exception as error:  # doctor reports every error of a broken environment
        outcome.reason = f"{target.module} cannot be imported: {error}"


def _is_healthy(report: Mapping[str, Any]) -> bool:
    return bool(report["patches"]) and not any(map(_is_problem, report["patches"]))


def _is_problem(row: Mapping[str, Any]) -> bool:
    return row["status"] not in ("applied", "skipped") or row["surprise"]


def _show_facts(console: Console, report: Mapping[str, Any]) -> None:
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_row("kohya_ext", f"{report['kohya_ext']}, Python {escape(report['python'])}")
    facts.add_row("system", report["system"])
    facts.add_row("packages", ", ".join(f"{name} {version}" for name, version in report["packages"].items()))
    facts.add_row("device", escape(_device_words(report["device"])))
    if report["attention"]:
        facts.add_row("attention", escape(_attention_words(report["attention"])))
    facts.add_row("compiling", escape(_compile_words(report["compile"])))
    variables = ", ".join(f"{name}={value}" for name, value in report["environment"]["variables"].items())
    armed = "armed" if report["environment"]["arms_plain_starts"] else "not armed; set KOHYA_EXT=1 or use the launcher"
    facts.add_row("switches", escape(variables) or "none set")
    facts.add_row("plain starts", armed)
    facts.add_row("sd-scripts", escape(_checkout_words(report["sd_scripts"])))
    console.print(facts)


def _show_patches(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the patches that are on, those that are off with the reason, and every problem with its fix."""
    on: list[str] = []
    off: dict[str, list[str]] = {}
    for patch, targets in _by_patch(rows).items():
        if targets[0]["engine"]:
            continue
        if any(row["status"] == "applied" for row in targets):
            on.append(patch)
        elif not any(map(_is_problem, targets)):
            off.setdefault(targets[0]["reason"], []).append(patch)
    short = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    short.add_row(f"{len(on)} patches on", ", ".join(on))
    for reason, patches in off.items():
        short.add_row(f"{len(patches)} off", escape(f"{reason}: {', '.join(patches)}"))
    console.print(short)
    problems = [row for row in rows if _is_problem(row)]
    for row in problems:
        console.print(f"[red]{row['status']}[/] {row['patch']}, {row['target']}: {escape(row['reason'])}", soft_wrap=True)
    for advice in dict.fromkeys(map(_fix, problems)):
        console.print(f"  {advice}", soft_wrap=True)
    if rows:
        console.print("`python -m kohya_ext doctor --verbose` shows what each patch does and every target.")


def _fix(row: Mapping[str, Any]) -> str:
    if row["surprise"]:
        return "skipped: this code is untested and runs unpatched. `python -m kohya_ext setup` fetches a tested version"
    if row["status"] == "failed":
        return "failed: a bug in kohya_ext; the code runs unpatched. Report it with this output"
    return "waiting: repair the package in the message, or reinstall sd-scripts' requirements"


def _show_targets(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print every patch with its summary and the outcome of each target."""
    for patch, targets in _by_patch(rows).items():
        about = targets[0]
        console.print(f"\n[bold]{patch}[/]: {escape(about['summary'])} ({about['exactness']}: {escape(about['held_to'])})")
        if about["options"]:
            console.print(f"  options  {', '.join(f'--{name}' for name in about['options'])}")
        if about["until"]:
            console.print(f"  until    sd-scripts v{about['until']}")
        for row in targets:
            colour = "red" if _is_problem(row) else "green" if row["status"] == "applied" else "dim"
            reason = f": {row['reason']}" if row["reason"] else ""
            console.print(f"  [{colour}]{row['status']:<8}[/] {row['target']}[{colour}]{escape(reason)}[/]")


def _by_patch(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["patch"], []).append(row)
    return groups


def _device_words(device: Mapping[str, Any]) -> str:
    if device["kind"] != "cuda":
        return f"{device['kind']} ({device.get('why', '')})".replace(" ()", "")
    gib = 2**30
    return (
        f"{device['count']} x {device['name']}, compute capability {device['compute_capability']}, CUDA {device['cuda']}, "
        f"{device['memory_free'] / gib:.1f} of {device['memory_total'] / gib:.1f} GiB free"
        + ("" if device["bf16"] else ", no bf16: use --mixed_precision fp16")
    )


def _attention_words(kernels: Mapping[str, Mapping[str, str]]) -> str:
    parts = []
    for dtype, by_shape in kernels.items():
        without, masked = (
            " or ".join(dict.fromkeys(kernel for shape, kernel in by_shape.items() if shape.endswith("mask") == has_mask))
            for has_mask in (False, True)
        )
        parts.append(f"{dtype} {without}" + (f", {masked} with a mask" if masked != without else ""))
    return "; ".join(parts)


def _compile_words(compiling: Mapping[str, Any]) -> str:
    compiler, triton = compiling["compiler"] or "not found", "found" if compiling["triton"] else "not found"
    words = f"C compiler {compiler}, Triton {triton}; --selective_torch_compile "
    words += f"will not work here: {compiling['obstacle']}" if compiling["obstacle"] else "will work here"
    return "; ".join(filter(None, (words, compiling["mismatch"], compiling["ignored_dynamo_backend"])))


def _checkout_words(checkout: Mapping[str, Any] | None) -> str:
    if checkout is None:
        searched = ", ".join(str(folder) for _, folder in candidates())
        return f"none found in {searched}: run `python -m kohya_ext setup` (fetches {UPSTREAM})"
    version = f"v{checkout['version']}" if checkout["version"] else "version unknown"
    if checkout["age"]:
        version += f" ({checkout['age']})"
    commit = f", commit {checkout['commit'][:8]}" if checkout["commit"] else ""
    return f"{version}, layout {checkout['layout']}{commit}, in {checkout['path']} ({checkout['source']})"
