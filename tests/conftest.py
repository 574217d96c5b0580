"""What every test shares: an environment without the extension's own variables, and a worker for each generation."""

import os
import re

import pytest

from kohya_ext.config.settings import variables

_GENERATION = re.compile(r"\bv0\.\d+\b")


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in variables():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    assert not any(name in os.environ for name in variables())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Run all tests of a generation of sd-scripts on one worker, where they share the runs of upstream.

    The groups of pytest-xdist 3.8 have no effect with pytest 9.2, which ignores the names that xdist gives to grouped tests.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGeneration(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            generation = _GENERATION.search(nodeid.partition("[")[2])
            return generation[0] if generation else nodeid

    return ByGeneration(config, log)
