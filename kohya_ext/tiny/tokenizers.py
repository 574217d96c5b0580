"""Tiny tokenizers, in the layouts in which sd-scripts looks for downloaded ones.

A folder written by `write` works both as `--tokenizer_cache_dir` and as HF_HUB_CACHE, because flux_train.py, sd3_train.py
and (for caching) lumina_train.py ignore the option, and the Lumina scripts use it as the hub's cache folder.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from kohya_ext.tiny import vocabulary

CLIP_L = "openai/clip-vit-large-patch14"
CLIP_G = "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k"
T5 = "google/t5-v1_1-xxl"
GEMMA = "google/gemma-2-2b"
QWEN_VL = "Qwen/Qwen2.5-VL-7B-Instruct"
BYT5 = "google/byt5-small"

_REVISION = "tiny"


def write(folder: Path) -> None:
    """Write all tokenizers to `folder` in both layouts. Create the folder if it is missing."""
    write_clip(folder)
    write_t5(folder)
    write_gemma(folder)
    write_qwen_vl(folder)
    write_byt5(folder)
    write_hub_cache(folder)


def write_clip(folder: Path) -> None:
    """Write the tokenizers of CLIP-L and CLIP-G, 514 tokens, to their subfolders of `folder`."""
    for model, padding in ((CLIP_L, "<|endoftext|>"), (CLIP_G, "!")):
        target = _subfolder(folder, model)
        _write_json(target / "vocab.json", {token: index for index, token in enumerate(vocabulary.CLIP)})
        (target / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
        settings = {
            "tokenizer_class": "CLIPTokenizer",
            "model_max_length": 77,
            "bos_token": "<|startoftext|>",
            "eos_token": "<|endoftext|>",
            "unk_token": "<|endoftext|>",
            "pad_token": padding,
        }
        _write_json(target / "tokenizer_config.json", settings)


def write_t5(folder: Path) -> None:
    """Write the tokenizer of T5, 192 tokens, to its subfolder of `folder`."""
    target = _subfolder(folder, T5)
    _write_json(target / "tokenizer.json", _unigram(vocabulary.T5, special=3, before=[], after=["</s>"]))
    settings = {
        "tokenizer_class": "T5TokenizerFast",
        "model_max_length": 512,
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "extra_ids": 0,
    }
    _write_json(target / "tokenizer_config.json", settings)


def write_gemma(folder: Path) -> None:
    """Write the tokenizer of Gemma 2, 193 tokens, to its subfolder of `folder`."""
    target = _subfolder(folder, GEMMA)
    _write_json(target / "tokenizer.json", _unigram(vocabulary.GEMMA, special=4, before=["<bos>"], after=[]))
    settings = {
        "tokenizer_class": "GemmaTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
    }
    _write_json(target / "tokenizer_config.json", settings)
    _write_json(target / "config.json", {"model_type": "gemma2"})  # transformers 5 reads it to choose the tokenizer's class


def write_qwen_vl(folder: Path) -> None:
    """Write the tokenizer of Qwen2.5-VL, 259 tokens, to its subfolder of `folder`."""
    target = _subfolder(folder, QWEN_VL)
    special = vocabulary.QWEN_VL[-3:]
    _write_json(target / "vocab.json", {token: index for index, token in enumerate(vocabulary.QWEN_VL[:-3])})
    (target / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 4096,
        "pad_token": special[0],
        "eos_token": special[2],
        "unk_token": None,
        "added_tokens_decoder": {
            str(len(vocabulary.QWEN_VL) - 3 + index): {"content": token, "special": True} for index, token in enumerate(special)
        },
    }
    _write_json(target / "tokenizer_config.json", settings)
    _write_json(target / "config.json", {"model_type": "qwen2_5_vl"})


def write_byt5(folder: Path) -> None:
    """Write the configuration of ByT5's tokenizer, whose vocabulary is the bytes, to its subfolder of `folder`."""
    target = _subfolder(folder, BYT5)
    _write_json(target / "tokenizer_config.json", {"tokenizer_class": "ByT5Tokenizer"})
    _write_json(target / "config.json", {"model_type": "t5"})


def write_hub_cache(folder: Path) -> None:
    """Copy the tokenizers in `folder` into the layout of a Hugging Face hub cache in the same folder."""
    for model in (CLIP_L, CLIP_G, T5, GEMMA, QWEN_VL, BYT5):
        source = _subfolder(folder, model)
        cached = folder / f"models--{model.replace('/', '--')}"
        shutil.copytree(source, cached / "snapshots" / _REVISION, dirs_exist_ok=True)
        (cached / "refs").mkdir(exist_ok=True)
        (cached / "refs" / "main").write_text(_REVISION, encoding="utf-8")


def _subfolder(folder: Path, model: str) -> Path:
    target = folder / model.replace("/", "_")
    target.mkdir(parents=True, exist_ok=True)
    return target


def _unigram(tokens: tuple[str, ...], special: int, before: list[str], after: list[str]) -> dict[str, Any]:
    """Return the content of a tokenizer.json.

    The first `special` tokens are special, and the last of them is the unknown token. `before` and `after` are added to
    each text. Pieces of two characters score higher than two pieces of one, so that a space joins the following character.
    """

    def mark(token: str) -> dict[str, Any]:
        return {"SpecialToken": {"id": token, "type_id": 0}}

    def around(text: str) -> list[dict[str, Any]]:
        return [*map(mark, before), {"Sequence": {"id": text, "type_id": 0}}, *map(mark, after)]

    def score(index: int) -> float:
        return 0.0 if index < special else -4.0 if len(tokens[index]) == 1 else -5.0

    metaspace = {"type": "Metaspace", "replacement": vocabulary.WORD_START, "prepend_scheme": "always", "split": True}
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in enumerate(tokens[:special])
        ],
        "pre_tokenizer": metaspace,
        "decoder": metaspace,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": around("A"),
            "pair": [*around("A"), *around("B")],
            "special_tokens": {
                token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in (*before, *after)
            },
        },
        "model": {
            "type": "Unigram",
            "unk_id": special - 1,
            "vocab": [[token, score(index)] for index, token in enumerate(tokens)],
            "byte_fallback": False,
        },
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
