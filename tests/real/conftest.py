"""Fixtures that run the real scripts on tiny models in child processes, for every installed generation of sd-scripts."""

import functools
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Patcher, Target, apply_needed, registry
from kohya_ext.sdscripts import checkouts, releases
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.tiny import arguments, checkpoints, dataset, environment
from kohya_ext.tiny.checkpoints import Models
from tests.real import starting

#: How a user starts a script: unchanged, through the launcher, through accelerate and the launcher, through torchrun with its
#: options ``before`` and the launcher, with the environment variable, or through accelerate and the environment variable as
#: the kohya_ss GUI does.
Start = Literal["plain", "launcher", "accelerate", "torchrun", "environment", "gui"]

#: Runs Python until it ends; see the fixture.
Call = Callable[..., subprocess.CompletedProcess[str]]

#: The number of finished steps in the progress bar of a training script.
PROGRESS = re.compile(rb"steps: +\d+%\|[^|]*\| (\d+)/\d+ \[")

ROOT = Path(__file__).parent.parent.parent
SITE = Path(__file__).parent / "site"
REPORT = "report.json"
RECORD = "checkpoint_calls.json"

# Train as users do, without ``CI``. With it, transformers passes warnings to the root logger, where rich 14.1 draws random
# numbers for each line, and one warning is logged only with gradient checkpointing. The fork server imports transformers
# with this process's environment.
os.environ.pop("CI", None)

#: Options that the kohya_ss GUI gives to ``accelerate launch``.
GUI_OPTIONS = ("--dynamo_backend", "no", "--mixed_precision", "no", "--num_machines", "1", "--num_cpu_threads_per_process", "1")

#: Additional arguments for every run of a script.
EXTRA_ARGUMENTS = {
    # AdamW amplifies rounding noise to full steps for weights with a true gradient of zero, such as a key's bias.
    "sdxl_train.py": ("--train_text_encoder", "--optimizer_type", "SGDNesterov", "--learning_rate", "0.01"),
}


@functools.cache
def generations() -> dict[str, Checkout]:
    """Return one checkout for each supported layout: the default one, or else the first registered one.

    Called while tests are collected, because a test may unset the variable that names a checkout.
    """
    available = [checkout for checkout in (checkouts.find(), *checkouts.registered()) if checkout is not None]
    return {checkout.layout: checkout for checkout in reversed(available) if checkout.layout in releases.TESTED}


def _skip_reason() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    return None if generations() else "no sd-scripts found (python -m kohya_ext setup)"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test with a checkout once for each generation, or for the one that ``only("v0.11")`` names."""
    if "checkout" not in metafunc.fixturenames:
        return
    reason = _skip_reason()
    if reason is not None:
        metafunc.parametrize("checkout", [pytest.param(None, marks=pytest.mark.skip(reason=reason))], ids=["none"])
        return
    only = metafunc.definition.get_closest_marker("only")
    available = {label: checkout for label, checkout in sorted(generations().items()) if only is None or label in only.args}
    metafunc.parametrize("checkout", available.values(), ids=available, scope="session")


@dataclass(frozen=True)
class Run:
    """A finished run of a script."""

    script: str
    code: int
    output: str
    """Standard output and standard error, interleaved."""
    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / f"{arguments.OUTPUT_NAME}.safetensors"

    @property
    def report(self) -> dict[str, Any]:
        """The extension's report of the run; empty without the extension."""
        file = self.folder / REPORT
        return json.loads(file.read_text()) if file.is_file() else {}

    @property
    def checkpoint_calls(self) -> dict[str, int]:
        """The number of calls of each kind of checkpointing."""
        others = ("steps", "left", "losses", "graphs", "collectives", "weights", "masks")
        return {kind: count for kind, count in self._record.items() if kind not in others}

    @property
    def measured_steps(self) -> list[tuple[int, int]]:
        """(peak bytes of tensors, FLOPs) of each batch; empty unless ``SPY_MEMORY`` is set."""
        return [(peak, flops) for peak, flops in self._record.get("steps", [])]

    @property
    def bytes_left_by_steps(self) -> list[int]:
        """The bytes that each batch allocated and left to the next one; empty unless ``SPY_MEMORY`` is set."""
        return self._record.get("left", [])

    @property
    def losses(self) -> list[float]:
        """The loss of each batch; empty unless ``SPY_LOSSES`` is set."""
        return self._record.get("losses", [])

    @property
    def graphs(self) -> list[int]:
        """The number of compiled graphs after each batch's backward; empty unless ``SPY_LOSSES`` is set."""
        return self._record.get("graphs", [])

    @property
    def collectives(self) -> list[list[tuple[str, str, int]]]:
        """(operation, data type, bytes of the whole tensor) of each collective operation of each batch, in the first process.

        Empty unless ``SPY_COLLECTIVES`` is set.
        """
        return self._record.get("collectives", [])

    @property
    def masks(self) -> dict[str, int]:
        """Numbers of ``masked`` and ``unmasked`` calls of PyTorch's attention; empty unless ``SPY_MASKS`` is set."""
        return self._record.get("masks", {})

    @property
    def weights(self) -> dict[str, int]:
        """Numbers of ``all`` weights of the models, of ``trained`` ones and of their ``tensors``; with the same variable."""
        return self._record.get("weights", {})

    @property
    def _record(self) -> dict[str, Any]:
        file = self.folder / RECORD
        return json.loads(file.read_text()) if file.is_file() else {}

    @cached_property
    def tensors(self) -> Mapping[str, object]:
        from safetensors.torch import load_file

        assert self.code == 0, self.output[-4000:]
        return load_file(self.file)

    def distance_from(self, exact: "Run") -> tuple[float, float]:
        """Return the Euclidean distances of losses and trained weights from another run's; needs ``SPY_LOSSES``."""
        losses = sum((a - b) ** 2 for a, b in zip(self.losses, exact.losses, strict=True)) ** 0.5
        ours: Mapping[str, Any] = self.tensors
        weights = sum((tensor - exact.tensors[name]).double().square().sum() for name, tensor in ours.items()) ** 0.5
        return losses, float(weights)


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny models and their tokenizers, which all families share."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def _fork_server(models_folder: Path) -> None:
    """A running fork server, where the platform can fork."""
    if starting.FORKS:
        # A forked run shrinks its models itself, if its PYTHONPATH says so.
        starting.start_server(environment.variables(models_folder / "tokenizers") | {"PYTHONPATH": environment.python_path()})


@pytest.fixture(scope="session")
def call(_fork_server: None) -> Call:
    """``call(*command, folder=, bare=, **environment)`` runs ``python *command`` until it ends.

    ``bare``: run in a new interpreter, not in a fork of one that has imported torch.
    """

    def run(*command: object, folder: Path = ROOT, bare: bool = False, **env: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": environment.python_path(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env}
        words = [*map(str, command)]
        if starting.FORKS and not bare:
            return starting.call(words, environ, folder)
        return subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        )

    return run


@pytest.fixture(scope="session")
def models(models_folder: Path) -> Callable[[str], Models]:
    """family -> tiny models, written once per session."""
    written: dict[str, Models] = {}

    def of(family: str) -> Models:
        if family not in written:
            checkout = next(iter(generations().values()))
            written[family] = checkpoints.write(family, checkout.path, models_folder)
        return written[family]

    return of


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    dataset.write(folder, 4, 128)
    return folder


@pytest.fixture(scope="session")
def train(
    models: Callable[[str], Models], images: Path, tmp_path_factory: pytest.TempPathFactory, _fork_server: None
) -> Callable[..., Run]:
    """Run a training script of a checkout for four steps: ``train(checkout, script, *more arguments, start=, env=)``."""

    def run(
        checkout: Checkout,
        script: str,
        *more: str,
        start: Start = "launcher",
        env: Mapping[str, str] | None = None,
        before: tuple[str, ...] = (),
        output: Path | None = None,
        at_step: int = 0,
        act: Callable[[Any], None] | None = None,
        bare: bool = False,
        family: str | None = None,
        without: tuple[str, ...] = (),
        ranks: int = 1,
    ) -> Run:
        """Train and wait until the run ends.

        ``output``: the output folder, by default a new one. ``act(process id)`` is called once, after step ``at_step``.
        ``bare``: run in a new interpreter, as users do, not in a fork of one that has imported torch.
        ``ranks``: processes on CPUs, without a launcher; the code is that of the first one that failed, and ``act`` is called
        with their IDs. ``family``: the model family, if the script trains several. ``without``: default arguments to omit.
        """
        tiny = models(family or arguments.SCRIPTS[script][0])
        output = output or tmp_path_factory.mktemp("run")
        usual = arguments.training_arguments(script, tiny, images, output)
        argv = [*(part for part in usual if part not in without), *EXTRA_ARGUMENTS.get(script, ()), *more]
        environ = {
            **os.environ,
            **environment.variables(tiny.tokenizers),
            "PYTHONPATH": environment.python_path(SITE),
            "SPY_FILE": str(output / RECORD),
            "COLUMNS": "200",
            # AOTAutograd with eager kernels traces, recomputes and saves the same tensors as inductor, and compiles in seconds.
            "COMPILE_BACKEND": "aot_eager",
            **({} if start == "plain" else {"KOHYA_EXT_REPORT": str(output / REPORT)}),
            **({"KOHYA_EXT": "1"} if start in ("environment", "gui") else {}),
            **(env or {}),
        }
        launcher = ["-m", "kohya_ext", "--sd-scripts", str(checkout.path), *(before if start != "torchrun" else ()), script]
        accelerate = ["-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "1"]
        command = {
            "plain": [str(checkout.path / script)],
            "environment": [str(checkout.path / script)],
            "launcher": launcher,
            "accelerate": [*accelerate, *launcher],
            "gui": [*accelerate, *GUI_OPTIONS, str(checkout.path / script)],
            "torchrun": ["-m", "torch.distributed.run", *before, *launcher],
        }[start]
        if ranks > 1:
            started = starting.start_ranks([*command, *argv], environ, output, ranks)
        elif bare or start in ("accelerate", "gui") or not starting.FORKS:
            started = [starting.start_bare([*command, *argv], environ, output)]
        else:
            started = [starting.start_forked([*command, *argv], environ, output)]
        printed = b""
        while chunk := os.read(started[0].output, 65536):
            printed += chunk
            if act is not None and any(int(step) >= at_step for step in PROGRESS.findall(printed)):
                act(started[0].pid if ranks == 1 else [process.pid for process in started])
                act = None
        os.close(started[0].output)
        codes = [process.wait() for process in started]
        return Run(script, next(filter(None, codes), 0), printed.decode(errors="replace"), output)

    return run


@pytest.fixture
def checkout_module(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """name -> a module of the checkout, imported into this process and removed after the test."""
    monkeypatch.syspath_prepend(str(checkout.path))

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("library", "networks")]:
            del sys.modules[name]

    forget()
    yield importlib.import_module
    forget()


@pytest.fixture(scope="session")
def upstream(train: Callable[..., Run]) -> Callable[[Checkout, str], Run]:
    """(checkout, script) -> upstream's own run, the reference; each runs once per session."""
    runs: dict[tuple[str, str], Run] = {}

    def of(checkout: Checkout, script: str) -> Run:
        if (checkout.layout, script) not in runs:
            runs[checkout.layout, script] = train(checkout, script, start="plain")
        return runs[checkout.layout, script]

    return of


def _of_torch(patch: Patch) -> tuple[Target, ...]:
    return tuple(target for target in patch.targets if target.module.startswith("torch."))


@pytest.fixture
def compiler_patches() -> Iterator[None]:
    """The patches of torch's compiler, as in a run with --selective_torch_compile."""
    whole = registry()
    patches = {
        name: replace(whole[name], targets=_of_torch(whole[name]), on_start=None)
        for name in ("selective_torch_compile", "activation_memory_budget")
    }
    patcher = Patcher(patches, Settings(selective_torch_compile=True), None)
    patcher.arm()
    apply_needed()
    yield
    patcher.undo()
