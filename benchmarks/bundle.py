"""``python -m benchmarks.bundle FILE``: everything that the benchmarks need on a machine without a network, in one archive.

It holds this project, a checkout of sd-scripts without its binaries and pictures, and the packages that such a machine
lacks, unpacked for a Python and a platform. Models, tokenizers and pictures are made on the spot. There:

    tar xzf FILE && sh kohya_ext-benchmarks/run.sh
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.results import COMMIT_FILE, ROOT, kohya_ext_commit
from kohya_ext.console import error, note
from kohya_ext.errors import UserError
from kohya_ext.sdscripts.checkouts import Checkout, find

NAME = "kohya_ext-benchmarks"
LARGEST = 64 * 2**20

#: What a machine with torch, accelerate, safetensors, numpy, einops, opencv and a newer transformers lacks. sd-scripts needs
#: transformers 4 with its own tokenizers and hub; tensorboard is how its steps are timed; the rest is small.
PACKAGES = (
    "transformers==4.54.1", "tokenizers==0.21.4", "huggingface_hub==0.34.3", "diffusers==0.32.1", "requests", "urllib3",
    "charset_normalizer", "idna", "certifi", "voluptuous==0.15.2", "toml==0.10.2", "imagesize==1.4.1", "ftfy", "wcwidth",
    "sentencepiece", "wrapt", "platformdirs", "rich", "markdown-it-py", "mdurl", "pygments", "tomlkit",
    "importlib_metadata", "zipp", "tensorboard", "absl-py", "grpcio", "markdown", "werkzeug", "markupsafe", "protobuf",
)  # fmt: skip

#: Of sd-scripts, what no training script reads.
_LEFT_OUT = (".dll", ".png", ".jpg", ".jpeg", ".webp", ".gif", ".ipynb", ".exe", ".so", ".whl")
_FOLDERS_LEFT_OUT = ("tests", "docs", "bitsandbytes_windows", ".github", ".ai", "_typos.toml")

RUN = """#!/bin/sh
# Measures what is still open, within ten minutes; call it again for the rest. Results: ./results, and $OUT where there is one.
here=$(cd "$(dirname "$0")" && pwd)
results=${RESULTS:-$here/results}
export PYTHONPATH="$here/site:$here" PYTHONUNBUFFERED=1 KOHYA_EXT_CACHE="$here/cache"
cd "$here" && "${PYTHON:-python3}" -m benchmarks.agenda --results "$results" "$@"
code=$?
if [ -n "$OUT" ]; then tar czf "$OUT/results.tar.gz" -C "$results" --exclude=scratch . ; fi
exit $code
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Pack; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bundle", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="the archive, .tar.gz")
    parser.add_argument("--sd-scripts", type=Path, metavar="FOLDER", help="the checkout (found as kohya_ext finds it)")
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="of the machine it is for (3.12)")
    parser.add_argument("--platform", default="manylinux_2_28_x86_64", help="of the machine it is for, as pip says it")
    given = parser.parse_args(argv)
    try:
        checkout = find(given.sd_scripts)
        if checkout is None:
            raise UserError("no sd-scripts found: name its folder with --sd-scripts, or run `python -m kohya_ext setup`")
        size = pack(given.file, checkout, given.python, given.platform)
    except UserError as problem:
        error(str(problem))
        return UserError.exit_code
    note(f"{given.file}: {size / 2**20:.1f} MiB. There: tar xzf {given.file.name} && sh {NAME}/run.sh")
    return 0


def pack(file: Path, checkout: Checkout, python: str, platform: str) -> int:
    """Write the archive and return its size in bytes. Raises UserError when it is larger than :data:`LARGEST`."""
    with tempfile.TemporaryDirectory(prefix="bundle-") as folder:
        site = Path(folder)
        _install(site, python, platform)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(file, "w:gz") as archive:
            for path in _tracked(ROOT):
                if not path.startswith(("tests/", "benchmarks/results/", ".")):
                    archive.add(ROOT / path, f"{NAME}/{path}")
            for path in _scripts(checkout):
                archive.add(checkout.path / path, f"{NAME}/sd-scripts/{path}")
            archive.add(site, f"{NAME}/site", filter=_without_caches)
            ours = kohya_ext_commit()
            _add_text(archive, COMMIT_FILE, f"{ours['kohya_ext']} {'changed' if ours['kohya_ext_changed'] else 'clean'}\n")
            _add_text(archive, "run.sh", RUN, mode=0o755)
    size = file.stat().st_size
    if size > LARGEST:
        raise UserError(f"{file} has {size / 2**20:.1f} MiB: more than the {LARGEST / 2**20:.0f} that can be carried")
    return size


def _install(site: Path, python: str, platform: str) -> None:
    """Unpack :data:`PACKAGES` for another Python. An older manylinux serves where a package has no newer one."""
    platforms = [word for name in (platform, "manylinux_2_17_x86_64", "manylinux2014_x86_64") for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    command += ["--only-binary=:all:", "--python-version", python, *platforms, "--target", str(site), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"pip could not get the packages: {done.stderr.strip().splitlines()[-1]}")


def _tracked(folder: Path) -> list[str]:
    done = subprocess.run(["git", "-C", str(folder), "ls-files", "-z"], check=True, capture_output=True, text=True)
    return [path for path in done.stdout.split("\0") if path and (folder / path).is_file()]


def _scripts(checkout: Checkout) -> Iterator[str]:
    if checkout.commit is None:
        raise UserError(f"{checkout.path} is no git checkout: fetch one with `python -m kohya_ext setup`")
    for path in _tracked(checkout.path):
        if path.split("/")[0] not in _FOLDERS_LEFT_OUT and not path.lower().endswith(_LEFT_OUT):
            yield path


def _without_caches(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in member.name or member.name.endswith((".dist-info/RECORD", ".so.debug")) else member


def _add_text(archive: tarfile.TarFile, name: str, text: str, mode: int = 0o644) -> None:
    content = text.encode()
    member = tarfile.TarInfo(f"{NAME}/{name}")
    member.size, member.mode = len(content), mode
    archive.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    sys.exit(main())
