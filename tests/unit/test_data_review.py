"""`check --images`: planted faults among photographs of other packages, and its remarks."""

import json
import os
from argparse import Namespace
from pathlib import Path

import pytest

from kohya_ext.data_review import likeness, measured, measures, page, review, texts

Image = pytest.importorskip("PIL.Image")
ImageDraw = pytest.importorskip("PIL.ImageDraw")
ImageFilter = pytest.importorskip("PIL.ImageFilter")
matplotlib = pytest.importorskip("matplotlib")
skimage = pytest.importorskip("skimage")
pytest.importorskip("imagehash")

SIDE = 128
SCRIPT = Path("sdxl_train_network.py")

DATA = Path(skimage.__file__).parent / "data"

#: Photographs, textures, microscopy and a scanned page of scikit-image and matplotlib, but for those that are out of focus.
#: The corners of the image of a retina are black.
PICTURES = {
    **{DATA / f"{name}.png": None for name in ("astronaut", "chelsea", "coffee", "ihc", "motorcycle_left", "camera", "brick")},
    **{DATA / f"{name}.png": None for name in ("grass", "gravel", "coins", "page")},
    **{DATA / f"{name}.jpg": None for name in ("hubble_deep_field", "rocket")},
    DATA / "retina.jpg": (256, 256, 1280, 1280),
    Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg": None,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path / "cache"))


def crops():
    """Yield parts of the images that do not overlap, in three sizes, each as large as it is trained."""
    for file, part in PICTURES.items():
        picture = Image.open(file).convert("RGB").crop(part)
        for scale in (1, 2, 3):
            scaled = picture.resize((picture.width // scale, picture.height // scale), Image.Resampling.BOX)
            for top in range(0, scaled.height - SIDE + 1, SIDE):
                for left in range(0, scaled.width - SIDE + 1, SIDE):
                    yield scaled.crop((left, top, left + SIDE, top + SIDE))


def enlarged(image):
    return image.resize((SIDE // 2, SIDE // 2), Image.Resampling.BOX).resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def with_bars(image):
    framed = Image.new("RGB", (SIDE, SIDE), (4, 4, 4))
    framed.paste(image.crop((0, 14, SIDE, SIDE - 14)), (0, 14))
    return framed


def with_mark(image):
    marked = image.copy()
    ImageDraw.Draw(marked).text((SIDE - 42, SIDE - 14), "(c) ACME", fill=(255, 255, 255), stroke_width=1, stroke_fill=(0, 0, 0))
    return marked


def compressed_before(image, folder):
    file = folder / "source.jpg"
    image.save(file, quality=8)
    with Image.open(file) as opened:
        again = opened.convert("RGB")
    file.unlink()
    return again


def blurred(image):
    return image.filter(ImageFilter.GaussianBlur(2))


@pytest.fixture
def planted(tmp_path):
    """A folder of 300 good images and 30 with a fault: the folder, and file name -> kind of fault."""
    folder = tmp_path / "data" / "10_acme"
    folder.mkdir(parents=True)
    every = list(crops())
    pictures = iter(every[:60:2])  # photographs of a person, a cat and a cup
    good = [*every[1:60:2], *every[60:330]]
    names = {}

    def add(image, kind, caption="acme, a photograph of a thing", suffix=".png", **options):
        name = f"{kind or 'good'}{len(names)}{suffix}"
        names[name] = kind
        image.save(folder / name, **options)
        (folder / name).with_suffix(".txt").write_text(caption, encoding="utf-8")

    for number, image in enumerate(good):
        add(image, None, f"acme, photograph number {number}")
    for original, changed, suffix in (
        (good[3], good[3], ".jpg"),
        (good[70], good[70].resize((100, 100), Image.Resampling.LANCZOS), ".png"),
        (good[200], good[200].point(lambda value: min(value + 12, 255)), ".png"),
    ):
        names[f"good{good.index(original)}.png"] = "duplicate"
        add(changed, "duplicate", suffix=suffix)
    for change, kind in ((blurred, "soft"), (enlarged, "soft"), (with_mark, "mark")):
        for _ in range(3):
            add(change(next(pictures)), kind)
    for _ in range(2):
        add(next(pictures).resize((40, 40), Image.Resampling.BOX), "small")
        add(next(pictures), "compressed", suffix=".jpg", quality=12)
        add(with_bars(next(pictures)), "bars")
        add(Image.new("RGB", (SIDE, SIDE), (20, 90, 60)), "flat")
        add(next(pictures).resize((3 * SIDE, SIDE), Image.Resampling.BICUBIC).crop((0, 0, 3 * SIDE, SIDE)), "cropped")
        add(next(pictures), "trigger", "a photograph without the word")
        add(next(pictures), "language", "acme, 一张没有英文字的图片")
        add(next(pictures), "cut", "acme, " + "word " * 90)
    add(compressed_before(next(pictures), tmp_path), "compressed")
    add(next(pictures), "empty", " \n")
    assert sum(kind is None for kind in names.values()) + 3 == len(good) == 300
    return folder, names


def arguments(folder, **more):
    given = {
        "train_data_dir": str(folder.parent),
        "resolution": "128,128",
        "caption_extension": ".txt",
        "train_batch_size": 1,
        "max_token_length": None,
    }
    return Namespace(**given, **more)


def reviewed(folder, **more):
    return review.of(SCRIPT, arguments(folder, **more), lambda done, total: None)


def test_planted_faults_are_found_and_good_images_are_not_marked(planted):
    folder, names = planted
    result = reviewed(folder)
    kinds = {image.file.name: {kind for kind, _ in image.remarks} for image in result.images}
    assert len(kinds) == len(names)
    assert [name for name, kind in names.items() if kind is not None and kind not in kinds[name]] == []
    marked = {name: kinds[name] for name, kind in names.items() if kind is None and kinds[name]}
    assert len(marked) <= 0.02 * 300, marked
    assert 0.85 < result.score < 0.92
    text = page.html(result, "acme")
    assert text.count("data:image/jpeg") == len(result.worst_first)
    assert "http" not in text.replace("http-equiv", "")


def test_a_second_review_measures_only_what_has_changed(tmp_path, monkeypatch):
    folder = tmp_path / "data" / "1_x"
    folder.mkdir(parents=True)
    for number, image in zip(range(6), crops(), strict=False):
        image.save(folder / f"{number}.png")
    with_mark(blurred(image)).save(folder / "6.png")
    first, calls = reviewed(folder), []
    monkeypatch.setattr(measured, "measure", lambda file, trained: calls.append(file.name) or measures.measure(file, trained))
    assert first.counts == {"duplicate": 2, "soft": 1}
    assert reviewed(folder).images == first.images
    assert calls == []
    os.utime(folder / "5.png", (1, 1))
    reviewed(folder)
    assert calls == ["5.png"]
    (kept,) = (tmp_path / "cache" / "images").iterdir()
    for damaged in ("{", "[]", json.dumps({"version": 1, "images": []})):
        kept.write_text(damaged)
        assert reviewed(folder).counts == first.counts


def test_damaged_files_are_remarks(tmp_path):
    folder = tmp_path / "data" / "1_x"
    folder.mkdir(parents=True)
    (folder / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "b.jpg").write_bytes(b"")
    result = reviewed(folder)
    assert [image.remarks[0][0] for image in result.images] == ["damaged", "damaged"]
    assert "cannot be read" in page.html(result, "x")


def test_names_and_captions_are_escaped(tmp_path):
    result = review.Review([review.Image(tmp_path / "<b>.png", (1, 1), [("trigger", "<script>")])], [])
    assert "<script>" not in page.html(result, "<i>")
    assert "<i>" not in page.html(result, "<i>")


@pytest.mark.parametrize(
    ("captions", "expected"),
    [
        (["the same words"] * 6, "same captions"),
        ([f"acme, white background, number {number}" for number in range(25)], "tags"),
    ],
)
def test_remarks_on_a_folder(captions, expected):
    result = texts.remarks(captions, True, None, {})
    assert [kind for kind, _ in result.of_folder] == [expected]
    assert not any(result.of_images.values())


def test_folders_out_of_balance(tmp_path):
    for name, count in (("10_cat", 8), ("1_dog", 8)):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.png").touch()
    result = reviewed(tmp_path / "10_cat")
    assert [(Path(folder).name, kind) for folder, kind, _ in result.folders] == [("1_dog", "classes")]


def test_similarity_is_passed_on():
    words = ["00" * 32, "00" * 31 + "03", "ff" * 32, "00" * 30 + "ffff", "aa" * 32]
    assert likeness.duplicates(words) == [[0, 1, 3]]
    assert likeness.duplicates([]) == []
    assert likeness.marked([]) == []


def test_a_folder_of_several_resolutions_is_reviewed_once(tmp_path):
    folder = tmp_path / "data" / "1_x"
    folder.mkdir(parents=True)
    next(crops()).save(folder / "a.png")
    dataset = "[[datasets]]\nresolution = {}\n[[datasets.subsets]]\nimage_dir = {}\n"
    config = tmp_path / "dataset.toml"
    config.write_text("".join(dataset.format(side, json.dumps(str(folder))) for side in (128, 96)), encoding="utf-8")
    result = reviewed(folder, dataset_config=str(config))
    assert [image.remarks for image in result.images] == [[]]
