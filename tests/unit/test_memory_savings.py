"""The memory savings that apply to a run, their order, and their changes of the command line."""

import importlib.util
from dataclasses import replace

import pytest

from kohya_ext.planning.memory_savings import MEMORY_SAVINGS, Attempt, Step, after, less_checkpointing, steps

LORA, FULL, FLUX = "sdxl_train_network.py", "sdxl_train.py", "flux_train_network.py"


def attempt(script: str, unknown: tuple[str, ...] = (), **values: object) -> Attempt:
    return Attempt(script, values, lambda key: key not in unknown)


def apply_all(run: Attempt) -> list[Step]:
    """Apply the first saving until none is left."""
    taken: list[Step] = []
    while (step := next(steps(run), None)) is not None:
        taken.append(step)
        run = after(run, step)
        assert len(taken) < 40, "savings must run out"
    return taken


@pytest.fixture(autouse=True)
def _eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make bitsandbytes importable, whether it is installed or not."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "bitsandbytes" else find_spec(name))


def test_a_fine_tune_reduces_precision_first_and_resolution_last() -> None:
    taken = apply_all(attempt(FULL, resolution="1024,1024", train_batch_size=1))
    assert [step.saving.name for step in taken] == [
        *("attention", "mixed precision", "cached latents", "cached text encoder outputs", "checkpointing"),
        *("8-bit optimizer", "Adafactor", "fused backward pass", "pure bf16", "optimizer states on the host"),
        *["resolution"] * 3,
    ]
    assert [step.changes["resolution"] for step in taken[-3:]] == ["768,768", "576,576", "512,512"]
    assert "down to half of the model's side" in taken[-1].saving.costs


def test_flux_uses_fp8_first_and_then_swaps_more_blocks() -> None:
    done = {"mixed_precision": "bf16", "network_train_unet_only": True, "cache_latents": True}
    run = attempt(FLUX, **done, cache_text_encoder_outputs=True, gradient_checkpointing=True, optimizer_type="AdamW8bit")
    assert [dict(step.changes) for step in apply_all(run)] == [
        {"fp8_base": True},
        {"blocks_to_swap": 17},
        {"blocks_to_swap": 34},
    ]


def test_an_8_bit_base_is_experimental_and_replaces_fp8() -> None:
    run = attempt(FLUX, mixed_precision="bf16", network_module="networks.lora_flux", fp8_base=True)
    assert "8-bit base" not in {step.saving.name for step in steps(run)}
    (step,) = [step for step in steps(replace(run, experimental=True)) if step.saving.name == "8-bit base"]
    assert step.words == ["--base_precision", "int8", "--no-fp8_base"]
    after_it = {step.saving.name for step in steps(after(replace(run, experimental=True), step))}
    assert not {"8-bit base", "fp8 base"} & after_it
    other = replace(run, experimental=True, values={**run.values, "network_module": "networks.oft"})
    assert "8-bit base" not in {step.saving.name for step in steps(other)}


@pytest.mark.parametrize(
    ("fused", "changes"),
    [
        ({}, {"blocks_to_swap": 17, "fused_backward_pass": True}),
        ({"fused_backward_pass": True}, {"blocks_to_swap": 17}),
        ({"blockwise_fused_optimizers": True, "optimizer_type": "AdamW"}, {"blocks_to_swap": 17}),
    ],
)
def test_a_fine_tune_swaps_blocks_only_if_the_optimizer_steps_within_the_backward_pass(fused, changes) -> None:
    run = attempt("flux_train.py", **{"optimizer_type": "Adafactor", **fused})
    assert changes in [step.changes for step in steps(run) if step.saving.name == "block swap"]


def test_the_effective_batch_is_kept() -> None:
    run = attempt(LORA, train_batch_size=6, gradient_accumulation_steps=2)
    sizes = [(6, 2)]
    for step in apply_all(run):
        if step.saving.name == "batch":
            sizes.append((step.changes["train_batch_size"], step.changes["gradient_accumulation_steps"]))
    assert sizes == [(6, 2), (3, 4), (1, 12)]


@pytest.mark.parametrize(
    ("run", "missing"),
    [
        (attempt(LORA, xformers=True), "attention"),
        (attempt(LORA, random_crop=True), "cached latents"),
        (attempt(LORA), "cached text encoder outputs"),  # the text encoders are trained
        (attempt(LORA, network_train_unet_only=True, shuffle_caption=True), "cached text encoder outputs"),
        (
            attempt("train_network.py", ("cache_text_encoder_outputs",), network_train_unet_only=True),
            "cached text encoder outputs",
        ),
        (attempt(LORA, dataset_config="d.toml", train_batch_size=4), "batch"),
        (attempt(FULL, fused_backward_pass=True, train_batch_size=4), "batch"),
        (attempt(FULL, optimizer_type="Lion"), "Adafactor"),
        (attempt(LORA), "Adafactor"),
        (attempt(FULL, optimizer_type="Adafactor", gradient_accumulation_steps=2), "fused backward pass"),
        (attempt(FULL), "pure bf16"),  # needs mixed precision first
        (attempt(LORA), "fp8 base"),
        (attempt(LORA, mixed_precision="bf16"), "block swap"),
        (attempt("lumina_train_network.py", mixed_precision="bf16"), "block swap"),
        (attempt(FLUX, cpu_offload_checkpointing=True), "block swap"),
        (attempt("flux_train.py", optimizer_type="AdamW8bit"), "block swap"),  # its step would find weights in host memory
        (attempt("anima_train_network.py", mixed_precision="bf16"), "fp8 base"),
        (attempt(LORA, network_train_unet_only=True), "text encoders frozen"),
        (attempt(LORA, resolution="512"), "resolution"),
    ],
)
def test_a_saving_that_cannot_apply_is_not_offered(run: Attempt, missing: str) -> None:
    assert missing in {saving.name for saving in MEMORY_SAVINGS}
    assert missing not in {step.saving.name for step in steps(run)}


def test_only_savings_that_lower_the_current_peak_are_offered() -> None:
    run = attempt(LORA, vae_batch_size=4, train_batch_size=4, mixed_precision="bf16", sdpa=True, resolution="1024")
    assert [step.saving.name for step in steps(run, "caching latents")] == ["vae batch", "resolution"]
    at_the_step = [step.saving.name for step in steps(run, "optimizer step")]
    assert "8-bit optimizer" in at_the_step
    assert not {"checkpointing", "batch", "resolution"} & set(at_the_step)


def test_compiled_blocks_with_checkpointing_use_no_activation_budget() -> None:
    run = attempt(LORA, activation_memory_budget=0.5)
    (step,) = [step for step in steps(run) if step.saving.name == "checkpointing"]
    assert step.changes == {"gradient_checkpointing": True, "activation_memory_budget": 1}


def test_freed_blocks_are_checkpointed_again() -> None:
    share = attempt(LORA, gradient_checkpointing=True, gradient_checkpointing_ratio=0.4)
    assert {"gradient_checkpointing_ratio": 1} in [step.changes for step in steps(share)]
    budget = attempt(LORA, gradient_checkpointing=True, vram_budget=14 * 10**9)
    everything = {"gradient_checkpointing": True, "gradient_checkpointing_ratio": 1}
    assert everything in [step.changes for step in steps(budget)]
    assert "checkpointing" not in {step.saving.name for step in steps(replace(budget, values={**budget.values, **everything}))}


def test_attention_is_recomputed_after_every_block() -> None:
    run = attempt(FLUX, gradient_checkpointing=True, gradient_checkpointing_ratio=0.5, keep_attention=True)
    taken = [step.words for step in apply_all(run) if step.saving.name in ("checkpointing", "recomputed attention")]
    assert taken == [["--gradient_checkpointing_ratio", "1"], ["--no-keep_attention"]]


def test_transformers_keep_attention_before_they_checkpoint_fewer_blocks() -> None:
    kept = {"keep_attention": True}
    assert less_checkpointing(attempt(FLUX), [0.5]) == [{"gradient_checkpointing_ratio": 0.5, **kept}, kept]
    assert less_checkpointing(attempt(LORA), [0.5]) == [{"gradient_checkpointing_ratio": 0.5}]
