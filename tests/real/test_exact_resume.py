"""A resume from each state of a run gives the file of the undisturbed run, bit for bit."""

import os

import pytest

from tests.real.test_losing_nothing import FULL, LORA, SCRIPTS, assert_nothing_failed, read, same

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.thorough

WORDS = ("--shuffle_caption", "--caption_separator", " ")
WARM_UP = (*WORDS, "--token_warmup_step", "12", "--token_warmup_min", "1")
EPOCHS = ("--max_train_epochs", "2", "--save_every_n_epochs", "1", "--save_state")
MIDDLE = ("--save_every_n_steps", "11")
WORKERS = ("--max_data_loader_n_workers", "2")
TIMED = ("--save_state_every_n_minutes", "0", "--save_last_n_timed_states", "99")
VARIED = ("--cache_text_encoder_outputs", "--network_train_unet_only", *WORDS, "--caption_dropout_rate", "0.3")
VARIANTS = (*VARIED, "--cached_caption_variants", "5")
PRESERVED = ("--output_preservation", "sks=person", "--network_dropout", "0.1")
SCHEDULE = ("--lr_scheduler", "cosine", "--lr_warmup_steps", "1")
FUSED = (*SCHEDULE, "--max_grad_norm", "0", "--save_every_n_steps", "2", "--save_state", "--max_train_steps", "4")
ADAFACTOR = ("--optimizer_type", "Adafactor", "--optimizer_args", "relative_step=False", "scale_parameter=False")
AFTER_TWO_STEPS = ("--save_every_n_steps", "2", "--save_state")
END_OF_EPOCH, IN_THE_SECOND, AFTER_TWO = "tiny-000001-state", "tiny-step00000011-state", "tiny-step00000002-state"

#: Case -> script, arguments, and the states to resume. An epoch has eight batches.
CASES = {
    "epochs": (LORA, (*WARM_UP, *EPOCHS, *MIDDLE), (END_OF_EPOCH, IN_THE_SECOND)),
    "epochs of a fine-tune": (FULL, (*WARM_UP, *EPOCHS, *MIDDLE), (END_OF_EPOCH, IN_THE_SECOND)),
    "epochs of FLUX": ("flux_train_network.py", (*WARM_UP, *EPOCHS, *MIDDLE), (END_OF_EPOCH, IN_THE_SECOND)),
    "epochs of SD 1.5": ("train_network.py", (*WARM_UP, *EPOCHS, *MIDDLE), (END_OF_EPOCH, IN_THE_SECOND)),
    "workers": (LORA, (*WORDS, *EPOCHS, *MIDDLE, *WORKERS), (END_OF_EPOCH, IN_THE_SECOND)),
    "persistent workers": (
        LORA,
        (*WORDS, *EPOCHS, "--save_every_n_steps", "9", *WORKERS, "--persistent_data_loader_workers"),
        (END_OF_EPOCH, "tiny-step00000009-state"),
    ),
    "cached caption variants": (LORA, (*VARIANTS, *EPOCHS, *MIDDLE, *WORKERS), (END_OF_EPOCH, IN_THE_SECOND)),
    "cached caption variants of FLUX": (
        "flux_train_network.py",
        (*VARIANTS, "--cache_text_encoder_outputs_to_disk", *EPOCHS, *MIDDLE),
        (END_OF_EPOCH, IN_THE_SECOND),
    ),
    "output preservation": (LORA, (*PRESERVED, *WORDS, *EPOCHS, *MIDDLE), (END_OF_EPOCH, IN_THE_SECOND)),
    "output preservation of cached variants of FLUX": (
        "flux_train_network.py",
        (*PRESERVED, *VARIANTS, "--cache_text_encoder_outputs_to_disk", *EPOCHS, *MIDDLE, *WORKERS),
        (END_OF_EPOCH, IN_THE_SECOND),
    ),
    "from the second epoch on": (
        LORA,
        ("--max_train_epochs", "3", "--initial_epoch", "2", *MIDDLE, "--save_every_n_epochs", "1", "--save_state"),
        ("tiny-000002-state", IN_THE_SECOND),
    ),
    "schedule-free": (
        LORA,
        ("--optimizer_type", "RAdamScheduleFree", "--max_train_epochs", "2", *TIMED, "--save_every_n_steps", "6"),
        ("tiny-rolling00000003-state", "tiny-rolling00000010-state"),
    ),
    "ProdigyPlus": (
        LORA,
        ("--optimizer_type", "prodigyplus.ProdigyPlusScheduleFree", "--learning_rate", "1", "--max_train_epochs", "2", *TIMED),
        ("tiny-rolling00000010-state",),
    ),
    "GGPO": (
        "flux_train_network.py",
        ("--network_args", "ggpo_sigma=0.03", "ggpo_beta=0.01", "--save_every_n_steps", "2", "--save_state"),
        (AFTER_TWO,),
    ),
    "fused groups of SDXL": (FULL, (*FUSED, "--fused_optimizer_groups", "4"), (AFTER_TWO,)),
    "fused blocks of FLUX": ("flux_train.py", (*FUSED, "--blockwise_fused_optimizers"), (AFTER_TWO,)),
    "fused blocks of SD 3": ("sd3_train.py", (*FUSED, "--blockwise_fused_optimizers"), (AFTER_TWO,)),
    "fused blocks of Lumina": ("lumina_train.py", (*FUSED, "--blockwise_fused_optimizers"), (AFTER_TWO,)),
    "clipped by gradients that no optimizer clears": (
        LORA,
        ("--text_encoder_lr", "0", "--max_grad_norm", "1e-4", "--optimizer_type", "SGDNesterov", *AFTER_TWO_STEPS),
        (AFTER_TWO,),
    ),
    "bf16 weights of FLUX": (
        "flux_train.py",
        (*ADAFACTOR, *FUSED, "--mixed_precision", "bf16", "--fused_backward_pass"),
        (AFTER_TWO,),
    ),
    "ControlNet of SDXL": (
        "sdxl_train_control_net.py",
        ("--save_every_n_steps", "2", "--save_state"),
        (AFTER_TWO,),
    ),
}


#: The generation that runs a case by default; the other cases are slow.
DEFAULTS = {"epochs": pytest.mark.newest, "fused blocks of FLUX": pytest.mark.oldest}


@pytest.mark.parametrize("case", [pytest.param(case, marks=DEFAULTS.get(case, pytest.mark.slow)) for case in CASES])
def test_resume_equals_the_undisturbed_run(checkout, train, case):
    script, options, states = CASES[case]
    undisturbed = train(checkout, script, *options)
    assert undisturbed.tensors
    different = {}
    for state in states:
        resumed = train(checkout, script, *options, "--resume", str(undisturbed.folder / state))
        if not same(resumed.tensors, undisturbed.tensors):
            different[state] = max(
                (tensor.double() - undisturbed.tensors[name].double()).abs().max().item()
                for name, tensor in resumed.tensors.items()
            )
    assert not different


@pytest.mark.thorough
@pytest.mark.newest
@pytest.mark.parametrize("script", [LORA, "flux_train_network.py"])
@pytest.mark.parametrize("option", ["--network_train_unet_only", ""])
def test_a_state_of_other_modules_is_an_error_before_a_model_is_loaded(checkout, train, script, option):
    run = train(checkout, script, *filter(None, [option]), *AFTER_TWO_STEPS)
    resume = (*AFTER_TWO_STEPS, "--resume", str(run.folder / AFTER_TWO))
    again, other = train(checkout, script, *filter(None, [option]), *resume), ("", "--network_train_unet_only")[not option]
    assert same(again.tensors, run.tensors)
    refused = train(checkout, script, *filter(None, [other]), *resume)
    assert refused.code == 2
    assert ("a text encoder; add --network_train_unet_only" if option else "remove that option") in refused.output


@pytest.mark.parametrize("scripts", SCRIPTS)
def test_resume_at_the_last_step_writes_the_final_model_once(checkout, train, scripts, tmp_path):
    """As after a kill between the last state and the final model, of which an earlier run left another. The output name has a
    folder.
    """
    folder, prompts = tmp_path / "cats", tmp_path / "prompts.txt"
    folder.mkdir()
    prompts.write_text("a cat --w 64 --h 64 --s 1 --d 1")
    options = (*TIMED, "--max_train_steps", "3", "--output_name", "cats/tiny", "--sample_prompts", str(prompts), "--ema")
    options += ("--sample_at_first", "--sample_every_n_steps", "99", "--resume", "auto")
    first = train(checkout, scripts[checkout.layout], *options, output=tmp_path)
    assert first.code == 0, first.output[-4000:]
    assert "written to" in first.output
    assert_nothing_failed(first)
    model, average, samples = folder / "tiny.safetensors", folder / "tiny-ema.safetensors", len(list(tmp_path.rglob("*.png")))
    expected, expected_average = read(model), read(average)
    assert not same(expected, expected_average)
    average.replace(model)
    os.utime(model, (0, 0))

    resumed = train(checkout, scripts[checkout.layout], *options, output=tmp_path)
    assert resumed.code == 0, resumed.output[-4000:]
    assert "all 3 steps are trained; writing the final model" in resumed.output
    assert same(read(model), expected)
    assert same(read(average), expected_average)
    assert same(read(folder / "tiny.previous.safetensors"), expected_average), "the earlier run's model is lost"
    assert len(list(tmp_path.rglob("*.png"))) == samples

    written = model.stat().st_mtime_ns
    again = train(checkout, scripts[checkout.layout], *options, output=tmp_path)
    assert again.code == 0, again.output[-4000:]
    assert f"this run is finished: {model} was written after" in again.output
    assert model.stat().st_mtime_ns == written
