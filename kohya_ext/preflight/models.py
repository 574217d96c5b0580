"""The model files: there, whole, and of the family that the script trains. Only headers are read."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection
from pathlib import Path

from kohya_ext import position, run_record
from kohya_ext.console import silent
from kohya_ext.errors import UserError
from kohya_ext.overlay import FAMILIES
from kohya_ext.preflight import Findings
from kohya_ext.safetensors_header import Header, read_header
from kohya_ext.settings import Settings

#: Arguments that name files to load, beside the model itself.
_OTHERS = (
    *("vae", "ae", "clip_l", "clip_g", "t5xxl", "gemma2", "qwen3", "text_encoder", "byt5", "llm_adapter_path"),
    *("network_weights", "base_weights", "controlnet_model_name_or_path", "weights"),
)

#: A piece of a tensor's name -> the family that it tells; the first that fits counts.
_SIGNS = (
    (("lora_down.", "lora_A.", "lora_unet_", "lora_te"), "LoRA"),
    (("distilled_guidance_layer.",), "Chroma"),
    (("double_blocks.0.img_attn.",), "FLUX"),
    (("joint_blocks.0.",), "SD3"),
    (("cap_embedder.", "noise_refiner."), "Lumina"),
    (("conditioner.embedders.1.",), "SDXL"),
    (("cond_stage_model.model.",), "SD 2"),
    (("cond_stage_model.transformer.",), "SD 1.5"),
)

_WANTED = {"sdxl": "SDXL", "sd15": "SD 1.5", "flux": "FLUX", "sd3": "SD3", "lumina": "Lumina"}

#: Which script trains a family, for the error that names it: LoRA, full fine-tune.
_SCRIPTS = {
    "SDXL": ("sdxl_train_network.py", "sdxl_train.py"),
    "SD 1.5": ("train_network.py", "fine_tune.py"),
    "SD 2": ("train_network.py --v2", "fine_tune.py --v2"),
    "FLUX": ("flux_train_network.py", "flux_train.py"),
    "Chroma": ("flux_train_network.py --model_type chroma", "flux_train.py"),
    "SD3": ("sd3_train_network.py", "sd3_train.py"),
    "Lumina": ("lumina_train_network.py", "lumina_train.py"),
}


def look(script: Path, args: Namespace, found: Findings, settings: Settings) -> None:
    """Check the model, the other files to load, and the state to resume from."""
    name = getattr(args, "pretrained_model_name_or_path", None)
    if not name:
        found.errors.append("no model to train: give --pretrained_model_name_or_path")
    elif (header := _header(name, "--pretrained_model_name_or_path", found)) is not None:
        _look_at_family(script, args, Path(name), header, found)
    for option in _OTHERS:
        value = getattr(args, option, None)
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, str) and one:
                _header(one, f"--{option}", found)
    _look_at_state(script, args, settings, found)


def _header(name: str, option: str, found: Findings) -> Header | None:
    path = Path(name)
    if not path.exists():
        # "owner/name" is a repository on the Hugging Face hub.
        if path.suffix in (".safetensors", ".sft", ".ckpt", ".pt", ".pth") or path.is_absolute() or name.count("/") > 1:
            found.errors.append(f"{option} {name} does not exist")
        return None
    if path.is_dir():
        if option == "--pretrained_model_name_or_path" and not (path / "model_index.json").is_file():
            found.errors.append(f"{option} {name} is a folder without model_index.json, so no model in Diffusers' format")
        return None
    if path.stat().st_size == 0:
        found.errors.append(f"{option} {name} is empty (0 bytes)")
        return None
    if path.suffix not in (".safetensors", ".sft"):
        with path.open("rb") as stream:
            start = stream.read(2)
        if start not in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04"):  # what torch.save writes: a zip, a pickle before 2020
            found.errors.append(f"{option} {name} is neither a safetensors file nor a checkpoint of torch")
        return None
    try:
        return read_header(path)
    except OSError as error:
        found.errors.append(f"{option} {name}: {error.strerror or error}")
    except ValueError as error:
        found.errors.append(f"{option}: {error} ({path.parent})")
    return None


def family(names: Collection[str]) -> str | None:
    """Tell a checkpoint's family from its tensors' names; None when they tell none."""
    for signs, its in _SIGNS:
        if any(sign in name for name in names for sign in signs):
            return its
    return None


def _look_at_family(script: Path, args: Namespace, file: Path, header: Header, found: Findings) -> None:
    its = family(header.shapes)
    wanted = _WANTED.get(FAMILIES.get(script.name, script.name).partition("-")[0].partition("_")[0])
    if wanted == "SD 1.5" and getattr(args, "v2", False):
        wanted = "SD 2"
    if wanted == "FLUX" and getattr(args, "model_type", None) == "chroma":
        wanted = "Chroma"
    if its is None or wanted is None or its == wanted:
        return
    hint = f": {_SCRIPTS[its]['network' not in script.name]} trains it" if its in _SCRIPTS else ""
    found.errors.append(f"{file.name} is of the family {its}, and {script.name} wants {wanted}{hint}")


def _look_at_state(script: Path, args: Namespace, settings: Settings, found: Findings) -> None:
    name = getattr(args, "resume", None)
    if not name or getattr(args, "resume_from_huggingface", False):
        return
    state: Path | None = Path(name)
    if name == position.AUTO:
        run = run_record.current() or run_record.describe(script.name, args)
        try:
            with silent():  # the run itself logs which state it takes
                state = position.state_to_resume(Path(args.output_dir), args.output_name, run, settings.inexact_resume)
        except UserError as error:
            found.errors.append(str(error))
            return
        if state is None:
            return
    assert state is not None
    if not state.is_dir():
        found.errors.append(f"--resume {state} does not exist")
    elif (problem := position.state_problem(state, settings.inexact_resume)) is not None:
        found.errors.append(f"--resume {state} is damaged: {problem}. Resume from another state (--resume auto finds one)")
    else:
        record = run_record.read(state)
        if record is not None and record.script != script.name:
            found.errors.append(f"--resume {state} was saved by {record.script}, not {script.name}")
        elif (rank := _other_rank(state, args)) is not None:
            found.errors.append(
                f"--resume {state} has rank {rank} and --network_dim is {args.network_dim or 4}: they must agree"
            )


def _other_rank(state: Path, args: Namespace) -> int | None:
    """Return the rank of the LoRA in a state when it is not the one asked for; None where it is, or where it cannot be told."""
    file = state / "model.safetensors"
    if not (getattr(args, "network_module", None) or "").startswith("networks.lora") or not file.is_file():
        return None
    ranks = [shape[0] for name, shape in read_header(file).shapes.items() if "lora_down" in name and len(shape) in (2, 4)]
    # Single layers may have ranks of their own (block_dims, conv_dim): most have the one that was asked for.
    usual = max(set(ranks), key=ranks.count, default=None)
    plain = not any("dim" in pair for pair in getattr(args, "network_args", None) or [])
    return usual if plain and usual is not None and usual != (args.network_dim or 4) else None
