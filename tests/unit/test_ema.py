"""The average of ``--ema`` on the host."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("staged", [1, 300, 2**20], ids=["each alone", "two groups", "together"])
def test_weights_are_averaged_in_groups_that_fit_the_buffer(monkeypatch, staged):
    from kohya_ext.patches import ema

    monkeypatch.setattr(ema, "_STAGED", staged)
    torch.manual_seed(0)
    weights = {
        str(size): torch.randn(size, size, dtype=kind)
        for size, kind in ((5, torch.float32), (9, torch.bfloat16), (3, torch.float32))
    }
    averages = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in weights.items()}
    expected = {name: average.clone() for name, average in averages.items()}
    updates = ema._HostUpdates(weights)
    for _ in range(3):
        updates.begin(averages, 0.25)
        for name, weight in weights.items():
            expected[name].lerp_(weight.float(), 0.25)
            weight.add_(1)  # the next step
    updates.finish()
    assert all(torch.equal(averages[name], expected[name]) for name in weights)


def test_an_interrupted_wait_does_not_forget_the_update():
    from kohya_ext.patches import ema

    updates = ema._HostUpdates({"a": torch.ones(2)})
    averages = {"a": torch.zeros(2)}
    updates.begin(averages, 1.0)
    update = updates._running
    updates._running = SimpleNamespace(result=interrupt)
    with pytest.raises(KeyboardInterrupt):
        updates.finish()
    assert updates._running is not None
    updates._running = update
    updates.finish()
    assert updates._running is None
    assert torch.equal(averages["a"], torch.ones(2))


def test_averages_work_without_pinned_memory(monkeypatch, capsys):
    from kohya_ext.patches import ema

    def no_pinned_memory(*sizes, pin_memory=False, empty=torch.empty, **options):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", no_pinned_memory)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ema._staging_memory(64).shape == (64,)
    assert "no pinned memory (CUDA error: out of memory)" in capsys.readouterr().err


class Saving:
    """A run that saves models with averages, as files or folders, and removes the old ones as upstream."""

    def __init__(self, monkeypatch, folder, as_folder=False):
        from kohya_ext.patches import ema

        self.folder, self.name = folder, "cat-{}" if as_folder else "cat-{}.safetensors"
        self.average = ema._Average(SimpleNamespace(), folder, 0.9, "cpu", values={"a": torch.ones(2)})
        self._average_path = ema._average_folder if as_folder else ema._average_file
        self._save = self.average.saving_average(self._write_folder if as_folder else self._write_file, self._average_path)
        monkeypatch.setattr(ema, "current", lambda kind: self.average)
        original = shutil.rmtree if as_folder else os.remove
        self._remove = ema._removing(self._average_path)(original, None)

    @staticmethod
    def _write_file(path):
        Path(path).write_text("weights")

    @staticmethod
    def _write_folder(path):
        Path(path, "unet").mkdir(parents=True)

    def model(self, step):
        return self.folder / self.name.format(step)

    def averages(self):
        return sorted(path.name.partition("-")[2].partition("-ema")[0] for path in self.folder.glob("*-ema*"))

    def save(self, step):
        self._save(str(self.model(step)))

    def remove(self, step):
        """Remove a model if it exists, as upstream does with ``--save_last_n_steps``."""
        if self.model(step).exists():
            self._remove(str(self.model(step)))


@pytest.mark.parametrize("as_folder", [False, True])
def test_the_average_of_a_model_that_the_script_removes_goes_with_it_and_after_a_resume_too(monkeypatch, tmp_path, as_folder):
    run = Saving(monkeypatch, tmp_path, as_folder)
    for step in (1, 2):
        run.save(step)
    run.remove(1)
    assert run.averages() == ["2"]
    run.average.on_state_save(tmp_path)
    resumed = Saving(monkeypatch, tmp_path, as_folder)
    resumed.average.on_state_load(tmp_path)
    resumed.save(3)
    assert resumed.averages() == ["2", "3"]
    resumed.remove(2)
    assert resumed.averages() == ["3"]


def test_the_average_of_a_model_that_the_user_moves_stays(monkeypatch, tmp_path):
    run = Saving(monkeypatch, tmp_path)
    run.save(1)
    run.model(1).rename(tmp_path / "best.safetensors")
    run.save(2)
    run.remove(1)
    assert run.averages() == ["1", "2"]
    run.average.on_state_save(tmp_path)
    resumed = Saving(monkeypatch, tmp_path)
    resumed.average.on_state_load(tmp_path)
    resumed.save(3)
    resumed.remove(1)
    assert resumed.averages() == ["1", "2", "3"]


def test_an_average_that_no_run_has_written_stays(monkeypatch, tmp_path):
    run = Saving(monkeypatch, tmp_path)
    (tmp_path / "cat-1.safetensors").write_text("of an earlier run")
    (tmp_path / "cat-1-ema.safetensors").write_text("of an earlier run")
    run.remove(1)
    assert run.averages() == ["1"]


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_model_that_is_open_keeps_its_average(monkeypatch, tmp_path, as_folder):
    run = Saving(monkeypatch, tmp_path, as_folder)
    run.save(1)
    from kohya_ext.patches import ema

    ema._removing(run._average_path)(lambda path: None, None)(str(run.model(1)))
    assert run.averages() == ["1"]


def test_the_models_of_a_state_that_is_resumed_in_another_folder_are_those_of_that(monkeypatch, tmp_path):
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
    run = Saving(monkeypatch, tmp_path / "first")
    run.save(1)
    run.average.on_state_save(tmp_path)
    resumed = Saving(monkeypatch, tmp_path / "second")
    resumed.average.on_state_load(tmp_path)
    assert resumed.average.written == {resumed.model(1)}
    assert run.averages() == ["1"]


def interrupt():
    raise KeyboardInterrupt
