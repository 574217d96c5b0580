"""Two ways of starting Python: bare, as a person does, and forked, with the heavy imports of a training script behind it.

Most of the time of a tiny run is the import of torch, transformers and diffusers. A server of Python's multiprocessing
imports them once, and each forked run becomes what ``python -m module ...`` or ``python script.py ...`` would be: arguments,
environment, path, output, signals, exit code and exit handlers. Neither sd-scripts nor the extension is there before the
fork. How a bare interpreter starts is left to the tests of starting.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

#: What the scripts of both generations import of others' packages.
HEAVY = (
    "torch",
    "torchvision.transforms",
    "torch.utils.checkpoint",
    "accelerate.state",
    "transformers.models.clip.modeling_clip",
    "transformers.models.clip.tokenization_clip",
    "transformers.models.t5.modeling_t5",
    "transformers.optimization",
    "diffusers.optimization",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "diffusers.schedulers",
    "diffusers.models.autoencoders.autoencoder_kl",
    "cv2",
)

#: The line that an installed kohya_ext runs at every Python start.
STARTUP = Path(__file__).parents[2] / "kohya_ext.pth"


#: Whether this platform can fork.
FORKS = "forkserver" in multiprocessing.get_all_start_methods()


@dataclass(frozen=True)
class Started:
    """A process, and the reading end of its standard output and error."""

    pid: int
    output: int
    wait: Callable[[], int]
    """Returns the exit code, or minus the number of the signal that ended it."""


def bare(command: Sequence[str], environ: Mapping[str, str], folder: Path) -> Started:
    """Start ``python *command`` in `folder`."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, *command], env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=writing, stderr=writing
    )
    os.close(writing)
    return Started(process.pid, reading, process.wait)


def serve(variables: Mapping[str, str]) -> None:
    """Start the server, once, with these environment variables, some of which the packages read at import and never again."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(HEAVY))
    with mock.patch.dict(os.environ, variables):
        forkserver.ensure_running()


def forked(command: Sequence[str], environ: Mapping[str, str], folder: Path) -> Started:
    """Become ``python *command`` in `folder`, after `serve`."""
    context = multiprocessing.get_context("forkserver")
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=_become, args=(list(command), dict(environ), str(folder), writing))
    process.start()
    writing.close()

    def wait() -> int:
        process.join()
        assert process.exitcode is not None
        return process.exitcode

    assert process.pid is not None
    return Started(process.pid, os.dup(reading.fileno()), wait)


def _become(command: list[str], environ: dict[str, str], folder: str, output: Connection) -> None:
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output.fileno(), 1), (output.fileno(), 2)):
        os.dup2(source, target)
    output.close()
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    # Nobody's worker, and its own workers start as they do elsewhere: a killed run's are then no server's, and end with it.
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)
    code = 0
    try:
        _run(command, [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    # From here on as a Python interpreter ends, which a child of multiprocessing does not.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _run(command: list[str], python_path: list[str]) -> None:
    module = command[1] if command[0] == "-m" else None
    sys.argv = command[module is not None :]
    sys.path[:0] = [os.getcwd() if module else str(Path(command[0]).parent), *python_path]
    exec(STARTUP.read_text(), {})
    for entry in python_path:
        if (customize := Path(entry) / "sitecustomize.py").is_file():
            runpy.run_path(str(customize), run_name="sitecustomize")
    if module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")
