"""Write the package's table of the tensors in each family's checkpoints: names, shapes and types, at full size.

    python tools/make_checkpoint_headers.py

Writes kohya_ext/dry_run/headers.json, from which a dry run makes the files that its command line does not name. The tensors are
those of the sparse checkpoints of benchmarks/. Run it for a new family.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import sparse_checkpoints
from kohya_ext.dry_run import stand_ins
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.run.safetensors_header import read_header
from kohya_ext.sdscripts.checkouts import find_or_fetch
from kohya_ext.sdscripts.families import FAMILIES


def main() -> int:
    """Write the table; each kind of checkpoint in a process of its own."""
    if len(sys.argv) > 1:
        print(_row(sys.argv[1]))
        return 0
    titles = [kind.title for family in FAMILIES for kind in family.checkpoints]
    command = [sys.executable, __file__]
    rows = [subprocess.run([*command, title], check=True, stdout=subprocess.PIPE, text=True).stdout for title in titles]
    text = ",\n".join(row.splitlines()[-1] for row in rows)
    Path(stand_ins.__file__).with_name(stand_ins.TABLE).write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
    return 0


def _row(title: str) -> str:
    """Return a kind of checkpoint and its files as a line of JSON."""
    family, kind = next((family, kind) for family in FAMILIES for kind in family.checkpoints if kind.title == title)
    option: dict[str, Any] = dict([kind.option] if kind.option is not None else [])
    config = MemoryConfig(family.lora, resolution="512,512", **option)
    with TemporaryDirectory() as folder:
        files = sparse_checkpoints.write(find_or_fetch(None), config, Path(folder)).files
        headers = {option: tree(_tensors(path)) for option, path in files.items()}
    return f"{dumps(title)}: {dumps(headers, separators=(',', ':'))}"


def _tensors(path: Path) -> dict[str, str]:
    header = read_header(path)
    return {name: " ".join(map(str, (header.dtypes[name], *shape))) for name, shape in header.shapes.items()}


def tree(tensors: Mapping[str, str]) -> dict[str, Any]:
    """Return descriptions of tensors as a tree of their names' parts between dots; equal branches share a key: ``"0,1"``."""
    branches: dict[str, dict[str, str]] = defaultdict(dict)
    leaves: dict[str, Any] = {}
    for name, tensor in tensors.items():
        first, dot, rest = name.partition(".")
        if dot:
            branches[first][rest] = tensor
        else:
            leaves[first] = tensor
    merged: dict[str, tuple[list[str], Any]] = {}
    for first, branch in (*leaves.items(), *((first, tree(rest)) for first, rest in branches.items())):
        merged.setdefault(dumps(branch), ([], branch))[0].append(first)
    return {",".join(names): branch for names, branch in merged.values()}


if __name__ == "__main__":
    sys.exit(main())
