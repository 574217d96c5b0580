"""Fixtures that run the real scripts on tiny models on the virtual GPU, upstream's and with the extension."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.tiny import arguments, environment
from kohya_ext.tiny.checkpoints import Models
from tests.real.conftest import images, models, pytest_generate_tests  # noqa: F401
from virtual_gpu import build

SITE = Path(__file__).parent / "site"
ROOT = Path(__file__).parents[2]

#: The cache of the user, whatever a test sets later: the libraries are built once.
_REASON = build.missing()


@dataclass(frozen=True)
class Step:
    """What one optimizer step costs."""

    launches: int
    syncs: int
    """The number of times that the host waits for the GPU."""
    copies_to_host: int
    allocated: int
    """Bytes of tensors at its end."""
    places: dict[str, int]
    """file:line -> the number of syncs there, as PyTorch's debug mode reports them."""


@dataclass(frozen=True)
class Run:
    """A finished run on the virtual GPU."""

    code: int
    output: str
    folder: Path

    @cached_property
    def record(self) -> dict[str, Any]:
        assert self.code == 0, self.output[-4000:]
        return json.loads((self.folder / "record.json").read_text())

    @property
    def steps(self) -> list[Step]:
        """All steps but the last one."""
        return [Step(**step) for step in self.record["steps"]]

    @property
    def later_steps(self) -> list[Step]:
        """The steps after the first one, which sets up what they reuse."""
        return self.steps[1:]

    @property
    def peak(self) -> int:
        """The most bytes of tensors."""
        return self.record["peak"]

    @property
    def reached(self) -> set[str]:
        """The patches whose code ran in the second step."""
        return set(self.record["reached"])

    @property
    def unknown_calls(self) -> dict[str, int]:
        """CUDA functions that the virtual GPU does not implement -> calls."""
        return self.record["unknown_calls"]

    @property
    def applied(self) -> set[str]:
        """The patches that are on in the step loop of the run, according to the extension's report."""
        report = json.loads((self.folder / "report.json").read_text())
        return {outcome["patch"] for outcome in report["patches"] if outcome["status"] == "applied"}


@pytest.fixture(scope="session")
def gpu_libraries() -> Path:
    """The folder of the built virtual GPU; skips where it cannot be built."""
    if _REASON is not None:
        pytest.skip(_REASON)
    return build.library_folder()


@pytest.fixture(scope="session")
def gpu_environment(gpu_libraries: Path) -> Callable[..., dict[str, str]]:
    """(settings) -> the environment of a process on the virtual GPU."""

    def of(**settings: str) -> dict[str, str]:
        base = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "PYTHONPATH")}
        # With this check, importing packages does not start CUDA, which a fork cannot start again.
        return build.environment(gpu_libraries, {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **settings}, base)

    return of


@pytest.fixture(scope="session")
def server(gpu_environment: Callable[..., dict[str, str]], models: Callable[[str], Models]) -> Iterator[subprocess.Popen[str]]:  # noqa: F811
    variables = environment.variables(models("sdxl").tokenizers)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cuda.server"],
        env={**gpu_environment(), **variables, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    yield process
    process.stdin.close()
    process.wait()


@pytest.fixture(scope="session")
def train_on_gpu(
    server: subprocess.Popen[str],
    models: Callable[[str], Models],  # noqa: F811
    images: Path,  # noqa: F811
    gpu_environment: Callable[..., dict[str, str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Run]:
    """Run a training script of a checkout for five steps, with or without the extension."""

    def run(
        checkout: Checkout,
        script: str,
        *more: str,
        extension: bool = True,
        family: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Run:
        tiny = models(family or arguments.SCRIPTS[script][0])
        folder = tmp_path_factory.mktemp("gpu")
        argv = [*arguments.training_arguments(script, tiny, images, folder), "--max_train_steps", "5", *more]
        start = ["-m", "kohya_ext", "--sd-scripts", str(checkout.path), script] if extension else [str(checkout.path / script)]
        environ = {
            **gpu_environment(),
            **environment.variables(tiny.tokenizers),
            "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)]),
            "SPY_FILE": str(folder / "record.json"),
            "COLUMNS": "200",
            **({"KOHYA_EXT_REPORT": str(folder / "report.json")} if extension else {}),
            **(env or {}),
        }
        output = folder / "output.txt"
        job = {"command": [*start, *argv], "environ": environ, "folder": str(folder), "output": str(output)}
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(job) + "\n")
        code = int(server.stdout.readline())
        return Run(code, output.read_text(errors="replace"), folder)

    return run
