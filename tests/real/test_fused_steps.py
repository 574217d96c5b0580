"""Steps of Adafactor and AdamW in Triton kernels, interpreted, as those of sd-scripts, transformers and gradient release."""

from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kohya_ext.patches import fused_adafactor  # noqa: E402
from transformers import Adafactor  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.dry_run.tracker import Tracker  # noqa: E402
from kohya_ext.dry_run.triton_kernels import counted_kernels  # noqa: E402
from tests import interpreted  # noqa: E402
from tests.fake_tensors import fake_tensors  # noqa: E402

INTERPRETED = """
import torch
from kohya_ext.patches import fused_adafactor
from library import adafactor_fused
from transformers import Adafactor

from kohya_ext.config.settings import Settings
from kohya_ext.kernels import adafactor, adafactor_kernels
from kohya_ext.optimizers.master_weights import LOWER
from kohya_ext.optimizers.stochastic_rounding import StochasticRounding
from kohya_ext.optimizers.weight_steps import RoundedSteps

adafactor.kernels_on, adafactor.LEAST = lambda *_: adafactor_kernels, 1
SHAPES = (200, 300), (64, 128), (1, 70), (130, 1), (40, 20, 3, 3), (24, 16, 1, 1), (4, 300, 2, 4)
OTHERS = (50,), (2, 3, 5, 5)
PLAIN = {"scale_parameter": False, "relative_step": False, "warmup_init": False, "lr": 0.01}
SETTINGS = Settings(fused_operations=True)


def trained(step, dtype, options):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in (*SHAPES, *OTHERS)]
    optimizer = Adafactor(weights, **options)
    for number in range(3):
        gradients = [torch.randn(weight.shape).mul(0.1 ** number).to(dtype) for weight in weights]
        for weight, gradient in zip(weights, gradients):
            weight.grad = gradient.clone()
        step(optimizer)
        assert all(torch.equal(weight.grad, gradient) for weight, gradient in zip(weights, gradients))
        for state in optimizer.state.values():  # as torch.optim loads them
            state.update((name, value.to(dtype)) for name, value in state.items() if name != LOWER and torch.is_tensor(value))
    return weights, [optimizer.state[weight] for weight in weights]


def each(step_param):
    def step(optimizer):
        for group in optimizer.param_groups:
            for weight in group["params"]:
                step_param(optimizer, weight, group)

    return step


def released(fused, masters=False):
    made, rounding = {}, StochasticRounding("cpu", 1)

    def step(optimizer):
        if optimizer not in made:
            made[optimizer] = RoundedSteps(optimizer, rounding, frozenset(), None, fused=fused, masters=masters)
        for weight in optimizer.param_groups[0]["params"]:
            gradient = weight.grad
            made[optimizer].step(weight)
            assert weight.grad is None
            weight.grad = gradient

    return step


step_param = adafactor_fused.adafactor_step_param
STOCHASTIC = each(step_param), each(fused_adafactor._step_param(step_param, SETTINGS))
NEAREST = Adafactor.step, fused_adafactor._step_all(Adafactor.step, SETTINGS)
for theirs, ours in (STOCHASTIC, NEAREST):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if dtype is torch.bfloat16 and theirs is NEAREST[0]:
            continue  # the interpreter truncates to bf16
        for options in (PLAIN, {**PLAIN, "weight_decay": 0.1, "clip_threshold": 0.5, "eps": (0.01, 0.001)}):
            fused_adafactor._counts.clear()
            (expected, their_states), (results, our_states) = (trained(step, dtype, options) for step in (theirs, ours))
            assert fused_adafactor._counts["weights"] == 3 * len(SHAPES)
            for result, weight in zip(results, expected):
                # In 16 bits another order of sums moves a value over the border of its rounding at times.
                eps = 1e-6 if dtype is torch.float32 else torch.finfo(dtype).eps
                torch.testing.assert_close(result, weight, rtol=eps, atol=1e-6)
                assert dtype is torch.float32 or (result != weight).sum() <= 0.001 * weight.numel()
            assert all(torch.equal(*pair) for pair in list(zip(results, expected))[len(SHAPES) :])
            for result, state in zip(our_states, their_states):
                assert result.keys() == state.keys()
                assert all(torch.allclose(*map(torch.as_tensor, (result[name], state[name])), rtol=0.01) for name in state)
    for options in ({**PLAIN, "scale_parameter": True}, {**PLAIN, "beta1": 0.9}, {"lr": None}):
        fused_adafactor._counts.clear()
        (expected, _), (results, _) = (trained(step, torch.bfloat16, options) for step in (theirs, ours))
        assert not fused_adafactor._counts["weights"] and all(torch.equal(*pair) for pair in zip(results, expected))
def counted(optimizer, weight, group, rounding):
    stepped = adafactor.step(optimizer, weight, group, rounding.bits, optimizer.state[weight].get(LOWER))
    fused_adafactor._counts["weights"] += stepped
    return stepped


fused_adafactor._counts.clear()
(expected, _), (results, _) = (trained(released(fused), torch.bfloat16, PLAIN) for fused in (lambda *_: False, counted))
assert fused_adafactor._counts["weights"] == 3 * len(SHAPES)
assert all((result != weight).sum() <= 0.001 * weight.numel() for result, weight in zip(results, expected))
fused_adafactor._counts.clear()
steps = released(lambda *_: False, masters=True), released(counted, masters=True)
(expected, _), (results, states) = (trained(step, torch.bfloat16, PLAIN) for step in steps)
assert fused_adafactor._counts["weights"] == 3 * len(SHAPES) and all(state[LOWER].any() for state in states)
assert all((result != weight).sum() <= 0.001 * weight.numel() for result, weight in zip(results, expected))
poisoned, ones = torch.full((4, 4), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32), torch.ones(4, 4)  # a NaN of a GPU
options = {"beta": 0.5, "eps": 1.0, "clip": 1.0, "rate": 0.1, "decay": 0.0, "random": lambda like: torch.ones_like(like).int()}
adafactor_kernels.step(poisoned, ones, ones[0].clone(), ones[0].clone(), **options)
assert poisoned.isnan().all()
adafactor.LEAST = 10**9
fused_adafactor._counts.clear()
trained(NEAREST[1], torch.float32, PLAIN)
assert not fused_adafactor._counts["weights"]
print("equal")
"""


@pytest.mark.newest
def test_steps_are_those_of_the_original_functions(checkout):
    done = interpreted.run(f"import sys\nsys.path.insert(0, {str(checkout.path)!r})\n" + INTERPRETED)
    assert done.stdout == "equal\n", done.stderr[-3000:]


ADAFACTOR = (
    "--optimizer_type",
    "Adafactor",
    "--optimizer_args",
    "scale_parameter=False",
    "relative_step=False",
    "warmup_init=False",
)
BF16 = ("--mixed_precision", "bf16", "--full_bf16", "--max_grad_norm", "0")

#: Options of a fine-tune, and the relative difference from which on elements count as different.
RUNS = {
    "bf16": ((*ADAFACTOR, *BF16, "--fused_backward_pass"), 0),
    "released": ((*ADAFACTOR, *BF16, "--gradient_release"), 0),
    "float32": ((*ADAFACTOR, "--fused_backward_pass", "--max_grad_norm", "0"), 1e-4),
    "adamw": (("--optimizer_type", "AdamW", *BF16, "--gradient_release"), 2**-5),  # it has other random bits
}


@pytest.mark.thorough
@pytest.mark.newest
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "bf16" else pytest.mark.slow) for name in RUNS])
def test_a_run_is_that_of_the_original_steps(checkout, train, name):
    """But for a few elements: next to a border of rounding, or with gradients that are only rounding, as of keys' biases."""
    options, tolerance = RUNS[name]
    original, ours = (
        train(checkout, "flux_train.py", *options, "--fused_operations", env=env, bare=bool(env))
        for env in ({}, {"TRITON_INTERPRET": "1"})  # triton reads it at import
    )
    assert ours.code == original.code == 0, ours.output[-4000:]
    facts = ours.report["facts"]
    assert (
        facts["gradient_release"]["fused"] if "--gradient_release" in options else facts["fused_adafactor"]["weights"]
    ) > 100
    pairs = [(value, original.tensors[name]) for name, value in ours.tensors.items()]
    differ = sum(int((~torch.isclose(*pair, rtol=tolerance, atol=tolerance * 0.01)).sum()) for pair in pairs)
    assert differ <= 0.02 * sum(value.numel() for value in ours.tensors.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["released", "float32", "adamw"])  # else PyTorch rounds the loaded states to bf16, as upstream
def test_a_resumed_run_is_the_undisturbed_one(checkout, train, name):
    options = (*RUNS[name][0], "--fused_operations", "--save_every_n_steps", "2", "--save_state")
    run = partial(train, env={"TRITON_INTERPRET": "1"}, bare=True)
    undisturbed = run(checkout, "flux_train.py", *options)
    resumed = run(checkout, "flux_train.py", *options, "--resume", str(undisturbed.folder / "tiny-step00000002-state"))
    assert resumed.code == 0, resumed.output[-4000:]
    assert all(torch.equal(resumed.tensors[name], undisturbed.tensors[name]) for name in undisturbed.tensors)


def test_an_estimate_counts_the_bytes_of_the_kernels(checkout_module):
    """Reads and writes of a bf16 weight, as docs/fine_tunes.md has them."""
    rows, columns = 512, 768
    upstreams, settings = checkout_module("library.adafactor_fused").adafactor_step_param, Settings(fused_operations=True)

    def moved(step):
        with fake_tensors(), counted_kernels(eight_bits=False):
            weight = torch.nn.Parameter(torch.zeros(rows, columns, dtype=torch.bfloat16))
            weight.grad = torch.zeros_like(weight)
            optimizer = Adafactor([weight], scale_parameter=False, relative_step=False, warmup_init=False, lr=0.1)
            with Tracker() as tracker:
                step(optimizer, weight, optimizer.param_groups[0])
        return round(sum(group.bytes for group in tracker.work.work().batch) / (rows * columns))

    assert moved(upstreams) == 132
    assert moved(fused_adafactor._step_param(upstreams, settings)) == 23
    assert moved(lambda optimizer, *_: fused_adafactor._step_all(Adafactor.step, settings)(optimizer)) == 13
