"""An environment without the extension's variables, and a worker for each generation of sd-scripts, for every test.

A file of tests with the real scripts runs by default on one generation, chosen by its name, and in CI's second run on the
other one (``-m thorough``).

With ``SKIPS_FAIL=1`` in the environment, as in CI, a skipped test or module is a failure.

On Windows a test with the mark ``linux`` or, under Wine, ``wine`` is skipped. With ``STALE_MARKS=1`` it runs there, and passing
is a failure: then the mark is stale.
"""

import os
import re
import sys
import zlib
from collections.abc import Generator
from typing import TypeVar

import pytest

from kohya_ext.config.settings import variables

_GENERATION = re.compile(r"\bv0\.\d+\b")

#: Marks of tests that pass on other systems only: not on Windows, or not in Wine.
_ELSEWHERE = ("linux", "wine")

_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)


def _failed_if_skipped(report: _Report) -> _Report:
    if os.environ.get("SKIPS_FAIL") == "1" and report.skipped and not _has_mark(report):
        report.outcome, report.longrepr = "failed", f"SKIPS_FAIL: {report.longrepr}"
    return report


def _has_mark(report: _Report) -> bool:
    """Return whether a mark says why a test is skipped or fails on this system."""
    is_test = sys.platform == "win32" and isinstance(report, pytest.TestReport)
    return is_test and any(name in report.keywords for name in _ELSEWHERE)


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


def runs_in_wine() -> bool:
    """Return whether this is a Windows Python that Wine runs."""
    if sys.platform != "win32":
        return False
    import ctypes

    return hasattr(ctypes.WinDLL("ntdll"), "wine_get_version")


def _leave_out_on_windows(items: list[pytest.Item]) -> None:
    """Skip the tests that cannot pass on Windows, or expect them to fail."""
    marks = [name for name, applies in zip(_ELSEWHERE, (sys.platform == "win32", runs_in_wine()), strict=True) if applies]
    for item in items:
        for mark in filter(None, map(item.get_closest_marker, marks)):
            (reason,), hangs = mark.args, mark.kwargs.get("hangs", False)
            if os.environ.get("STALE_MARKS") == "1":
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True, run=not hangs))
            else:
                item.add_marker(pytest.mark.skip(reason=f"{mark.name}: {reason}"))


@pytest.hookimpl(tryfirst=True)  # before pytest deselects slow and thorough tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with another generation than its default one: slow if it is ``newest`` or ``oldest``, else thorough."""
    from tests.real.conftest import generations

    _leave_out_on_windows(items)
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is None or callspec.params.get("checkout") is None:
            continue
        only, layout = item.get_closest_marker("only"), callspec.params["checkout"].layout
        layouts = [each for each in sorted(generations()) if only is None or each in only.args]
        wanted = [layouts[end] for marker, end in (("newest", -1), ("oldest", 0)) if item.get_closest_marker(marker)]
        if wanted and layout not in wanted:
            item.add_marker(pytest.mark.slow)
        elif not wanted and layout != layouts[zlib.crc32(item.path.name.encode()) % len(layouts)]:
            item.add_marker(pytest.mark.thorough)


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
