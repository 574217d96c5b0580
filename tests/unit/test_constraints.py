"""One table of what sd-scripts cannot combine, with three readers: preflight, presets, and ``plan``'s savings."""

from argparse import Namespace
from pathlib import Path

import pytest

from kohya_ext.config import preset_conflicts
from kohya_ext.config.settings import Settings
from kohya_ext.planning.memory_savings import Attempt, steps
from kohya_ext.preflight import options
from kohya_ext.sdscripts.constraints import CONSTRAINTS, VARIANTS, Run, newly_broken, stepping_in_backward

LORA, FINE_TUNE, FLUX, ANIMA = "sdxl_train_network.py", "sdxl_train.py", "flux_train_network.py", "anima_train.py"
ADAFACTOR = {"optimizer_type": "Adafactor", "mixed_precision": "bf16"}


@pytest.mark.parametrize(
    ("script", "base", "user", "change"),
    [
        (LORA, {"network_train_unet_only": True}, {"shuffle_caption": True}, {"cache_text_encoder_outputs": True}),
        (LORA, {"network_train_unet_only": True}, {"weighted_captions": True}, {"cache_text_encoder_outputs": True}),
        (LORA, {"network_train_unet_only": True}, {"caption_dropout_rate": 0.1}, {"cache_text_encoder_outputs": True}),
        (LORA, {}, {"color_aug": True}, {"cache_latents": True}),
        (LORA, {}, {"train_inpainting": True}, {"cache_latents": True}),
        (FINE_TUNE, ADAFACTOR, {"gradient_accumulation_steps": 2}, {"fused_backward_pass": True}),
        (FINE_TUNE, ADAFACTOR, {"fused_optimizer_groups": 2}, {"fused_backward_pass": True}),
        (FINE_TUNE, ADAFACTOR, {"optimizer_type": "AdamW"}, {"fused_backward_pass": True}),
        (FINE_TUNE, ADAFACTOR, {"mixed_precision": "fp16"}, {"full_bf16": True}),
        (FLUX, {}, {"cpu_offload_checkpointing": True}, {"blocks_to_swap": 17}),
        (ANIMA, ADAFACTOR | {"fused_backward_pass": True}, {"unsloth_offload_checkpointing": True}, {"blocks_to_swap": 13}),
    ],
)
def test_a_constraint_has_three_readers(script, base, user, change):
    (key,) = change
    values = {**base, **user}
    problems = [*options.impossible(Path(script), Namespace(**values, **change))]
    assert any(f"--{key} " in problem for problem in problems), problems
    assert not [problem for problem in options.impossible(Path(script), Namespace(**base, **change)) if f"--{key} " in problem]

    assert key in preset_conflicts.held_back(script, {**base, **change}, user)
    assert key not in preset_conflicts.held_back(script, {**base, **change}, {})

    offered = [step.changes for step in steps(Attempt(script, values, lambda key: True))]
    assert not [changes for changes in offered if key in changes and VARIANTS not in changes]


@pytest.mark.parametrize(
    "user", [{"shuffle_caption": True}, {"caption_tag_dropout_rate": 0.1}, {"caption_dropout_rate": 0.1}], ids=str
)
def test_cached_captions_change_with_variants(user):
    base, cache = {"network_train_unet_only": True}, {"cache_text_encoder_outputs": True}
    (problem,) = options.impossible(Path(LORA), Namespace(**base, **user, **cache))
    assert "--cached_caption_variants 8" in problem
    assert not [*options.impossible(Path(LORA), Namespace(**base, **user, **cache), Settings(cached_caption_variants=8))]

    (reason,) = preset_conflicts.held_back(LORA, {**base, **cache}, user).values()
    assert "--cached_caption_variants 8 would keep it" in reason.text
    assert preset_conflicts.held_back(LORA, {**base, **cache}, {**user, VARIANTS: 8}) == {}

    offered = [step.changes for step in steps(Attempt(LORA, {**base, **user}, lambda key: True))]
    assert {**cache, VARIANTS: 8} in offered
    given = [step.changes for step in steps(Attempt(LORA, {**base, **user, VARIANTS: 4}, lambda key: True))]
    assert cache in given


def test_split_weights_of_a_flux_lora_are_refused():
    given = {"network_module": "networks.lora_flux", "network_args": ["rank_dropout=0.1", "split_qkv=True"]}
    (problem,) = options.impossible(Path(FLUX), Namespace(**given))
    assert "--network_args split_qkv=True ends networks.lora_flux with a ValueError" in problem
    assert not [*options.impossible(Path(FLUX), Namespace(**{**given, "network_args": ["split_qkv=False"]}))]


@pytest.mark.parametrize(
    ("given", "fails"),
    [
        ({"initial_step": 3}, True),
        ({"initial_epoch": 2}, True),
        ({"initial_step": 0, "initial_epoch": 2}, False),
        ({"initial_epoch": 1}, False),
        ({}, False),
        ({"initial_step": 3, "gradient_accumulation_steps": 1}, False),
        ({"initial_step": 3, "skip_until_initial_step": False}, False),
    ],
    ids=str,
)
def test_accumulation_and_a_first_step_until_which_is_skipped_are_refused(given, fails):
    values = {"skip_until_initial_step": True, "gradient_accumulation_steps": 2, **given}
    problems = [*options.impossible(Path(LORA), Namespace(**values))]
    assert ["numbers its steps from below 0" in each for each in problems] == [True] * fails


def test_token_warm_up_stays_refused():
    run = Run(LORA, {"token_warmup_step": 10, VARIANTS: 8})
    assert newly_broken(run, {"cache_text_encoder_outputs": True})


def test_a_preset_value_is_kept_where_dropping_it_mends_nothing():
    preset = {"cache_latents_to_disk": True}
    user = {"cache_latents": True, "color_aug": True}
    assert preset_conflicts.held_back(LORA, preset, user) == {}


def test_what_a_run_already_breaks_is_not_newly_broken():
    run = Run(LORA, {"cache_latents": True, "color_aug": True})
    assert not newly_broken(run, {"random_crop": True})
    assert newly_broken(run, {"cache_text_encoder_outputs": True})


def test_messages_have_their_fields():
    for constraint in CONSTRAINTS:
        message = constraint.message.format(option="a", first="b", other="c", run=Run(LORA, {}))
        assert "{" not in message


def test_the_option_that_fuses_the_optimizer_is_named():
    assert stepping_in_backward(Namespace(fused_backward_pass=False, fused_optimizer_groups=4)) == "fused_optimizer_groups"
    assert stepping_in_backward(Namespace(fused_optimizer_groups=None)) is None
