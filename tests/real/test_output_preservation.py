"""--output_preservation: the LoRA's output on class captions is held to the base model's."""

import dataclasses
import json

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.tiny import arguments  # noqa: E402

FAMILIES = {family: script for script, families in arguments.SCRIPTS.items() for family in families if "_network" in script}
LORA = "sdxl_train_network.py"
OPTION = ("--output_preservation", "sks=person")
UNET_ONLY = ("--network_train_unet_only",)
CACHED = (*UNET_ONLY, "--cache_text_encoder_outputs")
ON_DISK = (*CACHED, "--cache_text_encoder_outputs_to_disk")

#: The LoRA's output differs from the base model's from the second step on.
SGD = ("--optimizer_type", "SGD", "--learning_rate", "1", "--max_grad_norm", "0", "--max_train_steps", "2")

#: Family -> a learning rate with which the LoRA's output differs by as much as in the others.
RATES = {"sd3": ("--learning_rate", "300"), "lumina": ("--learning_rate", "10")}
STRONG = ("--output_preservation_multiplier", "10")

#: A script that computes both losses in upstream's step with one backward pass, without the extension.
REFERENCE = """
import importlib, random, sys

sys.path[0] = {checkout!r}
import torch

script = importlib.import_module({module!r})
base = importlib.import_module("train_network").NetworkTrainer
kind = next(each for each in vars(script).values() if isinstance(each, type) and issubclass(each, base) and each is not base) \\
    if {module!r} != "train_network" else base


def states():
    return torch.get_rng_state(), random.getstate()


def restore(kept):
    torch.set_rng_state(kept[0])
    random.setstate(kept[1])


class Trainer(kind):
    def process_batch(self, batch, text_encoders, *rest, **kwargs):
        self.began = states()  # upstream leaves T5's dropout on unless its outputs are cached
        for encoder in text_encoders if {cached} else ():
            encoder.eval()
        self.tokens = rest[9].tokenize([caption.replace("sks", "person") for caption in batch["captions"]])
        encoders = self.get_models_for_text_encoding(rest[7], rest[6], text_encoders)
        self.encode = lambda: rest[8].encode_tokens(rest[9], encoders, self.tokens)
        return super().process_batch(batch, text_encoders, *rest, **kwargs) + {multiplier} * self.preservation

    def get_noise_pred_and_target(self, args, accelerator, scheduler, latents, batch, texts, unet, network, *rest, **kwargs):
        def predict(multiplier, is_train):
            restore(self.began)
            accelerator.unwrap_model(network).set_multiplier(multiplier)
            with torch.set_grad_enabled(is_train):
                return kind.get_noise_pred_and_target(
                    self, args, accelerator, scheduler, latents, batch, self.encode(), unet, network, *rest, is_train=is_train
                )[0]

        before = states()
        prior = predict(0.0, False)
        self.preservation = ((predict(1.0, True) - prior) ** 2).mean()
        restore(before)
        return super().get_noise_pred_and_target(
            args, accelerator, scheduler, latents, batch, texts, unet, network, *rest, **kwargs
        )


parser = script.setup_parser()
Trainer().train(parser.parse_args())
"""


@pytest.fixture
def reference(train, tmp_path):
    """Return a function that trains with the hand-written loss."""

    def run(checkout, script, *more, multiplier=10, cached=False, **options):
        module = script.removesuffix(".py")
        source = REFERENCE.format(checkout=str(checkout.path), module=module, multiplier=multiplier, cached=cached)
        (tmp_path / script).write_text(source, encoding="utf-8")
        return train(dataclasses.replace(checkout, path=tmp_path), script, *more, start="plain", **options)

    return run


def lines(run):
    """Return the lines of the steps in a run's journal."""
    journal = (run.folder / f"{arguments.OUTPUT_NAME}.journal.jsonl").read_text(encoding="utf-8")
    return [line for line in map(json.loads, journal.splitlines()) if line["kind"] == "step"]


def distance(first, second):
    """Return the Euclidean distance of two runs' weights."""
    assert first.tensors.keys() == second.tensors.keys()
    return sum((first.tensors[name].double() - second.tensors[name].double()).square().sum() for name in first.tensors) ** 0.5


VARIANTS = ("--cached_caption_variants", "3", "--shuffle_caption", "--caption_dropout_rate", "0.3", *ON_DISK)


def _thorough(is_wanted):
    return pytest.mark.thorough if is_wanted else pytest.mark.slow


CASES = [(family, texts) for family in FAMILIES for texts in ("encoded", "cached", "on disk")]
DEFAULT = (("sdxl", "encoded"),)
THOROUGH = (("flux", "cached"), ("sd3", "cached"), ("anima", "encoded"), ("lumina", "on disk"))


@pytest.mark.newest
@pytest.mark.parametrize(
    ("family", "texts"),
    [
        pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.thorough if case in THOROUGH else pytest.mark.slow)
        for case in CASES
        if case[0] != "hunyuan-image" and case != ("sd15", "cached") and case != ("sd15", "on disk")
    ],
)
def test_a_step_adds_the_gradient_of_the_preservation_loss(checkout, train, reference, family, texts):
    """The reference encodes class captions in each step, and computes the gradient of the sum of both losses."""
    script, options = FAMILIES[family], {"encoded": (), "cached": CACHED, "on disk": ON_DISK}[texts]
    words = (*SGD, *RATES.get(family, ()))
    ours = train(checkout, script, *OPTION, *STRONG, *words, *options, family=family)
    expected = reference(checkout, script, *words, *options[:1], cached=bool(options), family=family)
    assert distance(ours, expected) < 1e-5
    first, second = lines(ours)
    assert first["preservation_loss"] == 0
    assert second["preservation_loss"] > 1e-5


@pytest.mark.newest
@pytest.mark.parametrize("family", [pytest.param(each, marks=_thorough(each == "sdxl")) for each in FAMILIES])
def test_a_multiplier_of_0_changes_nothing(checkout, train, family):
    script, options = FAMILIES[family], ON_DISK if family == "hunyuan-image" else ()
    ours = train(checkout, script, *OPTION, "--output_preservation_multiplier", "0", *options, family=family)
    without = train(checkout, script, *options, family=family)
    assert distance(ours, without) == 0
    assert [line["loss"] for line in lines(ours)] == [line["loss"] for line in lines(without)]
    assert lines(ours)[-1]["preservation_loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("texts", [(), CACHED], ids=["encoded", "cached"])
@pytest.mark.parametrize(
    "options",
    [
        ("--gradient_accumulation_steps", "2", "--train_batch_size", "2"),
        ("--network_dropout", "0.3"),
        ("--mixed_precision", "bf16"),
        ("--no-gradient_checkpointing",),
        ("--max_data_loader_n_workers", "2"),
    ],
    ids=lambda options: " ".join(options[-2:]),
)
def test_other_options_keep_the_gradient(checkout, train, reference, options, texts):
    options = (*options, *texts[:1])
    ours = train(checkout, LORA, *OPTION, *STRONG, *SGD, *options, *texts[1:])
    expected = reference(
        checkout, LORA, *SGD, *[word for word in options if word != "--no-gradient_checkpointing"], cached=bool(texts)
    )
    assert distance(ours, expected) < (0.02 if "bf16" in options else 1e-5)
    assert lines(ours)[-1]["preservation_loss"] > 1e-6


@pytest.mark.newest
@pytest.mark.parametrize("family", [pytest.param(each, marks=_thorough(each == "flux")) for each in ("sdxl", "flux")])
def test_two_processes_add_the_same_gradient(checkout, train, reference, family):
    script = FAMILIES[family]
    ours = train(
        checkout, script, *OPTION, *STRONG, *SGD, "--disable_patch", "nonreentrant_checkpointing", family=family, ranks=2
    )
    expected = reference(checkout, script, *SGD, family=family, ranks=2, env={"WRAP_AS_ON_GPUS": "1"})
    assert distance(ours, expected) < 1e-5
    assert lines(ours)[-1]["preservation_loss"] > 1e-6


@pytest.mark.slow
def test_the_lora_leaves_the_output_on_the_class_as_it_was(checkout, train):
    """With a multiplier of 0 the loss is measured, and nothing is preserved."""
    strong = (*CACHED, "--learning_rate", "1e-2", "--max_train_steps", "30")
    losses = {}
    for multiplier in ("0", "1"):
        run = train(checkout, LORA, *OPTION, "--output_preservation_multiplier", multiplier, *strong)
        losses[multiplier] = sum(line["preservation_loss"] for line in lines(run)[-10:])
    assert losses["1"] < 0.5 * losses["0"]


@pytest.mark.newest
@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("flux", ("--base_precision", "int8"), marks=pytest.mark.thorough),
        pytest.param("sdxl", ("--base_precision", "int8"), marks=pytest.mark.slow),
        pytest.param("sdxl", ("--selective_torch_compile",), marks=pytest.mark.slow),
        pytest.param("sdxl", ("--network_module", "networks.oft"), marks=pytest.mark.slow),
        pytest.param("sdxl", VARIANTS, marks=pytest.mark.thorough),
        pytest.param("flux", ("--cache_text_encoder_outputs",), marks=pytest.mark.slow),  # CLIP is trained
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:2]),
)
def test_other_features_work_with_it(checkout, train, family, options):
    script, multiplier = FAMILIES[family], ("--output_preservation_multiplier", "0")
    ours = train(checkout, script, *OPTION, *multiplier, *options, family=family)
    assert distance(ours, train(checkout, script, *options, family=family)) == 0
    strong = train(checkout, script, *OPTION, *STRONG, *options, family=family)
    assert distance(ours, strong) > 0
    assert "failed" not in strong.output
    assert lines(strong)[-1]["preservation_loss"] > 0


@pytest.mark.newest
@pytest.mark.thorough
def test_a_step_whose_preservation_is_not_finite_is_skipped(checkout, train):
    run = train(checkout, LORA, *OPTION, *SGD, "--output_preservation_multiplier", "3e38")
    assert "step 2 skipped: loss or gradient is not finite" in run.output
    one_step = train(checkout, LORA, *SGD, "--max_train_steps", "1")
    assert distance(run, one_step) == 0


@pytest.mark.newest
@pytest.mark.thorough
def test_a_trigger_that_no_caption_contains_ends_the_run(checkout, train):
    run = train(checkout, LORA, "--output_preservation", "skz=person")
    assert run.code == 2
    assert "no caption contains the trigger 'skz'; correct it, or the captions" in run.output
    assert not run.file.exists()
