"""Fixtures of the tests with the real scripts. These tests are for Windows alone."""

import sys

from tests.real.conftest import (  # noqa: F401 - fixtures, and the hook that parametrizes `checkout`
    _fork_server,
    call,
    images,
    models,
    models_folder,
    pytest_generate_tests,
    train,
)

collect_ignore_glob = [] if sys.platform == "win32" else ["test_*.py"]
