"""Write the tensors of a kind of checkpoint to the package's table: names, shapes and types, from the files of a model.

    python tools/make_checkpoint_headers.py SDXL pretrained_model_name_or_path=sd_xl_base_1.0.safetensors

Adds to kohya_ext/dry_run/headers.json, from which a dry run makes the files that its command line does not name. Only headers
are read. Kinds are the titles of families' checkpoints (kohya_ext/sdscripts/families.py), names those of the scripts' options;
a model of several files has several. Run it for a new family.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import Any

from kohya_ext.dry_run import stand_ins
from kohya_ext.run.safetensors_header import read_header
from kohya_ext.sdscripts.families import FAMILIES

TABLE = Path(stand_ins.__file__).with_name(stand_ins.TABLE)


def main() -> None:
    """Replace a kind's row in the table."""
    titles = [kind.title for family in FAMILIES for kind in family.checkpoints]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=titles)
    parser.add_argument("files", nargs="+", metavar="OPTION=FILE")
    given = parser.parse_args()
    files = dict(each.split("=", 1) for each in given.files)
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    table[given.kind] = {option: tree(_tensors(Path(path))) for option, path in files.items()}
    rows = ",\n".join(f"{dumps(title)}: {dumps(table[title], separators=(',', ':'))}" for title in titles if title in table)
    TABLE.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")


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
    main()
