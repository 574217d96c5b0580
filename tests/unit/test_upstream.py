"""The package's table of upstream's fastest configurations, and what `presets list` makes of it."""

import json
import math

import pytest

from kohya_ext.commands import presets
from kohya_ext.estimate import gpus, step_time
from kohya_ext.planning import upstream
from kohya_ext.planning.tiers import fits, tiers

TIERS = {tier.name: tier for tier in (*tiers(), *tiers(experimental=True))}


@pytest.mark.parametrize("name", TIERS)
def test_upstreams_configuration_fits_and_has_none_of_the_extensions_options(name):
    """If the table lacks a tier, run: python tools/make_upstream_table.py"""
    tier = TIERS[name]
    best = upstream.fastest(tier)
    if best is None:
        return
    assert fits(best.estimate, tier.card)
    assert best.estimate.images % tier.config.train_batch_size == 0
    config = best.estimate.config
    ours = ("base_precision", "gradient_checkpointing_ratio", "fused_operations", "selective_torch_compile", "cuda_graphs")
    assert not {key: config[key] for key in ours if config.get(key)}
    assert best.estimate.work is not None


@pytest.mark.parametrize("name", [name for name, tier in TIERS.items() if tier.about.get("experimental")])
def test_an_8_bit_preset_is_faster_than_upstream_where_that_fits(name):
    tier = TIERS[name]
    best, card = upstream.fastest(tier), gpus.typical(tier.card)
    if best is not None and card.reason_without_kernels("int8") is None:
        ours, theirs = (step_time.seconds_per_image(estimate, card) for estimate in (tier.estimate, best.estimate))
        assert ours < 0.8 * theirs


@pytest.mark.thorough
def test_rows_have_seconds_of_both():
    rows = {f"{row.family}/{row.name}": row for row in presets.rows()}
    for name, tier in TIERS.items():
        row, best = rows[name], upstream.fastest(tier)
        assert row.gpu == gpus.typical(tier.card).name
        assert (row.upstream == math.inf) == (best is None)
        assert row.seconds is None or row.seconds > 0
    here = {f"{row.family}/{row.name}": row for row in presets.rows(gpus.named("H100"))}
    assert {row.gpu for row in here.values() if row.needs} == {"H100 SXM"}
    assert here["sdxl-lora/12gb"].seconds < rows["sdxl-lora/12gb"].seconds
    assert presets.seconds_text(math.inf) == "does not fit"


def test_an_older_table_is_not_read(tmp_path):
    file = tmp_path / upstream.TABLE
    upstream.write_table(file, {"sdxl-lora 12GB batch 1": None})
    assert upstream.read_table(file) == {"sdxl-lora 12GB batch 1": None}
    table = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**table, "method": table["method"] - 1}), encoding="utf-8")
    assert upstream.read_table(file) == {}
