"""Fixtures that run the real scripts on tiny models on the virtual GPU, upstream's and with the extension."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest

from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.tiny import arguments, environment
from kohya_ext.tiny.checkpoints import Models
from tests.cuda.configurations import CONFIGURATIONS, MARKS, Configuration
from tests.real import conftest as real
from tests.real.conftest import images, models, models_folder  # noqa: F401
from virtual_gpu import build

SITE = Path(__file__).parent / "site"
ROOT = Path(__file__).parents[2]

#: Family whose model reads lengths of captions from the GPU -> their value.
INTEGERS = {"chroma": 16, "hunyuan-image": 16}

#: The reason for a missing virtual GPU, or None.
_REASON = build.missing()


@dataclass(frozen=True)
class Step:
    """What one optimizer step costs."""

    launches: int
    launches_in_graphs: int
    """The launches in replays of CUDA graphs, which cost the host next to nothing."""
    syncs: int
    """The number of times that the host waits for the GPU."""
    bytes_to_device: int
    bytes_to_host: int
    seconds: float
    """From its beginning to that of the next step."""
    bytes: int
    """Bytes of the tensors that exist at its end."""
    random_state: str
    """The seed and the offset of the GPU's random numbers at its end."""
    sync_places: dict[str, int]
    """file:line -> the number of syncs there, as PyTorch's debug mode reports them."""

    @property
    def own_syncs(self) -> dict[str, int]:
        """The places in the extension's own code."""
        return {place: count for place, count in self.sync_places.items() if place.startswith(("kohya_ext/", "patches/"))}


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
        """The steps after the first one, in which optimizers create their state."""
        return self.steps[1:]

    @property
    def peak(self) -> int:
        """The most bytes of tensors."""
        return self.record["peak"]

    @property
    def reached(self) -> set[str]:
        """The patches, and the other files of the extension, whose code ran in the second step."""
        return set(self.record["reached"])

    @property
    def unknown_calls(self) -> dict[str, int]:
        """CUDA functions that the virtual GPU does not implement -> calls."""
        return self.record["unknown_calls"]


@dataclass(frozen=True)
class Case:
    """A configuration with one generation of sd-scripts."""

    checkout: Checkout
    configuration: Configuration


@dataclass(frozen=True)
class Pair:
    """The same training with and without the extension."""

    configuration: Configuration
    upstream: Run
    ours: Run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        real.pytest_generate_tests(metafunc)
        return
    available = sorted(real.generations().items())
    reason = _REASON or (None if available else "no sd-scripts found (python -m kohya_ext setup)")
    if reason is not None:
        metafunc.parametrize("case", [pytest.param(None, marks=pytest.mark.skip(reason=reason))], ids=["none"])
        return
    ends = {"newest": available[-1][0], "oldest": available[0][0]}
    chosen = {
        (ends[end], name): [] if mark == "default" else [pytest.mark.thorough]
        for mark, each in MARKS.items()
        for end, names in each.items()
        for name in names
    }
    marker = metafunc.definition.get_closest_marker("configurations")
    accepts = marker.args[0] if marker is not None else lambda configuration: True
    cases = [
        pytest.param(
            Case(checkout, configuration),
            id=f"{layout}-{name}",
            marks=chosen.get((layout, name), pytest.mark.slow),
        )
        for layout, checkout in available
        for name, configuration in CONFIGURATIONS.items()
        if (checkout.path / configuration.script).is_file() and accepts(configuration)
    ]
    metafunc.parametrize("case", cases, scope="session")


@pytest.fixture(scope="session")
def train_both(train_on_gpu: Callable[..., Run]) -> Callable[[Checkout, Configuration], Pair]:
    """(checkout, configuration) -> its two runs, which happen once per session."""

    # Configurations that differ in the extension's options share upstream's run.
    run = functools.cache(train_on_gpu)

    def train(checkout: Checkout, configuration: Configuration) -> Pair:
        of = partial(run, checkout, configuration.script, *configuration.options, family=configuration.family)
        return Pair(configuration, of(extension=False), of(*configuration.extension_options))

    return train


@pytest.fixture
def pair(case: Case, train_both: Callable[[Checkout, Configuration], Pair]) -> Pair:
    return train_both(case.checkout, case.configuration)


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


# The autograd engine's thread may still release a graph's Python objects after backward has returned. When the interpreter
# ends meanwhile, the process aborts (pytorch/pytorch#38228, #190489), on a real card too, so these scripts skip that end.
SCRIPT_WITHOUT_FINALIZATION = """
import os, runpy, sys
runpy.run_path(sys.argv[1], run_name="__main__")
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture(scope="session")
def printed_on_gpu(gpu_environment: Callable[..., dict[str, str]]) -> Callable[..., Any]:
    """(name of a script in this folder, settings) -> what it prints last as JSON, run on the virtual GPU."""

    def run(name: str, **settings: str) -> Any:
        environ = {**gpu_environment(**settings), "PYTHONPATH": str(ROOT)}
        script = str(Path(__file__).with_name(name))
        command = [sys.executable, "-c", SCRIPT_WITHOUT_FINALIZATION, script]
        done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


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
    process.terminate()
    process.wait()


@pytest.fixture(scope="session")
def train_on_gpu(
    server: subprocess.Popen[str],
    models: Callable[[str], Models],  # noqa: F811
    images: Path,  # noqa: F811
    gpu_environment: Callable[..., dict[str, str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Run]:
    """Run a training script of a checkout for four steps, with or without the extension."""

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
        argv = [*arguments.training_arguments(script, tiny, images, folder), *more]
        start = ["-m", "kohya_ext", "--sd-scripts", str(checkout.path), script] if extension else [str(checkout.path / script)]
        environ = {
            **gpu_environment(),
            **environment.variables(tiny.tokenizers),
            "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)]),
            "SPY_FILE": str(folder / "record.json"),
            "SPY_INTEGERS": str(INTEGERS.get(tiny.family, 0)),
            "COLUMNS": "200",
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
