"""Check that what a run takes from the Hugging Face Hub is in the cache, or can be downloaded.

Without a connection, upstream retries for minutes and ends with an error that does not name the connection; what it needs to
save a Diffusers model it only asks for after the training.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from kohya_ext.preflight import Findings, abbreviated
from kohya_ext.sdscripts import families
from kohya_ext.sdscripts.families import Checkpoint

#: Files of which a repository with a tokenizer has at least one.
_TOKENIZER = ("tokenizer_config.json", "tokenizer.json", "vocab.json", "spiece.model")

_DIFFUSERS = ("scheduler/scheduler_config.json",)

_TIMEOUT = 5.0
"""Seconds for an answer of the Hub."""


def check(script: Path, args: Namespace, findings: Findings) -> None:
    """Add an error for each repository that is neither in the cache nor can be downloaded."""
    kind = families.checkpoint_of(script.name, vars(args))
    lost = [*_lost(script, args, kind)] if kind is not None else []
    if not lost or _can_download():
        return
    lacks = "no connection to the Hugging Face Hub, and its cache lacks"
    if kind is not None and (tokenizers := [name for name in lost if name in kind.tokenizers]):
        findings.errors.append(
            f"{lacks} {abbreviated(tokenizers)}, which {script.name} needs for its tokenizer; go online once, or set "
            "HF_HUB_CACHE to a folder that has it"
        )
    if kind is not None and kind.reference in lost:
        findings.errors.append(
            f"{lacks} {kind.reference}, of which --save_model_as {args.save_model_as} takes parts at the end of the training; "
            "use --save_model_as safetensors"
        )


def _lost(script: Path, args: Namespace, kind: Checkpoint) -> Iterator[str]:
    """Yield the repositories that the run needs and the cache does not have."""
    family = families.of(script.name, vars(args))
    folder = getattr(args, "tokenizer_cache_dir", None)
    for name in kind.tokenizers:
        is_saved = folder and (Path(folder) / name.replace("/", "_")).exists()
        if not is_saved and not _is_cached(name, _TOKENIZER, folder):
            yield name
    saves_folder = (getattr(args, "save_model_as", None) or "").startswith("diffusers")
    is_file = Path(getattr(args, "pretrained_model_name_or_path", None) or "").is_file()
    trains_model = family is not None and script.name in family.finetune
    if kind.reference and saves_folder and is_file and trains_model and not _is_cached(kind.reference, _DIFFUSERS, None):
        yield kind.reference


def _is_cached(repository: str, files: tuple[str, ...], folder: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    folders = (None, folder) if folder else (None,)
    places = [(file, where) for file in (*files, *(f"tokenizer/{file}" for file in files)) for where in folders]
    return any(isinstance(try_to_load_from_cache(repository, file, cache_dir=where), str) for file, where in places)


def _can_download() -> bool:
    """Return whether the Hub answers, as the library asks it: with its proxies, endpoint and offline mode."""
    from huggingface_hub import constants, utils

    try:
        utils.get_session().head(constants.ENDPOINT, timeout=_TIMEOUT)
    except Exception:  # of requests or httpx, depending on the library's release
        return False
    return True
