"""Files of other people: whatever they contain, a reader answers or reports an error in one line, and a terminal obeys none.

Each test generates files of its kind: mostly well-formed ones with a few values of other types, sizes and characters.
"""

import contextlib
import io
import json
import os
import struct
from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from kohya_ext.commands import inspect
from kohya_ext.config import preset_files, sample_prompts, user_files
from kohya_ext.config.settings import Settings
from kohya_ext.console import printable
from kohya_ext.errors import UserError
from kohya_ext.launch import processes
from kohya_ext.output import Console
from kohya_ext.reporting import page as report_page
from kohya_ext.reporting.history import History
from kohya_ext.reporting.thumbnails import Thumbnails
from kohya_ext.run import output_lock, rank_reports, resume, run_record, scaled_checkpoints, step_times
from kohya_ext.run.journal_lines import MAX_BYTES
from kohya_ext.run.journal_reader import JournalReader
from kohya_ext.run.safetensors_header import read_header
from kohya_ext.watching import page, panels
from kohya_ext.watching.page import View

torch = pytest.importorskip("torch")

few = settings(
    max_examples=int(os.environ.get("HOSTILE_FILES", "15")),
    deadline=None,
    derandomize="HOSTILE_FILES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)

#: Text with escape sequences, markup of rich, controls of the writing direction, surrogates and lone brackets.
texts = st.one_of(
    st.sampled_from(["", "cat", "\x1b]0;owned\x07", "\x9b31m", "[/]", "[link=x]", "\u202egnp", "a\nb", "\\", "猫", "9" * 400]),
    st.text(st.characters(), max_size=8),
)
numbers = st.one_of(
    st.integers(-3, 3), st.floats(), st.sampled_from([10**22, -(10**22), 2**53, 10**400, 1e300, float("nan"), float("inf")])
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    scalars, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)), max_leaves=5
)


def deep(levels: int = 20_000) -> str:
    return "[" * levels + "]" * levels


# --- safetensors -----------------------------------------------------------------------------------------------------

TENSORS = (
    *("lora_unet_input_blocks_4_1_q.lora_up.weight", "lora_unet_input_blocks_4_1_q.lora_down.weight"),
    *("lora_unet_input_blocks_4_1_q.alpha", "lora_unet_x.hada_w1_a", "lora_unet_x.hada_w1_b", "lora_unet_x.hada_w2_a"),
    *("lora_unet_x.hada_w2_b", "te_y.lokr_w1", "te_y.lokr_w2", "z.oft_blocks", "lllite_unet_a.lllite_up.0.weight"),
    *("q.weight", "q.weight_scale", "q.comfy_quant", "scaled_fp8", "emb_params", "double_blocks." + "9" * 5000 + ".x"),
)
DTYPES = (("F32", 4), ("BF16", 2), ("I8", 1), ("F8_E4M3", 1), ("U8", 1), ("BOOL", 1), ("X", 1))
METADATA = (
    *("ss_steps", "ss_epoch", "ss_training_started_at", "ss_training_finished_at", "ss_tag_frequency", "ss_datasets"),
    *("ss_dataset_dirs", "ss_network_args", "ss_resolution", "ss_network_module", "_quantization_metadata", "modelspec.title"),
)


@st.composite
def safetensors(draw: st.DrawFn) -> bytes:
    """Return a file whose tensors fill it, with up to two values in its header replaced."""
    rows: dict[str, object] = {}
    end = 0
    for name in draw(st.lists(st.one_of(st.sampled_from(TENSORS), texts), min_size=1, max_size=6, unique=True)):
        dtype, size = draw(
            st.sampled_from([("F32", 4), ("BF16", 2), ("I8", 1), ("F8_E4M3", 1), ("U8", 1), ("BOOL", 1), ("X", 1)])
        )
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        length = size
        for side in shape:
            length *= side
        rows[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + length]}
        end += length
    odd = st.one_of(texts, values.map(lambda value: json.dumps(value, default=str)), st.just(deep()))
    if draw(st.booleans()):
        rows["__metadata__"] = draw(st.dictionaries(st.one_of(st.sampled_from(METADATA), texts), odd, max_size=6))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        row = rows[draw(st.sampled_from(sorted(rows)))]
        if isinstance(row, dict) and row:
            row[draw(st.sampled_from(sorted(row)))] = draw(values)
    text = json.dumps(rows).encode()
    return struct.pack("<Q", len(text)) + text + draw(st.binary(max_size=8)) + bytes(range(1, 200)) * (end // 199 + 1)


def framed(text: str, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode() + body


def row(shape: object, begin: object, end: object, dtype: object = "F32") -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hostile")


def answer(call, *arguments):
    """Return the result of a reader, or None after an error for the user."""
    try:
        return call(*arguments)
    except (UserError, ValueError, OSError):
        return None


@few
@given(content=safetensors(), as_json=st.booleans())
def test_inspect_describes_a_file_or_reports_an_error(folder, content, as_json):
    file = folder / "cat.safetensors"
    file.write_bytes(content)
    with contextlib.redirect_stdout(output := io.StringIO()):
        answer(inspect.run, Namespace(files=[file], against=None, json=as_json))
        answer(inspect.run, Namespace(files=[file, file], against=None, json=as_json))
    assert printable(output.getvalue(), lines=True) == output.getvalue()
    output.getvalue().encode()
    answer(scaled_checkpoints.stored_weights, file)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(framed(deep()), id="nesting"),
        pytest.param(framed(f'{{"a":{row(None, 0, 4)}}}', bytes(4)), id="no shape"),
        pytest.param(framed(f'{{"a":{row("x", 0, 4)}}}', bytes(4)), id="text as a shape"),
        pytest.param(framed(f'{{"a":{row([-1, -1], 0, 4)}}}', bytes(4)), id="negative shape"),
        pytest.param(framed(f'{{"a":{row([1], 0, 4, 7)}}}', bytes(4)), id="number as a dtype"),
        pytest.param(framed(f'{{"a":{row([1], -4, 0)}}}', bytes(8)), id="negative offset"),
        pytest.param(framed(f'{{"a":{row([2], 0, 4)}}}', bytes(8)), id="shape larger than the tensor"),
        pytest.param(framed(f'{{"a":{row([2], 0, 8)},"b":{row([2], 4, 12)}}}', bytes(12)), id="overlapping tensors"),
        pytest.param(framed(f'{{"a\\ud800":{row([1], 0, 4)}}}', bytes(4)), id="surrogate"),
        pytest.param(framed(f'{{"__metadata__":{{"a":1}},"b":{row([1], 0, 4)}}}', bytes(4)), id="number as metadata"),
        pytest.param(framed(f'{{"__metadata__":[],"b":{row([1], 0, 4)}}}', bytes(3)), id="truncated"),
        pytest.param(framed(f'{{"b":{row([0, 10**30], 0, 0)}}}', bytes(4)), id="side beyond 63 bits"),
    ],
)
def test_an_invalid_header_is_one_error(tmp_path, content, capsys):
    (tmp_path / "cat.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"^cat\.safetensors is (not a safetensors file|damaged: |truncated: )"):
        read_header(tmp_path / "cat.safetensors")
    assert inspect.run(Namespace(files=[tmp_path / "cat.safetensors"], against=None, json=False)) == 1
    assert capsys.readouterr().out.startswith("error  cat.safetensors is ")


def test_metadata_with_odd_numbers_is_described(tmp_path, capsys):
    metadata = {
        "ss_training_finished_at": "9" * 400,
        "ss_steps": "1e400",
        "ss_tag_frequency": json.dumps({"a": {"\x1b[2J": 3, "b": 10**400}}),
        "ss_output_name": "\x1b]0;owned\x07[/red]",
        "ss_datasets": deep(),
    }
    text = f'{{"__metadata__":{json.dumps(metadata)},"a":{row([1], 0, 4)}}}'
    (tmp_path / "cat.safetensors").write_bytes(framed(text, struct.pack("<f", 1.0)))
    assert inspect.run(Namespace(files=[tmp_path / "cat.safetensors"], against=None, json=False)) == 0
    output = capsys.readouterr().out
    assert r"\x1b]0;owned[/red]" in output  # rich leaves out the bell
    assert r"\x1b[2J (3)" in output
    assert "\x1b" not in output


@few
@given(value=st.recursive(st.just(torch.ones(2)), lambda inner: st.dictionaries(texts, inner, max_size=2), max_leaves=3))
def test_files_of_torch_save(folder, value):
    file = folder / "cat.pt"
    torch.save(value, file)
    assert inspect.run(Namespace(files=[file], against=None, json=True)) in (0, 1)


@pytest.mark.parametrize(
    "value",
    [
        {"a": torch.ones(1).expand(10**12)},
        {"a": torch.ones(2, 2).to_sparse()},
        {"a": torch.ones(2, dtype=torch.complex64)},
        {"a": torch.ones(2, device="meta")},
    ],
    ids=["a value for many", "sparse", "complex", "no values"],
)
def test_tensors_that_are_not_read(tmp_path, value, capsys):
    torch.save(value, tmp_path / "cat.pt")
    assert inspect.run(Namespace(files=[tmp_path / "cat.pt"], against=None, json=False)) == 1
    assert capsys.readouterr().out.startswith("error  cat.pt")


# --- journals --------------------------------------------------------------------------------------------------------

KINDS = ("start", "training", "step", "ranks", "save", "state", "sample", "skip", "validation", "profile", "check", "end", "x")
LINE = {
    "time": 1000.0, "run": "cat", "name": "cat", "script": "x.py", "host": "here", "pid": 1, "gpu": {"name": "G", "memory": 8},
    "predicted": {"seconds_per_step": 1.0, "reserved": 5}, "settings": {"seed": [1, "command line"]}, "command": "x",
    "resume_command": "y", "steps": 4, "epochs": 2, "images": ["a.png"], "buckets": {"64x64": 3}, "tags": {"cat": 2},
    "folders": [{"folder": "f", "repeats": 1, "images": 2, "captioned": 1, "caption": "c", "regularization": False}],
    "patches": {"ema": ["applied", ""]}, "sample_prompts": ["p"], "step": 2, "epoch": 1, "loss": 0.5, "losses": [0.5],
    "learning_rates": [1e-4], "seconds": 0.3, "data": 0.1, "outside": 0.0, "reserved": 4, "allocated": 3, "peak_reserved": 5,
    "peak_allocated": 4, "skipped": True, "file": "cat.safetensors", "bytes": 7, "problem": "bad", "problems": ["worse"],
    "summary": "s", "reason": "r", "status": "failed", "code": 1, "memory": {"host_resident": 9}, "first": 1, "last": 2,
    "ranks": [{"rank": 1, "host": "h", "own_seconds": 0.2, "cuda_reserved": 4}], "limit": "GPU", "verdict": "v",
    "advice": ["--x"], "blocks": [{"name": "b", "device": 0.1, "host": 0.2}], "table": "t", "trace": "t",
}  # fmt: skip


@st.composite
def journal_lines(draw: st.DrawFn) -> bytes:
    """Return a journal of a few lines, in each of which up to three values are replaced."""
    lines = []
    for kind in ["start", *draw(st.lists(st.sampled_from(KINDS), min_size=3, max_size=8))]:
        line = {"kind": kind, **LINE, **draw(st.dictionaries(st.sampled_from(sorted(LINE)), values, max_size=3))}
        lines.append(json.dumps(line).encode())
    odd = st.sampled_from([b"", b"{", b"null", b'{"kind":"step","step":', deep().encode(), b"\xff\xfe", b'{"kind":"start"}'])
    lines.insert(draw(st.integers(0, len(lines))), draw(odd))
    return b"\n".join(lines) + b"\n"


def read_journal(file: Path, log=History) -> list[History]:
    reader = JournalReader(file, log)
    reader.update()
    return list(reader.runs.values())


def shown(runs: list[History], file: Path) -> str:
    """Return what `watch` prints; also render the panels of its full-screen view and the report."""
    console = Console(file=io.StringIO(), highlight=False, markup=False, emoji=False, width=100)
    views = [View(file, run, run.summary(2000.0)) for run in runs]
    console.print(page.page(views, console))
    for view in views:
        parts = [
            *panels.loss_panel(view),
            *panels.time_panel(view, 20),
            *panels.memory_panel(view, 20),
            *panels.run_panel(view),
        ]
        for part in (panels.progress_panel(view, 40), *parts, *panels.run_row(view), *map(panels.event, view.log.events)):
            console.print(part)
        panels.profile_line(view)
    report_page.html(runs, Thumbnails(), 2000.0).encode(errors="replace")
    return console.file.getvalue()


@few
@given(content=journal_lines())
def test_watch_and_report_show_a_journal(folder, content):
    pytest.importorskip("jinja2")
    file = folder / "cat.journal.jsonl"
    file.write_bytes(content)
    runs = read_journal(file)
    assume(runs)
    output = shown(runs, file)
    assert printable(output, lines=True) == output
    output.encode()


def test_a_long_line_is_left_out(tmp_path):
    file = tmp_path / "cat.journal.jsonl"
    long = json.dumps({"kind": "warning", "problem": "x" * MAX_BYTES * 5}).encode()
    file.write_bytes(b'{"kind":"start","run":"cat"}\n' + long + b'\n{"kind":"step","step":3}\n')
    (run,) = read_journal(file)
    assert (run.step, len(run.events)) == (3, 0)


def test_values_of_a_journal_are_checked(tmp_path):
    file = tmp_path / "cat.journal.jsonl"
    step = '{"kind":"step","step":7,"reserved":1e400,"loss":NaN,"learning_rates":[1,"x",null]}'
    event = {"kind": "warning", "problem": "\x1b[31m" + "x" * 10**5, "time": "yesterday", "step": 10**22, "unknown": 1e400}
    file.write_text(
        "\n".join(
            ['{"kind":"start","run":"cat"}', deep(), '{"kind":"step","step":1' + "0" * 22 + "}", step, json.dumps(event), ""]
        )
    )
    (run,) = read_journal(file)
    assert list(run.steps) == [7]
    assert run.last == {"kind": "step", "step": 7, "loss": None, "learning_rates": [1]}
    (line,) = run.events
    assert line.keys() == {"kind", "problem", "unknown"}
    assert line["problem"].startswith(r"\x1b[31mx")
    assert len(line["problem"]) < 30_000


# --- small files -----------------------------------------------------------------------------------------------------

#: Keys of JSON files that the extension reads.
FIELDS = (
    *(
        "host",
        "pid",
        "since",
        "rank",
        "own_seconds",
        "script",
        "identity",
        "id",
        "started",
        "command",
        "step",
        "saved",
        "files",
    ),
    *("seconds", "day", "prompt", "width", "height", "seed", "subset", "general", "datasets", "subsets"),
    *("num_processes", "num_machines", "machine_rank"),
)
documents = st.one_of(
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=6).map(json.dumps),
    st.lists(st.dictionaries(st.sampled_from(FIELDS), values, max_size=3), max_size=2).map(json.dumps),
    values.map(json.dumps),
    st.sampled_from([deep(), "{", "", "\x00", "1e400"]),
    texts,
)
RECORD = {"script": "x.py", "identity": {}, "id": "a", "started": "now", "command": ["x"], "step": 1, "saved": 1.0, "files": {}}


@few
@given(text=documents, record=st.dictionaries(st.sampled_from(sorted(RECORD)), values, max_size=2))
@example(text=deep(), record={"files": {"a": "b"}})
def test_small_files(folder, monkeypatch, text, record):
    content = text.encode(errors="replace")
    state = folder / "cat-step00000001-state"
    state.mkdir(exist_ok=True)
    for name in ("prompts.json", "prompts.txt", "data.json", "config.yaml", ".cat.lock", "cat.journal.jsonl.rank1.json"):
        (folder / name).write_bytes(content)
    for name in ("scheduler.bin", "model.safetensors"):
        (state / name).write_bytes(content)
    (state / run_record.FILE).write_text(json.dumps({**RECORD, **record}), encoding="utf-8")
    for name in ("prompts.json", "prompts.txt"):
        answer(sample_prompts.largest, str(folder / name), 512)
        answer(sample_prompts.without_seed, str(folder / name))
    answer(user_files.read_dataset_config, folder / "data.json")
    if (config := answer(processes._configuration, folder / "config.yaml")) is not None:
        answer(processes.check, settings_of_a_run, config, 0)
    rank_reports.slowest(rank_reports.read(folder / "cat.journal.jsonl"))
    args = Namespace(output_dir=str(folder), output_name="cat")
    if (owner := answer(output_lock.other_owner, args)) is not None:
        output_lock.conflict_message(args, owner)
    answer(resume.state_to_resume, folder, "cat", run_record.describe("x.py", Namespace()))
    resume.newest_state(folder, "cat")
    monkeypatch.setattr(step_times, "_file", lambda key: folder / "prompts.json")
    if (measured := step_times.load("x")) is not None:
        step_times.format_duration(measured[0])


settings_of_a_run = Settings()
keys = st.sampled_from(["output_dir", "network_alpha", "notify", "preset", "seed", "vram", "[preset]", "summary"])
toml_values = st.one_of(
    scalars.map(json.dumps), st.sampled_from(["[[", "{a=1}", r'"C:\new"', "'" * 3, "1979-05-27", '[1, "a"]', "\\"])
)


@few
@given(lines=st.lists(st.tuples(keys, toml_values), max_size=5), other=texts)
@example(lines=[("seed", deep(5000))], other="")
def test_toml_files(folder, lines, other):
    text = "\n".join([*(f"{key} = {value}" for key, value in lines), other]).encode(errors="replace").decode()
    file = folder / "cat.toml"
    file.write_text(text, encoding="utf-8")
    answer(user_files.read_config_file, str(file))
    answer(user_files.read_dataset_config, file)
    answer(sample_prompts.largest, str(file), 512)
    answer(preset_files.parse, text, "cat", None)
