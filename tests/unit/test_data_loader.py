"""The choice of data loader workers is bounded by cores, memory and need."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.settings import Settings
from kohya_ext.patching.training_loop import Program
from kohya_ext.units import GB
from patches import automatic_data_loader as data_loader


@pytest.mark.parametrize(
    ("cores", "available", "cached", "forks", "workers"),
    [
        (16, 64 * GB, False, True, 8),
        (16, 64 * GB, True, True, 2),
        (4, 64 * GB, False, True, 3),
        (1, 64 * GB, False, True, 1),
        (16, 12 * GB, False, False, 3),
        (16, 1 * GB, False, False, 1),
    ],
)
def test_workers_follow_cores_memory_and_caches(cores, available, cached, forks, workers):
    assert data_loader.choose(cores, available, cached, forks) == workers


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), (2, True)),
        (("--max_data_loader_n_workers", "5"), (5, True)),
        (("--no-persistent_data_loader_workers",), (2, False)),
        (("--max_data_loader_n_workers", "0"), (0, False)),
    ],
)
def test_values_of_the_user_are_kept(words, expected, monkeypatch, capsys):
    command = CommandLine(Path("sdxl_train_network.py"), words, {})
    monkeypatch.setattr(data_loader, "program", lambda: Program(None, command))
    monkeypatch.setattr(data_loader, "available_cores", lambda: 16)
    workers = int(words[1]) if len(words) > 1 else 8
    args = Namespace(max_data_loader_n_workers=workers, persistent_data_loader_workers=False, cache_latents=True)
    data_loader._start(
        args, SimpleNamespace(num_processes=1, device=SimpleNamespace(type="cpu")), Settings(auto_data_loader=True)
    )
    assert (args.max_data_loader_n_workers, args.persistent_data_loader_workers) == expected
    assert ("data loader: " in capsys.readouterr().err) == (workers > 0)
