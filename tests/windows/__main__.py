"""Run tests with a Windows Python: on Windows with this one, elsewhere with one that Wine runs, built at its first use.

::

    python -m tests.windows                   # the tests of GROUP, as in CI
    python -m tests.windows --all             # every unit test, and every test with the real scripts on Windows
    python -m tests.windows tests/unit/test_plan.py -k vram        # these tests; other arguments are pytest's
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO
from unittest import mock

ROOT = Path(__file__).parents[2]

#: Tests of files, processes, signals, streams and quoting, which CI runs in four minutes.
GROUP = (
    "tests/windows",
    *(
        f"tests/unit/test_{name}.py"
        for name in (
            "atomic_write",
            "command_line_reading",
            "console",
            "output_files",
            "output_lock",
            "plain_files",
            "processes",
            "shared_files",
            "startup_file",
            "stop_request",
            "streams",
        )
    ),
)

ALL = ("tests/unit", "tests/windows")

#: Wait so long for the end of the output, because a process that a test has left may keep the pipe open.
_LAST_OUTPUT_SECONDS = 5.0

#: In the order of ``GROUP``, because the real runs of one file take as long as all the rest.
_TWO_PROCESSES = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")

_OPTIONS = ("-o", "addopts=", "-p", "no:cacheprovider", "-ra", "--strict-markers", *_TWO_PROCESSES)


def main(arguments: Sequence[str]) -> int:
    """Run the tests; return pytest's exit code, or 0 with a message where no Windows Python can run."""
    if arguments[:1] == ["--all"]:
        words = [*ALL, "-m", "not slow", *arguments[1:]]
    elif any(word.startswith("tests/") for word in arguments):
        words = [*arguments]
    else:
        words = [*GROUP, "-m", "not slow and not thorough", *arguments]
    command = ["-m", "pytest", *_OPTIONS, *words]
    if sys.platform == "win32":
        return subprocess.run([sys.executable, *command], cwd=ROOT).returncode
    return _in_wine(command)


def _in_wine(command: Sequence[str]) -> int:
    from tests.windows import environment

    if reason := environment.missing():
        print(f"tests.windows: skipped: {reason}", file=sys.stderr)
        return int(os.environ.get("SKIPS_FAIL") == "1")
    folder = environment.ready()
    _register_checkouts(environment.user_cache(folder))
    variables = environment.variables(folder)
    # Wine's desktop, which the first window starts, would inherit the pipes of a test and keep them open.
    variables["WINEDLLOVERRIDES"] += ";explorer.exe="
    # Through a pipe: in Wine 8, Python cannot write to a file that a program of Linux has opened.
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(environment.python(*command), cwd=ROOT, env=variables, **streams)
    assert process.stdout is not None
    printing = threading.Thread(target=_print, args=(process.stdout,), daemon=True)
    printing.start()
    process.wait()
    printing.join(_LAST_OUTPUT_SECONDS)
    return process.returncode


def _print(output: IO[bytes]) -> None:
    while printed := os.read(output.fileno(), 65536):
        sys.stdout.buffer.write(printed)
        sys.stdout.buffer.flush()


def _register_checkouts(folder: Path) -> None:
    """Register the checkouts of sd-scripts in this machine's cache in the cache of the Windows Python, too."""
    from kohya_ext.sdscripts import checkouts
    from kohya_ext.sdscripts.checkouts import Entry, Registry
    from tests.windows.environment import windows_path

    entries = tuple(Entry(windows_path(checkout.path), cloned=False) for checkout in checkouts.registered())
    with mock.patch.dict(os.environ, {"KOHYA_EXT_CACHE": str(folder)}):
        Registry(entries).write()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
