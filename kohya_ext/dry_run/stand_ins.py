"""Files for a run that the user has not got yet: checkpoints without weights, images, and tokenizers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

from kohya_ext.tiny import tokenizers

#: A file of this package, written by tools/make_checkpoint_headers.py: kind of checkpoint -> option -> tree of its tensors.
TABLE = "headers.json"

_FLOATS = ("F32", "F16", "BF16")
_BYTES = {"I64": 8, "I32": 4, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "BOOL": 1}

#: More than a text encoder takes, with one token for each character. HunyuanImage's second text encoder reads the quoted text.
CAPTION = 'a sign with the words "' + "sks style " * 20 + '" on ' + "a wall " * 100

CAPTION_EXTENSION = ".txt"

#: Tokens of CLIP's vocabulary, to whose number textual inversion resizes the embedding.
_CLIP_TOKENS = 49408


def options(kind: str) -> list[str]:
    """Return the options for the files of a kind of checkpoint: ``SDXL``."""
    return [*_table().get(kind, {})]


def write_checkpoint(kind: str, option: str, file: Path, fp8: bool = False) -> None:
    """Write the file of an option without weights, or one of fp8: it takes no more disk space than its header."""
    header: dict[str, Any] = {}
    end = 0
    for name, description in _tensors(_table()[kind][option]):
        dtype, *shape = description.split()
        dtype = "F8_E4M3" if fp8 and dtype in _FLOATS else dtype
        begin, end = end, end + math.prod(map(int, shape)) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": [*map(int, shape)], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as stream:
        _make_sparse(stream)
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def write_images(folder: Path, size: tuple[int, int], count: int) -> None:
    """Write ``count`` images with captions."""
    from PIL import Image

    folder.mkdir(parents=True)
    for index in range(count):
        Image.new("RGB", size).save(folder / f"{index}.png", compress_level=1)
        (folder / f"{index}{CAPTION_EXTENSION}").write_text(CAPTION, encoding="utf-8")


def write_tokenizers(folder: Path) -> None:
    """Write tokenizers without most of their words; CLIP's have as many tokens as the originals."""
    tokenizers.write(folder)
    for file in folder.rglob("vocab.json"):
        words = json.loads(file.read_text(encoding="utf-8"))
        if "<|startoftext|>" in words:
            missing = {f"unused{index}": index for index in range(len(words), _CLIP_TOKENS)}
            file.write_text(json.dumps({**words, **missing}), encoding="utf-8")


def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = json.loads((files("kohya_ext.dry_run") / TABLE).read_text(encoding="utf-8"))
    return table


def _tensors(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of each tensor in a tree, and its type and shape."""
    for names, branch in tree.items():
        for name in names.split(","):
            if isinstance(branch, str):
                yield name, branch
            else:
                yield from ((f"{name}.{rest}", tensor) for rest, tensor in _tensors(branch))


def _make_sparse(stream: IO[bytes]) -> None:
    """Let a file's unwritten parts take no disk space, which Windows must be asked for."""
    if sys.platform == "win32":
        import ctypes
        import msvcrt

        set_sparse, written = 0x900C4, ctypes.c_ulong()
        handle = ctypes.c_void_p(msvcrt.get_osfhandle(stream.fileno()))
        ctypes.windll.kernel32.DeviceIoControl(handle, set_sparse, None, 0, None, 0, ctypes.byref(written), None)
