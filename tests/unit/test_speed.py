"""--speed: trials choose the fastest correct features and leave no trace, and self-tests keep crashes out of runs."""

import copy
import os
import random
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from kohya_ext.speed import proof, switches, trial, verdicts  # noqa: E402
from kohya_ext.speed.switches import CUDA_GRAPHS, FUSED_OPERATIONS  # noqa: E402
from kohya_ext.speed.trial import Trial, choose  # noqa: E402
from tests.replayer import CpuRecorder  # noqa: E402

WIDTH = 32


@pytest.fixture(autouse=True)
def switched():
    switches.reset()
    yield
    switches.reset()


class Machine(CpuRecorder):
    """A GPU whose passes take made-up seconds, and whose clock advances by them."""

    def __init__(self, seconds, **rest):
        super().__init__(**rest)
        self.now = 0.0
        self._of = seconds

    def mark(self):
        return self.now

    def seconds(self, start, end):
        return end - start, end - start

    def replaying(self, replay):
        """Run the replay of one of both passes."""
        replay()
        features = (CUDA_GRAPHS.name, *([FUSED_OPERATIONS.name] if FUSED_OPERATIONS.on else []))
        self.now += self._of[features] / 2


class LoRA(torch.nn.Module):
    """A LoRA of a frozen layer, whose eager and fused forms round differently. ``fault`` replaces the fused form."""

    def __init__(self, layer, fault=None):
        super().__init__()
        self.down, self.up = torch.nn.Linear(WIDTH, 4, bias=False), torch.nn.Linear(4, WIDTH, bias=False)
        torch.nn.init.zeros_(self.up.weight)
        self.base, layer.forward, self.fault = layer.forward, self.forward, fault

    def forward(self, x):
        if not FUSED_OPERATIONS.on:
            return self.base(x) + self.up(self.down(x))
        if self.fault is not None:
            return self.fault(self, x)
        return torch.addmm(self.base(x), self.down(x), self.up.weight.t().to(x.dtype))


class Model(torch.nn.Module):
    def __init__(self, machine=None, faults=(None, None, None)):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in faults)
        network = torch.nn.ModuleList(LoRA(layer, fault) for layer, fault in zip(self.layers, faults, strict=True))
        self.network = [network]  # no part of the model
        self.machine, self.gradient_checkpointing = machine, False

    def forward(self, sample, scale=1.0):
        if self.machine is not None:
            self.machine.now += self.machine._of[(FUSED_OPERATIONS.name,) if FUSED_OPERATIONS.on else ()]
        x = sample * scale
        for layer in self.layers:
            run = torch.nn.functional.dropout(x, 0.1) if not self.gradient_checkpointing else x
            x = x + (checkpoint(layer, run, use_reentrant=False) if self.gradient_checkpointing else layer(run)).tanh()
        return x


def tried(model, machine, passes=10**6, features=switches.ALL, autocast=False, **rest):
    (network,) = model.network
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3), requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        the_trial = Trial(machine, [model, network], [*network.parameters()], passes, watch=machine.replaying, **rest)
        return the_trial.run(model, (x,), {"scale": 1.0}, features)


#: Seconds of eager passes, CUDA graphs, fused operations, and both -> the fastest features.
MACHINES = [
    ((1.0, 0.2, 0.8, 0.15), ("cuda_graphs", "fused_operations")),  # the host is slow
    ((1.0, 0.2, 0.8, 0.2), ("cuda_graphs",)),
    ((1.0, 0.2, 0.8, 0.25), ("cuda_graphs",)),  # the kernels are slow
    ((1.0, 1.0, 0.7, 0.7), ("fused_operations",)),  # the GPU is slow
    ((1.0, 1.1, 0.7, 0.8), ("fused_operations",)),
    ((1.0, 1.0, 1.0, 1.0), ()),
    ((1.0, 0.99, 0.98, 0.98), ()),
    ((1.0, 1.2, 1.3, 1.1), ()),
    ((1.0, 0.9, 0.95, 0.6), ("cuda_graphs", "fused_operations")),
    ((0.05, 0.04, 0.045, 0.03), ("cuda_graphs", "fused_operations")),
]


@pytest.mark.parametrize(("seconds", "fastest"), MACHINES)
def test_fastest_candidate_is_chosen(seconds, fastest):
    names = [(), ("cuda_graphs",), ("fused_operations",), ("cuda_graphs", "fused_operations")]
    machine = Machine(dict(zip(names, seconds, strict=True)))
    candidates = tried(Model(machine), machine)
    assert [candidate.rejected for candidate in candidates] == [None] * 4
    assert choose(candidates).features == fastest


def gains(seconds=1.0, **rest):
    """Return a machine on which everything gains, whose eager passes take some seconds."""
    return Machine(dict(zip(NAMES, (seconds, 0.5 * seconds, 0.7 * seconds, 0.3 * seconds), strict=True)), **rest)


NAMES = [(), ("cuda_graphs",), ("fused_operations",), ("cuda_graphs", "fused_operations")]


def factor(of, value):
    """Return a fused layer that multiplies one of its gradients or its output by a wrong factor."""

    def fault(layer, x):
        weight = layer.up.weight * value - layer.up.weight.detach() * (value - 1) if of == "gradient" else layer.up.weight
        out = torch.addmm(layer.base(x), layer.down(x), weight.t())
        return out * value if of == "output" else out

    return fault


def raising(error):
    def fault(layer, x):
        raise error

    return fault


FAULTS = {
    "5% everywhere": ([factor("gradient", 1.05)] * 3, "in layers.0, the gradients"),
    "1% in one layer": ([None, factor("gradient", 0.99), None], "in layers.1, the gradients"),
    "1% in one output": ([None, None, factor("output", 1.01)], "in layers.2, the gradients"),
    "NaN": ([None, factor("output", float("nan")), None], "in layers.1, the gradients differ by nan"),
    "error": ([None, raising(ValueError("of a kernel")), None], "ValueError: of a kernel"),
    "memory": ([raising(torch.OutOfMemoryError("2 GB")), None, None], "OutOfMemoryError: 2 GB"),
}


@pytest.mark.parametrize(("autocast", "checkpointing"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("faults", "reason"), FAULTS.values(), ids=FAULTS)
def test_wrong_candidate_is_rejected(faults, reason, autocast, checkpointing):
    machine = gains()
    model = Model(machine, faults)
    model.gradient_checkpointing = checkpointing
    candidates = tried(model, machine, autocast=autocast)
    assert candidates[2].rejected.startswith(reason)
    assert choose(candidates).rejected is None
    assert "fused_operations" not in choose(candidates).features


def test_recordings_that_leave_no_room_are_rejected():
    machine = gains(free=2**30, bytes_per_recording=2**30)
    candidates = tried(Model(machine), machine, needed=2**29)
    assert "bytes" in candidates[1].rejected or "MiB" in candidates[1].rejected
    assert choose(candidates).features == ("fused_operations",)


def test_trial_leaves_no_trace():
    machine = gains()
    model = Model(machine)
    weights = [*model.network[0].parameters()]
    weights[0].grad = torch.ones_like(weights[0])
    before = copy.deepcopy(model.network[0].state_dict()), random.getstate(), torch.get_rng_state()
    switches.use(["fused_operations"])
    tried(model, machine)
    assert all(torch.equal(model.network[0].state_dict()[name], value) for name, value in before[0].items())
    assert random.getstate() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert [weight.grad is None for weight in weights] == [False] + [True] * 5
    assert torch.equal(weights[0].grad, torch.ones_like(weights[0]))
    assert [switch.name for switch in switches.ALL if switch.on] == ["fused_operations"]
    assert not any(layer._forward_hooks for layer in model.modules())
    assert machine.released == 2, "each recording's memory"


@pytest.mark.parametrize(("passes", "most"), [(440, False), (10**6, True)])
def test_candidates_without_time_are_not_tried(passes, most):
    """Eager passes take 1 or 3 seconds; a trial 22 or at most 60."""
    machine = gains(1.0 if passes == 440 else 3.0)
    (network,) = (model := Model(machine)).network
    weights = [*network.parameters()]
    a_trial = Trial(machine, [model, network], weights, passes, watch=machine.replaying, clock=lambda: machine.now)
    candidates = a_trial.run(model, (torch.randn(8, WIDTH),), {}, switches.ALL)
    assert [candidate.rejected for candidate in candidates] == [None, None, trial.NO_TIME, trial.NO_TIME]
    assert a_trial.had_most_time is most


def test_passes_that_take_long_are_not_tried():
    machine = gains(4.0)
    (network,) = (model := Model(machine)).network
    a_trial = Trial(machine, [model, network], [*network.parameters()], 10**6, clock=lambda: machine.now)
    with pytest.raises(trial.NoTrialError, match=r"take 4\.0 s, too long"):
        a_trial.run(model, (torch.randn(8, WIDTH),), {}, switches.ALL)
    assert machine.now == 3 * 4.0, "it ends after the passes that are compared"


def test_length_of_a_run_decides_whether_a_trial_is_worthwhile():
    assert [Trial(CpuRecorder(), [], [], passes).is_worthwhile for passes in (100, 359, 360, 1500)] == [
        False,
        False,
        True,
        True,
    ]


def test_eager_passes_that_are_not_finite_are_no_reference():
    machine = gains()
    model = Model(machine)
    model.layers[0].weight.data.fill_(float("inf"))
    with pytest.raises(trial.NoTrialError, match="not finite"):
        tried(model, machine)


@pytest.mark.parametrize("fault", [None, factor("gradient", 0.99)])
def test_known_verdict_is_checked(fault):
    model = Model(None, [None, fault, None])
    (network,) = model.network
    x = torch.randn(8, WIDTH)
    problem = Trial(CpuRecorder(), [model, network], [*network.parameters()], 1).check(model, (x,), {}, [FUSED_OPERATIONS])
    assert (problem is None) == (fault is None)


# --- verdicts --------------------------------------------------------------------------------------------------------


def test_verdict_is_kept_for_its_key(monkeypatch, tmp_path):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path))
    verdict = verdicts.Verdict(("cuda_graphs",), 1.0, 0.2, candidates=[{"features": []}])
    key = verdicts.key({"driver": "580"}, "settings")
    verdicts.store(key, verdict)
    assert verdicts.load(key) == verdict
    assert verdicts.load(verdicts.key({"driver": "581"}, "settings")) is None
    assert list(tmp_path.rglob("*.partial")) == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"features": ["x"], "eager": 1, "seconds": 1}', '{"features": [], "eager": 1}']
)
def test_damaged_verdict_is_none(monkeypatch, tmp_path, text):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path))
    verdicts.store("k", verdicts.Verdict((), 1.0, 1.0))
    next(tmp_path.rglob("k.json")).write_text(text)
    assert verdicts.load("k") is None
    (tmp_path / verdicts.STATE_FILE).write_text(text)
    assert verdicts.read_from_state(tmp_path) == ()


# --- self-tests ------------------------------------------------------------------------------------------------------

MACHINE = {"gpu": "a GPU", "driver": "580"}


def child(program):
    """Return the start of a child that runs a program, whose ``names`` are the features."""

    def start(names):
        report = "say = lambda **row: print(json.dumps(row), flush=True)"
        code = f"import json, os, sys, time\nnames = {list(names)!r}\n{report}\n{program}"
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


EACH = "for name in names:\n    say(begun=name)\n"
CHILDREN = {
    "all right": (EACH + "    say(name=name, problem=None)", (None, None)),
    "wrong": (EACH + "    say(name=name, problem='GEGLU differs' if name == 'b' else None)", (None, "GEGLU differs")),
    "crash in the first": (
        EACH + "    if name == 'a': os._exit(139)\n    say(name=name, problem=None)",
        ("its self-test ended with code 139: no message", None),
    ),
    "error before any": ("sys.exit('no driver')", ("its self-test ended with code 1: no driver",) * 2),
    "hang in the second": (
        EACH + "    if name == 'b': time.sleep(600)\n    print('noise')\n    say(name=name, problem=None)",
        (None, "its self-test did not end within "),
    ),
}


@pytest.mark.parametrize(("program", "expected"), CHILDREN.values(), ids=CHILDREN)
def test_self_test_that_ends_badly_turns_its_feature_off(monkeypatch, tmp_path, program, expected):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path))
    if "sleep" in program:
        monkeypatch.setattr(proof, "LIMIT", 3.0 if os.name == "posix" else 30.0)  # Python starts slowly in Wine
    lines = []
    problems = proof.problems(MACHINE, ["a", "b"], child(program), lines.append)
    assert lines == ["testing the a GPU, once for this driver and PyTorch"]
    pairs = zip(problems.values(), expected, strict=True)
    assert all(ours is theirs is None or ours.startswith(theirs) for ours, theirs in pairs)

    def never(names):
        pytest.fail("a test is repeated")

    assert proof.problems(MACHINE, ["a", "b"], never, pytest.fail) == problems, "they are kept"
    with pytest.raises(pytest.fail.Exception, match="is repeated"):
        proof.problems({**MACHINE, "driver": "581"}, ["a"], never, lines.append)


def test_self_test_that_cannot_start_turns_its_features_off(monkeypatch, tmp_path):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path))

    def start(names):
        raise OSError("no memory")

    problems = proof.problems(MACHINE, ["a", "b"], start, [].append)
    assert set(problems.values()) == {"its self-test cannot be started: no memory"}


def test_results_that_cannot_be_kept_are_one_line(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path / "file"))
    lines = []
    assert proof.problems(MACHINE, ["a"], child(EACH + "    say(name=name, problem=None)"), lines.append) == {"a": None}
    assert len(lines) == 2
    assert lines[1].startswith("the self-test's results cannot be kept")
