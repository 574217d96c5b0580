"""The measures of the quality of an 8-bit base can fail, on a narrow block."""

import pytest

torch = pytest.importorskip("torch")

from benchmarks import base_weights_quality as quality  # noqa: E402
from benchmarks.family_blocks import CASES, Case  # noqa: E402
from kohya_ext.quantization import linear  # noqa: E402
from kohya_ext.sdscripts import families  # noqa: E402

CASE = Case(
    family="sdxl",
    title="narrow",
    module="torch.nn",
    build=lambda models: models.Sequential(
        models.LayerNorm(256), models.Linear(256, 512), models.GELU(), models.Linear(512, 256)
    ),
    streams=((64, 256),),
    call=lambda block, x: x + block(x),
)

MEASURES = ("output", "input_gradient", "lora_gradient")


@pytest.fixture(scope="module")
def base():
    return quality.base_of(CASE)


@pytest.fixture(scope="module")
def errors(base):
    return quality.block_errors(CASE, base)


def _error(errors, variant, size, measure, depth=1):
    return errors[variant][f"outliers {size}, depth {depth}"][measure][0]


def test_each_family_has_a_block():
    assert {case.family for case in CASES} == set(families.BY_NAME)


def test_a_family_without_an_8_bit_option_has_no_row_for_it():
    anima = next(case for case in CASES if case.family == "anima")
    assert "upstream" not in quality.variants(anima)
    assert "upstream" in quality.variants(CASE)


@pytest.mark.parametrize("measure", MEASURES)
def test_every_format_differs_more_than_bf16(errors, measure):
    usual = _error(errors, "bf16", 20, measure)
    assert 0 < usual < 0.05
    assert all(_error(errors, name, 20, measure) > usual for name in errors if name != "bf16")


@pytest.mark.parametrize("measure", ["output", "lora_gradient"])
def test_outliers_cost_int8_more_without_the_rotation(errors, measure):
    rotated, plain = ([_error(errors, name, size, measure) for size in (1, 20)] for name in ("int8", "int8 not rotated"))
    assert plain[1] > 1.3 * plain[0]
    assert plain[1] > 1.3 * rotated[1]


def test_errors_and_cosines_agree(errors):
    for variant in errors.values():
        for values in variant.values():
            for error, cosine in values.values():
                assert cosine <= 1 + 1e-9
                assert 1 - cosine <= error**2


def test_a_coarse_base_is_seen_in_what_a_lora_learns(base, monkeypatch):
    variants = quality.variants(CASE)
    monkeypatch.setattr(quality, "variants", lambda case: {"int8": variants["int8"]})
    fine = quality.learned(CASE, base, up=0.02)["losses"]
    assert fine["fp32"] < 0.9
    quantize = linear.quantize

    def coarse(rows, kind):
        values, scales = quantize(rows, kind)
        return (values.float() / 32).round().mul(32).clamp(-96, 96).to(kind), scales

    monkeypatch.setattr(linear, "quantize", coarse)
    assert quality.learned(CASE, base, up=0.02)["losses"]["int8"] > 1.5 * fine["int8"]


def test_inputs_are_the_same_for_every_variant():
    first, second = quality.inputs(CASE, 20), quality.inputs(CASE, 20)
    assert torch.equal(first.streams[0], second.streams[0])
    assert (first.streams[0].abs().mean((0, 1)) > 5).sum() == 2
