"""Names and prose use standard terms: see DESIGN.md, "Voice"."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Words that have a standard term in this field, or that engineers would not write.
WORDS = re.compile(
    r"""\b(
        anew | whoever | wherever\ it | nobody\ here | pictures? | rungs? | ladders? | stairs? | gauges? | climb(ed|s)?
        | lies?\ (on|in|there|at|where) | lay\ (on|in|there)
        | stands?\ (in|at|there|where|beside|above|below|before|behind|first|last)
        | said | told | tells?\ from | gone\ on | goes\ on | went\ on | go\ on | has\ no\ end | in\ words
        | at\ once | as\ sold | sold\ as | data\ sets? | time\ (is|was)\ up
        | is\ no\ (?!longer|more|less|slower|faster|such)\w+ | are\ no\ (?!longer|more|less)\w+ | beside | numbers\ trained
    )\b""",
    re.VERBOSE | re.IGNORECASE,
)

#: Names that do not describe their values.
NAMES = {"found", "made", "one", "look", "say", "says", "said", "told", "gauge", "rung", "ladder", "spend", "spender", "fill"}

SOURCES = [
    file
    for folder in ("kohya_ext", "patches", "benchmarks", "tools", "virtual_gpu", "tests")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if file != Path(__file__)
]
PROSE = [
    *ROOT.glob("*.md"),
    *(ROOT / "virtual_gpu").rglob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    ROOT / "benchmarks" / "README.md",
    *(ROOT / "presets").rglob("*.toml"),
]


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every comment and of every string with a space."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or tokenize.tok_name[token.type] == "FSTRING_MIDDLE":
            yield token.start[0], token.string
        elif token.type == tokenize.STRING and " " in token.string:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def names(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every function, class, parameter and variable."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_sources_use_standard_terms(file):
    source = file.read_text(encoding="utf-8")
    if WORDS.search(source):  # perhaps in code, where it is allowed
        assert [f"{line}: {text.strip()}" for line, text in prose(source) if WORDS.search(text)] == []
    if re.search(rf"\b_*({'|'.join(NAMES)})_*\b", source):
        assert [f"{line}: {name}" for line, name in names(source) if name.strip("_") in NAMES] == []


@pytest.mark.parametrize("file", PROSE, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_pages_and_presets_use_standard_terms(file):
    lines = file.read_text(encoding="utf-8").splitlines()
    assert [f"{number}: {line}" for number, line in enumerate(lines, 1) if WORDS.search(line)] == []
