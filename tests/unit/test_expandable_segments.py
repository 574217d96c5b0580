"""`--expandable_segments` reaches PyTorch's allocator on Linux with a GPU."""

from types import SimpleNamespace

import pytest

from kohya_ext.config.settings import Settings

torch = pytest.importorskip("torch")

from kohya_ext.patches import expandable_segments  # noqa: E402


@pytest.mark.parametrize(
    ("device", "system", "expected"),
    [("cuda", "Linux", ["expandable_segments:True"]), ("cuda", "Windows", []), ("cpu", "Linux", [])],
)
def test_the_allocator_is_configured_on_linux(monkeypatch, capsys, device, system, expected):
    settings = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    monkeypatch.setattr(expandable_segments.platform, "system", lambda: system)
    accelerator = SimpleNamespace(device=SimpleNamespace(type=device))
    expandable_segments._start(SimpleNamespace(), accelerator, Settings(expandable_segments=True))
    assert settings == expected
    assert ("does nothing on Windows" in capsys.readouterr().err) == (system == "Windows")


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_own_settings_of_the_allocator_stay(monkeypatch, variable):
    settings = []
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv(variable, "max_split_size_mb:128")
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    monkeypatch.setattr(expandable_segments.platform, "system", lambda: "Linux")
    expandable_segments._start(SimpleNamespace(), SimpleNamespace(device=SimpleNamespace(type="cuda")), Settings())
    assert settings == ["max_split_size_mb:128,expandable_segments:True"]
