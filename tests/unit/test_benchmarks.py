"""The benchmarks' statistics, files and plans. No test here measures time."""

import json
import os
import re
import shlex
from argparse import Namespace
from itertools import islice
from pathlib import Path

import pytest

from benchmarks import caching, command_lines, families, report, run
from benchmarks.plan import Plan
from benchmarks.processes import Bench
from benchmarks.ratios import quartiles, ratio
from benchmarks.results import Comparison, Result, Variant, kept, read, without_paths
from kohya_ext.errors import UserError
from kohya_ext.sdscripts.checkouts import Checkout


def test_a_ratio_divides_medians_and_its_spread_covers_the_rounds():
    result = ratio([[2.0, 2.0, 9.0], [4.0, 4.0, 4.0]], [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    assert result.of_medians == pytest.approx(4.0)
    assert (result.lowest, result.highest, result.rounds) == (2.0, 4.0, 2)


def test_an_incomplete_round_is_ignored_for_both_variants():
    result = ratio([[2.0], [100.0]], [[1.0]])
    assert (result.of_medians, result.rounds) == (2.0, 1)
    with pytest.raises(ValueError, match="no round in common"):
        ratio([[1.0]], [])


def test_quartiles_of_few_samples():
    assert quartiles([3.0]) == (3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)
    with pytest.raises(ValueError, match="no samples"):
        quartiles([])


def _result() -> Result:
    upstream = Variant(
        "upstream", "upstream, checkpointing", rounds=[[0.25, 0.25], [0.5, 0.5]], memory={"host_resident": 10**9}
    )
    ours = Variant(
        "compiled", "compiled", rounds=[[0.125, 0.125], [0.125, 0.125]], warm_up={"first_steps_seconds": [60.0, 0.1]}
    )
    absent = Variant("budget-0.5", "budget", status="left out", reason="no such patch")
    return Result(
        suite="step",
        command="python -m benchmarks.run step",
        date="2026-01-01T00:00:00+00:00",
        machine={"device": "cpu", "processor": "a processor", "cores": 2, "threads": 1},
        versions={"python": "3.11.0", "torch": "2.6.0"},
        commits={"kohya_ext": "0" * 40, "kohya_ext_changed": False, "sd_scripts": "1" * 40, "sd_scripts_version": "0.11.1"},
        reduced=True,
        comparisons=[Comparison("model step", "seconds a step", {"batch": 2}, [upstream, ours, absent])],
        complete=True,
    )


def test_a_written_result_is_read_back_with_its_summary(tmp_path):
    result = _result()
    result.write(tmp_path / "r.json")
    assert read(tmp_path / "r.json") == result
    (written,) = json.loads((tmp_path / "r.json").read_text())["comparisons"]
    assert written["summary"]["compiled"]["ratio"] == {"of_medians": 3.0, "lowest": 2.0, "highest": 4.0, "rounds": 2}
    assert "budget-0.5" not in written["summary"]


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 99}', '{"schema": 1, "comparisons": []}'])
def test_a_foreign_file_is_not_a_result(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=r"r\.json is not a result"):
        read(tmp_path / "r.json")


def test_the_table_has_ratio_images_and_reasons():
    lines = list(report.table(_result().comparisons[0], _result()))
    assert lines[0] == "| variant | seconds a step | ratio | images a second | process GB |"
    assert lines[2] == "| upstream, checkpointing | 0.375 (0.25 to 0.5) |  | 5.33 | 1.00 |"
    assert lines[3].startswith("| compiled | 0.125 (0.125 to 0.125) | 3.00x (2.00 to 4.00) | 16.00 |")
    assert "left out: no such patch" in lines[4]
    assert "compiled 60 s" in lines[-1]


def test_the_compile_table_has_the_share_of_python():
    visits = [
        {
            "bucket": [64, 32],
            "first_seconds": 9.0,
            "then_seconds": 1.0,
            "processor_seconds": 2.5,
            "new": {"graphs": 2, "breaks": 0},
        },
        {
            "bucket": [32, 64],
            "first_seconds": 1.0,
            "then_seconds": 1.0,
            "processor_seconds": 0.5,
            "new": {"graphs": 0, "breaks": 0},
        },
    ]
    compiled, eager = (
        Variant("compiled", "compiled", facts={"visits": visits}),
        Variant("patched", "eager", facts={"visits": visits[1:]}),
    )
    lines = list(report.compiling_table(Comparison("cold", "seconds of compiling", {}, [compiled, eager])))
    assert lines[0].strip() == "compiled: 2 graphs, 0 graph breaks; 3 s of processor time without the C++ compilers"
    assert "| 64x32 | 9 s | 1 s | 2 |" in lines
    assert "eager: 0 graphs, 0 graph breaks" in [line.strip() for line in lines]


def test_the_recorded_command_has_no_absolute_path():
    words = [
        "-m",
        "benchmarks.run",
        "step",
        "--scratch",
        "/some/where",
        "--rounds",
        "2",
        "--output=/some/file",
        "--",
        "--seed",
        "1",
    ]
    assert without_paths(words) == ["-m", "benchmarks.run", "step", "--rounds", "2", "--", "--seed", "1"]


def test_every_committed_result_can_be_read_and_repeated():
    assert kept()
    for file in kept():
        result = read(file)
        assert result.commits["sd_scripts"], file
        words = shlex.split(result.command)
        if words[:3] == ["python", "-m", "benchmarks.caching"]:
            caching.parser().parse_args(words[3:])
        else:
            assert words[:3] == ["python", "-m", "benchmarks.run"], file
            given = run.parse(words[3:])
            assert all(name in families.RECIPES for name in filter(None, given.variants.split(","))), file
        assert not re.search(r"(?<![\w.])/(root|home|tmp|work|Users)/", file.read_text(encoding="utf-8")), file


def _plan(**more) -> Plan:
    checkout = Checkout(Path("nowhere"), "0.11.1", "v0.11", "test")
    bench = Bench(checkout, "cpu", reduced=True, scratch=Path("nowhere"))
    given = {"variants": (), "more": (), "rounds": 2, "steps": 1, "deadline": float("inf"), **more}
    return Plan(bench=bench, family_name="sdxl-lora", **given)


def test_the_last_value_of_an_option_counts():
    assert _plan().value("resolution", "1") == "256,256"
    assert _plan(more=("--resolution", "512,512")).value("resolution", "1") == "512,512"
    assert _plan().value("train_batch_size", "1") == "1"


def test_no_round_starts_after_the_time_limit():
    assert list(_plan().turns()) == [1, 2]
    assert list(_plan(deadline=0.0).turns()) == []


def test_an_unknown_variant_is_an_error():
    with pytest.raises(UserError, match="unknown variant compield"):
        _plan(variants=("compield",)).recipes(())


def test_a_variant_without_its_patch_is_skipped(monkeypatch):
    monkeypatch.setattr("kohya_ext.patching.patch.registry", dict)
    ((_, upstream), (_, compiled)) = _plan(variants=("upstream", "compiled")).recipes(())
    assert (upstream.status, compiled.status) == ("measured", "left out")
    assert "selective_torch_compile" in compiled.reason


def test_the_upstream_variant_has_no_patches():
    for name, recipe in families.RECIPES.items():
        assert name.startswith("upstream") is not recipe.patched, name


def test_the_best_variants_at_equal_memory_and_at_equal_time():
    comparison = Comparison(
        "model step", "seconds a step", {},
        [
            Variant(name, name, rounds=[[seconds]], memory={"allocated": size})
            for name, seconds, size in (("upstream", 2.0, 100), ("larger", 0.5, 101), ("better", 1.6, 100), ("slow", 3.0, 10))
        ],
    )  # fmt: skip
    (line,) = report.at_equal_cost(comparison)
    assert "the fastest is `better`, 1.25x" in line
    assert "the smallest is `upstream`, 1.00 of the memory (allocated)" in line


def test_a_sparse_checkpoint_has_shapes_and_takes_no_space(tmp_path):
    torch = pytest.importorskip("torch")
    from benchmarks.sparse_checkpoints import write_file
    from kohya_ext.run.safetensors_header import read_header

    file = tmp_path / "model.safetensors"
    write_file(
        file, {"weight": torch.empty(2**14, 2**14, device="meta"), "ids": torch.empty(3, dtype=torch.long, device="meta")}
    )
    header = read_header(file)
    assert header.shapes == {"weight": (2**14, 2**14), "ids": (3,)}
    assert header.dtypes == {"weight": "BF16", "ids": "I64"}
    assert file.stat().st_size > 2 * 2**28
    if os.name == "posix":  # Windows does not report allocated blocks
        assert file.stat().st_blocks * 512 < 2**20


def test_the_peak_of_a_trace_is_grouped_by_lines():
    pytest.importorskip("torch")
    from benchmarks.full_size_worker import at_peak

    def frames(line):
        return [
            {"filename": "/torch/nn.py", "line": 1, "name": "call"},
            {"filename": "/a/model.py", "line": line, "name": "forward"},
        ]

    trace = [
        {"action": "alloc", "addr": 1, "size": 8, "frames": frames(3)},
        {"action": "alloc", "addr": 2, "size": 8, "frames": frames(3)},
        {"action": "alloc", "addr": 3, "size": 4, "frames": frames(5)},
        {"action": "free_completed", "addr": 2, "size": 8, "frames": []},
        {"action": "alloc", "addr": 4, "size": 6, "frames": frames(7)},
    ]
    assert at_peak(trace) == [
        {"bytes": 8, "tensors": 2, "lines": "model.py:3 forward"},
        {"bytes": 4, "tensors": 1, "lines": "model.py:5 forward"},
    ]


def test_full_size_runs_one_command_line_or_the_chosen_presets():
    pytest.importorskip("torch")
    from benchmarks.full_size import Row, chosen

    words = "sdxl_train_network.py --preset 8gb --network_dim 64"
    options = {
        "only": "sdxl-lora/",
        "faster": False,
        "compiled": False,
        "eight_bits": False,
        "planned": False,
        "random": None,
        "gpu_memory": 8 * 2**30,
    }
    row = Row(words, "sdxl_train_network.py", ["--preset", "8gb", "--network_dim", "64"], 8 * 2**30)
    assert [*chosen(Namespace(command=words, **options), None)] == [row]
    names = [row.name for row in chosen(Namespace(command=None, **options), None)]
    assert len(names) > 3
    assert all(name.startswith("sdxl-lora/") for name in names)
    options |= {"only": "compiled: flux", "compiled": True}
    compiled = [row.arguments for row in chosen(Namespace(command=None, **options), None)]
    assert len(compiled) == 4  # with and without checkpointing, with and without CUDA graphs
    assert all("--selective_torch_compile" in arguments for arguments in compiled)
    options |= {"only": "8-bit base: sdxl", "eight_bits": True}
    assert all("--base_precision" in row.arguments for row in chosen(Namespace(command=None, **options), None))


def test_random_command_lines_are_those_of_their_seed_and_of_every_kind():
    drawn = [*islice(command_lines.draw(1, ["loha"]), len(command_lines.KINDS))]
    assert drawn == [*islice(command_lines.draw(1, ["loha"]), len(command_lines.KINDS))]
    assert drawn != [*islice(command_lines.draw(2, ["loha"]), len(command_lines.KINDS))]
    assert len({script for script, _ in drawn}) == len(command_lines.KINDS) - 1  # FLUX and Chroma have the same script


def test_random_command_lines_have_only_the_networks_of_sd_scripts():
    drawn = [" ".join(arguments) for _, arguments in islice(command_lines.draw(1, ["loha"]), 200)]
    assert any("networks.loha" in line for line in drawn)
    assert not any("networks.lokr" in line for line in drawn)
