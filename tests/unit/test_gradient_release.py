"""gradient_release: steps of single weights, stochastic rounding, clipping, and what it refuses."""

import contextlib
import copy
import importlib
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches import gradient_release  # noqa: E402
from kohya_ext.patches.gradient_release import _Release  # noqa: E402

from kohya_ext.config.command_line import CommandLine  # noqa: E402
from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.errors import UserError  # noqa: E402
from kohya_ext.optimizers import probes, weight_steps  # noqa: E402
from kohya_ext.optimizers.master_weights import LOWER, joined, split  # noqa: E402
from kohya_ext.optimizers.stochastic_rounding import StochasticRounding  # noqa: E402
from kohya_ext.optimizers.weight_steps import RoundedSteps, WeightSteps  # noqa: E402
from kohya_ext.planning import automatic, memory_savings  # noqa: E402
from kohya_ext.preflight import options  # noqa: E402
from kohya_ext.sdscripts.constraints import stepping_in_backward  # noqa: E402

tree_leaves = torch.utils._pytree.tree_leaves

SHAPES = ((8, 6), (40, 30), (5,), (3, 4, 2))
STATES = frozenset({"exp_avg", "exp_avg_sq"})


@pytest.fixture(autouse=True)
def prodigy_without_hooks(monkeypatch):
    """Put Prodigy's step back: torch wraps that of a class when the first optimizer of it is created, for all later tests."""
    with contextlib.suppress(ImportError):
        kind = importlib.import_module("prodigyopt").Prodigy
        monkeypatch.setattr(kind, "step", kind.step)


def weights_of(dtype=torch.float32):
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def give_gradients(weights, step):
    for place, weight in enumerate(weights):
        weight.grad = torch.cos(weight.detach() * (step + place + 1))


def options_of(optimizer):
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def optimizer_of(kind, weights):
    module, _, name = kind.partition(":")
    kind = getattr(pytest.importorskip(module), name)
    groups = [{"params": weights[:2]}, {"params": weights[2:], "lr": 0.02}]
    optimizer = kind(groups, lr=0.01)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


class Averaging(torch.optim.Optimizer):
    """An optimizer of nobody's package, which scales its step by the mean of all gradients, and whose group has a list."""

    def __init__(self, weights, lr):
        super().__init__(weights, {"lr": lr, "means": []})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            trained = [weight for weight in group["params"] if weight.grad is not None]
            if trained:
                group["means"].append(torch.stack([weight.grad.abs().mean() for weight in trained]).mean())
            for weight in trained:
                weight.sub_(weight.grad / group["means"][-1], alpha=group["lr"])


class Counting(torch.optim.SGD):
    """An optimizer of nobody's package, whose first thousand calls of ``step`` are for warmup."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls > 1000:
            super().step(closure)


# --- rounding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1 + 2**-10, -3.1415926, 1.7e-30, 0.0, -2.0, 65000.123])
def test_the_mean_of_roundings_is_the_value(value):
    count = 200_000
    values = torch.full((count,), value)
    rounded = StochasticRounding("cpu", 7).rounded(values).double()
    below, above = rounded.min().item(), rounded.max().item()
    exact = values[0].item()
    assert below <= exact <= above
    assert len(rounded.unique()) == (1 if below == exact else 2), "only the two neighbours"
    assert above - below <= abs(exact) * 2**-7
    deviation = (above - exact) * (exact - below) / count  # the variance of the mean of two values
    assert abs(rounded.mean().item() - exact) <= 5 * deviation**0.5


def test_a_value_that_is_not_finite_stays_so():
    values = torch.tensor([0.0, float("nan"), float("inf"), -float("inf")])
    values.view(torch.int32)[0] = 0x7FFFFFFF  # the NaN of a GPU: adding bits to it gives -0.0
    for seed in range(20):
        assert not StochasticRounding("cpu", seed).rounded(values).isfinite().any()


def test_rounding_draws_from_its_own_random_numbers():
    values = torch.randn(1000)
    before = torch.get_rng_state()
    rounding = StochasticRounding("cpu", 3)
    state = rounding.state()
    first, second = rounding.rounded(values), rounding.rounded(values)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, second)
    rounding.restore(state)
    assert torch.equal(rounding.rounded(values), first)


def test_small_updates_are_not_lost_in_bf16():
    rate, steps = 1e-4, 500
    weights = {}
    for name in ("nearest", "stochastic"):
        weight = torch.nn.Parameter(torch.ones(2000, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([weight], lr=rate)
        step = WeightSteps(optimizer)
        if name == "stochastic":
            step = RoundedSteps(optimizer, StochasticRounding("cpu", 1), frozenset(), None)
        for _ in range(steps):
            weight.grad = torch.ones_like(weight)
            step.step(weight)
        weights[name] = weight.detach().double()
    assert (weights["nearest"] == 1).all()
    assert weights["stochastic"].mean().item() == pytest.approx(1 - rate * steps, abs=1e-3)


# --- master weights --------------------------------------------------------------------------------------------------


def test_master_weights_hold_a_float32_but_for_its_last_bit():
    rounding = StochasticRounding("cpu", 1)
    torch.manual_seed(1)
    borders = [0, -(2**31), 0x7F800000, 0x7F7FFFFF, 0x3F808000, 0x3F817FFF, 0x7FFFFFFF, -1, -(2**15)]  # the last three: NaN
    drawn = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64)
    values = torch.cat([drawn, torch.tensor(borders)]).to(torch.int32).view(torch.float32)
    weight, lower = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    split(values, weight, lower, rounding.bits(values))
    master, is_number = joined(weight, lower), ~values.isnan()
    off = master.view(torch.int32).long() - values.view(torch.int32)
    assert off[is_number].abs().max() == 1
    assert torch.equal(weight.isnan(), ~is_number)
    assert torch.equal(master.isnan(), ~is_number)


def test_a_master_weight_is_rounded_stochastically():
    count, value = 200_000, 1 + 2**-10
    values = torch.full((count,), value)
    weight, lower = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    split(values, weight, lower, StochasticRounding("cpu", 7).bits(values))
    assert set(weight.tolist()) == {1.0, 1 + 2**-7}
    deviation = (2**-10 * (2**-7 - 2**-10) / count) ** 0.5
    assert abs(weight.double().mean().item() - value) <= 5 * deviation
    torch.testing.assert_close(joined(weight, lower), values, rtol=2**-23, atol=0)


@pytest.mark.parametrize("part", [None, 64])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
def test_master_weights_are_those_of_float32_training(kind, part):
    """But for the last bit of each step; with states in float32, and in parts of an optimizer without states."""
    kind = kind if part is None else torch.optim.SGD
    weights = weights_of(torch.bfloat16)
    exact = [torch.nn.Parameter(weight.detach().float()) for weight in weights]
    optimizers = kind(exact, lr=1e-4, weight_decay=0.1), kind(weights, lr=1e-4, weight_decay=0.1)
    steps = RoundedSteps(optimizers[1], StochasticRounding("cpu", 1), frozenset(), part, masters=True)
    steps.reserve(weights)
    for number in range(5):
        give_gradients(weights, number)
        for weight, other in zip(weights, exact, strict=True):
            other.grad = weight.grad.float()
            steps.step(weight)
        for optimizer in optimizers:
            optimizer.step()
    for weight, other in zip(weights, exact, strict=True):
        master = joined(weight.detach(), optimizers[1].state[weight][LOWER])
        torch.testing.assert_close(master, other.detach(), rtol=5 * 2**-23, atol=1e-9)
        assert ((weight - master).abs() <= master.abs() * 2**-7).all()


def test_master_weights_of_an_optimizer_that_changes_weights_between_steps_are_refused(capsys):
    optimizer = optimizer_of("schedulefree:AdamWScheduleFree", weights_of(torch.bfloat16))
    accelerator = SimpleNamespace(_optimizers=[SimpleNamespace(optimizer=optimizer)])
    with pytest.raises(SystemExit):
        _Release(StochasticRounding("cpu", 1), 0.0, masters=True).before_batch(accelerator)
    assert "--master_weights cannot be combined with AdamWScheduleFree" in capsys.readouterr().err


# --- steps of single weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        *(f"torch.optim:{name}" for name in ("AdamW", "SGD", "RAdam", "NAdam", "Adagrad")),
        *(f"schedulefree:{name}" for name in ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree")),
        "lion_pytorch:Lion",
    ],
)
def test_weights_and_counts_are_those_of_usual_steps(kind):
    usual, single = weights_of(), weights_of()
    optimizer, other = optimizer_of(kind, usual), optimizer_of(kind, single)
    steps = WeightSteps(other)
    for number in range(5):
        give_gradients(usual, number)
        optimizer.step()
        give_gradients(single, number)
        for weight in reversed(single):
            steps.step(weight)
            assert weight.grad is None
        other.step()
    assert all(map(torch.equal, usual, single))
    expected, state = optimizer.state_dict(), other.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(state["state"][key][name]))
               for key, values in expected["state"].items() for name, value in values.items())  # fmt: skip


class _Nearest:
    """Rounding to nearest, with which steps in parts can be compared."""

    def __init__(self, device="cpu"):
        self.device = torch.device(device)

    def copy(self, target, value):
        target.copy_(value)


def rounded_steps(part, reserve=False, steps=4):
    weights = weights_of(torch.bfloat16)
    optimizer = torch.optim.AdamW(weights, lr=0.01)
    single = RoundedSteps(optimizer, _Nearest(), STATES, part)
    if reserve:
        single.reserve(weights)
    for number in range(steps):
        give_gradients(weights, number)
        for weight in weights:
            single.step(weight)
        optimizer.step()
    return weights, optimizer


@pytest.mark.parametrize("reserve", [False, True])
def test_parts_of_a_weight_are_stepped_as_the_whole(reserve):
    (whole, expected), (parts, optimizer) = rounded_steps(None), rounded_steps(64, reserve)
    assert all(map(torch.equal, whole, parts))
    for usual, weight in zip(whole, parts, strict=True):
        assert expected.state[usual].keys() == optimizer.state[weight].keys()
        assert optimizer.state[weight]["step"] == 4
        assert all(torch.equal(value, optimizer.state[weight][name]) for name, value in expected.state[usual].items())
        assert {optimizer.state[weight][name].dtype for name in STATES} == {torch.bfloat16}


def test_states_of_a_resumed_run_move_to_one_piece_of_memory():
    weights, optimizer = rounded_steps(64)
    before = {weight: {name: optimizer.state[weight][name].clone() for name in STATES} for weight in weights}
    RoundedSteps(optimizer, _Nearest(), STATES, 64).reserve(weights)
    for name in STATES:
        assert len({optimizer.state[weight][name].untyped_storage().data_ptr() for weight in weights}) == 1
        assert all(torch.equal(optimizer.state[weight][name], before[weight][name]) for weight in weights)


def test_states_are_on_the_gpu_although_a_swapped_block_is_not():
    weights = weights_of(torch.bfloat16)
    steps = RoundedSteps(torch.optim.AdamW(weights), _Nearest("meta"), STATES, 64)
    steps.reserve(weights)
    assert {memory.device.type for memory in steps._reserved.values()} == {"meta"}


@pytest.mark.parametrize("counts_on_gpu", [False, True])
def test_loaded_states_are_on_the_gpu_although_a_swapped_block_is_not(counts_on_gpu):
    weights = weights_of()
    optimizer = torch.optim.AdamW(weights, capturable=counts_on_gpu)
    step = torch.tensor(2.0)
    for weight in weights:
        optimizer.state[weight] = {"step": step, "exp_avg": weight.detach().clone(), "exp_avg_sq": weight.detach().clone()}
    accelerator = SimpleNamespace(device=torch.device("meta"), _optimizers=[SimpleNamespace(optimizer=optimizer)])
    release = _Release(None, 0.0)
    release.before_batch(accelerator)
    release.on_end()
    for weight in weights:
        places = {name: value.device.type for name, value in optimizer.state[weight].items()}
        assert places == {"step": "meta" if counts_on_gpu else "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_an_error_in_a_step_leaves_a_state_that_can_be_saved():
    weights, optimizer = rounded_steps(64)
    single = RoundedSteps(optimizer, _Nearest(), STATES, 64)
    give_gradients(weights, 5)
    groups = optimizer.param_groups
    groups[0]["lr"] = "nothing"
    with pytest.raises(TypeError):
        single.step(weights[0])
    assert optimizer.param_groups is groups
    assert set(optimizer.state) == set(weights)
    optimizer.state_dict()


@pytest.mark.parametrize(
    ("kind", "is_separate", "states", "is_elementwise"),
    [
        ("torch.optim:AdamW", True, STATES, True),
        ("torch.optim:SGD", True, frozenset(), True),
        ("lion_pytorch:Lion", True, {"exp_avg"}, True),
        ("schedulefree:AdamWScheduleFree", True, {"z", "exp_avg_sq"}, True),
        ("transformers.optimization:Adafactor", True, frozenset(), False),
        ("prodigyopt:Prodigy", False, {*STATES, "s", "p0"}, False),
        (f"{__name__}:Averaging", False, frozenset(), False),
        (f"{__name__}:Counting", False, frozenset(), True),
    ],
)
def test_probes_know_how_an_optimizer_treats_weights(kind, is_separate, states, is_elementwise):
    if kind.startswith("transformers"):
        weights = weights_of()
        adafactor = pytest.importorskip("transformers.optimization").Adafactor
        optimizer = adafactor(weights, lr=1e-3, relative_step=False, scale_parameter=False)
    else:
        optimizer = optimizer_of(kind, weights := weights_of())
    random, state = torch.get_rng_state(), dict(optimizer.state)
    groups = copy.deepcopy(options_of(optimizer))
    assert probes.steps_weights_separately(optimizer) == is_separate
    names = probes.states_of_the_weights_type(optimizer)
    assert names == states
    assert probes.steps_elements_separately(optimizer, names) == is_elementwise
    assert torch.equal(torch.get_rng_state(), random)
    assert optimizer.state == state
    assert options_of(optimizer) == groups
    assert all(map(torch.equal, weights, weights_of()))


def test_optimizers_of_other_packages_have_no_kernels():
    optimizer = torch.optim.Adafactor([torch.nn.Parameter(torch.zeros(512, 512, dtype=torch.bfloat16))])
    (group,) = optimizer.param_groups
    (weight,) = group["params"]
    weight.grad = torch.zeros_like(weight)
    assert not _Release(None, 0.0, fuses=lambda: True)._fused_step(optimizer, weight, group, StochasticRounding("cpu", 1))


# --- clipping --------------------------------------------------------------------------------------------------------


def clipped(release, *gradients):
    """Return the gradients of a step after clipping."""
    tensors = [torch.tensor(gradient) for gradient in gradients]
    for gradient in tensors:
        release._clip(gradient)
    release.after_batch(None)
    return [gradient.tolist() for gradient in tensors]


def test_gradients_are_clipped_by_the_last_norm_and_by_this_steps():
    release = _Release(None, 1.0)
    first, second = clipped(release, [3.0, 0.0], [0.0, 4.0])
    assert first == pytest.approx([1, 0])  # by its own norm of 3
    assert second == pytest.approx([0, 0.8])  # by the norm of both, which is 5
    first, second = clipped(release, [0.3, 0.0], [0.0, 0.4])
    assert (first, second) == (pytest.approx([0.06, 0]), pytest.approx([0, 0.08]))  # by the last step's 5
    assert clipped(release, [0.3, 0.1], [0.0, 0.4]) == [pytest.approx([0.3, 0.1]), pytest.approx([0, 0.4])]
    (spike,) = clipped(release, [300.0, 0.0])
    assert spike == pytest.approx([1, 0])


def test_gradients_below_the_limit_keep_their_bits():
    release = _Release(None, 100.0)
    gradient = torch.randn(100)
    before = gradient.clone()
    for _ in range(2):
        release._clip(gradient)
        release.after_batch(None)
    assert torch.equal(gradient, before)


def test_a_skipped_step_keeps_the_norm_of_the_last_one():
    release = _Release(None, 1.0)
    clipped(release, [5.0])
    release.after_batch(None)
    assert clipped(release, [0.5]) == [pytest.approx([0.1])]


def test_a_state_holds_the_norm_and_the_random_state(tmp_path):
    release = _Release(StochasticRounding("cpu", 1), 1.0)
    clipped(release, [5.0])
    release.on_state_save(tmp_path)
    values = torch.randn(100)
    expected = release.rounding.rounded(values)
    accelerator = SimpleNamespace(_optimizers=[SimpleNamespace(optimizer=torch.optim.AdamW(weights_of()))])
    resumed = _Release(StochasticRounding("cpu", 2), 1.0, accelerator=accelerator)
    resumed.on_state_load(tmp_path)
    assert clipped(resumed, [0.5]) == [pytest.approx([0.1])]
    assert torch.equal(resumed.rounding.rounded(values), expected)


@pytest.mark.parametrize(("limit", "warnings"), [(1.0, 1), (0.0, 0)])
def test_only_clipping_misses_the_norm_of_a_state_without_it(tmp_path, capsys, limit, warnings):
    accelerator = SimpleNamespace(_optimizers=[SimpleNamespace(optimizer=torch.optim.AdamW(weights_of()))])
    _Release(None, limit, accelerator=accelerator).on_state_load(tmp_path)
    assert capsys.readouterr().err.count("has no norm of its last step") == warnings


# --- the run ---------------------------------------------------------------------------------------------------------


def hooked(optimizer, rounding=None):
    """Return a release whose hooks are on an optimizer's weights."""
    release = _Release(rounding, 0.0)
    release.before_batch(SimpleNamespace(_optimizers=[SimpleNamespace(optimizer=optimizer)]))
    return release


def test_gradients_are_freed_during_the_backward_pass():
    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    release = hooked(torch.optim.AdamW(weights, lr=0.1))
    kept = []
    for weight in weights:  # called after the patch's
        weight.register_post_accumulate_grad_hook(lambda _: kept.append([each.grad is None for each in weights]))
    (weights[0] * weights[1] * weights[2]).sum().backward()
    assert kept == [[True] * 3] * 3
    assert all((weight != 1).all() for weight in weights)
    release.on_end()
    (weights[0] * 1).sum().backward()
    assert weights[0].grad is not None


def test_an_optimizer_that_needs_all_gradients_ends_the_run(capsys):
    prodigy = pytest.importorskip("prodigyopt").Prodigy
    with pytest.raises(SystemExit):
        hooked(prodigy(weights_of()))
    assert "cannot be combined with Prodigy, whose step depends on the gradients of all weights" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        hooked(torch.optim.LBFGS(weights_of()))
    assert "cannot step one weight at a time with LBFGS" in capsys.readouterr().err


REFUSED = {
    ("sdxl_train_network.py", ()): "fine-tune whole models, not with sdxl_train_network.py",
    ("train_textual_inversion.py", ()): "fine-tune whole models, not with train_textual_inversion.py",
    ("sdxl_train.py", (("gradient_accumulation_steps", 2),)): "no gradient is kept",
    ("sdxl_train.py", (("fused_optimizer_groups", 4),)): "remove --fused_optimizer_groups",
    ("flux_train.py", (("blockwise_fused_optimizers", True),)): "remove --blockwise_fused_optimizers",
    ("sdxl_train.py", (("deepspeed", True),)): "DeepSpeed steps its own optimizer",
    ("sdxl_train.py", (("mixed_precision", "fp16"),)): "needs --mixed_precision bf16 or no",
    ("sdxl_train.py", (("optimizer_type", "Prodigy"),)): "--optimizer_type Prodigy, whose step depends",
    ("sdxl_train.py", (("optimizer_type", "prodigyplus.ProdigyPlusScheduleFree"),)): "--optimizer_type ProdigyPlus",
    ("sdxl_train.py", (("optimizer_type", "DAdaptLion"),)): "--optimizer_type DAdaptLion, whose step depends",
}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_it_cannot_do_is_refused_before_a_model_is_loaded(case):
    script, values = case
    problems = [*options.impossible(Path(script), Namespace(**dict(values)), Settings(gradient_release=True))]
    assert any("--gradient_release" in problem and REFUSED[case] in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("script", "values"),
    [
        ("sdxl_train.py", {"optimizer_type": "AdamW8bit", "mixed_precision": "bf16"}),
        ("sdxl_train.py", {"use_8bit_adam": True}),
        ("flux_train.py", {"blocks_to_swap": 5, "optimizer_type": "AdamW"}),
        ("fine_tune.py", {}),
        ("train_db.py", {}),
    ],
)
def test_fine_tunes_with_any_other_optimizer_may_use_it(script, values):
    assert [*options.impossible(Path(script), Namespace(**values), Settings(gradient_release=True))] == []


def test_swapped_blocks_need_steps_during_the_backward_pass():
    (problem,) = options.impossible(Path("flux_train.py"), Namespace(blocks_to_swap=5), Settings())
    assert "or --gradient_release" in problem


@pytest.mark.parametrize(
    ("script", "values", "words"),
    [
        ("sdxl_train.py", {"full_bf16": True}, None),
        ("flux_train.py", {}, None),
        ("sdxl_train.py", {}, "would train float32 ones"),
        ("fine_tune.py", {"full_bf16": True}, "would train float32 ones"),
        ("sdxl_train.py", {"full_bf16": True, "optimizer_type": "AdamWScheduleFree"}, "changes the weights between steps"),
    ],
)
def test_master_weights_are_for_bf16_weights_that_only_steps_change(script, values, words):
    settings = Settings(gradient_release=True, master_weights=True)
    problems = [*options.impossible(Path(script), Namespace(mixed_precision="bf16", **values), settings)]
    assert [each for each in problems if "--master_weights" in each and (words or "") in each] == problems
    assert bool(problems) is bool(words)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "--master_weights needs --gradient_release"),
        ({"gradient_release": True, "stochastic_rounding": False}, "cannot be"),
    ],
)
def test_master_weights_without_what_they_need_are_an_error(values, words):
    with pytest.raises(UserError, match=words):
        gradient_release._wanted(Settings(master_weights=True, **values))


def test_several_processes_are_refused():
    settings = Settings(num_processes=2, gradient_release=True)
    (problem,) = options.impossible(Path("sdxl_train.py"), Namespace(mixed_precision="bf16"), settings)
    assert "remove it or use one process" in problem


@pytest.mark.parametrize(("processes", "offered"), [(1, True), (2, False)])
def test_several_processes_are_not_advised_to_use_it(processes, offered):
    values = {"optimizer_type": "Adafactor", "mixed_precision": "bf16", "num_processes": processes}
    changes = [
        step.changes for step in memory_savings.steps(memory_savings.Attempt("sdxl_train.py", values, lambda name: True))
    ]
    assert any("gradient_release" in each for each in changes) is offered
    assert any("fused_backward_pass" in each for each in changes) is offered


def test_one_name_for_every_option_that_steps_during_the_backward_pass():
    assert stepping_in_backward(Namespace(), Settings(gradient_release=True)) == "gradient_release"
    assert stepping_in_backward(Namespace(), Settings()) is None
    assert stepping_in_backward(Namespace(fused_backward_pass=True), Settings()) == "fused_backward_pass"


def test_the_automatic_preset_needs_no_estimate():
    argv = ["--gradient_release", "--preset", "auto", "--vram", "24gb"]
    command = CommandLine(Path("sdxl_train.py"), argv, {}, automatic=automatic)
    assert "24gb" in command.presets.label


def test_importing_it_imports_no_torch():
    for module in (weight_steps, probes, gradient_release):
        assert "torch" not in vars(importlib.import_module(module.__name__))


@pytest.mark.parametrize(("free", "warns"), [(7999, True), (8000, False)])
def test_too_little_host_memory_for_states_is_a_warning(monkeypatch, capsys, free, warns):
    monkeypatch.setattr("kohya_ext.patching.page_lock.free_memory", lambda: free)
    gradient_release._check_host_memory([torch.zeros(500, dtype=torch.bfloat16), torch.zeros(750)])
    assert ("GB of host memory" in capsys.readouterr().err) is warns
