"""Peaks of memory of several processes."""

import json

import pytest

from kohya_ext.run import rank_memory
from kohya_ext.run.rank_memory import RankMemory


@pytest.fixture
def journal(tmp_path):
    return tmp_path / "cat[1].journal.jsonl"


def test_peaks_of_all_ranks_in_order(journal, tmp_path):
    for rank in (10, 2):
        memory = RankMemory(journal, rank, "here")
        memory.add({"host_resident": rank * 1000, "cuda_reserved": 5000})
        memory.add({"host_resident": rank * 1000, "cuda_reserved": 4000})  # after the allocator's peaks were reset
    assert rank_memory.collect(journal) == [
        {"rank": 2, "host": "here", "host_resident": 2000, "cuda_reserved": 5000},
        {"rank": 10, "host": "here", "host_resident": 10000, "cuda_reserved": 5000},
    ]
    assert list(tmp_path.iterdir()) == []
    assert rank_memory.collect(journal) == []


def test_only_growth_is_written(journal, tmp_path):
    memory = RankMemory(journal, 1, "here")
    memory.add({"host_resident": 1000})
    (file,) = tmp_path.iterdir()
    file.write_text("kept")
    memory.add({"host_resident": 1005})
    assert file.read_text() == "kept"
    memory.add({"host_resident": 1011})
    assert json.loads(file.read_text())["host_resident"] == 1011


def test_files_of_other_runs_and_damaged_ones_are_left_out(journal, tmp_path):
    other = tmp_path / "cat2.journal.jsonl.rank1.json"
    other.write_text("{}")
    (tmp_path / f"{journal.name}.rank1.json").write_text("{")
    (tmp_path / f"{journal.name}.rank2.json.partial").write_text("{")
    assert rank_memory.collect(journal) == []
    assert list(tmp_path.iterdir()) == [other]


def test_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    RankMemory(tmp_path / "file" / "cat.journal.jsonl", 1, "here").add({"host_resident": 1})
    assert rank_memory.collect(tmp_path / "missing" / "cat.journal.jsonl") == []
