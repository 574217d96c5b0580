"""A layer norm that waits for its modulation."""

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.kernels.modulation import PendingNorm, is_modulation  # noqa: E402
from tests.counting import recorded_operators  # noqa: E402

WIDTH = 16
NORM = torch.nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)

#: Shape of the activation -> shapes of modulations: one for the batch, one for each image.
SHAPES = {
    (1, 6, WIDTH): ((1, 1, WIDTH),),
    (3, 6, WIDTH): ((1, 1, WIDTH), (3, 1, WIDTH)),
    (2, 1, 4, 5, WIDTH): ((1, 1, 1, 1, WIDTH), (2, 1, 1, 1, WIDTH)),
}

FORMULAS = {
    "factor first": lambda norm, scale, shift: (1 + scale) * norm + shift,
    "norm first": lambda norm, scale, shift: norm * (1 + scale) + shift,
    "shift first": lambda norm, scale, shift: shift + norm * (1 + scale),
}


def _inputs(*shapes, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize(("shape", "of_modulation"), [(shape, each) for shape, every in SHAPES.items() for each in every])
def test_values_and_gradients_are_those_of_the_formula(shape, of_modulation, formula):
    results = []
    for is_fused in (False, True):
        x, scale, shift = _inputs(shape, of_modulation, of_modulation)
        with recorded_operators() as operators:
            result = FORMULAS[formula](PendingNorm(NORM, x) if is_fused else NORM(x), scale, shift)
        assert ("aten::mul" in operators) is not is_fused
        (result**3).sum().backward()
        results.append([result, x.grad, scale.grad, shift.grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("trained", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_wanted_gradients_are_computed(trained):
    inputs = _inputs((2, 6, WIDTH), (2, 1, WIDTH), (2, 1, WIDTH))
    for value, is_trained in zip(inputs, trained, strict=True):
        value.requires_grad_(is_trained)
    x, scale, shift = inputs
    ((1 + scale) * PendingNorm(NORM, x) + shift).sum().backward()
    assert [value.grad is not None for value in inputs] == list(trained)


@pytest.mark.parametrize(
    "use",
    [
        lambda norm, other: torch.cat([norm, norm]),
        lambda norm, other: norm + 1,
        lambda norm, other: norm * 2 + other,
        lambda norm, other: other - norm * other,
        lambda norm, other: torch.add(other, norm, alpha=2),
        lambda norm, other: other.clone().mul_(norm),
        lambda norm, other: norm.transpose(0, 1),
        lambda norm, other: norm[:, 1:],
        lambda norm, other: -norm - 2,
        lambda norm, other: (1 - norm) / 2,
        lambda norm, other: norm @ other.transpose(1, 2),
        lambda norm, other: torch.stack([*norm]),
        lambda norm, other: torch.mul(other, other=norm),
        lambda norm, other: (1 + other) * norm,
        lambda norm, other: (1 + other[:, :1]) * norm + other,
        lambda norm, other: (1 + other[:, :1].float()) * norm + other[:, :1],
        lambda norm, other: (1 + other[:1, :1]) * norm + other[:, :1],
    ],
)
def test_other_uses_compute_the_norm(use):
    """Among them factors and shifts for each token, of other types, and of different shapes."""
    x, other = (value.detach() for value in _inputs((2, 6, WIDTH), (2, 6, WIDTH)))
    result, expected = use(PendingNorm(NORM, x), other), use(NORM(x), other)
    torch.testing.assert_close(result.value() if isinstance(result, PendingNorm) else result, expected)


def test_shapes_of_modulations():
    x = torch.zeros(2, 6, WIDTH)
    assert all(is_modulation(torch.zeros(shape), x) for shape in ((2, 1, WIDTH), (1, 1, WIDTH)))
    assert not any(is_modulation(torch.zeros(shape), x) for shape in ((2, 6, WIDTH), (1, 6, WIDTH), (WIDTH,), (2, 1, 1)))
    assert not is_modulation(torch.zeros(2, 1, WIDTH).bfloat16(), x)
    assert not is_modulation(2.0, x)
