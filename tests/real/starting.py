"""Start Python in a new interpreter, or in a fork that has already imported the packages of a training script.

A tiny run spends most of its time importing torch, transformers and diffusers. A fork server of Python's multiprocessing
imports them once. Each forked run behaves like ``python -m module ...`` or ``python script.py ...``: arguments, environment,
path, output, signals, exit code and exit handlers. The server imports neither sd-scripts nor the extension. The startup of a
new interpreter is covered by test_start.
"""

import atexit
import faulthandler
import functools
import gc
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NoReturn
from unittest import mock

#: Third-party modules that the scripts of both generations import.
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

#: The startup file of an installed kohya_ext, which Python runs at every start.
STARTUP = Path(__file__).parents[2] / "kohya_ext.pth"

#: Seconds after which a forked run prints the stacks of its threads and exits; the longest takes a quarter of it.
LIMIT = 400

#: Whether this platform can fork.
FORKS = "forkserver" in multiprocessing.get_all_start_methods()


@dataclass(frozen=True)
class Started:
    """A process and the reading end of its standard output and error."""

    pid: int
    output: int
    wait: Callable[[], int]
    """Returns the exit code, or the negative number of the signal that ended the process."""


def start_bare(command: Sequence[str], environ: Mapping[str, str], folder: Path) -> Started:
    """Start ``python *command`` in `folder`."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, *command], env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=writing, stderr=writing
    )
    os.close(writing)
    return Started(process.pid, reading, process.wait)


def start_server(variables: Mapping[str, str]) -> None:
    """Start the fork server once, with environment variables that the packages read only at import."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(HEAVY))
    with mock.patch.dict(os.environ, variables):
        forkserver.ensure_running()


def start_forked(command: Sequence[str], environ: Mapping[str, str], folder: Path) -> Started:
    """Start ``python *command`` in `folder` as a fork; call `start_server` first."""
    context = multiprocessing.get_context("forkserver")
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=run_as_interpreter, args=(list(command), dict(environ), str(folder), writing))
    process.start()
    writing.close()

    return Started(process.pid or 0, os.dup(reading.fileno()), functools.partial(_exit_code, process))


def start_ranks(command: Sequence[str], environ: Mapping[str, str], folder: Path, count: int) -> list[Started]:
    """Start ``python *command`` in `folder` as `count` forks with a common output: the processes of one run on CPUs.

    They have the variables that torchrun would set, and no launcher.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    several = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # accelerate ignores DeepSpeed with ACCELERATE_USE_CPU.
    several |= {"ACCELERATE_USE_CPU": str("DEEPSPEED_ON_CPU" not in environ), "CUDA_VISIBLE_DEVICES": ""}
    reading, writing = os.pipe()
    started = []
    for rank in range(count):
        variables = {**environ, **several, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        context = multiprocessing.get_context("forkserver")
        with Connection(os.dup(writing)) as output:
            process = context.Process(target=run_as_interpreter, args=(list(command), variables, str(folder), output))
            process.start()
        started.append(Started(process.pid or 0, reading, functools.partial(_exit_code, process)))
    os.close(writing)
    return started


def _exit_code(process: Any) -> int:
    process.join()
    return int(process.exitcode)


def call(command: Sequence[str], environ: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``python *command`` in `folder` as a fork until it ends; call `start_server` first."""
    with tempfile.TemporaryDirectory() as temporary:
        files = [str(Path(temporary) / name) for name in ("output", "errors")]
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_run_to_files, args=(list(command), dict(environ), str(folder), *files))
        process.start()
        process.join()
        assert process.exitcode is not None
        texts = [Path(file).read_text("utf-8", errors="replace") for file in files]
        return subprocess.CompletedProcess(list(command), process.exitcode, *texts)


def _run_to_files(command: list[str], environ: dict[str, str], folder: str, output: str, errors: str) -> NoReturn:
    with open(output, "wb") as opened, open(errors, "wb") as opened_errors:
        run_as_interpreter(command, environ, folder, opened, opened_errors)


def run_as_interpreter(
    command: list[str],
    environ: dict[str, str],
    folder: str,
    output: Connection | IO[bytes],
    errors: IO[bytes] | None = None,
) -> NoReturn:
    """Run ``python *command`` in this forked process, and exit. ``errors``: for standard error, if not to ``output`` too."""
    gc.freeze()  # the scripts call gc.collect() often, which would visit every imported module: a third of a tiny run
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output.fileno(), 1), ((errors or output).fileno(), 2)):
        os.dup2(source, target)
    for each in filter(None, (output, errors)):
        each.close()
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    # Detach from the server, so that workers start as usual and end with a killed run.
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
    # Exit like an interpreter, which children of multiprocessing do not.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _run(command: list[str], python_path: list[str]) -> None:
    module, code = (command[1] if command[0] == option else None for option in ("-m", "-c"))
    sys.argv = command[module is not None :] if code is None else ["-c", *command[2:]]
    sys.path[:0] = [str(Path(command[0]).parent) if module is code else os.getcwd(), *python_path]
    exec(STARTUP.read_text(), {})
    for entry in python_path:
        if (customize := Path(entry) / "sitecustomize.py").is_file():
            runpy.run_path(str(customize), run_name="sitecustomize")
    if code is not None:
        exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
    elif module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")
