"""Write the package's table of the tensors that each kind of model file must have.

    python tools/make_tensor_names.py

Writes kohya_ext/sdscripts/tensor_names.json, with which preflight counts the tensors that a file lacks. The names are those
that sd-scripts' own classes have at full size (built without memory for their weights) and at the size of the tests' tiny
models, so that the table holds for every number of blocks. Run it for a new family; a test fails until then.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from kohya_ext.run.safetensors_header import read_header
from kohya_ext.sdscripts import families, parts
from kohya_ext.sdscripts.checkouts import find_or_fetch
from kohya_ext.tiny import checkpoints

TABLE = Path(parts.__file__).with_name(parts.TABLE)

#: Part -> the family and the option of a file that has it.
SOURCES: Mapping[str, tuple[str, str]] = {
    **{family.name: (family.name, "pretrained_model_name_or_path") for family in families.FAMILIES},
    "clip-l": ("sd3", "clip_l"),
    "clip-g": ("sd3", "clip_g"),
    "t5": ("sd3", "t5xxl"),
    "flux-ae": ("flux", "ae"),
    "gemma2": ("lumina", "gemma2"),
    "qwen3": ("anima", "qwen3"),
    "qwen-vae": ("anima", "vae"),
    "qwen-vl": ("hunyuan-image", "text_encoder"),
    "byt5": ("hunyuan-image", "byt5"),
    "hunyuan-vae": ("hunyuan-image", "vae"),
}

#: Lists of blocks whose number differs between checkpoints; in the table an index is ``#``.
_BLOCKS = (
    *("block", "blocks", "layers", "resblocks", "resnets", "norms", "transformer_blocks"),
    *("double_blocks", "single_blocks", "joint_blocks", "noise_refiner", "context_refiner"),
)
_INDEX = re.compile(rf"(?<![a-z_])({'|'.join(_BLOCKS)})\.\d+\.")

#: Part, empty for all -> parts of names of tensors that upstream's loaders do without.
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "": ("position_ids", "logit_scale", "inv_freq", ".seq", "dim_spatial_range", "dim_temporal_range"),  # buffers
    "flux": ("guidance_in.",),  # FLUX.1 schnell has none
    "sd3": (".ln_q.", ".ln_k.", ".attn2."),  # SD 3 medium has no norms of queries, SD 3.5 large no second attention
    "clip-l": ("text_projection.",),  # SD 3's loader adds it, FLUX has none
    **dict.fromkeys(("t5", "byt5"), ("shared.", "embed_tokens.")),  # a file has one of the embedding's two names
}


def main() -> int:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print_names", nargs=2, metavar=("FAMILY", "CHECKOUT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.print_names:
        print(json.dumps(full_size_names(given.print_names[0], Path(given.print_names[1]))))
        return 0
    checkout, table = find_or_fetch(None).path, {}
    with TemporaryDirectory() as folder:
        for family in checkpoints.FAMILIES:
            files = checkpoints.write(family, checkout, Path(folder)).files
            command = [sys.executable, __file__, "--print_names", family, str(checkout)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            full = json.loads(output.splitlines()[-1])
            for part in (part for part, (source, _) in SOURCES.items() if source == family):
                file = files[SOURCES[part][1]]
                table[part] = tree(required(part, full[file.stem], [*read_header(file).shapes]))
    TABLE.write_text(text(table), encoding="utf-8")
    return 0


def text(table: Mapping[str, Any]) -> str:
    """Return the table as JSON, with a line for each part."""
    rows = (f"{json.dumps(part)}: {json.dumps(table[part], separators=(',', ':'))}" for part in sorted(table))
    return "{\n" + ",\n".join(rows) + "\n}\n"


def full_size_names(family: str, checkout: Path) -> dict[str, list[str]]:
    """Return file -> names of its tensors, as the writers of the tiny models would write them in full size.

    Nothing is computed: weights have no memory. Call it in a process of its own.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from kohya_ext.tiny import shrink, weights

    names: dict[str, list[str]] = {}

    def save_file(tensors: Mapping[str, Any], file: Any, *_: Any, **__: Any) -> None:
        names[Path(file).stem] = [*tensors]

    # Stable Diffusion's converters copy weights to the CPU; other models read values while they are built.
    mode = FakeTensorMode(allow_non_fake_inputs=True) if families.BY_NAME[family].unet else torch.device("meta")
    with (
        mock.patch.object(shrink, "install"),
        mock.patch.object(weights, "_randomized", lambda module, seed: module),
        mock.patch.object(weights, "_flux_clip_l", torch.nn.Module),  # needs the tiny models' configuration
        mock.patch("safetensors.torch.save_file", save_file),
        mode,
    ):
        weights.write(family, checkout, checkpoints.locate(family, Path()).files)
    return names


def required(part: str, *sizes: Collection[str]) -> set[str]:
    """Return the patterns of names that a model has in each of some sizes, and in each block of a list."""
    optional = (*_OPTIONAL[""], *_OPTIONAL.get(part, ()))
    patterns = set.intersection(*(_in_every_block(names) for names in sizes))
    return {name for name in patterns if not any(each in name for each in optional)}


def _in_every_block(names: Iterable[str]) -> set[str]:
    indexes: dict[str, set[str]] = defaultdict(set)
    """List of blocks -> the indexes of all its blocks."""
    having: dict[str, set[str]] = defaultdict(set)
    """Pattern -> the indexes of the blocks that have it."""
    lists = {}
    for name in names:
        pattern = _INDEX.sub(r"\1.#.", name)
        index = ".".join(match[0] for match in _INDEX.finditer(name))
        lists[pattern] = pattern.rpartition("#")[0]
        indexes[lists[pattern]].add(index)
        having[pattern].add(index)
    return {pattern for pattern, blocks in having.items() if blocks == indexes[lists[pattern]]}


def tree(names: Iterable[str]) -> dict[str, Any]:
    """Return names as a tree of their parts between dots, in which equal branches share one key: ``"weight,bias"``."""
    branches: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        first, _, rest = name.partition(".")
        branches[first].append(rest)
    merged: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for first, rests in branches.items():
        branch = tree(filter(None, rests))
        keys, _ = merged.setdefault(json.dumps(branch) if first != "#" else first, ([], branch))
        keys.append(first)
    return {",".join(keys): branch for keys, branch in merged.values()}


if __name__ == "__main__":
    sys.exit(main())
