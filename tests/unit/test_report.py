"""Reports: one HTML file without network, safe against names and captions, and correct about every kind of run."""

import base64
import errno
import hashlib
import io
import json
import math
import os
import random
import re
import shutil
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kohya_ext.__main__ import main
from kohya_ext.commands import report as command
from kohya_ext.patching.patch import Outcome, Patcher
from kohya_ext.reporting import charts
from kohya_ext.reporting.history import History
from kohya_ext.reporting.similarity import ImageModel
from kohya_ext.run import atomic_write
from kohya_ext.run.journal import SUFFIX
from kohya_ext.run.journal_reader import JournalReader
from patches import journal as journal_patch

pytest.importorskip("jinja2")

DEAD = 2**22 + 1  # above the largest number of a process
SETTINGS = {
    "learning_rate": [1e-4, "command line"],
    "cache_latents": [True, "preset"],
    "optimizer_args": [["a=1"], "config file"],
}
ATTACK = "</script><script>window.attacked = true</script><img src=x onerror='window.attacked = true'>"


def start(name="cat", **changes):
    line = {
        "kind": "start",
        "time": 1000.0,
        "run": name,
        "name": name,
        "script": "sdxl_train_network.py",
        "pid": DEAD,
        "host": socket.gethostname(),
        "processes": 1,
        "torch": "2.14",
        "command": "python -m kohya_ext train",
        "resume_command": "python -m kohya_ext train --resume auto",
        "settings": SETTINGS,
        "stop_file": None,
        "gpu": {"name": "RTX 4090", "memory": 25_757_220_864},
        "predicted": {"seconds_per_step": 1.25, "reserved": 12_000_000_000},
    }
    return {**line, **changes}


def training(**changes):
    line = {"kind": "training", "time": 1030.0, "steps": 100, "epochs": 2, "images": 10, "images_with_repeats": 30}
    return {**line, "buckets": {"1024x1024": 20, "832x1216": 10, "64x64": 0}, "batch_sizes": [2], **changes}


def steps(first, last, **changes):
    memory = {"reserved": 10**10, "peak_reserved": 11 * 10**9, "allocated": 9 * 10**9, "peak_allocated": 95 * 10**8}
    for step in range(first, last + 1):
        line = {
            "kind": "step",
            "time": 1030.0 + step,
            "step": step,
            "epoch": 1,
            "loss": 1 / step,
            "learning_rates": [1e-4, 5e-5],
        }
        yield {**line, "seconds": 1.0, "data": 0.25, "outside": 0.0, **memory, **changes}


def end(status="finished", **changes):
    return {"kind": "end", "time": 1200.0, "status": status, "reason": "", "code": 0, "step": 0, "memory": {}, **changes}


@pytest.fixture
def write(tmp_path):
    def lines(*lines, name="cat"):
        file = tmp_path / f"{name}{SUFFIX}"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return file

    return lines


@pytest.fixture
def report(tmp_path):
    """Write a report with the command; returns its text."""

    def run(*words):
        file = tmp_path / "out" / "report.html"
        assert main(["report", *map(str, words), "--output", str(file)]) == 0
        return file.read_text(encoding="utf-8")

    return run


def read(file):
    reader = JournalReader(file, History)
    reader.update()
    return reader.latest


def clock(sleep):
    return SimpleNamespace(time=time.time, perf_counter=time.perf_counter, sleep=sleep)


def chart_data(text):
    (data,) = re.findall(r'<script type="application/json" id="chart-data">(.*?)</script>', text)
    return json.loads(data)


def words(text):
    """Return the text of a page without tags, styles and scripts."""
    body = re.sub(r"<(style|script).*?</\1>|<!--.*?-->", "", text.replace("<wbr>", ""), flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


@pytest.fixture
def images(tmp_path):
    pil = pytest.importorskip("PIL.Image")

    def make(name, size=(640, 400), colour="red"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        pil.new("RGB", size, colour).save(file)
        return str(file)

    return make


# --- history ---------------------------------------------------------------------------------------------------------


def test_profile_shows_its_verdict_advice_and_parts(write, report):
    blocks = [{"name": "DoubleBlock forward", "device": 0.0125, "host": 1.5}, {"name": "idle", "device": 0.0, "host": 0.0}]
    line = {"kind": "profile", "time": 1050.0, "step": 12, "first": 10, "last": 12, "blocks": blocks, "table": "cat.txt"}
    line |= {"verdict": f"the host is the limit{ATTACK}", "advice": ["--cuda_graphs replays"], "trace": "cat.json.gz"}
    text = report(write(start(), training(), *steps(1, 12), line, end()))
    assert "Steps 10 to 12" in text
    assert "the host is the limit&lt;/script&gt;" in text
    assert "<li>--cuda_graphs replays</li>" in text
    assert '<td>DoubleBlock forward</td><td class="n">12.5</td><td class="n">1,500.0</td>' in text
    assert "<td>idle</td>" not in text


def test_history_has_a_value_of_each_column_for_each_step_also_after_a_resume(write):
    resumed = start(time=5000.0)
    lines = [start(), training(), *steps(1, 10), end("stopped"), resumed, training(time=5010.0)]
    lines += steps(8, 12, time=5020.0, data=0.5, outside=99.0)
    run = read(write(*lines))
    assert list(run.steps) == list(range(1, 13))
    assert list(run.data) == [0.25] * 7 + [0.5] * 5
    assert [len(column) for column in run.memory.values()] == [12] * 3
    assert len(run.learning_rates) == len(run.outside) == 12
    assert list(run.outside) == [0.0] * 8 + [99.0] * 4  # before its first step a process loads models
    assert (run.loading, run.elapsed) == (30.0 + 10.0, 200.0 + 20.0)
    assert (len(run.starts), run.began) == (2, 1000.0)


def test_history_keeps_all_events(write):
    run = read(write(start(), *({"kind": "skip", "time": 1.0, "step": step} for step in range(1000))))
    assert len(run.of_kind("skip")) == 1000


# --- charts ----------------------------------------------------------------------------------------------------------


def test_reduced_curve_has_every_extreme():
    values = [random.Random(1).random() for _ in range(10_001)]
    values[3333], values[7777], values[5000] = 50.0, -50.0, math.nan
    kept = charts.extremes(values, 100)
    assert len(kept) <= 202
    assert {0, 3333, 7777, 10_000} <= set(kept)
    assert charts.extremes(values[:50], 100) == list(range(50))
    assert charts.extremes([math.nan] * 1000, 10)


def test_smoothed_curve_is_the_mean_of_the_known_values():
    assert charts.smoothed([1.0, 2.0, math.nan, 4.0, 6.0], 2) == [1.0, 1.5, 2.0, 4.0, 5.0]
    assert [math.isnan(value) for value in charts.smoothed([1.0] * 10, 8)] == [True] * 3 + [False] * 7


def test_rare_large_values_are_above_the_scale_and_noted():
    chart = charts.Chart("Loss")
    chart.scale([("", range(1, 201), [1.0] * 199 + [80.0])])
    assert chart.maximum == pytest.approx(1.3)
    assert chart.notes == ["1 value is above the scale; the largest, 80, at step 200."]
    usual = charts.Chart("Loss")
    usual.scale([("", range(1, 201), [1.0] * 199 + [1.2])])
    assert (usual.maximum, usual.notes) == (None, [])


def test_charts_have_the_journals_values(write, report):
    lines = [start(), training(), *steps(1, 4), *steps(5, 5, loss=None, skipped=True), {"kind": "skip", "time": 1.0, "step": 5}]
    data = chart_data(report(write(*lines, *steps(6, 30), {"kind": "save", "time": 1.0, "step": 30, "file": "a"})))
    assert set(data) == {"loss", "learning_rate", "seconds", "memory"}
    (table,) = data["loss"]["tables"]
    assert table[0] == list(range(1, 31))
    assert table[1][:6] == [1.0, 0.5, 0.33333, 0.25, None, 0.16667]
    assert data["loss"]["marks"] == [{"name": "skipped", "steps": [5]}, {"name": "saved", "steps": [30]}]
    assert [curve["label"] for curve in data["learning_rate"]["curves"]] == ["group 1", "group 2"]
    assert data["learning_rate"]["tables"][0][2][0] == 5e-5
    assert data["memory"]["levels"] == [{"label": "predicted", "value": 12.0}, {"label": "GPU", "value": 25.757}]
    assert data["memory"]["tables"][0][1][0] == 10.0


def test_the_loss_of_output_preservation_is_a_curve_of_its_own(write, report):
    lines = [start(), training(), *steps(1, 4), *steps(3, 5, preservation_loss=0.25), *steps(6, 6, preservation_loss=None)]
    loss = chart_data(report(write(*lines)))["loss"]
    assert [curve["label"] for curve in loss["curves"]] == ["loss", "preservation"]
    assert loss["tables"][1] == [[1, 2, 3, 4, 5, 6], [None, None, 0.25, 0.25, 0.25, None]]


# --- page ------------------------------------------------------------------------------------------------------------


def test_page_has_the_facts_of_the_run(write, report):
    folders = [
        {"folder": "/data/3_cat", "repeats": 3, "regularization": False, "images": 10, "captioned": 9, "caption": "a cat"}
    ]
    facts = training(folders=folders, tags={"cat": 9}, patches={"ema": ["skipped", "not enabled"], "journal": ["applied", ""]})
    check = {"kind": "check", "time": 1.0, "file": "/out/cat.safetensors", "problems": [], "summary": "rank 8"}
    save = {"kind": "save", "time": 1.0, "step": 100, "file": "/out/cat.safetensors", "bytes": 228 * 10**6, "seconds": 1.5}
    text = words(report(write(start(), facts, *steps(1, 100), save, check, end())))
    for part in (
        *("cat DONE", "100 of 100", "20.0% below the predicted 1.25 s", "11.00 GB", "8.3% below the predicted 12.00 GB"),
        *("10 images 30 with repeats batch size 2 2 epochs", "3_cat 10 3 9 a cat", "1024 \u00d7 1024 20", "cat 9"),
        *("learning_rate 0.0001 command line", "cache_latents true preset", "optimizer_args a=1 config file"),
        *(
            "ema skipped not enabled",
            "journal applied",
            "1 applied of 2",
            "cat.safetensors 100 0.23 GB 1.5 s no problem rank 8",
        ),
        *("loading 30 s", "steps 1 min", "waiting for data 25 s", "PyTorch 2.14"),
    ):
        assert part in text, text
    assert "64 \u00d7 64" not in text  # an empty bucket
    assert "To resume" not in text


ENDS = {
    "killed": ([], "DEAD The process has ended without a last line"),
    "stopped": ([end("stopped", reason="SIGTERM")], "STOPPED SIGTERM"),
    "out of memory": ([end("out of memory", reason="OutOfMemoryError: CUDA out of memory")], "FAILED OutOfMemoryError"),
    "failed": ([end("failed", reason="ValueError: bad")], "FAILED ValueError: bad"),
}


@pytest.mark.parametrize(("lines", "expected"), ENDS.values(), ids=ENDS)
def test_page_says_how_the_run_ended_and_how_to_continue(write, report, tmp_path, lines, expected):
    (tmp_path / "cat-state").mkdir()
    state = {"kind": "state", "time": 1.0, "step": 2, "file": str(tmp_path / "cat-state"), "seconds": 1.0}
    text = words(report(write(start(), training(), *steps(1, 2), *lines)))
    assert expected in text
    assert "To start it again Copy python -m kohya_ext train" in text
    text = words(report(write(start(), training(), *steps(1, 2), state, *lines)))
    assert "To resume Copy python -m kohya_ext train --resume auto" in text


@pytest.mark.parametrize(
    "lines", [[start()], [start(), training()], [{"kind": "start", "time": 1.0, "run": "x"}, *steps(1, 1)]]
)
def test_page_of_a_run_without_steps_or_facts(write, report, lines):
    assert "Settings" in words(report(write(*lines)))


def test_problems_of_a_file_are_on_top(write, report):
    check = {"kind": "check", "time": 1.0, "file": "/out/cat.safetensors", "problems": ["te1: not finite"], "summary": ""}
    text = words(report(write(start(), training(), check, end())))
    assert text.index("output file te1: not finite") < text.index("Time by part")
    assert "cat.safetensors 1 problem te1: not finite" in text


def test_torn_and_unknown_lines_and_wrong_types_are_tolerated(write, report):
    odd = start(settings={"a": 5, "b": [1, "preset"]}, gpu=None, predicted=None)
    broken = training(buckets=[1], tags=5, folders=[3, {"folder": "f"}], patches={"x": 1}, images=None)
    wrong = {"kind": "step", "time": "x", "step": 2, "loss": "x", "learning_rates": ["x"], "seconds": None}
    file = write(odd, broken, *steps(1, 1), wrong, {"kind": "skip", "images": "x"}, {"kind": "check"}, {"kind": "new"})
    with file.open("a") as stream:
        stream.write('{"kind":"step","st')
    text = report(file)
    assert "b 1 preset" in words(text)
    assert chart_data(text)["loss"]["tables"][0][0] == [1, 2]


def test_file_needs_no_network_and_allows_only_its_own_scripts(write, report):
    text = report(write(start(), training(), *steps(1, 10), end()))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 2
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert policy.endswith("script-src " + " ".join(f"'sha256-{each}'" for each in hashes))
    assert policy.startswith("default-src 'none'; ")
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)|url\((?!data:)|@import""", text.replace("".join(scripts), ""))
    assert "The MIT License" in text  # uPlot's, which its copies must contain


def test_names_captions_and_paths_are_escaped(write, report):
    folders = [{"folder": ATTACK, "repeats": 1, "regularization": False, "images": 1, "captioned": 1, "caption": ATTACK}]
    facts = training(folders=folders, tags={ATTACK: 1}, patches={ATTACK: [ATTACK, ATTACK]}, buckets={ATTACK: 1})
    facts["sample_prompts"] = [ATTACK]
    lines = [start(ATTACK, script=ATTACK, settings={ATTACK: [ATTACK, ATTACK]}, command=ATTACK), facts, *steps(1, 3)]
    lines += [{"kind": "skip", "time": 1.0, "step": 2, "problem": ATTACK, "images": [ATTACK]}]
    lines += [{"kind": kind, "time": 1.0, "step": ATTACK, "file": ATTACK} for kind in ("sample", "save", "spill", ATTACK)]
    lines += [{"kind": "check", "time": 1.0, "file": ATTACK, "problems": [ATTACK], "summary": ATTACK}]
    file = write(*lines, end("failed", reason=ATTACK))
    other = write(start("dog"), training(), *steps(1, 3), end(), name="dog")
    for text in (report(file), report(file, other)):
        assert text.count("window.attacked") > 20
        assert "<script>window" not in text
        assert "<img src=x" not in text
        assert (
            not re.search(r"<[^>]*=\"[^\"]*onerror", text.replace("&#39;", "").replace("&lt;", "")) or "<img src=x" not in text
        )


def test_names_that_are_not_unicode(write, report):
    assert r"a\udc80.png" in report(write(start(), {"kind": "skip", "time": 1.0, "step": 1, "images": ["/data/a\udc80.png"]}))


# --- images ----------------------------------------------------------------------------------------------------------


def sample(file, step):
    return {"kind": "sample", "time": 1.0, "step": step, "file": file}


def test_samples_are_inlined_by_prompt_and_step(write, report, images):
    files = [images(f"sample/cat_{step:06d}_{prompt:02d}_20261122120000_1.png") for prompt in (0, 1) for step in (50, 100)]
    lines = [sample(file, 50 * (1 + index % 2)) for index, file in enumerate(files)]
    text = report(write(start(), training(sample_prompts=["a cat", "a dog"]), *steps(1, 1), *lines, lines[0]))
    assert text.count('<img src="data:image/jpeg;base64,') == 4
    assert "1 a cat step 50 step 100 2 a dog step 50 step 100" in words(text)
    content = base64.b64decode(re.search(r"data:image/jpeg;base64,([^\"]+)", text).group(1))
    from PIL import Image

    assert Image.open(io.BytesIO(content)).size == (320, 200)


def test_samples_of_a_step_share_a_column_and_missing_ones_leave_a_gap(write, report, images):
    def lines(run, *places):
        names = [f"{run}/sample/cat_{step:06d}_{prompt:02d}_20261122120000{seed}.png" for prompt, step, seed in places]
        return [sample(images(name), step) for name, (_, step, _) in zip(names, places, strict=True)]

    cat = write(start(), training(), *steps(1, 1), *lines("a", (0, 50, "_1"), (0, 100, "_1"), (1, 100, "_7")))
    dog = write(start("dog", time=2000.0), training(), *steps(1, 1), *lines("b", (0, 100, "_1")), name="dog")
    rows = re.findall(r"<tr>\s*<th>(.*?)</th>(.*?)</tr>", report(cat, dog).partition('class="grid"')[2], re.DOTALL)
    cells = [[re.findall(r"step (\d+)<", cell) for cell in row.split("<td>")[1:]] for _, row in rows[:3]]
    assert cells == [[["50"], ["100"]], [[], ["100"]], [[], ["100"]]]
    assert "without a seed" not in report(cat)
    random_noise = write(start("x"), training(), *lines("c", (0, 50, ""), (0, 100, "")), name="x")
    assert "A prompt without a seed has other noise at each step" in report(random_noise)


def test_samples_after_training_follow_with_their_multiplier(write, report, images):
    names = [f"sample/cat_e{step:06d}_00_20261122120000_1.png" for step in range(1, 71)]
    names += [f"sample/cat-multiplier-{value}_000070_00_20261122120000_1.png" for value in ("0", "0.5", "1")]
    lines = [sample(images(name), min(step, 70)) for step, name in enumerate(names, 1)]
    shown = re.findall(r"<figcaption>([^<]+)<", report(write(start(), training(), *steps(1, 70), *lines)))
    assert len(shown) == 60
    assert shown[-4:] == ["step 70", "without the LoRA", "multiplier 0.5", "multiplier 1"]


@pytest.mark.parametrize("kind", ["CLIP", "DINOv2"])
def test_samples_are_compared_with_the_images_of_the_run(write, report, images, tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 14, "patch_size": 7}
    if kind == "CLIP":
        model = transformers.CLIPModel(
            transformers.CLIPConfig(vision_config={**size, "intermediate_size": 8}, projection_dim=4)
        )
        processor = transformers.CLIPImageProcessor(size={"shortest_edge": 14}, crop_size=14)
    else:
        model = transformers.Dinov2Model(transformers.Dinov2Config(**size))
        processor = transformers.BitImageProcessor(size={"shortest_edge": 14}, crop_size=14)
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    for weight in model.parameters():  # the usual small ones embed all images alike
        torch.nn.init.normal_(weight)
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    trained, other, damaged = images("data/a.png"), images("sample/b.png", colour=(200, 30, 90)), images("data/c.png")
    Path(damaged).write_bytes(b"damaged")
    copied = str(shutil.copy(trained, tmp_path / "sample" / "a.png"))
    usual = {"repeats": 1, "images": 2, "captioned": 2, "caption": ""}
    folders = [{**usual, "folder": str(tmp_path / name), "regularization": name == "sample"} for name in ("data", "sample")]
    facts = training(folders=folders)
    file = write(start(), facts, *steps(1, 2), sample(copied, 1), sample(other, 2), sample(damaged, 2))
    text = words(report(file, "--image_model", str(tmp_path / "model")))
    (mean, nearest), _ = re.findall(r"step \d 1 (\d\.\d{3}) (\d\.\d{3})", text.partition("Similarity of samples")[2])
    assert mean == nearest == "1.000"
    embedded = ImageModel(tmp_path / "model")
    (same,), (different,) = (embedded.similarities(Path(sample), [Path(trained)]) for sample in (copied, other))
    assert different < same == pytest.approx(1, abs=1e-6)
    assert "Similarity" not in report(file)


def test_a_folder_without_an_image_model_is_an_error(write, tmp_path, capsys):
    pytest.importorskip("transformers")
    assert main(["report", str(write(start())), "--image_model", str(tmp_path)]) == 2
    assert "give the folder of an image model of transformers" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.html"))


def test_many_samples_are_thinned_out_and_the_file_stays_small(write, report, images):
    pil = pytest.importorskip("PIL.Image")
    noise = images("sample/cat_000001_00_20261122120000.png")
    pil.frombytes("RGB", (320, 320), random.Random(1).randbytes(3 * 320 * 320)).save(noise)  # does not compress
    names = [noise.replace("000001", f"{step:06d}") for step in range(1, 1001)]
    for name in names[1:]:
        os.link(noise, name)
    text = report(write(start(), training(), *(sample(name, step) for step, name in enumerate(names, 1))))
    assert text.count('<img src="data:') == 60
    assert "60 of 1000 samples" in words(text)
    assert {"step 1", "step 1000"} <= set(re.findall(r"<figcaption>(step \d+)<", text))
    assert len(text) < 10e6


def test_images_that_cannot_be_read_are_named(write, report, tmp_path, images):
    (tmp_path / "damaged.png").write_bytes(b"\x89PNG damaged")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.png")
    large = images("large.png", (10_000, 8_001))
    files = [str(tmp_path / name) for name in ("damaged.png", "pipe.png", "missing.png")]
    text = report(write(start(), *(sample(file, 1) for file in (*files, large))))
    assert [f"{name} cannot be read" in text for name in ("damaged.png", "pipe.png", "missing.png", "large.png")] == [True] * 4
    assert "<img" not in text


def test_skipped_steps_have_their_images(write, report, images):
    skips = [
        {"kind": "skip", "time": 1.0, "step": 7, "problem": "loss nan", "images": [images("a.png"), "/none/b.png"]},
        {"kind": "skip", "time": 1.0, "step": 9, "problem": "loss inf", "images": ["x.png"] * 20},
    ]
    text = report(write(start(), training(), *steps(1, 9), *skips))
    assert text.count("<img") == 1
    assert "step 7 loss nan a.png b.png step 9 loss inf x.png" in words(text)
    assert "and 12 more" in text


def test_report_without_pillow_names_the_samples(write, report, monkeypatch, images):
    file = images("a.png")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert "a.png cannot be read" in report(write(start(), sample(file, 1)))


# --- several runs ----------------------------------------------------------------------------------------------------


def test_several_runs_show_only_their_differences_on_top(write, report):
    cat = write(start(), training(), *steps(1, 30), end())
    changed = {**SETTINGS, "learning_rate": [2e-4, "preset"], "seed": [1, "command line"]}
    dog = write(start("dog", settings=changed, torch="2.6", time=2000.0), training(), *steps(1, 20), name="dog")
    text = report(dog, cat)
    shown = words(text)
    assert shown.index("Differences") < shown.index("Results") < shown.index("Charts")
    differences = shown[shown.rindex("Differences") : shown.rindex("Results")]
    assert "cat dog PyTorch 2.14 2.6 learning_rate 0.0001 command line 0.0002 preset seed default 1 command line" in differences
    assert "cache" not in differences
    assert "2 runs" in shown
    data = chart_data(text)
    assert [curve["label"] for curve in data["loss"]["curves"]] == ["cat", "dog"]
    assert [len(table[0]) for table in data["loss"]["tables"]] == [30, 20]
    assert data["memory"]["levels"][0]["label"] == "predicted"


def test_runs_with_equal_settings(write, report):
    files = [write(start(name, run=name), training(), *steps(1, 3), name=name) for name in ("a", "b")]
    assert "The runs have the same settings." in report(*files)


def test_a_folder_means_its_newest_run_and_all_means_every_run(write, report, tmp_path):
    write(start(run="first"), training(), *steps(1, 5), start(run="second", time=3000.0), training(), *steps(1, 7, time=3100.0))
    write(start("old", time=10.0), training(time=10.0), *steps(1, 9, time=11.0), name="old")
    assert chart_data(report(tmp_path))["loss"]["tables"][0][0] == list(range(1, 8))
    data = chart_data(report(tmp_path, "--all"))
    assert [len(table[0]) for table in data["loss"]["tables"]] == [9, 5, 7]
    first, second, third = (curve["label"] for curve in data["loss"]["curves"])
    assert first == "old"
    assert second.startswith("cat, 1970-01-01 ")
    assert second != third
    assert len(chart_data(report(tmp_path, tmp_path))["loss"]["tables"]) == 1


# --- command ---------------------------------------------------------------------------------------------------------


def test_default_file_is_next_to_the_journal(write, tmp_path, monkeypatch, capsys):
    write(start(), training(), *steps(1, 3))
    write(start("dog"), training(), name="dog")
    monkeypatch.chdir(tmp_path)
    assert main(["report", f"cat{SUFFIX}"]) == 0
    assert (tmp_path / "cat.report.html").is_file()
    assert f"report: {tmp_path / 'cat.report.html'}" in capsys.readouterr().err
    assert main(["report", "--all"]) == 0
    assert (tmp_path / "runs.report.html").is_file()


def test_live_report_is_rewritten_until_the_run_ends(write, report, tmp_path, monkeypatch, capsys):
    file = write(start(pid=os.getpid(), process_started=None), training(), *steps(1, 3))
    pages, target = [], tmp_path / "out" / "report.html"

    def sleep(seconds):
        assert seconds >= 15
        pages.append(target.read_text())
        lines = steps(4, 4) if len(pages) == 1 else [end()]
        with file.open("a") as stream:
            stream.writelines(json.dumps(line) + "\n" for line in lines)

    monkeypatch.setattr(command, "time", clock(sleep))
    pages.append(report(file, "--live"))
    assert ["data-refresh=" in page for page in pages] == [True, True, False]
    assert [len(chart_data(page)["loss"]["tables"][0][0]) for page in pages] == [3, 4, 4]
    assert "DONE" in pages[-1]
    assert capsys.readouterr().err.count("Ctrl-C ends the report, not the run") == 1


def test_ctrl_c_ends_a_live_report(write, report, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "time", clock(interrupt))
    assert "RUNNING" in report(write(start(pid=os.getpid(), process_started=None), training(), *steps(1, 3)), "--live")


def test_failed_write_keeps_the_last_report(write, report, tmp_path, monkeypatch, capsys):
    file = write(start(), training(), *steps(1, 3))
    before = report(file)

    def fail(partial, final):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(atomic_write, "_rename", fail)
    assert main(["report", str(file), "--output", str(tmp_path / "out" / "report.html")]) == 2
    assert "report.html: Permission denied" in capsys.readouterr().err
    assert [path.read_text("utf-8") for path in (tmp_path / "out").iterdir()] == [before]


def test_wrong_input_is_an_error(tmp_path, write, capsys, monkeypatch):
    (tmp_path / "text").write_text("text\n")
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        (["none"], "none does not exist; give an output folder or a journal"),
        (["text"], "text is not a journal; give an output folder or a file NAME.journal.jsonl"),
        (["empty"], "empty; give the --output_dir of a run"),
        (["empty", "--output", "cat.safetensors"], "--output cat.safetensors: the name must end in .html"),
    ):
        assert main(["report", *(str(tmp_path / word) if index == 0 else word for index, word in enumerate(arguments))]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["report", str(write(start()))]) == 2
    assert "the report needs Jinja2" in capsys.readouterr().err


def test_report_changes_nothing_but_its_file(write, report, tmp_path):
    file = write(start(), training(), *steps(1, 3))
    before = (file.stat().st_mtime_ns, file.read_bytes())
    report(file)
    assert (file.stat().st_mtime_ns, file.read_bytes()) == before
    assert {path.name for path in tmp_path.iterdir()} == {file.name, "out"}


def test_report_on_20_000_steps_is_small(tmp_path, report):
    file, numbers = tmp_path / f"cat{SUFFIX}", random.Random(1)
    lines = [json.dumps(start()), json.dumps(training(steps=20_000))]
    for step, line in enumerate(steps(1, 20_000), 1):
        lines.append(json.dumps({**line, "loss": numbers.random(), "seconds": numbers.random(), "data": step % 7 / 100}))
    file.write_text("\n".join(lines) + "\n")
    text = report(file)
    assert len(text) < 1e6
    assert len(chart_data(text)["loss"]["tables"][0][0]) <= 2 * charts.SPANS + 2


# --- the journal's facts ---------------------------------------------------------------------------------------------


def test_journal_has_folders_captions_and_tags():
    def image(folder, caption, repeats=2, regularization=False):
        return SimpleNamespace(absolute_path=f"{folder}/a.png", num_repeats=repeats, is_reg=regularization, caption=caption)

    data = {"a": image("/cat", ""), "b": image("/cat", "x" * 500), "c": image("/dog", "a dog", 1, True)}
    sets = [SimpleNamespace(image_data=data, tag_frequency={"cat": {"x": 2}, "dog": {"x": 1, "a dog": 1}}), SimpleNamespace()]
    assert journal_patch._folders(sets) == [
        {"folder": "/cat", "repeats": 2, "regularization": False, "images": 2, "captioned": 1, "caption": "x" * 300},
        {"folder": "/dog", "repeats": 1, "regularization": True, "images": 1, "captioned": 1, "caption": "a dog"},
    ]
    assert list(journal_patch._tags(sets).items()) == [("x", 3), ("a dog", 1)]


def test_dataset_of_another_kind_has_the_reason_instead_of_captions():
    strange = SimpleNamespace(image_data={"a": object()}, bucket_manager=object())
    loader = SimpleNamespace(dataset=SimpleNamespace(datasets=[strange]))
    (problem,) = journal_patch._caption_facts(SimpleNamespace(_dataloaders=[loader])).values()
    assert problem.startswith("AttributeError: ")


def test_journal_has_the_prompts_of_samples(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("# comment\na cat --w 64\n\n  a dog\n", encoding="utf-8")
    assert journal_patch._sample_prompts(SimpleNamespace(sample_prompts=str(file))) == ["a cat --w 64", "a dog"]
    file.write_bytes(b"\xff")
    for value in (str(file), str(tmp_path / "none.txt"), "prompts.toml", None):
        assert journal_patch._sample_prompts(SimpleNamespace(sample_prompts=value)) == []


def test_summary_of_a_patch_names_its_problem():
    patcher = Patcher({"a": None, "b": None, "c": None, "d": None}.fromkeys("abcd", journal_patch.PATCH), None, None)
    for name, target, status, reason in (
        *(("a", "1", "skipped", "not enabled"), ("b", "1", "applied", ""), ("b", "2", "failed", "ValueError")),
        ("c", "1", "failed", "TypeError"),
    ):
        patcher.outcomes[name, target] = Outcome(name, target, status, reason)
    assert patcher.summary() == {"a": ("skipped", "not enabled"), "b": ("applied", "ValueError"), "c": ("failed", "TypeError")}


# --- browser ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    program, driver = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs Chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()


def messages(page):
    """Return errors and warnings of the page, also those of its Content-Security-Policy."""
    return [
        line for line in page.get_log("browser") if "getImageData" not in line["message"]
    ]  # advice on this test's own reads


@pytest.fixture
def show(browser, report, tmp_path):
    """Write a report and open it: ``show(*places, width=, dark=)``."""
    from selenium.webdriver.support.ui import WebDriverWait

    def open_page(*places, width=1280, dark=False):
        report(*places)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get((tmp_path / "out" / "report.html").as_uri())
        WebDriverWait(browser, 10).until(lambda page: page.execute_script("return document.body.dataset.charts") == "4")
        assert messages(browser) == []
        return browser

    return open_page


@pytest.fixture
def full(write, images):
    """A run with everything that a report shows, and hostile names."""
    folders = [
        {"folder": "/data/3_cat", "repeats": 3, "regularization": False, "images": 10, "captioned": 9, "caption": ATTACK}
    ]
    lines = [start(), training(folders=folders, tags={ATTACK: 3, "cat": 1}, sample_prompts=[ATTACK]), *steps(1, 200)]
    lines += [sample(images(f"sample/cat_{step:06d}_00_20261122120000.png", (832, 1216)), step) for step in range(20, 220, 20)]
    lines += [{"kind": "skip", "time": 1.0, "step": 9, "problem": "loss nan", "images": [images("a.png"), "w" * 200 + ".png"]}]
    return write(*lines, end("failed", reason="ValueError: " + "long " * 50 + "w" * 300))


SIDEWAYS = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"

DRAWN = """
return [...document.querySelectorAll("canvas")].map((canvas) => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, colours = {};
  for (let i = 0; i < pixels.length; i += 4)
    if (pixels[i + 3] === 255) colours[pixels.slice(i, i + 3).join()] = (colours[pixels.slice(i, i + 3).join()] ?? 0) + 1;
  return colours;
});
"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_browser_draws_the_page_without_network_or_sideways_scrolling(show, full, width, dark):
    page = show(full, width=width, dark=dark)
    colours = page.execute_script(DRAWN)
    line = "130,160,255" if dark else "59,91,219"
    assert [each.get(line, 0) > 100 for each in colours] == [True] * 4
    assert page.execute_script(SIDEWAYS) == 0
    assert (
        page.execute_script("return performance.getEntriesByType('resource').filter((each) => !each.name.startsWith('data:'))")
        == []
    )
    assert page.execute_script("return [...document.images].map((each) => each.naturalWidth)") == [219] * 10 + [112]
    background = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(14, 16, 20)" if dark else "rgb(245, 246, 248)")
    assert page.execute_script("return window.attacked") is None


def test_browser_follows_a_change_of_the_colour_scheme(show, full):
    from selenium.webdriver.support.ui import WebDriverWait

    page = show(full)
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    WebDriverWait(page, 10).until(lambda page: all(each.get("130,160,255", 0) > 100 for each in page.execute_script(DRAWN)))


def test_browser_zooms_shows_values_and_draws_a_log_scale(show, full):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    page = show(full)
    legends = page.find_elements(By.CSS_SELECTOR, ".u-legend")
    assert legends[0].text.startswith("step200 loss0.005 ")  # the last step's values
    plots = page.find_elements(By.CSS_SELECTOR, ".u-over")
    middle = ActionChains(page, duration=50).move_to_element(plots[0])
    middle.perform()
    steps_shown = [re.match(r"step(\d+) ", legend.text).group(1) for legend in legends]
    assert len(set(steps_shown)) == 1
    assert 90 < int(steps_shown[0]) < 110
    middle.click_and_hold().move_by_offset(200, 0).release().perform()
    ticks = page.execute_script("return document.querySelectorAll('.u-select').length")
    assert ticks == 4
    before = page.execute_script(DRAWN)[0]
    page.find_element(By.CSS_SELECTOR, ".log").click()
    assert page.execute_script(DRAWN)[0] != before
    assert messages(page) == []


def test_browser_shows_several_runs(show, full, write):
    from selenium.webdriver.common.by import By

    dog = write(start("dog", time=2000.0, settings={}), training(), *steps(5, 90), end(), name="dog")
    page = show(full, dog, width=390)
    assert all(each.get("59,91,219", 0) > 20 and each.get("232,89,12", 0) > 20 for each in page.execute_script(DRAWN))
    assert page.execute_script(SIDEWAYS) == 0
    (details,) = (each for each in page.find_elements(By.CSS_SELECTOR, "details.run") if "dog" in each.text)
    assert details.get_attribute("open") is None
    page.execute_script("location.hash = arguments[0]", details.get_attribute("id"))
    page.execute_async_script("setTimeout(arguments[0], 100)")
    assert details.get_attribute("open") is not None


def test_browser_reloads_a_live_report(browser, full, report, tmp_path, monkeypatch):
    from selenium.webdriver.support.ui import WebDriverWait

    monkeypatch.setattr(command, "_REFRESH", 0.2)
    file = tmp_path / f"live{SUFFIX}"
    file.write_text("".join(json.dumps(line) + "\n" for line in (start(pid=os.getpid(), process_started=None), *steps(1, 5))))
    target, loads = tmp_path / "out" / "report.html", []

    def sleep(seconds):
        if not loads:
            browser.get(target.as_uri())
        expected = "9" if loads else "5"
        value = "return document.querySelector('.tile .value')?.textContent.trim()"
        WebDriverWait(browser, 10).until(lambda page: page.execute_script(value) == expected)
        loads.append(expected)
        with file.open("a") as stream:
            stream.writelines(json.dumps(line) + "\n" for line in (steps(6, 9) if len(loads) == 1 else [end()]))

    monkeypatch.setattr(command, "time", clock(sleep))
    report(file, "--live")
    assert loads == ["5", "9"]


def validation(step, losses, **changes):
    line = {"kind": "validation", "time": 1100.0 + step, "step": step, "epoch": 1, "losses": losses, "held_out": True}
    return {**line, "loss": sum(losses) / len(losses), "error": 0.1, "bands": {"0-250": losses[0]}, **changes}


def test_the_step_where_over_fitting_began_is_marked_and_the_best_file_named(write, report):
    means = dict(zip(range(10, 101, 10), [0.9, 0.8, 0.72, 0.7, 0.72, 0.75, 0.79, 0.83, 0.88, 0.93], strict=True))
    turned = [validation(step, [mean, mean + 1]) for step, mean in means.items()]
    saves = [{"kind": "save", "time": 1150.0, "step": step, "file": f"/x/cat-{step}.safetensors"} for step in (40, 80)]
    text = report(write(start(), training(), *steps(1, 100), *turned, *saves, end()))
    assert "Since step 40 the validation loss rises while the training loss falls" in text
    assert "best saved file: cat-40.safetensors of step 40" in text
    loss = chart_data(text)["loss"]
    assert {"name": "over-fitting", "steps": [40]} in loss["marks"]
    assert loss["tables"][1] == [[*means], [round(mean + 0.5, 5) for mean in means.values()]]
    assert text.count("lowest validation loss</span>") == 1

    averages = [{**saves[0], "file": "/x/cat-40-ema.safetensors"}]
    text = report(write(start(), training(), *steps(1, 100), *turned, *saves, *averages, end()))
    assert "best saved file: cat-40.safetensors of step 40" in text, "the average was not validated"

    falling = report(write(start(), training(), *steps(1, 100), *turned[:2], *saves, end()))
    assert "over-fitting" not in falling.partition("<body")[2].replace("m-over-fitting", "").partition("<script")[0]
    assert not [mark for mark in chart_data(falling)["loss"]["marks"] if mark["name"] == "over-fitting"]
