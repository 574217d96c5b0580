"""Find packages that are too new for a checkout of sd-scripts."""

from __future__ import annotations

from argparse import Namespace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import Version

from kohya_ext.preflight import Findings
from kohya_ext.sdscripts import families

#: The release that removed the submodule ``text_model`` of CLIP's text model, and with it the prefix of its tensors' names.
_WITHOUT_PREFIX = Version("5.6")

#: Families with that text model. Stable Diffusion 3 has the one with a projection, which is as before.
_WITH_CLIP = ("sdxl", "sd15", "flux")


def check(script: Path, args: Namespace, findings: Findings) -> None:
    """Add an error for a checkout whose loaders fail with the installed transformers."""
    family = families.of(script.name, vars(args))
    library = script.parent / "library"
    if family is None or family.name not in _WITH_CLIP or not library.is_dir() or (library / "clip_text_model.py").is_file():
        return
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        return
    if Version(installed) >= _WITHOUT_PREFIX:
        findings.errors.append(
            f"this sd-scripts cannot load CLIP with transformers {installed}; run pip install -r "
            f"{script.parent / 'requirements.txt'}, or use sd-scripts v0.12.0 or newer"
        )
