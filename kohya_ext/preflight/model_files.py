"""Check that a script has all of its model files, and that each holds the model that the script loads from it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path

from kohya_ext.config.command_line import option_words
from kohya_ext.preflight import Findings, abbreviated
from kohya_ext.sdscripts import families, parts
from kohya_ext.sdscripts.families import Family

MODEL = "pretrained_model_name_or_path"

#: Options that name networks: one to continue, and others to merge into the model.
NETWORKS = ("network_weights", "base_weights")


def missing_options(script: Path, args: Namespace, model: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield a message for each file that the script needs, and that is neither given nor part of the model's file."""
    family = families.of(script.name, vars(args))
    if family is None:
        return
    for option, name in family.files.items():
        included = option in family.embedded and any(tensor.startswith(family.embedded[option]) for tensor in model)
        if not getattr(args, option, None) and not included:
            yield f"--{option} is missing: {script.name} needs {parts.of_name(name).title}"
    prefix = family.embedded.get("vae", "")
    if model and not getattr(args, "vae", None) and not any(tensor.startswith(prefix) for tensor in model):
        yield f"--vae is missing: {Path(getattr(args, MODEL)).name} has no VAE"


def check_model(script: Path, args: Namespace, shapes: Mapping[str, tuple[int, ...]], findings: Findings) -> None:
    """Check that the model's file is of the family that the script trains with these arguments, and complete."""
    wanted = families.checkpoint_of(script.name, vars(args))
    family = families.of(script.name, vars(args))
    if wanted is None or family is None:
        return
    file = Path(getattr(args, MODEL))
    recognized = families.recognize(shapes)
    if _is_lora(shapes):
        findings.errors.append(f"{file.name} is a LoRA, but {script.name} trains {wanted.title}; give the base model")
    elif recognized is not None and recognized[1] != wanted:
        other, checkpoint = recognized
        option = option_words({} if checkpoint.option is None else dict([checkpoint.option]))
        command = " ".join([_script_for(other, script), *option])
        findings.errors.append(
            f"{file.name} is a checkpoint of {checkpoint.title}, but {script.name} trains {wanted.title}; use {command}"
        )
    elif wanted == family.checkpoints[0]:  # SD 2 has no list of names
        _check_part(file, f"--{MODEL}", family.name, shapes, findings, is_model=recognized is not None)
        findings.errors.extend(_too_many_swapped(family, script, args, shapes))


def check_file(
    script: Path, args: Namespace, option: str, file: Path, shapes: Mapping[str, tuple[int, ...]], findings: Findings
) -> None:
    """Check that the file of an option holds the part that the script loads from it, or a network of the rank to train."""
    if option in NETWORKS:
        findings.errors.extend(_network_problems(args, option, file, shapes))
        return
    family = families.of(script.name, vars(args))
    wanted = _parts_of(family).get(option)
    if wanted is not None:
        _check_part(file, f"--{option}", wanted, shapes, findings)


def _network_problems(args: Namespace, option: str, file: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield a message for a file that has no network, or one whose weights do not fit the rank."""
    other = None if _is_lora(shapes) else _title(shapes)
    if other is not None:
        yield f"--{option} {file} is {other}, not a network such as a LoRA; nothing of it would be used"
    elif (
        option == NETWORKS[0]
        and not getattr(args, "dim_from_weights", False)
        and (rank := other_rank(shapes, args)) is not None
    ):
        yield (
            f"--{option} {file} has rank {rank}, but --network_dim is {args.network_dim or 4}; use --network_dim {rank}, or "
            "--dim_from_weights"
        )


def other_rank(shapes: Mapping[str, tuple[int, ...]], args: Namespace) -> int | None:
    """Return the rank of a LoRA's tensors if it differs from ``--network_dim``; None if it matches or is unknown."""
    if not (getattr(args, "network_module", None) or "").startswith("networks.lora"):
        return None
    ranks = [shape[0] for name, shape in shapes.items() if "lora_down" in name and len(shape) in (2, 4)]
    # block_dims and conv_dim change the rank of some layers, but most have that of --network_dim.
    usual = max(set(ranks), key=ranks.count, default=None)
    plain = not any("dim" in pair for pair in getattr(args, "network_args", None) or [])
    return usual if plain and usual is not None and usual != (getattr(args, "network_dim", None) or 4) else None


def _too_many_swapped(family: Family, script: Path, args: Namespace, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield a message if --blocks_to_swap leaves fewer than two blocks of a list on the GPU, which upstream refuses."""
    swapped = getattr(args, "blocks_to_swap", None) or 0
    if not swapped or "blocks_to_swap" in family.ignores(script.name):
        return
    prefixes = parts.of_name(family.name).prefixes
    counts = [parts.count_blocks(shapes, name, prefixes) for name in family.swapped]
    if not all(counts):
        return
    # Where a model has two lists, half of the number is swapped in the first, and two for each of the rest in the second.
    most = next((number for number in range(sum(counts), 0, -1) if _fits(number, counts)), 0)
    if swapped > most:
        yield f"--blocks_to_swap {swapped} is too large for {Path(getattr(args, MODEL)).name}; use at most {most}"


def _fits(swapped: int, counts: list[int]) -> bool:
    """Return whether two blocks of each list stay on the GPU."""
    each = [swapped] if len(counts) == 1 else [swapped // 2, 2 * (swapped - swapped // 2)]
    return all(some <= count - 2 for some, count in zip(each, counts, strict=True))


def is_read(option: str, family: Family | None) -> bool:
    """Return whether a family's scripts read the file of an option, which may be another family's."""
    of_families = {other for each in families.FAMILIES for other in _parts_of(each)}
    return family is None or option in _parts_of(family) or option not in of_families


def _parts_of(family: Family | None) -> dict[str, str]:
    """Return the options of a family's other files -> the name of the part in each."""
    if family is None:
        return {}
    return {**family.files, **({"vae": family.vae} if family.vae else {})}


def _check_part(
    file: Path,
    option: str,
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    findings: Findings,
    is_model: bool = False,
) -> None:
    part = parts.of_name(name)
    contents = parts.contents(shapes, part)
    missing = f"{len(contents.missing)} of {contents.required} tensors"
    other = contents.other or (None if contents.is_recognized else _title(shapes))
    if contents.is_recognized and contents.missing:
        findings.errors.append(
            f"{option} {file} is incomplete: {missing} of {part.title} are missing ({abbreviated(list(contents.missing), 3)}); "
            "download it again"
        )
    elif not contents.is_recognized and other is not None and not is_model:
        findings.errors.append(f"{option} {file} is {other}, but the script loads {part.title} from it")
    elif not contents.is_recognized:
        findings.warnings.append(
            f"{option} {file}: {missing} that the script loads for {part.title} have other names or are missing, so the run "
            "will probably fail"
        )


def _title(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return what a file is, as far as known."""
    if _is_lora(shapes):
        return "a LoRA"
    recognized = families.recognize(shapes)
    return parts.recognize(shapes) or (f"a checkpoint of {recognized[1].title}" if recognized is not None else None)


def _is_lora(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    return any(part in name for name in shapes for part in families.LORA_TENSORS)


def _script_for(family: Family, script: Path) -> str:
    """Return the script of a family that corresponds to another family's: LoRA, or full fine-tuning where there is one."""
    return family.lora if "network" in script.name or not family.finetune else family.finetune[0]
