"""An environment without the extension's variables, for every test."""

import os

import pytest

from kohya_ext.config.settings import variables


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in variables():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    assert not any(name in os.environ for name in variables())
