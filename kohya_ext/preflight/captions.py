"""Find captions that a text encoder does not read to their end.

sd-scripts cuts tokens beyond a limit without a message. Tokenizers take seconds to load, so tokens are counted from below: each
word, number or run of punctuation has at least one. A caption that is reported is certainly cut; one slightly above the limit
may not be reported.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from kohya_ext.sdscripts import families

#: Family -> the option for the largest number of tokens, and its default.
LIMITS: Mapping[str, tuple[str, int]] = {
    "sdxl": ("max_token_length", 75),
    "sd15": ("max_token_length", 75),
    "sd3": ("t5xxl_max_token_length", 256),
    "flux": ("t5xxl_max_token_length", 512),
    "chroma": ("t5xxl_max_token_length", 512),
    "lumina": ("gemma2_max_token_length", 256),
    "anima": ("qwen3_max_token_length", 512),
}

#: The parts into which CLIP's tokenizer divides a text before it divides these into tokens.
_CLIP = re.compile(r"'(?:s|t|re|ve|m|ll|d)\b|[^\W\d_]+|\d|(?:[^\s\w]|_)+", re.IGNORECASE)

_LARGEST_OF_CLIP = 225


def count_tokens(caption: str) -> tuple[int, int]:
    """Return the smallest possible numbers of tokens of a caption's first line, which is trained: CLIP's, and others'."""
    line = next(iter(caption.strip().splitlines()), "")
    return len(_CLIP.findall(line)), len(line.split())


def trained_text(caption: str, wildcards: bool) -> str:
    """Return the part of a caption's file that sd-scripts reads: the first line, or with wildcards all lines."""
    return (caption if wildcards else caption.partition("\n")[0]).strip()


def limit_of(script: Path, args: Namespace) -> int | None:
    """Return the most tokens of a caption that the text encoder reads; None if that is not known."""
    family = families.of(script.name, vars(args))
    if family is None or family.name not in LIMITS:
        return None
    option, default = LIMITS[family.name]
    return getattr(args, option, None) or default


def cut_message(folder: Path, counts: Sequence[tuple[int, int]], script: Path, args: Namespace) -> str | None:
    """Return a message about the captions that are cut, from the counts of each; None if none is known to be."""
    family, limit = families.of(script.name, vars(args)), limit_of(script, args)
    if family is None or limit is None:
        return None
    option = LIMITS[family.name][0]
    longest = [clip if family.unet else words for clip, words in counts]
    cut = sum(count > limit for count in longest)
    if not cut:
        return None
    remedy = f"use a larger --{option}, or shorten them"
    if family.unet:
        larger = next((each for each in (150, _LARGEST_OF_CLIP) if each >= max(longest)), _LARGEST_OF_CLIP)
        remedy = f"use --{option} {larger}, or shorten them" if limit < _LARGEST_OF_CLIP else "shorten them"
    return (
        f"at least {cut} of {len(counts)} captions in {folder} have more than {limit} tokens, and sd-scripts leaves out the "
        f"rest; {remedy}"
    )
