"""Options that add no work to a step: it waits, launches and holds as much as without them, on the virtual GPU."""

import pytest

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.thorough, pytest.mark.newest]

LORA, FLUX = "sdxl_train_network.py", "flux_train_network.py"
BF16 = ("--mixed_precision", "bf16")
CACHED = (*BF16, "--cache_text_encoder_outputs", "--network_train_unet_only")
SHUFFLED = ("--shuffle_caption", "--caption_separator", " ", "--caption_dropout_rate", "0.3", "--cached_caption_variants", "3")

#: Name -> script, options of both runs, and options of the extension's run.
CASES = {
    "cached caption variants": (LORA, CACHED, SHUFFLED),
    "cached caption variants of FLUX on disk": (FLUX, (*CACHED, "--cache_text_encoder_outputs_to_disk"), SHUFFLED),
    "sample multipliers": (LORA, BF16, ("--sample_multipliers", "0,1")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_costs_what_it_does_without_them(checkout, train_on_gpu, tmp_path, name):
    script, options, added = CASES[name]
    if name == "sample multipliers":
        (tmp_path / "prompts.txt").write_text("sks style --w 64 --h 64 --s 1 --d 1", encoding="utf-8")
        options = (*options, "--sample_prompts", str(tmp_path / "prompts.txt"))
    without, ours = train_on_gpu(checkout, script, *options), train_on_gpu(checkout, script, *options, *added)
    costs, usual = ([(step.syncs, step.launches, step.bytes) for step in run.later_steps] for run in (ours, without))
    print(name, costs, usual)
    assert costs == usual
    assert "failed" not in ours.output
    assert ("sampling with the multipliers 0, 1" in ours.output) == (name == "sample multipliers")
