"""Names and prose use the field's words: see DESIGN.md, "Voice"."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Words that the project once used for something that the field has another word for, or that no engineer would write.
WORDS = re.compile(
    r"""\b(
        anew | whoever | wherever\ it | nobody\ here | pictures? | rungs? | ladders? | stairs? | gauges? | climb(ed|s)?
        | lies?\ (on|in|there|at|where) | lay\ (on|in|there)
        | stands?\ (in|at|there|where|beside|above|below|before|behind|first|last)
        | said | told | tells?\ from | gone\ on | goes\ on | went\ on | go\ on | has\ no\ end | in\ words
        | is\ no\ (?!longer|more|less|slower|faster|such)\w+ | are\ no\ (?!longer|more|less)\w+ | beside | numbers\ trained
    )\b""",
    re.VERBOSE | re.IGNORECASE,
)

#: Names that say nothing of what they hold.
NAMES = {"found", "made", "one", "look", "say", "says", "said", "told", "gauge", "rung", "ladder", "spend", "spender", "fill"}

SOURCES = [
    file
    for folder in ("kohya_ext", "patches", "benchmarks", "tools", "virtual_gpu")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if "__pycache__" not in file.parts
]
PROSE = [
    *ROOT.glob("*.md"),
    *(ROOT / "virtual_gpu").rglob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "presets").rglob("*.toml"),
]


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every comment and string, in which one with a space is taken for a sentence."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or tokenize.tok_name[token.type] == "FSTRING_MIDDLE":
            yield token.start[0], token.string
        elif token.type == tokenize.STRING and " " in token.string:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def names(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of everything that the source gives a name to."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_sources_use_the_fields_words(file):
    source = file.read_text(encoding="utf-8")
    assert [f"{line}: {text.strip()}" for line, text in prose(source) if WORDS.search(text)] == []
    assert [f"{line}: {name}" for line, name in names(source) if name.strip("_") in NAMES] == []


@pytest.mark.parametrize("file", PROSE, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_pages_and_presets_use_the_fields_words(file):
    lines = file.read_text(encoding="utf-8").splitlines()
    assert [f"{number}: {line}" for number, line in enumerate(lines, 1) if WORDS.search(line)] == []
