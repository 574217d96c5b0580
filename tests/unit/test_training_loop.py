"""Callbacks run in the order of their stages, and leave no state to the next run of the process."""

import importlib
import random
import signal
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate")

from accelerate.accelerator import Accelerator  # noqa: E402
from accelerate.data_loader import DataLoaderShard  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.patching.patch import TRAINING_LOOP, Patch, Patcher, registry  # noqa: E402
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current_batch, data_sets  # noqa: E402
from kohya_ext.run import resume, stop_request  # noqa: E402
from kohya_ext.run.last_step import last_step  # noqa: E402
from kohya_ext.sdscripts.checkouts import Checkout  # noqa: E402

CHECKOUT = Checkout(Path("sd-scripts"), "0.11.1", "v0.11", "for the test")

WRAPPED = {
    "prepare_accelerator": lambda: sys.modules["library.accelerator_setup"],
    "accumulate": lambda: Accelerator,
    "__iter__": lambda: DataLoaderShard,
}


@pytest.fixture
def library(tmp_path, monkeypatch):
    """sd-scripts' module with prepare_accelerator, removed after the test."""
    package = tmp_path / "checkout" / "library"
    package.mkdir(parents=True)
    (package / "accelerator_setup.py").write_text(
        "from accelerate import Accelerator\n"
        "def prepare_accelerator(args):\n"
        "    return Accelerator(cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps)\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    for name in [name for name in sys.modules if name.partition(".")[0] == "library"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield importlib.import_module("library.accelerator_setup")
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for name in ("library.accelerator_setup", "library"):
        sys.modules.pop(name, None)


def arguments(output):
    given = {"output_dir": str(output), "output_name": "cat", "max_train_steps": 4, "gradient_accumulation_steps": 2}
    return Namespace(**given, resume=None, max_grad_norm=0.0, optimizer_type="SGD", gradient_checkpointing=True)


def train(args, observe=lambda: None):
    """Train like a script of sd-scripts, for four steps of two micro-batches; return the weights."""
    from library.accelerator_setup import prepare_accelerator

    torch.manual_seed(0)
    accelerator = prepare_accelerator(args)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = torch.utils.data.DataLoader([{"x": torch.rand(3)} for _ in range(4)], shuffle=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    global_step = 0
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                assert current_batch() is batch
                loss = model(batch["x"]).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            observe()
            global_step += accelerator.sync_gradients
    assert global_step == 4
    return [parameter.detach().clone() for parameter in model.parameters()]


class Recorder(TrainingCallback):
    """Append its calls to a shared list."""

    def __init__(self, stage, events):
        self.stage, self.events = stage, events

    def before_training(self, accelerator):
        self.events.append(("begin", self.stage))

    def before_batch(self, accelerator):
        self.events.append(("before", self.stage))

    def after_batch(self, accelerator):
        self.events.append(("after", self.stage))

    def on_end(self):
        self.events.append(("end", self.stage))


def recording(name, stage, events):
    def start(args, accelerator, settings):
        events.append(("start", stage))
        return Recorder(stage, events)

    return Patch(name, "records", (), "exact", "itself", "here", stage=stage, on_start=start)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_depends_on_stages_and_not_on_names(library, tmp_path, seed):
    events = []
    names = random.Random(seed).sample("abcdefghijklmnop", len(Stage))
    patches = {name: recording(name, stage, events) for name, stage in zip(names, Stage, strict=True)}
    patcher = Patcher(dict(sorted(patches.items())), Settings(), CHECKOUT)
    patcher.arm()
    try:
        train(arguments(tmp_path))
    finally:
        patcher.undo()
    inwards, outwards = list(reversed(Stage)), list(Stage)
    after = [("after", stage) for stage in outwards]
    first = [*((event, stage) for stage in inwards for event in ("begin", "before")), *after]
    batch = [*(("before", stage) for stage in inwards), *after]
    assert events == [
        *(("start", stage) for stage in outwards),
        *first,
        *batch * 7,
        *(("end", stage) for stage in inwards),
    ]


#: Enables all callbacks that need neither a GPU nor a compiler.
EVERYTHING = Settings(
    save_state_every_n_minutes=0.0, save_last_n_timed_states=99, ema=True, adaptive_lr=True, adaptive_lr_patience=1
)


def shuffled(seed):
    """Return the shipped patches with shuffled names, sorted by name, and shuffled name -> real name."""
    shipped = registry()
    names = list(shipped)
    if seed is not None:
        random.Random(seed).shuffle(names)
    own = dict(zip(names, shipped, strict=True))
    return {name: replace(shipped[own[name]], name=name) for name in sorted(own)}, own


def run_everything(seed, folder):
    """Train with the shipped patches; return weights, positions, states, files, tensors, stages and wrappers."""
    patches, _ = shuffled(seed)
    patcher = Patcher(patches, EVERYTHING, CHECKOUT)
    stages, places, orders = {patch.on_start: patch.stage for patch in patches.values()}, [], []

    def observe():
        places.append((resume.position().step, last_step().snapshot.step if last_step().snapshot else 0))

    patcher.arm()
    try:
        weights = train(arguments(folder), observe)
        orders = [stages[patch.start] for patch in patcher._loop.participants()]
        wrapped = {name: vars(owner())[name] for name, owner in WRAPPED.items()}
    finally:
        patcher.undo()
    saved = {state.name: torch.load(state / resume.FILE, weights_only=True)["step"] for state in sorted(folder.glob("*-state"))}
    files = {file.relative_to(folder) for file in folder.rglob("*") if file.is_file()}
    tensors = [file.read_bytes() for file in sorted(folder.rglob("*.safetensors"))]
    return weights, places, saved, files, tensors, orders, wrapped


def test_results_do_not_depend_on_patch_names_and_files(library, tmp_path):
    (tmp_path / "as shipped").mkdir()
    usual = run_everything(None, tmp_path / "as shipped")
    weights, places, saved, files, tensors, orders, _ = usual
    assert saved == {f"cat-rolling0000000{step}-state": step for step in (1, 2, 3, 4)}
    assert places == [(step, step) for step in (0, 1, 1, 2, 2, 3, 3, 4)]
    assert orders == sorted(orders)
    assert tensors
    for seed in range(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        again = run_everything(seed, folder)
        assert all(map(torch.equal, weights, again[0]))
        assert again[1:6] == (places, saved, files, tensors, orders)


def test_no_two_patches_of_a_stage_replace_the_same_function():
    patches = registry().values()
    places = [
        (patch.stage or Stage.COMPUTE, label) for patch in patches for label in {target.label for target in patch.targets}
    ]
    assert {place for place in places if places.count(place) > 1} == set()


def test_a_patch_with_a_callback_needs_a_stage():
    with pytest.raises(TypeError, match="patch a has on_start but no stage"):
        Patch("a", "", (), "exact", "", "", on_start=lambda args, accelerator, settings: None)


@pytest.mark.parametrize("settings", [Settings(), EVERYTHING, EVERYTHING.with_(vram_budget=10**9)])
def test_each_function_of_the_loop_is_wrapped_once(library, settings):
    before = {name: vars(owner())[name] for name, owner in WRAPPED.items()}
    patcher = Patcher(registry(), settings, CHECKOUT)
    patcher.arm()
    try:
        for name, owner in WRAPPED.items():
            assert vars(owner())[name].__wrapped__ is before[name]
        replaced = [
            (patch, target.partition(":")[2]) for (patch, target), row in patcher.outcomes.items() if row.status == "applied"
        ]
        for attribute in ("prepare_accelerator", "Accelerator.accumulate", "DataLoaderShard.__iter__"):
            assert [patch for patch, place in replaced if place == attribute] == [TRAINING_LOOP]
    finally:
        patcher.undo()
    assert {name: vars(owner())[name] for name, owner in WRAPPED.items()} == before


def test_without_callbacks_the_loop_is_not_patched(library):
    before = vars(Accelerator)["accumulate"]
    patcher = Patcher(registry(), Settings(disable_patch=("*",)), CHECKOUT)
    patcher.arm()
    assert vars(Accelerator)["accumulate"] is before
    assert {row.status for row in patcher.outcomes.values()} == {"skipped"}


def test_outcomes_include_callbacks(library):
    patcher = Patcher({"a": recording("a", Stage.SAVE, [])}, Settings(), CHECKOUT)
    patcher.arm()
    row = patcher.outcomes["a", "training_loop:SAVE"]
    assert row.status == "applied"
    assert [patch.name for patch in patcher.active()] == ["a"]
    patcher.undo()
    assert (row.status, row.reason) == ("skipped", "undone")


def test_an_unknown_loop_is_not_patched_and_a_warning_is_printed(library, capsys):
    library.prepare_accelerator = lambda arguments: None
    patcher = Patcher({"a": recording("a", Stage.SAVE, [])}, Settings(), CHECKOUT)
    patcher.arm()
    row = patcher.outcomes["a", "training_loop:SAVE"]
    patcher.undo()
    assert "patch training_loop does not recognize library.accelerator_setup:prepare_accelerator" in capsys.readouterr().err
    assert patcher.active() == []
    assert row.status == "skipped"


def test_undo_ends_the_run_and_the_next_one_starts_clean(library, tmp_path):
    before = sys.excepthook, signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    seen = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        patcher = Patcher(registry(), EVERYTHING, CHECKOUT)
        patcher.arm()
        weights = train(arguments(tmp_path / name))
        assert (resume.position().step, resume.position().epoch) == (4, 1)
        assert stop_request.stopper().stepping
        assert sys.excepthook != before[0]
        facts = {name: patch.facts() for name, patch in patcher.patches.items() if patch.facts is not None}
        seen.append((weights[0].tolist(), len(stop_request.stopper().states), str(facts["skip_unused_gradients"])))
        patcher.undo()
        assert resume.position() is None
        assert stop_request.stopper() is None
        assert current_batch() == {}
        assert (sys.excepthook, signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert seen[0] == seen[1]


def test_a_second_run_of_the_same_patches_starts_clean(library, tmp_path):
    patcher = Patcher(registry(), EVERYTHING, CHECKOUT)
    patcher.arm()
    try:
        first = train(arguments(tmp_path / "first"))
        position = resume.position()
        handler = signal.getsignal(signal.SIGTERM)
        second = train(arguments(tmp_path / "second"))
        assert resume.position() is not position
        assert resume.position().step == 4
        assert signal.getsignal(signal.SIGTERM) not in (handler, signal.SIG_DFL)
        assert torch.equal(first[0], second[0])
    finally:
        patcher.undo()


def test_the_current_batch_is_the_loaders_last_one(library, tmp_path):
    patcher = Patcher({"a": recording("a", Stage.SAVE, [])}, Settings(), CHECKOUT)
    patcher.arm()
    try:
        accelerator = library.prepare_accelerator(arguments(tmp_path))
        training = accelerator.prepare(torch.utils.data.DataLoader([{"at": 1}, {"at": 2}], batch_size=None))
        other = accelerator.prepare(torch.utils.data.DataLoader([{"at": 3}], batch_size=None))
        seen = []
        for batch in training:
            assert current_batch() is batch
            for _ in other:
                seen.append(current_batch()["at"])
            assert current_batch() == {}
        assert seen == [3, 3]
        assert current_batch() == {}
        assert data_sets(accelerator) == []
    finally:
        patcher.undo()


def test_every_stage_is_used():
    assert {patch.stage for patch in registry().values()} - {None} == set(Stage)
