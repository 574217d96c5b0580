"""The average of ``--ema`` on the host."""

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


def interrupt():
    raise KeyboardInterrupt
