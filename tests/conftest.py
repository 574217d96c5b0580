"""An environment without the extension's variables, and a worker for each generation of sd-scripts, for every test."""

import os
import re

import pytest

from kohya_ext.config.settings import variables

_GENERATION = re.compile(r"\bv0\.\d+\b")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in variables():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    assert not any(name in os.environ for name in variables())


@pytest.hookimpl(tryfirst=True)  # before pytest deselects slow tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the other generations of a test as slow, if it or its parameter set is marked ``newest`` or ``oldest``."""
    from tests.real.conftest import generations

    layouts = sorted(generations())
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is None or callspec.params.get("checkout") is None:
            continue
        wanted = [layouts[end] for marker, end in (("newest", -1), ("oldest", 0)) if item.get_closest_marker(marker)]
        if wanted and callspec.params["checkout"].layout not in wanted:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Run all tests of a generation of sd-scripts on one worker, where they share the runs of upstream."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGeneration(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            generation = _GENERATION.search(nodeid.partition("[")[2])
            return generation[0] if generation else nodeid

    return ByGeneration(config, log)
