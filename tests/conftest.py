"""An environment without the extension's variables, and a worker for each generation of sd-scripts, for every test.

With ``SKIPS_FAIL=1`` in the environment, as in CI, a skipped test or module is a failure.
"""

import os
import re
from collections.abc import Generator
from typing import TypeVar

import pytest

from kohya_ext.config.settings import variables

_GENERATION = re.compile(r"\bv0\.\d+\b")

_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)


def _failed_if_skipped(report: _Report) -> _Report:
    if os.environ.get("SKIPS_FAIL") == "1" and report.skipped:
        report.outcome, report.longrepr = "failed", f"SKIPS_FAIL: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _failed_if_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _failed_if_skipped((yield))


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
