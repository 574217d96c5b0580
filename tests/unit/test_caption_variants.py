"""Variants of captions: which text a step takes, and the names of their files."""

import pickle
import random
from argparse import Namespace
from collections import Counter
from types import SimpleNamespace

import pytest
from kohya_ext.patches import cached_caption_variants

from kohya_ext.caching.caption_variants import (
    CachedCaptions,
    ImagesOfBatch,
    ProcessedCaption,
    Variants,
    older_files,
    plan,
    variants_of,
)
from kohya_ext.config.settings import Settings

OFF = {
    "shuffle_caption": False,
    "caption_tag_dropout_rate": 0.0,
    "caption_dropout_rate": 0.0,
    "caption_dropout_every_n_epochs": 0,
    "enable_wildcard": False,
    "caption_prefix": None,
    "caption_suffix": None,
    "secondary_separator": None,
}


class Data:
    """A dataset that shuffles words, and drops captions at the subset's rate."""

    def __init__(self, folder, captions, **options):
        self.seed, self.current_epoch = 3, 0
        subset = SimpleNamespace(**{**OFF, **options})
        paths = {str(folder / f"{index}.png"): caption for index, caption in enumerate(captions)}
        self.image_data = {path: image(path, caption) for path, caption in paths.items()}
        self.image_to_subset = dict.fromkeys(paths, subset)

    def process_caption(self, subset, caption):
        if random.random() < subset.caption_dropout_rate:
            return ""
        words = caption.split()
        random.shuffle(words)
        return " ".join(words)


def image(path, caption):
    return SimpleNamespace(
        image_key=path,
        absolute_path=path,
        caption=caption,
        caption_dropout_rate=0.1,
        text_encoder_outputs=None,
        text_encoder_outputs_npz=None,
    )


def test_the_choice_is_the_same_on_every_machine_and_in_every_release():
    variants = Variants(("a", "b", "c", "d"), "cats/1.png", 0.2)
    chosen = "".join(variants.choose(7, epoch, (batch, 0)) or "-" for epoch in (1, 2) for batch in range(8))
    assert chosen == "bcdbacb-bdbaccbb"


def test_captions_are_dropped_at_the_given_rate_and_variants_are_taken_alike():
    variants = Variants(("a", "b", "c", "d"), "cats/1.png", 0.1)
    taken = Counter(variants.choose(1, epoch, (batch, 0)) for epoch in range(100) for batch in range(100))
    assert taken[""] == pytest.approx(1000, abs=90)  # three standard deviations
    assert all(taken[text] == pytest.approx(2250, abs=130) for text in "abcd")


def test_variants_follow_from_seed_and_caption_alone(tmp_path):
    data = Data(
        tmp_path, ["one two three four five", "one two three four five", "six seven eight nine ten"], shuffle_caption=True
    )
    first, same, other = data.image_data.values()
    state = random.getstate()
    texts = variants_of(data, first, 4, 0).texts
    assert random.getstate() == state
    assert len(set(texts)) > 2
    assert variants_of(data, same, 4, 0).texts == texts
    assert variants_of(data, first, 8, 0).texts[:4] == texts
    assert variants_of(data, first, 4, 1).texts != texts
    assert {tuple(sorted(text.split())) for text in variants_of(data, other, 4, 0).texts} == {
        tuple(sorted(other.caption.split()))
    }


def test_dropout_does_not_use_up_variants(tmp_path):
    data = Data(tmp_path, ["one two three"], caption_dropout_rate=0.9)
    (info,) = data.image_data.values()
    variants = variants_of(data, info, 5, 0)
    assert "" not in variants.texts
    assert "" in variants.all_texts
    texts = plan(data, 5, 0).texts
    assert "" in texts
    assert all(each.caption_dropout_rate == 0 for each in texts.values())
    assert info.caption_dropout_rate == 0.1


def test_a_file_has_the_hash_of_its_text_in_its_name(tmp_path):
    data = Data(tmp_path, ["one two", "one two"], shuffle_caption=True)
    planned = plan(data, 8, 0)
    assert set(planned.texts) == {"one two", "two one"}
    names = {info.absolute_path for info in planned.texts.values()}
    assert len(names) == 2
    assert all(name.startswith(f"{tmp_path / '0'}_caption-") and name.endswith(".png") for name in names)
    again = plan(Data(tmp_path, ["two one"], shuffle_caption=True), 8, 5)
    assert {info.absolute_path for info in again.texts.values()} == names


def test_files_of_other_texts_of_the_same_model_are_old(tmp_path):
    hashes = [f"{digit}" * 16 for digit in "abc"]
    names = [f"0_caption-{digits}_flux_te.npz" for digits in hashes]
    for name in (*names, f"0_caption-{hashes[0]}_te_outputs.npz", "0_flux_te.npz", "0.txt"):
        (tmp_path / name).touch()
    assert older_files([str(tmp_path / names[0])]) == [str(tmp_path / name) for name in names[1:]]


def test_a_batch_sees_each_image_with_the_variant_of_its_place(tmp_path):
    data = Data(tmp_path, ["a b c d e f"], shuffle_caption=True, caption_dropout_rate=0.3)
    planned = plan(data, 6, 0)
    for number, info in enumerate(planned.texts.values()):
        info.text_encoder_outputs = number
    captions = pickle.loads(pickle.dumps(planned.captions(is_fixed=False)))  # as for a spawned worker
    captions.epoch = SimpleNamespace(value=2)
    (key,) = data.image_data
    images = ImagesOfBatch(captions, data, 4)
    assert (list(images), len(images)) == ([key], 1)
    seen = [images[key] for _ in range(20)]
    assert [info.caption for info in seen] == [captions.variants[key].choose(3, 2, (4, place)) for place in range(20)]
    assert {info.caption: info.text_encoder_outputs for info in seen} == {
        text: info.text_encoder_outputs for text, info in planned.texts.items() if text in {info.caption for info in seen}
    }
    assert len({info.caption for info in seen}) > 3
    assert all(isinstance(info.caption, ProcessedCaption) for info in seen)
    assert data.image_data[key].text_encoder_outputs is None

    fixed = ImagesOfBatch(CachedCaptions(captions.variants, captions.outputs, is_fixed=True), data, 4)
    assert {fixed[key].caption for _ in range(20)} == {captions.variants[key].texts[0]}


def test_an_image_without_variants_is_left_alone(tmp_path):
    data = Data(tmp_path, ["a b"])
    planned = plan(data, 6, 0)
    assert not planned.variants
    assert planned.images == data.image_data
    (key,) = data.image_data
    assert ImagesOfBatch(planned.captions(is_fixed=False), data, 0)[key] is data.image_data[key]


@pytest.mark.parametrize(("cached", "count"), [("cache_text_encoder_outputs", 0), ("cache_latents", 1)])
def test_the_option_needs_a_cache(cached, count):
    args = Namespace(**{cached: True})
    settings = Settings(cached_caption_variants=2)
    assert len([*cached_caption_variants.PATCH.problems("sdxl_train_network.py", args, settings)]) == count


def test_a_full_disk_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cached_caption_variants._check_disks([str(tmp_path / "a.npz"), str(tmp_path / "b.npz")], 10**18)
    printed = capsys.readouterr().err
    assert f"--cached_caption_variants needs 2000000000.00 GB in {tmp_path}, which has " in printed
    assert "use fewer variants" in printed
    cached_caption_variants._check_disks([str(tmp_path / "a.npz")], 10)
