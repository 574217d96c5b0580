"""The names of the tensors of each part of a model."""

import pytest

from kohya_ext.sdscripts import parts
from kohya_ext.sdscripts.families import FAMILIES

CLIP = "text_model.embeddings.token_embedding.weight"


def names(part, blocks, prefix=""):
    """Return a file's tensors that has all of a part, with ``blocks`` blocks in each list."""

    def expand(branch, start):
        for key, inner in branch.items():
            for word in map(str, range(blocks)) if key == "#" else key.split(","):
                yield from expand(inner, f"{start}{word}.") if inner else [start + word]

    return dict.fromkeys(expand(parts._names_of(part.names or part.name), prefix), ())


@pytest.mark.parametrize("part", parts.PARTS, ids=lambda part: part.name)
def test_missing_tensors_are_counted_for_each_number_of_blocks_and_each_prefix(part):
    for blocks in (1, 3, 40):
        for prefix in part.prefixes:
            file = names(part, blocks, prefix)
            complete = parts.contents(file, part)
            assert (complete.required, complete.missing) == (len(file), ())
            lost = sorted(file)[len(file) // 2]
            del file[lost]
            incomplete = parts.contents({**file, "of.another.part": ()}, part)
            assert incomplete.is_recognized
            assert incomplete.missing == (lost,)
            assert not parts.contents({f"unknown.{name}": () for name in file}, part).is_recognized


def test_each_option_of_a_family_has_a_part():
    for family in FAMILIES:
        assert parts.of_name(family.name).title == family.checkpoints[0].title
        assert all(parts.of_name(part) for part in (*family.files.values(), *filter(None, [family.vae])))


@pytest.mark.parametrize(("width", "is_clip", "other"), [(768, True, ""), (32, True, ""), (1280, False, "CLIP-G")])
def test_a_part_of_another_known_size_is_named(width, is_clip, other):
    clip = parts.of_name("clip-l")
    contents = parts.contents(names(clip, 2) | {CLIP: (49408, width)}, clip)
    assert (contents.is_recognized, contents.other) == (is_clip, other)


def test_layouts_that_a_loader_converts_are_not_counted():
    assert parts.contents({"conv1.bias": ()}, parts.of_name("qwen-vae")).is_recognized
    assert parts.recognize({"conv1.bias": ()}) == "Qwen-Image's VAE"


def test_files_of_no_known_part_are_not_recognized():
    assert parts.recognize({"a": (), "b.c": ()}) is None
