"""Threads around the GPU keep order, bounds and errors; the index knows a file by its size and time."""

import os
import pickle
import threading
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from kohya_ext.caching import checks, safetensors_file, sources, threads
from kohya_ext.caching.checks import Check
from kohya_ext.caching.threads import Writer, default_workers, in_order
from kohya_ext.run import file_index, run_record
from kohya_ext.run.file_index import FileIndex, check_id
from kohya_ext.run.run_record import RunRecord


def test_results_are_in_order_and_at_most_the_limit_is_ahead():
    first = threading.Event()
    started = []

    def work(item):
        started.append(item)
        if item == 0:
            first.wait(10)
        return item * item

    with ThreadPoolExecutor(4) as pool:
        results = in_order(work, range(20), pool, 6)
        threading.Timer(0.05, first.set).start()
        assert next(results) == (0, 0)
        assert max(started) <= 6
        assert list(results) == [(item, item * item) for item in range(1, 20)]


def test_an_error_is_raised_in_its_items_turn():
    def work(item):
        return 1 / item

    with ThreadPoolExecutor(2) as pool:
        results = in_order(work, [1, 2, 0, 4], pool, 4)
        assert [next(results), next(results)] == [(1, 1), (2, 0.5)]
        with pytest.raises(ZeroDivisionError):
            next(results)


def test_closing_cancels_what_has_not_begun():
    release = threading.Event()
    begun = []

    def work(item):
        begun.append(item)
        if item:
            release.wait(10)

    with ThreadPoolExecutor(1) as pool:
        results = in_order(work, range(10), pool, 10)
        next(results)
        results.close()
        release.set()
    assert len(begun) <= 3


def test_the_writer_holds_back_its_caller_and_waits_at_the_end():
    release, held = threading.Event(), []
    with Writer(4, limit=100) as writer:
        for _ in range(2):
            writer.submit(50, release.wait, 10)
        later = threading.Thread(target=lambda: writer.submit(1, held.append, "third"))
        later.start()
        later.join(0.1)
        assert later.is_alive()
        release.set()
        later.join(10)
        assert not later.is_alive()
        writer.submit(1000, held.append, "larger than the limit")
    assert sorted(held) == ["larger than the limit", "third"]


def test_the_writer_raises_the_first_error_and_still_makes_the_other_calls():
    written = []

    submitted = threading.Event()

    def write(value):
        submitted.wait(10)
        if value == 1:
            raise OSError("disk")
        written.append(value)

    def write_all():
        with Writer(1, limit=10) as writer:
            for value in range(4):
                writer.submit(1, write, value)
            submitted.set()

    with pytest.raises(OSError, match="disk"):
        write_all()
    assert written == [0, 2, 3]


def test_an_error_inside_the_block_is_not_hidden():
    def fail():
        with Writer(1, 100) as writer:
            writer.submit(1, lambda: 1 / 0)
            raise ValueError("block")

    with pytest.raises(ValueError, match="block"):
        fail()


def test_workers_are_the_cores_of_this_process_shared_by_processes(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8), raising=False)
    assert [default_workers(), default_workers(3), default_workers(100)] == [8, 2, 1]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64))
    assert default_workers() == threads._MAX_WORKERS


@pytest.fixture
def cache(tmp_path):
    file = tmp_path / "a b_0064x0064_sdxl.npz"
    file.write_bytes(b"latents")
    return file


def test_a_check_is_remembered_until_the_file_changes(cache):
    FileIndex().add(str(cache), "check")
    assert FileIndex().has_passed(str(cache), "check")
    assert not FileIndex().has_passed(str(cache), "other")
    stat = cache.stat()
    os.utime(cache, ns=(stat.st_atime_ns, stat.st_mtime_ns + 100))  # NTFS counts in 100 ns
    assert not FileIndex().has_passed(str(cache), "check")
    os.utime(cache, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert FileIndex().has_passed(str(cache), "check")
    cache.write_bytes(b"latents of another model")
    os.utime(cache, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert not FileIndex().has_passed(str(cache), "check")
    cache.unlink()
    assert not FileIndex().has_passed(str(cache), "check")
    assert not FileIndex().exists(str(cache))


def test_torn_and_foreign_lines_are_ignored(cache):
    file = cache.with_name(file_index.CACHES)
    file.write_bytes(b"\xff\xfe 12 x\n7 12")
    FileIndex().add(str(cache), "check")
    assert FileIndex().has_passed(str(cache), "check")


def test_the_index_is_rewritten_when_most_lines_are_stale(cache, monkeypatch):
    monkeypatch.setattr(file_index, "_SURPLUS_LINES", 3)
    file = cache.with_name(file_index.CACHES)
    file.write_text("".join(f"1 {time} check gone.npz\n" for time in range(5)))
    FileIndex().add(str(cache), "check")
    assert len(file.read_text().splitlines()) == 1 + 1  # and the line break before the new line
    assert FileIndex().has_passed(str(cache), "check")


def test_a_folder_without_write_access_is_checked_at_each_start(cache, monkeypatch):
    def fail(file, line):
        raise PermissionError(file)

    monkeypatch.setattr(file_index, "_append", fail)
    shared = FileIndex()
    shared.add(str(cache), "check")
    assert shared.has_passed(str(cache), "check")
    assert not FileIndex().has_passed(str(cache), "check")


def test_check_ids_depend_on_all_parts():
    assert check_id(1, (64, 64), True) == check_id(1, (64, 64), True)
    assert len({check_id(1, True), check_id(1, False), check_id(2, True), check_id(1)}) == 4


def test_a_damaged_file_is_rejected_with_a_reason_and_a_sound_one_is_read_once(cache):
    reads = []

    def problem(path, flip):
        reads.append(path)
        return "values that are not finite" if flip else ""

    check = Check(FileIndex(), lambda path, flip: True, problem, ("strategy",), position=0)
    assert check(str(cache), False)
    assert check(str(cache), False)
    assert len(reads) == 1
    assert not check(str(cache), True)
    assert check.summary() == f"caches to be created again (values that are not finite): {cache}"

    def fail(path, flip):
        raise EOFError

    broken = Check(FileIndex(), fail, problem, ("other",), position=0)
    assert not broken(str(cache), False)
    assert broken.unusable == [str(cache)]
    assert not broken(str(cache.with_name("missing.npz")), False)
    assert "EOFError" in broken.summary()


def test_a_file_of_another_source_is_rejected_and_one_without_a_record_accepted(cache):
    def check(**options):
        return Check(FileIndex(), lambda path: True, lambda path: "", ("strategy",), position=0, **options)

    old = check(outdated={str(cache)})
    assert not old(str(cache))
    assert old.unusable == [str(cache)]
    assert check(sources={str(cache): "source:first"})(str(cache))
    assert check(sources={str(cache): "source:first"}, outdated={str(cache)})(str(cache))
    assert check()(str(cache))
    other = check(sources={str(cache): "source:other"})
    assert not other(str(cache))
    assert other.unusable == [str(cache)]
    assert "have changed" in other.summary()


def test_sources_tell_images_captions_limits_and_checkpoints_apart(tmp_path, monkeypatch):
    image, checkpoint = tmp_path / "a.png", tmp_path / "model.safetensors"
    image.write_bytes(b"pixels")
    info, short, long = SimpleNamespace(absolute_path=str(image), caption="a cat"), Namespace(limit=77), Namespace(limit=227)
    images = [*sources.of_images([str(image), str(tmp_path / "missing.png")]).items()]
    image.write_bytes(b"other pixels")
    images += sources.of_images([str(image)]).items()
    texts = [sources.of_texts([info], limits) for limits in (short, long)]
    info.caption = "a dog"
    texts.append(sources.of_texts([info], short))
    for content in (b"weights" * 1000, b"weights" * 999 + b"others "):
        checkpoint.write_bytes(content)
        run = RunRecord("sdxl_train.py", {"pretrained_model_name_or_path": str(checkpoint)})
        monkeypatch.setattr(run_record, "_current", run)
        texts.append(sources.of_texts([info], short))
    everything = images + [entry for text in texts for entry in text.items()]
    assert {path for path, _ in everything} == {str(image)}
    assert len({source for _, source in everything}) == len(everything) == 7


def test_files_are_read_one_at_a_time_where_python_needs_it(cache, monkeypatch):
    monkeypatch.setattr(checks, "_READING", threading.Lock())
    check = Check(FileIndex(), lambda path: checks._READING.locked(), lambda path: "alone", ("strategy",), position=0)
    assert check.read(str(cache)) == "alone"
    assert not checks._READING.locked()


def test_safetensors_keep_types_and_detect_changes(tmp_path):
    np, _ = pytest.importorskip("numpy"), pytest.importorskip("torch")
    arrays = {
        "latents": np.linspace(-5, 5, 24, dtype=np.float32).reshape(2, 3, 4)[:, ::-1],
        "hidden": np.full(3, 1e30, np.float32),  # overflows fp16
        "alpha_mask": np.full((2, 2), 1 / 3, np.float32),
        "half": np.ones(2, np.float16),
        "original_size": np.array((64, 128)),
        "apply_t5_attn_mask": True,
        "caption_dropout_rate": np.float32(0.1),
    }
    file = str(tmp_path / "a_sdxl.safetensors")
    for dtype in safetensors_file.DTYPES:
        safetensors_file.write(file, arrays, dtype)
        read = safetensors_file.read(file)
        assert read.files == list(read)
        assert read.keys() == arrays.keys()
        for name, array in arrays.items():
            assert read[name].dtype == np.asarray(array).dtype
            assert read[name].shape == np.asarray(array).shape
            tolerance = {"rtol": 2**-8} if dtype == "bf16" else {"rtol": 2**-11}
            is_exact = dtype == "fp32" or name not in ("latents", "hidden")
            assert np.array_equal(read[name], array) if is_exact else np.allclose(read[name], array, **tolerance, atol=0)
    content = bytearray((tmp_path / "a_sdxl.safetensors").read_bytes())
    content[-3] ^= 1
    (tmp_path / "a_sdxl.safetensors").write_bytes(content)
    with pytest.raises(safetensors_file.DamagedFileError):
        safetensors_file.read(file)


def test_a_data_loaders_worker_reads_safetensors(tmp_path, monkeypatch):
    np, _ = pytest.importorskip("numpy"), pytest.importorskip("torch")
    safetensors_file.write(str(tmp_path / "a.safetensors"), {"latents": np.ones(3, np.float32)})
    strategy = pickle.dumps({"kohya_ext_reader": safetensors_file.ReaderInWorkers()})
    monkeypatch.setattr(np, "load", np.load)  # restored after the test
    safetensors_file._installed.cache_clear()
    pickle.loads(strategy)
    assert np.load(str(tmp_path / "a.safetensors"))["latents"].tolist() == [1, 1, 1]
