"""What every test shares: an environment without the extension's own variables."""

import os

import pytest

from kohya_ext.settings import MASTER_SWITCH, options


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [MASTER_SWITCH, *(option.environment for _, option in options() if option.environment)]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    assert not any(name in os.environ for name in names)
