"""The model files: there, whole, and of the family that the script trains. Only headers are read."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from kohya_ext.config.command_line import option_words
from kohya_ext.config.settings import Settings
from kohya_ext.console import silent
from kohya_ext.errors import UserError
from kohya_ext.preflight import Findings
from kohya_ext.run import resume, run_record
from kohya_ext.run.safetensors_header import Header, read_header
from kohya_ext.sdscripts import families

#: Arguments that name files to load, beside the model itself.
_OTHERS = (
    *dict.fromkeys(option for family in families.FAMILIES for option in family.files),
    *("llm_adapter_path", "network_weights", "base_weights", "controlnet_model_name_or_path", "weights"),
)


def check(script: Path, args: Namespace, findings: Findings, settings: Settings) -> None:
    """Check the model, the other files to load, and the state to resume from."""
    name = getattr(args, "pretrained_model_name_or_path", None)
    if not name:
        findings.errors.append("no model to train: give --pretrained_model_name_or_path")
    elif (header := _header(name, "--pretrained_model_name_or_path", findings)) is not None:
        _check_family(script, args, Path(name), header, findings)
    for option in _OTHERS:
        value = getattr(args, option, None)
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, str) and one:
                _header(one, f"--{option}", findings)
    _check_state(script, args, settings, findings)


def _header(name: str, option: str, findings: Findings) -> Header | None:
    path = Path(name)
    if not path.exists():
        # "owner/name" is a repository on the Hugging Face hub.
        if path.suffix in (".safetensors", ".sft", ".ckpt", ".pt", ".pth") or path.is_absolute() or name.count("/") > 1:
            findings.errors.append(f"{option} {name} does not exist")
        return None
    if path.is_dir():
        if option == "--pretrained_model_name_or_path" and not (path / "model_index.json").is_file():
            findings.errors.append(f"{option} {name} is a folder without model_index.json, so no model in Diffusers' format")
        return None
    if path.stat().st_size == 0:
        findings.errors.append(f"{option} {name} is empty (0 bytes)")
        return None
    if path.suffix not in (".safetensors", ".sft"):
        with path.open("rb") as stream:
            start = stream.read(2)
        if start not in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04"):  # what torch.save writes: a zip, a pickle before 2020
            findings.errors.append(f"{option} {name} is neither a safetensors file nor a checkpoint of torch")
        return None
    try:
        return read_header(path)
    except OSError as error:
        findings.errors.append(f"{option} {name}: {error.strerror or error}")
    except ValueError as error:
        findings.errors.append(f"{option}: {error} ({path.parent})")
    return None


def _check_family(script: Path, args: Namespace, file: Path, header: Header, findings: Findings) -> None:
    wanted = families.checkpoint_of(script.name, vars(args))
    if wanted is None:
        return
    if any(part in name for name in header.shapes for part in families.LORA_TENSORS):
        findings.errors.append(f"{file.name} is of the family LoRA, and {script.name} wants {wanted.title}")
    elif (recognized := families.recognize(header.shapes)) is not None and recognized[1] != wanted:
        family, its = recognized
        trains = " ".join([_script_for(family, script), *option_words({} if its.option is None else dict([its.option]))])
        findings.errors.append(
            f"{file.name} is of the family {its.title}, and {script.name} wants {wanted.title}: {trains} trains it"
        )


def _script_for(family: families.Family, script: Path) -> str:
    """Return the script that trains a family as another script trains its own: fully, where there is one for it."""
    return family.lora if "network" in script.name or not family.finetune else family.finetune[0]


def _check_state(script: Path, args: Namespace, settings: Settings, findings: Findings) -> None:
    name = getattr(args, "resume", None)
    if not name or getattr(args, "resume_from_huggingface", False):
        return
    state: Path | None = Path(name)
    if name == resume.AUTO:
        run = run_record.current() or run_record.describe(script.name, args)
        try:
            with silent():  # the run itself logs which state it takes
                state = resume.state_to_resume(Path(args.output_dir), args.output_name, run, settings.inexact_resume)
        except UserError as error:
            findings.errors.append(str(error))
            return
        if state is None:
            return
    assert state is not None
    if not state.is_dir():
        findings.errors.append(f"--resume {state} does not exist")
    elif (problem := resume.state_problem(state, settings.inexact_resume)) is not None:
        findings.errors.append(f"--resume {state} is damaged: {problem}. Resume from another state (--resume auto finds one)")
    else:
        record = run_record.read(state)
        if record is not None and record.script != script.name:
            findings.errors.append(f"--resume {state} was saved by {record.script}, not {script.name}")
        elif (rank := _other_rank(state, args)) is not None:
            findings.errors.append(
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
