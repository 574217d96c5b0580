"""--speed: trials choose what is faster and right, leave no trace, and self-tests keep crashes out of runs."""

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from kohya_ext.speed import switches  # noqa: E402
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


class Layer(torch.nn.Module):
    """A frozen layer with a LoRA whose eager and fused forms round differently."""

    def __init__(self, fault=None):
        super().__init__()
        self.base = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(WIDTH, 4, bias=False), torch.nn.Linear(4, WIDTH, bias=False)
        torch.nn.init.zeros_(self.up.weight)
        self.fault = fault

    def forward(self, x):
        if not FUSED_OPERATIONS.on:
            return self.base(x) + self.up(self.down(x))
        if self.fault is not None:
            return self.fault(self, x)
        return torch.addmm(self.base(x), self.down(x), self.up.weight.t())


class Model(torch.nn.Module):
    def __init__(self, machine=None, faults=(None, None, None)):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(fault) for fault in faults)
        self.machine, self.gradient_checkpointing = machine, False

    def forward(self, sample, scale=1.0):
        if self.machine is not None and not torch.compiler.is_compiling():
            self.machine.now += self.machine._of[(FUSED_OPERATIONS.name,) if FUSED_OPERATIONS.on else ()]
        x = sample * scale
        for layer in self.layers:
            run = torch.nn.functional.dropout(x, 0.1)
            x = x + (checkpoint(layer, run, use_reentrant=False) if self.gradient_checkpointing else layer(run)).tanh()
        return x


def tried(model, machine, passes=10**6, features=switches.ALL, **rest):
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3), requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, rest.pop("autocast", True)):
        the_trial = Trial(machine, [model], weights, passes, watch=getattr(machine, "replaying", lambda run: run()), **rest)
        return the_trial.run(model, (x,), {"scale": 1.0}, features)


#: Seconds of eager passes, CUDA graphs, fused operations, and both -> what is fastest.
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
