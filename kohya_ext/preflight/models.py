"""Check that the model files exist, are complete and match the script. Reads only headers."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kohya_ext.config.settings import Settings
from kohya_ext.console import silent
from kohya_ext.errors import UserError
from kohya_ext.preflight import Findings, abbreviated, model_files
from kohya_ext.preflight.model_files import MODEL
from kohya_ext.run import resume, run_record
from kohya_ext.run.atomic_write import folders_elsewhere
from kohya_ext.run.safetensors_header import Header, read_header
from kohya_ext.run.scaled_checkpoints import UnreadableError, of_header, reject_gguf
from kohya_ext.sdscripts import families
from kohya_ext.sdscripts.families import Family

#: Arguments that name files to load, other than the model itself.
OTHERS = (
    *dict.fromkeys(option for family in families.FAMILIES for option in family.files),
    *("llm_adapter_path", *model_files.NETWORKS, "controlnet_model_name_or_path", "weights"),
)

#: Options of Stable Diffusion's scripts that may name a repository or a Diffusers folder.
_REPOSITORIES = (MODEL, "vae", "controlnet_model_name_or_path")

#: Options whose empty value sd-scripts does not take for a missing one.
_OPENED = ("vae", *model_files.NETWORKS)

#: Options that may name a folder with a model of transformers.
_FOLDERS = ("qwen3",)

#: Families whose model upstream reads without the library of safetensors, which refuses more files.
_READ_BY_UPSTREAM = ("anima", "hunyuan-image")

#: Types of safetensors that torch does not have, or does not compute with.
_UNTRAINABLE = {"F4", "F6_E2M3", "F6_E3M2"}

#: The patch that reads weights with scales.
_READER = "scaled_checkpoints"


def check(script: Path, args: Namespace, findings: Findings, settings: Settings) -> None:
    """Check the model, the other files to load, and the state to resume from."""
    family = families.of(script.name, vars(args))
    name = getattr(args, MODEL, None)
    model: Mapping[str, tuple[int, ...]] = {}
    if not name:
        findings.errors.append(f"no model to train: --{MODEL} is required")
    elif (header := _header(name, MODEL, family, findings)) is not None:
        model = header.shapes
        _check_format(args, MODEL, Path(name), header, family, findings)
        model_files.check_model(script, args, model, findings)
        _check_stored_weights(script, args, Path(name), header, settings, findings)
    for option in OTHERS:
        if not model_files.is_read(option, family):
            continue
        value = getattr(args, option, None)
        for file in value if isinstance(value, (list, tuple)) else [value]:
            if file == "" and option in _OPENED:
                findings.errors.append(f"--{option} is empty, and the script would open a file without a name; remove it")
            elif isinstance(file, str) and file and (header := _header(file, option, family, findings)) is not None:
                _check_format(args, option, Path(file), header, family, findings)
                model_files.check_file(script, args, option, Path(file), header.shapes, findings)
                _check_stored_weights(script, args, Path(file), header, settings, findings)
    findings.errors.extend(model_files.missing_options(script, args, model))
    _check_state(script, args, settings, findings)


def problems_of_model(script: Path, values: Mapping[str, object]) -> list[str]:
    """Return why a script cannot train the model that is given; empty for none, and for a repository."""
    name, findings = values.get(MODEL), Findings()
    header = _header(str(name), MODEL, families.of(script.name, values), findings) if name else None
    if header is not None:
        model_files.check_model(script, Namespace(**values), header.shapes, findings)
    return findings.errors


def _header(name: str, option: str, family: Family | None, findings: Findings) -> Header | None:
    """Return the header of an option's file; None for a repository, a folder, another format, and a file with an error."""
    path, label = Path(name), f"--{option} {name}"
    if not path.exists():
        if not _may_be_repository(path, name, option, family):
            findings.errors.append(f"{label} does not exist")
        return None
    if path.is_dir():
        if (problem := _folder_problem(path, option, family)) is not None:
            findings.errors.append(f"{label} {problem}")
        return None
    if path.stat().st_size == 0:
        findings.errors.append(f"{label} is empty (0 bytes)")
        return None
    try:
        reject_gguf(path)
        if path.suffix in (".safetensors", ".sft"):
            if (header := _whole(path)).shapes:
                return header
            findings.errors.append(f"{label} has no tensors, so nothing would be loaded from it; download or save it again")
            return None
        with path.open("rb") as stream:
            start = stream.read(2)
    except OSError as error:
        findings.errors.append(f"{label}: {error.strerror or error}")
    except ValueError as error:
        findings.errors.append(f"--{option}: {error} ({path.parent})")
    else:
        if start not in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04"):  # torch.save's zip; its pickle before 2020
            findings.errors.append(f"{label} is neither a safetensors file nor a torch checkpoint")
    return None


def _check_format(args: Namespace, option: str, file: Path, header: Header, family: Family | None, findings: Findings) -> None:
    """Check that the installed safetensors, with which sd-scripts reads most files, and torch know the file's format."""
    from safetensors import SafetensorError, safe_open  # `estimate` imports this module without sd-scripts' packages

    label = f"--{option} {file}"
    try:
        with safe_open(file, "np"):
            unknown = set(header.dtypes.values()) & _UNTRAINABLE
    except SafetensorError as error:
        if "unknown variant" not in str(error):
            reads_itself = option == MODEL and family is not None and family.name in _READ_BY_UPSTREAM
            is_read = reads_itself or getattr(args, "disable_mmap_load_safetensors", False)
            message = f"{label} has bytes that belong to no tensor, so it is probably damaged; download or save it again"
            (findings.warnings if is_read else findings.errors).append(message)
            return
        unknown = set(re.findall("variant `(\\w+)`", str(error)))
    if unknown:
        types = ", ".join(sorted(unknown))
        findings.errors.append(
            f"{label} has tensors of the type {types}, which cannot be read; download it in another precision"
        )


def _may_be_repository(path: Path, name: str, option: str, family: Family | None) -> bool:
    """Return whether a name of no file may be a repository on the Hugging Face Hub: ``owner/name``."""
    if path.suffix in (".safetensors", ".sft", ".ckpt", ".pt", ".pth") or path.is_absolute() or name.count("/") != 1:
        return False
    return option in _REPOSITORIES and (family is None or family.unet)


def _folder_problem(path: Path, option: str, family: Family | None) -> str | None:
    """Return why a script cannot load a folder; None if it may."""
    if option in _REPOSITORIES and (family is None or family.unet):
        is_whole = option != MODEL or (path / "model_index.json").is_file()
        return None if is_whole else "is not a Diffusers model: the folder has no model_index.json"
    is_flux = option == MODEL and family is not None and family.name == "flux"
    if option in _FOLDERS or (is_flux and (path / "transformer").is_dir()):
        return None
    return "is a folder; give the .safetensors file in it"


def _whole(file: Path) -> Header:
    """Return a file's header, with the tensors of the other files of its model: ``NAME-00001-of-00003.safetensors``."""
    header = read_header(file)
    match = re.search(r"-\d+-of-(\d+)$", file.stem)
    if match is None:
        return header
    start, count = file.stem[: match.start()], int(match[1])
    others = [file.with_name(f"{start}-{index:05d}-of-{count:05d}{file.suffix}") for index in range(1, count + 1)]
    if lost := [other.name for other in others if not other.is_file()]:
        raise ValueError(f"{file.name} needs {abbreviated(lost)} in the same folder")
    shapes = {name: shape for other in others for name, shape in read_header(other).shapes.items()}
    return replace(header, shapes={**shapes, **header.shapes})


def _check_stored_weights(
    script: Path, args: Namespace, file: Path, header: Header, settings: Settings, findings: Findings
) -> None:
    """Report weights that are stored in 8 bits with scales, and what would train on wrong ones."""
    try:
        stored = of_header(file, header)
    except UnreadableError as error:
        findings.errors.append(str(error))
        return
    if stored is None:
        return
    family = families.of(script.name, vars(args))
    if not {_READER, "*"}.isdisjoint(settings.disable_patch):
        findings.errors.append(f"{file.name} has {stored}, which sd-scripts would read without them; turn {_READER} on")
        return
    if family is not None and family.unet and getattr(args, "disable_mmap_load_safetensors", False):
        findings.errors.append(f"{file.name} has {stored}; remove --disable_mmap_load_safetensors, which would leave them out")
        return
    findings.notes.append(f"{file.name} has {stored}, which are applied")
    if getattr(args, "fp8_base", False) or getattr(args, "fp8_base_unet", False):
        findings.warnings.append(
            f"--fp8_base rounds the weights of {file.name} a second time, without scales; use --base_precision fp8"
        )


def _check_state(script: Path, args: Namespace, settings: Settings, findings: Findings) -> None:
    name = getattr(args, "resume", None)
    if not name or getattr(args, "resume_from_huggingface", False):
        return
    state: Path | None = Path(name)
    if name == resume.AUTO:
        run = run_record.current() or run_record.describe(script.name, args)
        try:
            with silent():  # the run itself logs which state it resumes
                state = resume.state_to_resume(
                    *(Path(args.output_dir), args.output_name, run, settings["inexact_resume"]),
                    folders_elsewhere(settings["fallback_dir"]),
                )
        except UserError as error:
            findings.errors.append(str(error))
            return
        if state is None:
            return
    assert state is not None
    if not state.is_dir():
        findings.errors.append(f"--resume {state} does not exist")
    elif (problem := resume.unreadable(state)) is not None:
        findings.errors.append(f"--resume: {problem}")
    elif (problem := resume.state_problem(state, settings["inexact_resume"])) is not None:
        advice = f"Use another state, or --resume auto{resume.inexact_advice(state)}"
        findings.errors.append(f"--resume {state} is damaged: {problem}. {advice}")
    else:
        record = run_record.read(state)
        if record is not None and record.script != script.name:
            findings.errors.append(f"--resume {state} was saved by {record.script}, not {script.name}")
        elif (rank := _other_rank(state, args)) is not None:
            findings.errors.append(
                f"--resume {state} has rank {rank}, but --network_dim is {args.network_dim or 4}; use --network_dim {rank}"
            )
        elif (change := _change_of_parts(state, script, args)) is not None:
            findings.errors.append(f"--resume {state} {change}")


def _other_rank(state: Path, args: Namespace) -> int | None:
    """Return the rank of the LoRA in a state if it differs from ``--network_dim``; None if it matches or is unknown."""
    file = state / "model.safetensors"
    return model_files.other_rank(read_header(file).shapes, args) if file.is_file() else None


#: Scripts and families whose LoRA has modules of a text encoder unless it is for the model alone. LECO's never has.
_WITH_TEXT_ENCODERS = {"train_network.py": "sd15", "sdxl_train_network.py": "sdxl", "flux_train_network.py": "flux"}

#: (start of a module's name, what it changes, the option that leaves it out)
_PARTS = (
    ("lora_te", "a text encoder", "network_train_unet_only"),
    ("lora_unet", "the model", "network_train_text_encoder_only"),
)


def _change_of_parts(state: Path, script: Path, args: Namespace) -> str | None:
    """Return which modules the LoRA in a state has or lacks, and the option to change; None if it is this run's or unknown."""
    file, family = state / "model.safetensors", families.of(script.name, vars(args))
    has_both = family is not None and _WITH_TEXT_ENCODERS.get(script.name) == family.name
    is_of_weights = getattr(args, "dim_from_weights", False)  # which have the modules that they have
    if not has_both or is_of_weights or not (getattr(args, "network_module", None) or "").startswith("networks.lora"):
        return None
    names = read_header(file).shapes if file.is_file() else ()
    has = {prefix: any(name.startswith(prefix) for name in names) for prefix, _, _ in _PARTS}
    if not any(has.values()):
        return None
    for prefix, title, option in _PARTS:
        is_left_out = getattr(args, option, False)
        if has[prefix] and is_left_out:
            return f"has a LoRA of {title}, which --{option} does not train; remove that option"
        if not has[prefix] and not is_left_out:
            return f"has no LoRA of {title}; add --{option}, with which it was trained"
    return None
