"""Streams of legacy code pages and terminals: what they cannot hold is replaced, and what they would obey is escaped."""

import ast
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kohya_ext import console
from kohya_ext.console import printable
from kohya_ext.output import Console

#: Characters of each page, and others: Latin, Japanese, Chinese, box drawing, an emoji.
NAME = "Größe 学習 训练 ┃ ▁ 🙂"
PAGES = ("cp1252", "cp932", "cp936")

ROOT = Path(__file__).parents[2]

#: The error handlers of a standard output: of PYTHONIOENCODING, and of Python on Windows without it.
HANDLERS = ("strict", "surrogateescape")


def python(page: str, *words: str, handler: str = HANDLERS[1], **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run Python with standard streams as a pipe of Windows has them."""
    environ = {**os.environ, "PYTHONIOENCODING": f"{page}:{handler}", "PYTHONUTF8": "0", **variables}
    return subprocess.run([sys.executable, *words], capture_output=True, env=environ, timeout=120)


@pytest.mark.parametrize("page", PAGES)
def test_watch_prints_any_name_in_any_code_page(tmp_path, page):
    lines = [
        {"kind": "start", "time": 1.0, "run": "a", "name": NAME, "script": "x.py", "host": "other"},
        *({"kind": "step", "time": 2.0 + step, "step": step, "loss": 1 / step, "seconds": 1.0} for step in range(1, 9)),
        {"kind": "warning", "time": 20.0, "problem": f"{NAME}\x1b[2J"},
    ]
    file = tmp_path / f"{NAME.split()[0]}.journal.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = python(page, "-m", "kohya_ext", "watch", "--once", str(file))
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode(page)
    assert NAME.encode(page, "replace").decode(page) in text
    assert r"\x1b[2J" in text


def test_messages_are_readable_in_every_code_page():
    """Their own characters are in all of them. The full screen of watch is for terminals, and its pages are tested below."""
    sources = (file for folder in ("kohya_ext", "patches") for file in (ROOT / folder).rglob("*.py"))
    sources = (file for file in sources if file.parent.name != "watching")
    texts = {file: set(_messages(ast.parse(file.read_text(encoding="utf-8")))) for file in sources}
    assert len(texts) > 100
    for file, characters in texts.items():
        unreadable = [character for character in characters for page in PAGES if not character.encode(page, "ignore")]
        assert not unreadable, file


def _messages(tree: ast.Module) -> Iterator[str]:
    """Yield the characters of the strings that are printed as they are."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)))
    for call in calls:
        name = call.func.id if isinstance(call.func, ast.Name) else call.func.attr
        if name in ("note", "warn", "error", "stop", "print", "note_at_once", "progress", "UserError", "append", "Text"):
            constants = (node.value for node in ast.walk(call) if isinstance(node, ast.Constant))
            yield from (character for text in constants if isinstance(text, str) for character in text)


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("page", PAGES[:2])
def test_a_print_of_the_script_does_not_end_a_run(library, page, handler):
    """The session of a plain start arms the streams when the script imports ``library``."""
    script = library / "tool.py"
    script.write_text(f"import library\nprint({NAME!r})\nimport sys\nprint({NAME!r}, file=sys.stderr)\n", encoding="utf-8")
    done = python(page, str(script), handler=handler, KOHYA_EXT="1", KOHYA_EXT_ALLOW_UNKNOWN_VERSION="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode(page).strip() == NAME.encode(page, "replace").decode(page)


@pytest.fixture
def library(tmp_path):
    """A folder with a library that makes a script of this folder start the session."""
    (tmp_path / "library").mkdir()
    for name in ("__init__", "train_util", "model_util"):
        (tmp_path / "library" / f"{name}.py").touch()
    (tmp_path / "train_network.py").touch()
    return tmp_path


READER_HAS_ENDED = """
import sys
import library
from pathlib import Path
print("ready", flush=True)
sys.stdin.read(1)
for _ in range(3):
    print("more than a buffer " * 1000, flush=True)
    print("more", file=sys.stderr)
Path("saved").touch()
"""


@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_reader_that_has_ended_does_not_end_a_run(library, buffered):
    """A GUI is closed, or Ctrl-C in a terminal ends ``tee``, too."""
    script = library / "tool.py"
    script.write_text(READER_HAS_ENDED)
    environ = {**os.environ, "KOHYA_EXT": "1", "KOHYA_EXT_ALLOW_UNKNOWN_VERSION": "1", "PYTHONUNBUFFERED": buffered}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    run = subprocess.Popen([sys.executable, str(script)], env=environ, cwd=library, **pipes)
    while b"ready" not in run.stdout.readline():
        assert run.poll() is None
    run.stdout.close()
    with run.stdin:
        run.stdin.write(b"x")
    assert run.wait(120) == 0
    assert (library / "saved").exists()


@pytest.mark.parametrize("page", [*PAGES, "utf-8"])
def test_a_page_of_watch_is_drawn_with_what_the_code_page_has(tmp_path, page):
    lines = [{"kind": "start", "time": 1.0, "run": "a", "name": "cat", "script": "x.py", "host": "other"}]
    lines += [{"kind": "training", "time": 1.5, "steps": 90, "epochs": 1}]
    lines += [{"kind": "step", "time": 2.0 + step, "step": step, "loss": 1 / step, "seconds": 1.0} for step in range(1, 9)]
    file = tmp_path / "cat.journal.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    variables = {"PYTHONUTF8": "1"} if page == "utf-8" else {}
    done = python(page, "-m", "kohya_ext", "watch", "--once", str(file), handler="strict", **variables)
    assert done.returncode == 0, done.stderr
    assert "?" not in (text := done.stdout.decode(page))
    assert ("\u2501" in text) == (page == "utf-8")
    assert ("#####" in text) == (page != "utf-8")


def test_messages_never_raise(monkeypatch):
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed, io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")):
        monkeypatch.setattr(sys, "stderr", stream)
        console.note(NAME)
        console.error(NAME)


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_stream_of_a_gui_is_made_to_replace(monkeypatch, handler):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252", errors=handler)
    monkeypatch.setattr(sys, "stderr", stream)
    console.replace_unencodable()
    console.note(NAME)
    assert "Größe" in stream.buffer.getvalue().decode("cp1252")


#: A program that has replaced its standard output, as wrappers do, so that nothing else holds the stream.
REPLACED = """
import gc, os, sys
from kohya_ext.console import drop_unwritable
sys.stdout = open(1, "w")
sys.__stdout__ = None
drop_unwritable()
gc.collect()
other = os.open(os.devnull, os.O_WRONLY)  # would get the number of a file that was closed
print("shown")
"""


def test_output_that_a_program_has_replaced_stays_open():
    assert python("utf-8", "-c", REPLACED).stdout.split() == [b"shown"]


def test_messages_show_what_a_terminal_would_obey(capsys):
    console.note("a\x1b[2J\nkohya_ext: error: \u202egnp.exe \x9b1m 学習")
    assert capsys.readouterr().err == "kohya_ext: a\\x1b[2J\\nkohya_ext: error: \\u202egnp.exe \\x9b1m 学習\n"


def test_lines_are_kept_in_long_texts():
    assert printable("a\tb\n\x00\ud800", lines=True) == "a\\tb\n\\x00\\ud800"


def test_tables_stay_aligned_and_keep_their_own_colours():
    from rich.table import Table

    table = Table("name", "next")
    table.add_row("a\x1b[31mb", "c")
    output = Console(file=io.StringIO(), force_terminal=True, width=60, color_system="standard")
    output.print(table, "[bold]x[/bold]")
    text = output.file.getvalue()
    assert "\x1b[31m" not in text
    assert "\x1b[1mx" in text
    rows = [line for line in text.splitlines() if "│" in line]
    assert rows
    assert r"\x1b" in rows[-1]  # rich draws the head of a table with this character, too, on older consoles


def test_no_command_has_a_console_of_its_own():
    """Every command prints through :class:`kohya_ext.output.Console`."""
    sources = [*Path(console.__file__).parent.rglob("*.py")]
    own = [file.name for file in sources if "Console(" in file.read_text(encoding="utf-8") and file.name != "output.py"]
    assert own
    for file in sources:
        text = file.read_text(encoding="utf-8")
        if "Console(" in text and file.name != "output.py":
            assert "from kohya_ext.output import Console" in text, file
