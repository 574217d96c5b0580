"""Every test that does not pass on Windows says why in a mark, so that a stale one is found (see tests/conftest.py)."""

import re
from pathlib import Path

#: How a test can be skipped on a system without one of the marks ``linux`` and ``wine``.
_BY_SYSTEM = re.compile(r"skip(if)?\(.*(os\.name|sys\.platform|platform\.system)")


def test_no_unit_test_is_skipped_by_system_without_a_mark():
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    assert len(files) > 100
    lines = [(file.name, line.strip()) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert not [each for each in lines if _BY_SYSTEM.search(each[1]) and "_BY_SYSTEM" not in each[1]]
