"""In CI, a skipped test is a failure (tests/conftest.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SKIPPED = "import pytest\n\ndef test_skipped():\n    pytest.skip('nothing to test with')\n"
NOT_IMPORTED = "import pytest\n\npytest.importorskip('no_such_module')\n"


@pytest.mark.parametrize("source", [SKIPPED, NOT_IMPORTED], ids=["test", "module"])
@pytest.mark.parametrize("fails", [False, True], ids=["elsewhere", "ci"])
def test_a_skip_is_a_failure_in_ci(tmp_path, source, fails):
    (tmp_path / "test_one.py").write_text(source)
    words = ("-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path / "test_one.py")
    env = os.environ | {"PYTHONPATH": str(ROOT), "SKIPS_FAIL": str(int(fails))}
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=tmp_path, env=env, capture_output=True, text=True, encoding="utf-8"
    )
    assert (process.returncode in (1, 2)) == fails, process.stdout + process.stderr
    assert ("SKIPS_FAIL" in process.stdout) == fails
    assert ("1 skipped" in process.stdout) != fails
