"""Reports of several processes."""

import json
from types import SimpleNamespace

import pytest

from kohya_ext.run import rank_reports
from kohya_ext.run.rank_reports import RankReport


@pytest.fixture
def journal(tmp_path):
    return tmp_path / "cat[1].journal.jsonl"


def test_peaks_of_all_ranks_in_order(journal, tmp_path):
    for rank in (10, 2):
        memory = RankReport(journal, rank, "here")
        memory.add({"host_resident": rank * 1000, "cuda_reserved": 5000})
        memory.add({"host_resident": rank * 1000, "cuda_reserved": 4000})  # after the allocator's peaks were reset
    assert rank_reports.read(journal) == [
        {"rank": 2, "host": "here", "host_resident": 2000, "cuda_reserved": 5000},
        {"rank": 10, "host": "here", "host_resident": 10000, "cuda_reserved": 5000},
    ]
    rank_reports.remove(journal)
    assert list(tmp_path.iterdir()) == []
    assert rank_reports.read(journal) == []


def test_only_growth_is_written(journal, tmp_path):
    memory = RankReport(journal, 1, "here")
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
    assert rank_reports.read(journal) == []
    rank_reports.remove(journal)
    assert list(tmp_path.iterdir()) == [other]


def test_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    RankReport(tmp_path / "file" / "cat.journal.jsonl", 1, "here").add({"host_resident": 1})
    assert rank_reports.read(tmp_path / "missing" / "cat.journal.jsonl") == []


def test_slowest_process_is_named_if_it_is_clearly_slower():
    rows = [{"rank": rank, "host": "here", "own_seconds": seconds} for rank, seconds in enumerate((1.0, 1.5, 1.2))]
    assert rank_reports.slowest(rows) == "rank 1 on here, 1.5 s per batch for data and forward; the fastest 1 s"
    assert rank_reports.slowest([rows[0], {**rows[1], "own_seconds": 1.05}]) == ""
    assert rank_reports.slowest([{"rank": 0, "host": "here"}, rows[1]]) == ""


def test_own_work_is_data_and_forward(monkeypatch):
    times = iter((10.0, 11.5, 20.0, 20.5))
    monkeypatch.setattr(rank_reports.time, "perf_counter", lambda: next(times))
    work = rank_reports.OwnWork(SimpleNamespace(type="cpu"))
    assert work.mean() is None
    for _ in range(2):
        work.add_data(0.25)
        work.begin_forward()
        work.end_forward()
        work.end_forward()  # the backward pass of a validation has no beginning
    assert work.mean() == (2 + 2 * 0.25) / 2
