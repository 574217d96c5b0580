"""The real scripts, on tiny models, in processes of their own; once for every generation of sd-scripts that is there."""

import functools
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patcher, apply_needed, registry
from kohya_ext.sdscripts import checkouts
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.tiny import arguments, checkpoints, dataset, environment
from kohya_ext.tiny.checkpoints import Models
from tests.real import starting

#: The ways in which a person starts a script: untouched, through the launcher, with the launcher below accelerate, and
#: plain with the environment's switch.
Start = Literal["plain", "launcher", "accelerate", "environment"]

#: The steps made, in the progress bar of a training script.
PROGRESS = re.compile(rb"steps: +\d+%\|[^|]*\| (\d+)/\d+ \[")

ROOT = Path(__file__).parent.parent.parent
SITE = Path(__file__).parent / "site"
REPORT = "report.json"
SPIED = "checkpoint_calls.json"

# The environment as it is where people train. With ``CI`` set, transformers passes its warnings on to the root logger, where
# rich 14.1 draws random numbers for each line; one of them is logged only with gradient checkpointing. The server that runs
# are forked from imports transformers with this process's environment.
os.environ.pop("CI", None)

#: More arguments for a script, the same in every run of it.
MORE = {
    # AdamW would blow up the rounding noise of weights whose true gradient is zero (a key's bias, say) to whole steps.
    "sdxl_train.py": ("--train_text_encoder", "--optimizer_type", "SGDNesterov", "--learning_rate", "0.01"),
}


@functools.cache
def _generations() -> dict[str, Checkout]:
    """One checkout of each known layout that the product itself finds: the one it would use, or else the first one known.

    They are looked for while tests are collected, when the variable that names one is still set.
    """
    found = [checkout for checkout in (checkouts.find(), *checkouts.known()) if checkout is not None]
    return {checkout.layout: checkout for checkout in reversed(found) if checkout.layout in checkouts.KNOWN_LAYOUTS}


def _why_not() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    return None if _generations() else "no sd-scripts found (python -m kohya_ext setup)"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test that asks for a checkout once for each generation, a generation's tests all on one worker.

    What upstream's own runs gave is kept there for all of them.
    """
    if "checkout" not in metafunc.fixturenames:
        return
    reason = _why_not()
    if reason is not None:
        metafunc.parametrize("checkout", [pytest.param(None, marks=pytest.mark.skip(reason=reason))], ids=["none"])
        return
    found = sorted(_generations().items())
    ends = {"newest": found[-1], "oldest": found[0]}
    only = [end for marker, end in ends.items() if metafunc.definition.get_closest_marker(marker)]
    generations = [
        pytest.param(
            checkout,
            id=layout,
            marks=[pytest.mark.xdist_group(layout), *([] if not only or (layout, checkout) in only else [pytest.mark.slow])],
        )
        for layout, checkout in found
    ]
    metafunc.parametrize("checkout", generations, scope="session")


@dataclass(frozen=True)
class Run:
    """A finished run of a script."""

    script: str
    code: int
    output: str
    """Standard output and standard error, as they came."""
    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / f"{arguments.OUTPUT_NAME}.safetensors"

    @property
    def report(self) -> dict[str, Any]:
        """What the extension says of the run; empty when it was not there."""
        file = self.folder / REPORT
        return json.loads(file.read_text()) if file.is_file() else {}

    @property
    def checkpoint_calls(self) -> dict[str, int]:
        """How often each kind of checkpointing was reached."""
        return {kind: count for kind, count in self._spied.items() if kind not in ("steps", "left", "losses", "graphs")}

    @property
    def weighed_steps(self) -> list[tuple[int, int]]:
        """(peak bytes of tensors, FLOPs) of each batch; empty unless ``SPY_MEMORY`` was set."""
        return [(peak, flops) for peak, flops in self._spied.get("steps", [])]

    @property
    def left_by_steps(self) -> list[int]:
        """The bytes that each batch allocated and that the next one found alive; empty unless ``SPY_MEMORY`` was set."""
        return self._spied.get("left", [])

    @property
    def losses(self) -> list[float]:
        """The loss of each batch; empty unless ``SPY_LOSSES`` was set."""
        return self._spied.get("losses", [])

    @property
    def graphs(self) -> list[int]:
        """How many graphs had been compiled after each batch's backward; empty unless ``SPY_LOSSES`` was set."""
        return self._spied.get("graphs", [])

    @property
    def _spied(self) -> dict[str, Any]:
        file = self.folder / SPIED
        return json.loads(file.read_text()) if file.is_file() else {}

    @cached_property
    def tensors(self) -> Mapping[str, object]:
        from safetensors.torch import load_file

        assert self.code == 0, self.output[-4000:]
        return load_file(self.file)

    def distance_from(self, exact: "Run") -> tuple[float, float]:
        """How far losses and trained weights are from another run's, as Euclidean norms; needs ``SPY_LOSSES``."""
        losses = sum((a - b) ** 2 for a, b in zip(self.losses, exact.losses, strict=True)) ** 0.5
        ours: Mapping[str, Any] = self.tensors
        weights = sum((tensor - exact.tensors[name]).double().square().sum() for name, tensor in ours.items()) ** 0.5
        return losses, float(weights)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Models]:
    """family -> tiny models, written once a session, all with the same tokenizers."""
    folder = tmp_path_factory.mktemp("models")
    written: dict[str, Models] = {}

    def of(family: str) -> Models:
        if family not in written:
            checkout = next(iter(_generations().values()))
            written[family] = checkpoints.write(family, checkout.path, folder)
        return written[family]

    return of


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    dataset.write(folder, 4, 128)
    return folder


@pytest.fixture(scope="session")
def train(models: Callable[[str], Models], pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
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
        act: Callable[[int], None] | None = None,
        bare: bool = False,
        family: str | None = None,
        without: tuple[str, ...] = (),
    ) -> Run:
        """Train, and wait for the end.

        ``output``: a folder to write to, instead of a new one. ``act(process id)`` is called once ``at_step`` is reached.
        ``bare``: in a bare interpreter, as a person starts it, not in a fork of one that has imported torch already.
        ``family``: of the models, where the script trains several. ``without``: switches that are otherwise given.
        """
        tiny = models(family or arguments.SCRIPTS[script][0])
        output = output or tmp_path_factory.mktemp("run")
        usual = arguments.training_arguments(script, tiny, pictures, output)
        given = [*(part for part in usual if part not in without), *MORE.get(script, ()), *more]
        environ = {
            **os.environ,
            **environment.variables(tiny.tokenizers),
            "PYTHONPATH": environment.python_path(SITE),
            "SPY_FILE": str(output / SPIED),
            "COLUMNS": "200",
            **({} if start == "plain" else {"KOHYA_EXT_REPORT": str(output / REPORT)}),
            **({"KOHYA_EXT": "1"} if start == "environment" else {}),
            **(env or {}),
        }
        launcher = ["-m", "kohya_ext", "--sd-scripts", str(checkout.path), *before, script]
        command = {
            "plain": [str(checkout.path / script)],
            "environment": [str(checkout.path / script)],
            "launcher": launcher,
            "accelerate": ["-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "1", *launcher],
        }[start]
        if bare or start == "accelerate" or not starting.FORKS:
            process = starting.bare([*command, *given], environ, output)
        else:
            starting.serve(environment.variables(tiny.tokenizers))
            process = starting.forked([*command, *given], environ, output)
        said = b""
        while piece := os.read(process.output, 65536):
            said += piece
            if act is not None and any(int(step) >= at_step for step in PROGRESS.findall(said)):
                act(process.pid)
                act = None
        os.close(process.output)
        return Run(script, process.wait(), said.decode(errors="replace"), output)

    return run


@pytest.fixture
def from_checkout(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """name -> a module of the checkout, in this process; none of them stays."""
    monkeypatch.syspath_prepend(str(checkout.path))

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("library", "networks")]:
            del sys.modules[name]

    forget()
    yield importlib.import_module
    forget()


@pytest.fixture(scope="session")
def upstream(train: Callable[..., Run]) -> Callable[[Checkout, str], Run]:
    """(checkout, script) -> upstream's own run, the oracle; each is run once a session."""
    runs: dict[tuple[str, str], Run] = {}

    def of(checkout: Checkout, script: str) -> Run:
        if (checkout.layout, script) not in runs:
            runs[checkout.layout, script] = train(checkout, script, start="plain")
        return runs[checkout.layout, script]

    return of


@pytest.fixture
def compiler_patches() -> Iterator[None]:
    """The patches of torch's compiler, as in a run with --selective_torch_compile."""
    whole = registry()
    blocks = whole["selective_torch_compile"]
    of_torch = tuple(target for target in blocks.targets if target.module.startswith("torch."))
    names = ("dynamo_bound_methods", "dynamo_deleted_names", "partition_by_activations")
    patches = {blocks.name: replace(blocks, targets=of_torch, on_start=None), **{name: whole[name] for name in names}}
    patcher = Patcher(patches, Settings(selective_torch_compile=True), None)
    patcher.arm()
    apply_needed()
    yield
    patcher.undo()
