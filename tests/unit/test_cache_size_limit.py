"""Images are divided between files up to a limit and host memory."""

from types import SimpleNamespace

import pytest

from kohya_ext.caching.size_limit import Cache, divide, latents_bytes, memory_copies
from kohya_ext.units import read_size
from patches import cache_size_limit


def caches(folder, count, size=100):
    return [Cache(str(index), str(folder / f"{index}.npz"), size, 2 * size) for index in range(count)]


def test_existing_files_are_kept_and_count(tmp_path):
    (tmp_path / "3.npz").write_bytes(bytes(150))
    (tmp_path / "other.safetensors").write_bytes(bytes(50))
    (tmp_path / "image.png").write_bytes(bytes(1000))
    division = divide(caches(tmp_path, 5), 400)
    assert division.disk == {"0", "1", "3"}
    assert division.memory == {"2", "4"}
    assert (division.files, division.memory_bytes, division.missing) == (400, 400, 200)


def test_everything_on_disk_has_nothing_missing(tmp_path):
    division = divide(caches(tmp_path, 5), 500)
    assert (len(division.disk), division.memory, division.missing) == (5, set(), 0)


def test_sizes_of_latents_follow_bucket_flip_mask_and_dtype():
    class FluxLatentsCachingStrategy:
        pass

    strategy = FluxLatentsCachingStrategy()
    assert latents_bytes(strategy, (1024, 512), False, False, 4) - 2048 == 16 * 128 * 64 * 4
    assert latents_bytes(strategy, (1024, 512), True, True, 2) - 2048 == 2 * 16 * 128 * 64 * 2 + 1024 * 512 * 4
    assert latents_bytes(object(), (1024, 512), False, False, 4) is None


def test_new_processes_copy_the_caches():
    assert memory_copies(1, 8, forks=True) == 1
    assert memory_copies(2, 8, forks=False) == 18


@pytest.mark.parametrize(("text", "size"), [("20GB", 20 * 10**9), ("1.5 GiB", 3 * 2**29), ("100mb", 10**8)])
def test_sizes_have_a_unit(text, size):
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["20", "0GB", "auto", "-1GB", "GB"])
def test_other_sizes_are_rejected(text):
    with pytest.raises(ValueError, match="size with its unit"):
        read_size(text)


def test_caches_that_fit_nowhere_stop_the_run_with_numbers(tmp_path, monkeypatch, capsys):
    psutil = pytest.importorskip("psutil")
    division = divide(caches(tmp_path, 100, 10**9), 20 * 10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=16 * 10**9))
    with pytest.raises(SystemExit):
        cache_size_limit._announce("latents", division, 20 * 10**9, SimpleNamespace(num_processes=1), "--no-cache_latents")
    printed = capsys.readouterr().err
    assert "latents of 80 of 100 images do not fit (80.00 GB more on disk)" in printed
    assert "need 160.00 GB of host memory, of which 16.00 GB is available" in printed
    assert "use --cache_size_limit 100GB, or --no-cache_latents" in printed
