"""Commands for PowerShell arrive as they were, by its documented rules, in Windows PowerShell 5.1 and in PowerShell 7.

No PowerShell runs here. ``argument_mode``, ``passed`` and ``argv`` follow about_Parsing, about_Quoting_Rules and
about_Preference_Variables of its documentation, and "Parsing C command-line arguments" of Microsoft's C++ documentation. The
examples of these pages are tested first.
"""

import re
from pathlib import Path

import pytest

from kohya_ext.config import command_line
from kohya_ext.config.command_line import CommandLine, quoted
from tests.windows.test_cmd import VALUES, VARIABLES

#: How a version passes words to a program: 5.1; 6 to 7.2, and later ones with a variable; 7.3 and later.
PASSING = ("5.1", "legacy", "windows")

SINGLE, DOUBLE = "'\u2018\u2019\u201a\u201b", '"\u201c\u201d\u201e'

LEGACY = re.compile(r"& \{ \$PSNativeCommandArgumentPassing = 'Legacy'; (.*) \}")

VERSIONS = ("5.1", "7.2", "7.3")


def argument_mode(line):
    """Return the words of a command, after the call operator if it has one: strings in quotes, and plain bare words."""
    words, rest = [], line.removeprefix("& ")
    assert line.startswith("& ") or rest[0] not in SINGLE + DOUBLE, "a string in quotes alone is an expression"
    while rest := rest.lstrip(" "):
        if rest[0] in SINGLE:
            end = re.match(f"[{SINGLE}]((?:[^{SINGLE}]|[{SINGLE}]{{2}})*)[{SINGLE}]( |$)", rest)
            words.append(re.sub(f"[{SINGLE}]([{SINGLE}])", r"\1", end[1]))
        elif rest[0] in DOUBLE:
            end = re.match(f"[{DOUBLE}]((?:[^`${DOUBLE}]|[{DOUBLE}]{{2}})*)[{DOUBLE}]( |$)", rest)
            words.append(re.sub(f"[{DOUBLE}]([{DOUBLE}])", r"\1", end[1]))
        else:
            end = re.match(r"([^ ]+)( |$)", rest)
            assert not re.search(f"[`,;(){{}}|&$%{SINGLE}{DOUBLE}]|^[<>@#~]", end[1]), end[1]
            assert not re.match("-[^-].*[.:]|--%$|--$", end[1]), end[1]
            words.append(end[1])
        rest = rest[end.end() :]
    return words


def needs_quotes(word):
    """Return whether PowerShell puts a word into double quotes: it has white space outside of quotes."""
    quotes = 0
    for before, character in zip(f" {word}", word, strict=False):
        if character == '"' and before != "\\":
            quotes += 1
        elif character.isspace() and quotes % 2 == 0:
            return True
    return False


def passed(words, how):
    """Return the command line that a program gets for words."""
    if how == "windows":  # as .NET writes it
        return " ".join(command_line._in_double_quotes(word) for word in words)
    line = []
    for word in filter(None, words):
        doubled = "\\" * (len(word) - len(word.rstrip("\\")) if how == "legacy" else 0)
        line.append(f'"{word}{doubled}"' if needs_quotes(word) else word)
    return " ".join(line)


def argv(line):
    """Return the words of a command line, as the startup code of a program in C reads them."""
    words, word, inside = [], None, False
    for part in re.findall(r'\\*"|\\+|[ \t]|[^\\" \t]+', line):
        if part.isspace() and not inside:
            words += [] if word is None else [word]
            word = None
        elif part.endswith('"'):
            word = (word or "") + "\\" * ((len(part) - 1) // 2)
            if len(part) % 2 == 0:
                word += '"'
            else:
                inside = not inside
        else:
            word = (word or "") + part
    return [*words, *([] if word is None else [word])]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('"abc" d e', ["abc", "d", "e"]),
        (r"a\\b d", [r"a\\b", "d"]),
        (r'a\\\b d"e f"g h', [r"a\\\b", "de fg", "h"]),
        (r"a\\\"b c d", [r"a\"b", "c", "d"]),
        (r'a\\\\"b c" d e', [r"a\\b c", "d", "e"]),
    ],
)
def test_the_examples_of_programs(line, words):
    assert argv(line) == words


@pytest.mark.parametrize(
    ("line", "how", "words"),
    [
        ("""TestExe 'c" "d'""", "windows", ['c" "d']),
        ("TestExe '' a b ''", "windows", ["", "a", "b", ""]),
        ("""TestExe '"C:\\Program Files (x86)\\Microsoft\\"'""", "windows", ['"C:\\Program Files (x86)\\Microsoft\\"']),
        ("TestExe 'don''t'", "windows", ["don't"]),
        ('TestExe "a ""b"" c"', "windows", ['a "b" c']),
        ("TestExe '' a b ''", "legacy", ["a", "b"]),
        ("""TestExe 'a"b c"d'""", "legacy", ["ab cd"]),
        ("TestExe 'C:\\my folder\\' next", "legacy", ["C:\\my folder\\", "next"]),
        ("TestExe 'C:\\my folder\\' next", "5.1", ['C:\\my folder" next']),
        ("""TestExe '"a \\"b\\" c"'""", "5.1", ['a "b" c']),
    ],
)
def test_the_examples_of_powershell(line, how, words):
    assert argv(passed(argument_mode(line)[1:], how)) == words


def received(line, version):
    """Return the words that the program of a printed line receives."""
    legacy = LEGACY.fullmatch(line)
    how = {"5.1": "5.1", "7.2": "legacy", "7.3": "legacy" if legacy else "windows"}[version]
    program, *words = argument_mode(legacy[1] if legacy else line)
    return [program, *argv(passed(words, how))]


MORE = (
    *("it\u2019s \u2018x\u2019", "\u201ca\u201d b", 'a "b | c" d', "a\u3000b\\", "\u3000"),
    *("~", "-a.b", "@x", "#1", "a;b", "1e-4", '\\"', 'a\\\\" b\\'),
)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("value", [*VALUES, *VARIABLES, *MORE])
@pytest.mark.parametrize("program", ["python", r"C:\Users\Jörg O'Neil\.venv\Scripts\python.exe"])
def test_a_value_arrives_as_it_was(monkeypatch, program, value, version):
    monkeypatch.setattr(command_line, "shell", lambda: "powershell")
    words = [program, "-m", "kohya_ext", "--before", value, "--after", "x & y"]
    assert received(quoted(words), version) == words


@pytest.mark.parametrize("version", VERSIONS)
def test_a_line_changes_the_folder_and_runs(monkeypatch, tmp_path, version):
    monkeypatch.setattr(command_line, "shell", lambda: "powershell")
    folder = tmp_path / "it\u2019s 100% [x]"
    folder.mkdir()
    monkeypatch.chdir(folder)
    words = ["--training_comment", 'say "hi"', "--network_args", "a=b c"]
    line = CommandLine(Path("sdxl_train_network.py"), words, {"CUDA_VISIBLE_DEVICES": "0,1"}).shell_line()
    change, gpus, command = line.split("; ", 2)
    assert argument_mode(change) == ["Set-Location", "-LiteralPath", str(folder)]
    assert gpus == "$env:CUDA_VISIBLE_DEVICES = '0,1'"
    assert received(command, version)[-4:] == words


def test_a_line_without_special_characters_is_for_every_shell(monkeypatch):
    words = ["python", "-m", "kohya_ext", "sdxl_train.py", "--learning_rate", "1e-4", "--output_dir", "out/cat"]
    for shell in ("sh", "cmd", "powershell"):
        monkeypatch.setattr(command_line, "shell", lambda shell=shell: shell)
        assert quoted(words) == " ".join(words)
