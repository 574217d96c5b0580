"""The tokens of the tiny tokenizers, without imports, because `shrink` needs their number at Python's startup."""

_PRINTABLE = [chr(code) for code in range(33, 127)]
_LATIN = [chr(code) for code in (*range(0xA1, 0xAD), *range(0xAE, 0x100))]
# Byte-level BPE maps bytes without a printable Latin-1 character to the characters from U+0100 on
# (bytes_to_unicode in https://github.com/openai/gpt-2/blob/master/src/encoder.py).
_BYTES = [*_PRINTABLE, *_LATIN, *(chr(256 + n) for n in range(256 - len(_PRINTABLE) - len(_LATIN)))]

WORD_START = "\u2581"  # SentencePiece's mark for a space
_PIECES = [WORD_START, *_PRINTABLE, *(WORD_START + character for character in _PRINTABLE)]

CLIP = (*_BYTES, *(byte + "</w>" for byte in _BYTES), "<|startoftext|>", "<|endoftext|>")
"""514 tokens: every byte, inside a word and at its end. CLIP pools at the highest id, so the end token comes last."""

QWEN_VL = (*_BYTES, "<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""259 tokens: every byte, without merges."""

T5 = ("<pad>", "</s>", "<unk>", *_PIECES)
"""192 tokens: the printable ASCII characters, inside a word and at its start."""

GEMMA = ("<pad>", "<eos>", "<bos>", "<unk>", *_PIECES)
"""193 tokens: the same characters as T5."""
