"""--speed: trials choose the fastest correct features and leave no trace, and self-tests keep crashes out of runs."""

import contextlib
import copy
import json
import math
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches import speed  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from kohya_ext.compiling import blocks, deadline  # noqa: E402
from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.kernels import casts  # noqa: E402
from kohya_ext.kernels.modulation import PendingNorm  # noqa: E402
from kohya_ext.speed import layers, proof, switches, trial, verdicts  # noqa: E402
from kohya_ext.speed.comparison import Results  # noqa: E402
from kohya_ext.speed.layers import LayerCheck  # noqa: E402
from kohya_ext.speed.switches import COMPILED_BLOCKS, CUDA_GRAPHS, FUSED_OPERATIONS  # noqa: E402
from kohya_ext.speed.timing import TimedPasses  # noqa: E402
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
        self.launches = 1.0  # the share of its seconds in which Python has launched a pass
        self._of = seconds

    def mark(self):
        return self.now

    def seconds(self, start, end):
        return self.launches * (end - start), end - start

    def replaying(self, replay):
        """Run the replay of one of both passes."""
        replay()
        self.now += self._of[(CUDA_GRAPHS.name, *features_on())] / 2


def features_on():
    return tuple(switch.name for switch in (FUSED_OPERATIONS, COMPILED_BLOCKS) if switch.on)


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
        torch.manual_seed(1)  # the faults are larger than the rounding
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in faults)
        network = torch.nn.ModuleList(LoRA(layer, fault) for layer, fault in zip(self.layers, faults, strict=True))
        self.network = [network]  # no part of the model
        self.machine, self.gradient_checkpointing = machine, False

    def forward(self, sample, scale=1.0):
        if self.machine is not None:
            self.machine.now += self.machine._of[features_on()]
        x = sample * scale
        for layer in self.layers:
            run = torch.nn.functional.dropout(x, 0.1) if not self.gradient_checkpointing else x
            x = x + (checkpoint(layer, run, use_reentrant=False) if self.gradient_checkpointing else layer(run)).tanh()
        return x


#: The features that need no compiler.
EAGER = (CUDA_GRAPHS, FUSED_OPERATIONS)


def tried(model, machine, passes=10**6, features=EAGER, autocast=False, **rest):
    (network,) = model.network
    x = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(3), requires_grad=True)
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


class Swapped(Model):
    """A model whose blocks a forward pass leaves elsewhere, until a backward pass or its method moves them back."""

    blocks_to_swap, are_in_place, prepared = 1, True, 0

    def forward(self, sample, scale=1.0):
        assert self.are_in_place
        self.are_in_place = False
        output = super().forward(sample, scale)
        if output.requires_grad:
            output.register_hook(lambda gradient: setattr(self, "are_in_place", True))
        return output

    def prepare_block_swap_before_forward(self):
        self.are_in_place, self.prepared = True, self.prepared + 1


@pytest.mark.parametrize("fault", [None, factor("gradient", 0.99), raising(RuntimeError())])
def test_swapped_blocks_are_in_place_before_each_pass_and_after_the_trial(fault):
    machine = gains()
    model = Swapped(machine, (None, fault, None))
    candidates = tried(model, machine, features=(FUSED_OPERATIONS,))
    assert choose(candidates).features == (("fused_operations",) if fault is None else ())
    assert model.are_in_place
    assert model.prepared


def timed_trial(seconds, passes, features=EAGER, **rest):
    """Return the trial and candidates of passes that take some seconds, the seconds that it took, and the compared layers."""
    machine = gains(seconds)
    (network,) = (model := Model(machine, **rest)).network
    a_trial = Trial(
        machine, [model, network], [*network.parameters()], passes, watch=machine.replaying, clock=lambda: machine.now
    )
    candidates = a_trial.run(model, (torch.randn(8, WIDTH),), {}, features)
    return a_trial, candidates, machine.now


@pytest.mark.parametrize(("seconds", "passes", "tried"), [(1.0, 180, 2), (1.0, 280, 3), (6.0, 10**6, 2), (1.5, 10**6, 4)])
def test_candidates_without_time_are_not_tried(seconds, passes, tried):
    """A trial takes a twentieth of the run, and a minute at most."""
    _, candidates, took = timed_trial(seconds, passes)
    assert sum(not candidate.in_time for candidate in candidates) == 4 - tried
    assert took <= min(60, seconds * passes / 20)
    assert choose(candidates).features != ()


def test_passes_of_many_seconds_get_a_trial():
    """Six seconds: eager passes, and fused ones, whose gradients are wrong in one layer."""
    assert timed_trial(6.0, 10**6)[1][2].rejected is None
    _, candidates, _ = timed_trial(6.0, 10**6, faults=(None, factor("gradient", 0.99), None))
    assert candidates[2].rejected.startswith("in layers.1, the gradients")


@pytest.mark.parametrize(("seconds", "compared"), [(0.1, 3), (6.0, 1)])
def test_slow_passes_compare_one_layer_of_each_kind(monkeypatch, seconds, compared):
    names = []
    original = LayerCheck._results
    monkeypatch.setattr(LayerCheck, "_results", lambda self, *args: names.append(args[0]) or original(self, *args))
    timed_trial(seconds, 10**6)
    assert len(set(names)) == compared, "layers of one kind, compared once for both candidates with fused operations"
    assert len(names) == 3 * compared, "eager, in fp32 and fused"


@pytest.mark.parametrize(("seconds", "passes"), [(9.0, 700), (38.0, 10**6)])
def test_passes_that_take_too_long_are_not_tried(seconds, passes):
    """Beyond a minute a trial takes a hundredth of the run, and five minutes at most."""
    with pytest.raises(trial.NoTrialError, match=rf"take {seconds} s, too long"):
        timed_trial(seconds, passes)


@pytest.mark.parametrize(("seconds", "passes"), [(9.0, 900), (36.0, 10**6)])
def test_long_passes_get_time_for_one_candidate(seconds, passes):
    _, candidates, took = timed_trial(seconds, passes)
    assert sum(candidate.in_time for candidate in candidates) == 2
    assert 50 < took <= min(300, seconds * passes / 100)


@pytest.mark.parametrize(
    ("seconds", "count"),
    [
        ([0.1, 0.2, 0.1, 0.2, 0.1, 0.2, 0.1, 0.2, 0.1], 9),
        ([0.3] * 5, 5),
        ([1.0, 1.0], 2),
        ([1.0, 1.02, 1.0], 3),
        ([8.0, 8.0], 2),
    ],
)
def test_long_passes_that_hardly_differ_are_timed_twice(seconds, count):
    given = iter(seconds)
    clock = SimpleNamespace(mark=lambda: None, seconds=lambda start, end: (next(given), 0.0))
    passes = TimedPasses(lambda: None, lambda: None, clock)
    passes.until_known()
    assert len(passes.seconds) == count
    assert passes.spread >= (0.02 if count == 3 else 0) / 2


def test_recordings_are_not_tried_if_the_gpu_does_not_wait():
    machine = gains()
    machine.launches = 0.2
    candidates = tried(Model(machine), machine)
    assert [candidate.rejected for candidate in candidates] == [None, trial.NO_GAIN, None, trial.NO_GAIN]
    assert choose(candidates).features == ("fused_operations",)
    assert machine.released == 0


def test_length_of_a_run_decides_whether_a_trial_is_worthwhile():
    lengths = {passes: Trial(CpuRecorder(), [], [], passes).is_worthwhile for passes in (100, 139, 140, 1500)}
    assert lengths == {100: False, 139: False, 140: True, 1500: True}


def test_samples_of_large_gradients_find_differences_of_all():
    """A whole model's gradients would not fit into the host's memory."""
    torch.manual_seed(1)
    gradient = torch.randn(1000, 2048)
    reference = Results([gradient])
    assert sum(sample.values.numel() for sample in reference.samples) < 2**17
    scale = Results([gradient * 1.01]).minus(reference)
    assert scale.scale == pytest.approx(0.01, abs=1e-5)
    part = gradient.clone()
    part[-128:] *= 1.5
    exact = float((part - gradient).norm() / gradient.norm())
    assert Results([part]).minus(reference).share == pytest.approx(exact, rel=0.1)
    gradient[7, 7] = float("nan")
    assert math.isnan(Results([gradient]).minus(reference).share)


def test_all_weights_of_a_model_can_be_trained():
    model = Model(machine := gains())
    model.layers.requires_grad_()
    before = copy.deepcopy(model.state_dict())
    candidates = Trial(
        machine, [model], [*model.parameters(), *model.network[0].parameters()], 10**6, watch=machine.replaying
    ).run(model, (torch.randn(8, WIDTH),), {}, (FUSED_OPERATIONS,))
    assert choose(candidates).features == ("fused_operations",)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def steps_in_the_backward_pass(model):
    """Return the outcome of fused operations, the weights that were stepped, and gradients held at the end of each pass."""
    (network,) = model.network
    weights, stepped, held = [*network.parameters()], [], []

    def step(weight):
        stepped.append(weight)
        weight.data.add_(weight.grad)
        weight.grad = None

    def forward(sample):
        y = sample.tanh()
        if y.requires_grad:
            y.register_hook(lambda _: held.append(sum(weight.grad is not None for weight in weights)))
        return model(y)

    for weight in weights:
        weight.register_post_accumulate_grad_hook(step)
    a_trial = Trial(model.machine, [model, network], weights, 10**6, watch=model.machine.replaying)
    _, fused = a_trial.run(forward, (torch.randn(8, WIDTH, requires_grad=True),), {}, (FUSED_OPERATIONS,))
    return fused, stepped, held


def test_optimizer_that_steps_in_the_backward_pass_does_not_step_in_a_trial():
    model = Model(gains())
    (network,) = model.network
    before = copy.deepcopy(network.state_dict())
    fused, stepped, held = steps_in_the_backward_pass(model)
    assert fused.rejected is None
    assert set(held) == {0}
    assert stepped == []
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    model(torch.randn(8, WIDTH)).sum().backward()
    assert set(stepped) == {*network.parameters()}


def test_gradients_that_are_freed_at_once_are_compared(monkeypatch):
    monkeypatch.setattr(Trial, "_problem_of_layers", lambda *_: None)
    fused, _, _ = steps_in_the_backward_pass(Model(gains(), [factor("gradient", 0.95)] * 3))
    assert fused.rejected.startswith("the gradients' scale differs by -0.0")


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


# --- rounding ----------------------------------------------------------------------------------------------------------


def check_layers(model, x):
    """Return what a comparison of a model's layers in bfloat16 says about its fused form."""
    switches.use([FUSED_OPERATIONS.name])
    check = LayerCheck([*model.parameters()], CpuRecorder())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), check.on(model):
        model(x)
    return check.problem


class Norm(torch.nn.LayerNorm):
    """A norm whose fused form returns 16 bits, as its consumer would round it."""

    def __init__(self, factor=1.0):
        super().__init__(WIDTH)
        self.factor = factor

    def forward(self, x):
        exact = super().forward(x.float())
        return (exact * self.factor).to(torch.bfloat16) if FUSED_OPERATIONS.on else exact


@pytest.mark.parametrize(("factor", "problem"), [(1.0, None), (1.01, "in 0, the gradients")])
def test_output_in_16_bits_differs_by_rounding(factor, problem):
    differs = check_layers(torch.nn.Sequential(Norm(factor)), torch.randn(64, WIDTH, dtype=torch.bfloat16))
    assert differs == problem if problem is None else differs.startswith(problem)


class Copied(torch.nn.Module):
    """A block whose layer has a copy of its weight, with a gradient that is wrong by a factor."""

    def __init__(self, factor):
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.layer.weight.register_hook(lambda gradient: gradient * (factor if FUSED_OPERATIONS.on else 1.0))

    def forward(self, x):
        with casts.together([self.layer]):
            return self.layer(x)


@pytest.mark.parametrize(("factor", "problem"), [(1.0, None), (1.01, "in 0.layer, the gradients")])
def test_weights_that_a_block_copies_are_compared_themselves(factor, problem):
    differs = check_layers(torch.nn.Sequential(Copied(factor)), torch.randn(64, WIDTH))
    assert differs == problem if problem is None else differs.startswith(problem)


class FaultyNorm(PendingNorm):
    def __mul__(self, factor):
        return super().__mul__(factor * 1.01)


class ModulatedNorm(torch.nn.LayerNorm):
    """A norm whose fused form is computed together with its modulation."""

    is_modulated = True

    def __init__(self, pending):
        super().__init__(WIDTH, elementwise_affine=False)
        self.pending = pending

    def forward(self, x):
        return self.pending(self, x) if FUSED_OPERATIONS.on else super().forward(x)


@pytest.mark.parametrize(("pending", "problem"), [(PendingNorm, None), (FaultyNorm, "in 0, ")])
def test_norms_are_compared_with_a_modulation(pending, problem):
    model = torch.nn.Sequential(ModulatedNorm(pending), torch.nn.Module())
    model[1].forward = lambda norm: norm * torch.ones(1, 1, WIDTH).bfloat16() + torch.zeros(1, 1, WIDTH).bfloat16()
    differs = check_layers(model, torch.randn(2, 8, WIDTH).bfloat16())
    assert differs == problem if problem is None else differs.startswith(problem)


class Scaled(torch.nn.Module):
    """A product with a trained number, whose fused form rounds twice."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.scale, self.factor = torch.nn.Parameter(torch.tensor(0.7)), factor

    def forward(self, x):
        if FUSED_OPERATIONS.on:
            return ((x * 3).to(x.dtype) * (self.scale * self.factor / 3)).to(x.dtype)
        return (x * self.scale).to(x.dtype)


@pytest.mark.parametrize("seed", [1, 2, 5])
def test_gradients_that_are_mostly_rounding_may_differ_more(monkeypatch, seed):
    monkeypatch.setattr(layers, "_is_layer", lambda module: isinstance(module, Scaled))
    torch.manual_seed(seed)
    x, gradient = torch.randn(4096), torch.arange(4096.0).cos()
    x -= gradient * (x @ gradient - 0.5) / (gradient @ gradient)  # the number's gradient is a sum that cancels out
    x = x.to(torch.bfloat16)[None]
    assert check_layers(torch.nn.Sequential(Scaled()), x) is None
    assert "differ by 0.02 of their norm" in check_layers(torch.nn.Sequential(Scaled(1.02)), x)
    monkeypatch.setattr(layers, "_NOISY", math.inf)
    assert check_layers(torch.nn.Sequential(Scaled()), x), "by chance one is further from the exact gradient"


END_WHILE_TRYING = """
import os
from kohya_ext.speed import verdicts
with verdicts.noted("key", ["fused_operations"]):
    os._exit(1)
"""


def test_features_that_have_ended_two_runs_are_not_tried_again(monkeypatch, tmp_path):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path))
    for fatal in ([], [("fused_operations",)]):
        subprocess.run([sys.executable, "-c", END_WHILE_TRYING], cwd=Path(__file__).parents[2])
        assert verdicts.fatal("key") == fatal
    machine = gains()
    notes = {"fatal": verdicts.fatal("key"), "noted": partial(verdicts.noted, "key")}
    candidates = tried(Model(machine), machine, **notes)
    assert [each.features for each in candidates if each.rejected == trial.FATAL] == [("fused_operations",)]
    assert choose(candidates).features == ("cuda_graphs",)
    model = Model(machine)
    checked = Trial(CpuRecorder(), [model], [*model.network[0].parameters()], 1, **notes)
    assert checked.check(model, (torch.randn(8, WIDTH),), {}, [FUSED_OPERATIONS]) == trial.FATAL
    assert list(tmp_path.rglob("*-tries.json")), "the note of the fatal features remains"
    verdicts.forget()
    assert verdicts.fatal("key") == []


def test_lost_device_ends_the_trial_and_its_features_are_known():
    lost = []

    def fault(layer, x):
        lost.append(True)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    machine = gains()
    tries = {}
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tried(Model(machine, [None, fault, None]), machine, is_lost=lambda: bool(lost), noted=partial(noting, tries))
    assert tries == {("cuda_graphs",): 1, ("fused_operations",): 1}, "nothing is tried on a device that is lost"


@contextlib.contextmanager
def noting(tries, features):
    tries[features] = tries.get(features, 0) + 1
    yield


def test_condemned_features_are_fatal(monkeypatch, tmp_path):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path))
    verdicts.condemn("key", ("cuda_graphs", "fused_operations"))
    verdicts.condemn("key", ("selective_torch_compile",))
    assert verdicts.fatal("key") == [("cuda_graphs", "fused_operations"), ("selective_torch_compile",)]


def test_an_interrupted_trial_is_not_held_against_its_features(monkeypatch, tmp_path):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path))
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt), verdicts.noted("key", ["cuda_graphs", "fused_operations"]):
            raise KeyboardInterrupt
    assert verdicts.fatal("key") == []
    assert not list(tmp_path.rglob("*-tries.json"))


# --- compiled blocks -------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A block with a LoRA in its layer. ``fault`` multiplies the LoRA in compiled code."""

    def __init__(self, width, fault=1.0):
        super().__init__()
        self.layer = torch.nn.Linear(width, WIDTH).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(width, 4, bias=False), torch.nn.Linear(4, WIDTH, bias=False)
        self.fault = fault

    def forward(self, x):
        factor = self.fault if torch.compiler.is_compiling() else 1.0
        return (self.layer(x) + self.up(self.down(x)) * factor).tanh()


class Blocks(torch.nn.Module):
    """Blocks of two kinds."""

    def __init__(self, machine, fault=1.0):
        super().__init__()
        torch.manual_seed(1)
        self.machine = machine
        self.blocks = torch.nn.ModuleList([Block(2 * WIDTH), Block(WIDTH), Block(WIDTH, fault)])

    def forward(self, sample, scale=1.0):
        self.machine.now += self.machine._of[features_on()]
        x = torch.cat([sample, sample * scale], dim=-1)
        for block in self.blocks:
            x = block(x)
        return x


class Peaks:
    """A meter of made-up peaks."""

    def __init__(self, eager, compiled):
        self._of = {(): eager, (COMPILED_BLOCKS.name,): compiled}

    def begin(self):
        pass

    def end(self):
        return self._of[features_on()]


@pytest.fixture
def compiled_trial(monkeypatch, tmp_path):
    """Return a function that tries compiled blocks: the candidates, and what remains of them.

    Compiling a graph takes some seconds, and both compiled passes ``gain`` times as long as eager ones.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(blocks, "RUN", blocks.Run())
    monkeypatch.setattr(layers, "RUN", blocks.RUN)
    monkeypatch.setattr(trial, "RUN", blocks.RUN)
    method = blocks.compile_method(
        Block.forward, f"{__name__}:Block.forward", "1 of 1", Settings(), works=lambda: COMPILED_BLOCKS.on
    )
    monkeypatch.setattr(Block, "forward", method)

    def run(
        seconds=2.0, gain=0.5, fault=1.0, error=None, passes=10**6, features=(COMPILED_BLOCKS,), meter=None, free=2**40, waits=0
    ):
        names = [(), ("cuda_graphs",), ("selective_torch_compile",), ("cuda_graphs", "selective_torch_compile")]
        machine = Machine(dict(zip(names, (1.0, 0.8, gain, 0.8 * gain), strict=True)), free=free)
        model = Blocks(machine, fault)
        trained = [weight for weight in model.parameters() if weight.requires_grad]

        def compile_graph(graph, inputs):
            machine.now += seconds
            for _ in range(100 * waits):
                time.sleep(0.01)
            if error is not None:
                raise error
            return graph.forward

        blocks.RUN.backend = compile_graph
        a_trial = Trial(machine, [model], trained, passes, meter=meter, watch=machine.replaying, clock=lambda: machine.now)
        candidates = a_trial.run(model, (torch.randn(64, WIDTH),), {}, features)
        return candidates, machine

    yield run
    blocks.RUN.forget()


@pytest.mark.thorough
def test_compiled_blocks_are_tried_in_all_combinations_and_compiled_once(compiled_trial):
    candidates, _ = compiled_trial(features=(CUDA_GRAPHS, COMPILED_BLOCKS))
    assert [candidate.rejected for candidate in candidates] == [None] * 4
    assert choose(candidates).features == ("cuda_graphs", "selective_torch_compile")
    (block,) = blocks.RUN.blocks.values()
    # Recordings have another kind of autocast, and torch 2.6 tells their dispatch modes apart.
    assert block.graphs in (4, 8), "of two kinds"
    blocks.RUN.forget()
    assert block.compiled is None
    assert (block.graphs, block.seconds, block.calls) == (0, 0, 0)


def test_features_that_contradict_each_other_are_not_combined():
    assert [candidate.features for candidate in trial._combinations(switches.ALL)] == [
        ("cuda_graphs",),
        ("fused_operations",),
        ("selective_torch_compile",),
        ("cuda_graphs", "fused_operations"),
        ("cuda_graphs", "selective_torch_compile"),
    ]


COMPILED_FAULTS = {
    "ten minutes": ({"seconds": 600 / 4}, "compiling takes about 301 s, and this run allows 234 s; a longer run"),
    "one graph of ten minutes": ({"seconds": 600}, "compiling took longer than the 234 s that this run allows"),
    "minutes in a short run": ({"seconds": 30, "passes": 1000}, "compiling takes about 61 s, and this run allows 54 s"),
    "crash": ({"error": ValueError("no registers left")}, "Block could not be compiled: "),
    "memory": ({"error": torch.OutOfMemoryError("2 GB")}, "Block could not be compiled: "),
    "1% in one layer": ({"fault": 0.99}, "in blocks.2, the gradients"),
    "2 GB more": ({"meter": Peaks(10**9, 3 * 10**9), "free": 3 * 10**9}, "the passes need 2861 of 2861 MiB, too much"),
    "NaN": ({"fault": float("nan")}, "in blocks.2, the gradients differ by nan"),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("faulty", "reason"), COMPILED_FAULTS.values(), ids=COMPILED_FAULTS)
def test_compiled_blocks_with_a_fault_are_rejected(compiled_trial, faulty, reason, capsys):
    candidates, _ = compiled_trial(**faulty)
    assert candidates[1].rejected.startswith(reason)
    assert choose(candidates).features == ()
    assert capsys.readouterr().err == "", "the trial's caller reports it"


@pytest.mark.thorough
def test_compiled_blocks_that_are_slower_are_not_chosen(compiled_trial):
    candidates, _ = compiled_trial(gain=1.03)
    assert candidates[1].rejected is None
    assert choose(candidates).features == ()


def test_graph_that_takes_too_long_is_ended(compiled_trial, monkeypatch):
    limits = []

    def call_soon(seconds, *rest):
        limits.append(seconds)
        return deadline.call_until(0.1, *rest)

    monkeypatch.setattr(blocks, "call_until", call_soon)
    begun = time.monotonic()
    candidates, _ = compiled_trial(waits=300)
    assert time.monotonic() - begun < 100
    assert limits == [pytest.approx(234, abs=1)]
    assert candidates[1].rejected.startswith("compiling took longer than the 234 s that this run allows; a longer run")
    assert not candidates[1].in_time
    assert choose(candidates).features == ()


def test_compiling_is_not_tried_in_runs_that_are_too_short(compiled_trial):
    (_, compiled), machine = compiled_trial(passes=200)
    assert not compiled.in_time
    assert compiled.rejected == trial.NO_TIME
    assert machine.now < 0.06 * 200


@pytest.mark.thorough
def test_known_verdict_compiles_blocks_at_once(compiled_trial, monkeypatch):
    compiled_trial()
    blocks.RUN.forget()
    monkeypatch.setattr(Trial, "run", lambda self, *rest: [self.check(*rest), self])
    problem, _ = compiled_trial()[0]
    assert problem is None
    assert next(iter(blocks.RUN.blocks.values())).graphs == 2


@pytest.mark.parametrize(
    ("capability", "version", "reason"), [((7, 5), "3.8.0", "Triton 3.8.0"), ((7, 5), "3.2.0", None), ((8, 6), "3.8.0", None)]
)
def test_blocks_are_not_compiled_on_a_gpu_that_triton_does_not_support(monkeypatch, capability, version, reason):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(speed, "find_obstacle", lambda device, backend: None)
    settings = {"activation_memory_budget": None, "compile_mode": "default"}
    because = speed._reason_not_to_compile(SimpleNamespace(), torch.device("cuda", 0), settings)
    assert because == reason if reason is None else because.startswith(reason)


# --- verdicts --------------------------------------------------------------------------------------------------------


def test_verdict_is_kept_for_its_key(monkeypatch, tmp_path):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path))
    verdict = verdicts.Verdict(("cuda_graphs",), 1.0, 0.2, candidates=[{"features": []}])
    key = verdicts.key({"driver": "580"}, "settings")
    verdicts.store(key, verdict)
    assert verdicts.load(key) == verdict
    assert verdicts.load(verdicts.key({"driver": "581"}, "settings")) is None
    assert list(tmp_path.rglob("*.partial")) == []


def kept(**compiled):
    """Return a verdict that was kept: compiled blocks, or else fused operations."""
    rows = [
        trial.Candidate((), 1.0),
        trial.Candidate(("fused_operations",), 0.8),
        trial.Candidate(("selective_torch_compile",), 0.5, **compiled),
    ]
    return verdicts.Verdict(
        ("selective_torch_compile",), 1.0, 0.5, candidates=json.loads(json.dumps([asdict(row) for row in rows])), allowed=30.0
    )


@pytest.mark.parametrize(
    ("passes", "features"), [(50, ("fused_operations",)), (59, ("fused_operations",)), (61, ("selective_torch_compile",))]
)
def test_short_runs_take_the_best_choice_that_compiles_nothing(passes, features):
    """Compiling took 30 seconds, and saves half a second in each pass."""
    verdict = speed._without_setup(kept(setup=30.0), passes)
    assert verdict.features == features
    assert verdict.seconds == {"fused_operations": 0.8, "selective_torch_compile": 0.5}[features[0]]


@pytest.mark.parametrize(("in_time", "allowed", "lacks"), [(False, 60.0, True), (False, 40.0, False), (True, 60.0, False)])
def test_longer_runs_try_again_what_a_shorter_one_had_no_time_for(in_time, allowed, lacks):
    assert kept(in_time=in_time).lacks(allowed) is lacks


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


def test_a_change_of_a_kernel_repeats_the_self_test():
    tested = {file.name for file in proof.tested_code()}
    assert {"adafactor_kernels.py", "elementwise.py", "graphs.py", "page_lock.py", "self_test.py"} <= tested
    assert all(any(Path(proof.__file__).parents[1].glob(pattern)) for pattern in proof._CODE)


def test_the_self_test_has_a_test_and_a_name_for_each_feature():
    from kohya_ext.speed import self_test

    assert self_test.TESTS.keys() == proof.FEATURES.keys()
    assert proof.FEATURES.keys() > {switch.name for switch in switches.ALL}
