"""--output_preservation: class captions, their cached outputs, and the checks before a run."""

import random
from argparse import Namespace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace

import pytest
from kohya_ext.patches import output_preservation, speed

from kohya_ext.caching import caption_variants, class_captions
from kohya_ext.caching.class_captions import ClassWord, Recorded, images_of, outputs_of
from kohya_ext.config.settings import Settings
from kohya_ext.patching.step_values import StepValues
from kohya_ext.patching.training_loop import unobserved_backward
from kohya_ext.preflight import options

LORA = "sdxl_train_network.py"


def image(path, caption):
    return SimpleNamespace(
        image_key=path, absolute_path=path, caption=caption, text_encoder_outputs=None, text_encoder_outputs_npz=None
    )


class Data:
    """A dataset whose batches have the outputs of captions."""

    def __init__(self, *captions, **subset):
        self.image_data = {f"{index}.png": image(f"{index}.png", caption) for index, caption in enumerate(captions)}
        self.image_to_subset = dict.fromkeys(self.image_data, SimpleNamespace(**subset))

    def batch(self, *keys):
        infos = [self.image_data[key] for key in keys]
        random.random()
        return {"text_encoder_outputs_list": [info.text_encoder_outputs for info in infos], "latents": infos[0].latents}


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("sks", "a cat"),
        ("photo of SKS, sks's hat, sks-like", "photo of a cat, a cat's hat, a cat-like"),
        ("asks, sks2, my_sks", "asks, sks2, my_sks"),
        ("一只sks在桌上", "一只a cat在桌上"),
        ("a dog", "a dog"),
        ("", ""),
    ],
)
def test_the_trigger_is_replaced_as_a_word(caption, expected):
    word = ClassWord.read(" sks = a cat ")
    assert word.of(caption) == expected
    assert word.is_in(caption) == (caption != expected)


def test_a_class_is_no_pattern():
    assert ClassWord.read(r"s.s=\1 \d").of("s.s, sks") == r"\1 \d, sks"


@pytest.mark.parametrize("value", ["sks", "sks=", "=person", " = ", "", True])
def test_a_malformed_option_names_the_form(value):
    with pytest.raises(ValueError, match=r"must be TRIGGER=CLASS, such as sks=person, not "):
        output_preservation.OUTPUT_PRESERVATION.parse(value)


@pytest.mark.parametrize("value", ["-1", "inf", "nan", "much", True])
def test_a_wrong_multiplier_is_refused(value):
    with pytest.raises(ValueError, match="must be a number, 0 or more"):
        output_preservation.OUTPUT_PRESERVATION_MULTIPLIER.parse(value)


def test_equal_class_captions_are_encoded_once():
    data = Data("sks", "person", "a dog", "sks")
    images = images_of(data, ClassWord("sks", "person"))
    assert {caption: info.caption for caption, info in images.items()} == {
        "sks": "person",
        "person": "person",
        "a dog": "a dog",
    }
    assert len({info.image_key for info in images.values()}) == 2
    assert all(class_captions.MARK in info.absolute_path for info in images.values())
    assert {info.absolute_path for info in images.values()}.isdisjoint(data.image_data)


def test_class_captions_of_variants_are_no_variants(tmp_path):
    """Files of other variants are reported as superfluous."""
    path = str(tmp_path / "caption" / "x_caption-0.png")
    variant = caption_variants.image_of("sks, red", image(path, "sks"))
    (of_class,) = images_of(SimpleNamespace(image_data={"": variant}), ClassWord("sks", "person")).values()
    assert of_class.caption == "person, red"
    assert Path(of_class.absolute_path).name.startswith("x_caption-0_class-")


def test_a_batch_has_the_class_outputs_of_the_images_it_took():
    data = Data("sks, red", "sks, blue", "a dog")
    images = images_of(data, ClassWord("sks", "person"))
    for info in images.values():
        info.text_encoder_outputs = f"outputs of {info.caption}"
    taken = Recorded(data.image_data)
    assert [taken[key].caption for key in ("1.png", "2.png", "1.png")] == ["sks, blue", "a dog", "sks, blue"]
    random.seed(5)
    before, own = random.getstate(), data.image_data
    outputs = class_captions.collated(data, lambda: data.batch("x", "y", "z"), taken.taken, outputs_of(images))
    assert outputs == ["outputs of person, blue", "outputs of a dog", "outputs of person, blue"]
    assert random.getstate() == before
    assert data.image_data is own
    assert not hasattr(own["1.png"], "latents")


def test_captions_without_the_trigger_are_counted_and_none_with_it_is_an_error(capsys):
    def check(added, *captions, **subset):
        group = SimpleNamespace(datasets=[Data(*captions, **subset)])
        output_preservation._check_captions(group, ClassWord("sks", "person"), added)
        return capsys.readouterr().err

    added = ("caption_prefix", "caption_suffix")
    assert check(added, "sks", "SKS here") == ""
    assert "3 of 4 captions do not contain 'sks'; the output on them is preserved as well" in check(added, "sks", "a", "", None)
    assert check(added, "a dog", caption_prefix="sks,") == ""
    with pytest.raises(SystemExit):  # upstream ignores prefixes of cached captions
        check((), "a dog", caption_prefix="sks,")
    assert "no caption contains the trigger 'sks'; correct it, or the captions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "given", "problem"),
    [
        (LORA, {}, None),
        ("flux_train_network.py", {}, None),
        ("sdxl_train.py", {}, "works with the scripts that train LoRAs, not with sdxl_train.py"),
        ("sdxl_train_control_net.py", {}, "works with the scripts that train LoRAs"),
        ("train_leco.py", {}, "works with the scripts that train LoRAs"),
        (LORA, {"network_module": "networks.dylora"}, "networks.dylora, which ignores its multiplier"),
        (LORA, {"deepspeed": True}, "--deepspeed and --output_preservation cannot be combined"),
    ],
)
def test_runs_without_it_are_refused(script, given, problem):
    problems = [*options.impossible(Path(script), Namespace(**given), Settings(output_preservation="sks=person"))]
    assert [each for each in problems if "output_preservation" in each and (problem is None or problem in each)] == problems[:1]
    assert bool(problems) == (problem is not None)
    assert not [*options.impossible(Path(script), Namespace(**given), Settings())]


def test_the_trial_of_speed_stands_aside():
    accelerator = SimpleNamespace(num_processes=1)
    for given, expected in (({}, None), ({"output_preservation": "sks=person"}, "--output_preservation runs the model three")):
        reason = speed._reason_not_to_choose(Namespace(), accelerator, Settings(speed="auto", **given))
        assert reason == expected or reason.startswith(expected)


def test_own_datasets_are_refused():
    (problem,) = output_preservation._problems(LORA, Namespace(dataset_class="mine.Data"), Settings())
    assert "--dataset_class" in problem


def test_nothing_sees_the_backward_pass_but_accelerates_scaling():
    class Accelerator:
        def backward(self, loss):
            calls.append(loss / 2)

    def patched(original):
        @wraps(original)
        def backward(self, loss):
            calls.append("seen")
            return original(self, loss)

        return backward

    calls = []
    Accelerator.backward = patched(patched(Accelerator.backward))
    unobserved_backward(Accelerator(), 3.0)
    assert calls == [1.5]


def test_other_values_of_a_step_are_means_of_its_micro_batches():
    torch = pytest.importorskip("torch")
    values = StepValues()
    assert values.means() == {}
    values.record("preservation_loss", torch.tensor(0.5, requires_grad=True))
    values.record("preservation_loss", torch.tensor(1.5))
    assert values.means() == {"preservation_loss": 1.0}
    assert values.read_losses() == []
