"""AdamW's step in one Triton kernel, interpreted: its values, its rounding, what it leaves to PyTorch; its count."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kohya_ext.dry_run.tracker import Tracker  # noqa: E402
from kohya_ext.dry_run.triton_kernels import counted_kernels  # noqa: E402
from kohya_ext.kernels import adamw  # noqa: E402
from kohya_ext.optimizers.stochastic_rounding import StochasticRounding  # noqa: E402
from tests import interpreted  # noqa: E402
from tests.fake_tensors import fake_tensors  # noqa: E402

INTERPRETED = """
import math
import torch
from kohya_ext.kernels import adamw, adamw_kernels
from kohya_ext.optimizers.master_weights import LOWER, joined
from kohya_ext.optimizers.stochastic_rounding import StochasticRounding

adamw.kernels_on = lambda *_: adamw_kernels
STATES = "exp_avg", "exp_avg_sq"
ROUNDING = StochasticRounding("cpu", 1)


def optimizer_of(weight, gradient, states, count, convert, options):
    weight = torch.nn.Parameter(convert(weight))
    weight.grad = convert(gradient)
    optimizer = torch.optim.AdamW([weight], **{"lr": 0.01, **options})
    if count:
        optimizer.state[weight] = {"step": torch.tensor(float(count)), **dict(zip(STATES, map(convert, states)))}
    return optimizer, weight


def values(optimizer, weight):
    return [weight.detach(), *(optimizer.state[weight][name] for name in STATES)]


def stepped(optimizer, weight):
    lower = optimizer.state[weight].get(LOWER)
    return adamw.step(optimizer, weight, optimizer.param_groups[0], ROUNDING.seed, lower)


def start(*shape):
    weight, gradient, average = (torch.randn(shape).bfloat16() for _ in range(3))
    return weight, gradient, (average.mul(0.1), average.square().mul(0.01).add(1e-3))


torch.manual_seed(0)
for shape, count, options in (((300, 1001), 4, {}), ((7,), 1, {"betas": (0.5, 0.9), "eps": 0.1, "weight_decay": 0.3})):
    tensors = start(*shape)
    reference = optimizer_of(*tensors, count, torch.Tensor.double, options)
    reference[0].step()
    ours = optimizer_of(*tensors, count, torch.clone, options)
    assert stepped(*ours)
    assert ours[0].state[ours[1]]["step"] == count + 1
    errors = []
    for result, exact in zip(values(*ours), values(*reference)):
        nearest = exact.bfloat16()
        spacing = torch.maximum(exact.abs(), torch.tensor(1e-3)).log2().floor().sub(7).exp2()
        error = (result.double() - exact) / spacing
        assert error.abs().max() < 1.001 and (result != nearest).any() | (exact.numel() < 10)
        assert error.mean().abs() < 5 / math.sqrt(12 * exact.numel()) + 1e-4
        errors.append(error.view(-1))
    if len(errors[0]) > 1000:
        others = torch.corrcoef(torch.stack(errors)) - torch.eye(3)
        assert others.abs().max() < 5 / math.sqrt(len(errors[0]))  # each has random bits of its own
        neighbours = torch.corrcoef(torch.stack([errors[0][:-1], errors[0][1:]]))[0, 1]
        assert neighbours.abs() < 5 / math.sqrt(len(errors[0]))
    optimizer, master = optimizer_of(*tensors, count, torch.clone, options)
    lower = optimizer.state[master][LOWER] = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16)
    reference = optimizer_of(joined(master.detach(), lower).clone(), *tensors[1:], count, torch.Tensor.double, options)
    reference[0].step()
    assert stepped(optimizer, master)
    torch.testing.assert_close(joined(master.detach(), lower), reference[1].detach().float(), rtol=1e-6, atol=1e-6)
    again = optimizer_of(*tensors, count, torch.clone, options)
    stepped(*again)
    assert not torch.equal(again[1], ours[1]) or ours[1].numel() < 10  # other bits in another step

poisoned = torch.full((3, 16), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # a NaN of a GPU
options = {"number": 1.0, "betas": (0.9, 0.99), "eps": 0.1, "rate": 0.1, "decay": 0.0}
adamw_kernels.step(poisoned[0], torch.ones(16), poisoned[1], poisoned[2], ROUNDING.seed(), **options)
assert poisoned.isnan().all()

weight, gradient, states = start(8, 8)
others = [(weight, gradient, states, 0, {}), (weight.float(), gradient.float(), states, 1, {})]
others += [(weight, gradient, states, 1, {name: True}) for name in ("amsgrad", "maximize", "capturable")]
others += [(weight, gradient, [state.float() for state in states], 1, {}), (weight.t(), gradient, states, 1, {})]
for *tensors, count, options in others:
    optimizer, weight = optimizer_of(*tensors, count, lambda tensor: tensor, options)
    before = [tensor.clone() for tensor in (values(optimizer, weight) if count else [weight.detach()])]
    assert not stepped(optimizer, weight)
    assert all(map(torch.equal, before, values(optimizer, weight) if count else [weight.detach()]))
    assert not count or optimizer.state[weight]["step"] == count
print("equal")
"""


def test_weights_and_states_are_those_of_torch_rounded_stochastically():
    done = interpreted.run(INTERPRETED)
    assert done.stdout == "equal\n", done.stderr[-3000:]


@pytest.mark.parametrize(("masters", "moved"), [(False, 14), (True, 18)])
def test_an_estimate_counts_the_bytes_of_the_kernel(masters, moved):
    """Reads and writes of a bf16 weight, as docs/fine_tunes.md has them."""
    with fake_tensors(), counted_kernels(eight_bits=False):
        weight = torch.nn.Parameter(torch.zeros(512, 768, dtype=torch.bfloat16))
        weight.grad = torch.zeros_like(weight)
        optimizer = torch.optim.AdamW([weight])
        states = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        lower = torch.zeros_like(weight, dtype=torch.int16) if masters else None
        optimizer.state[weight] = {"step": torch.tensor(1.0, device="cpu"), **states}
        with Tracker() as tracker:
            assert adamw.step(optimizer, weight, optimizer.param_groups[0], StochasticRounding(weight.device, 1).seed, lower)
    assert round(sum(group.bytes for group in tracker.work.work().batch) / weight.numel()) == moved
