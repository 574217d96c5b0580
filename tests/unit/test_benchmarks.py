"""The benchmarks' files and command lines. No test here measures time."""

import os
import re
from argparse import Namespace
from itertools import islice

import pytest

from benchmarks import command_lines, results
from benchmarks.results import FOLDER
from kohya_ext.sdscripts.checkouts import Checkout


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_a_committed_result_has_no_paths_and_a_command(file):
    assert not re.search(r"(?<![\w.])/(root|home|tmp|work|Users)/", file.read_text(encoding="utf-8"))
    commands = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"`{file.stem.removesuffix('_v0.10')}.json`" in commands


def test_the_commands_of_the_results_exist():
    modules = re.findall(r"python -m benchmarks\.(\w+)", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert modules
    assert [name for name in modules if not (FOLDER.parent / f"{name}.py").is_file()] == []


def test_the_circumstances_of_a_result_name_the_device_the_versions_and_the_commits(tmp_path):
    about = results.circumstances(Checkout(tmp_path, "0.11.1", "v0.11", "test"), threads=2)
    assert about["machine"]["threads"] == 2
    assert about["versions"]["wrapt"]
    assert about["commits"]["sd_scripts_version"] == "0.11.1"


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
