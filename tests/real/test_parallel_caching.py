"""Caching with threads writes upstream's files, survives kills, and creates damaged files again."""

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

torch = pytest.importorskip("torch")

from kohya_ext.caching import safetensors_file  # noqa: E402
from kohya_ext.run import file_index  # noqa: E402
from kohya_ext.tiny import environment  # noqa: E402
from tests.real import starting  # noqa: E402
from tests.real.caching import FAMILIES, Checkout, Vae, caches, write_images  # noqa: E402
from tests.real.conftest import ROOT  # noqa: E402

CACHED = (
    "--cache_latents_to_disk",
    "--cache_text_encoder_outputs",
    "--cache_text_encoder_outputs_to_disk",
    "--network_train_unet_only",
)


@pytest.fixture
def library(checkout, checkout_module):
    return Checkout(checkout_module, checkout)


@pytest.fixture
def folder(tmp_path):
    write_images(tmp_path / "images")
    return tmp_path / "images"


def copied(folder, name):
    """Return a copy of a folder whose images have the same relative paths."""
    target = folder.parent / name / folder.name
    shutil.copytree(folder, target)
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_latents_are_upstreams(library, folder, family):
    upstreams = copied(folder, "upstream")
    _, theirs = library.cache_latents(upstreams, family, patched=False)
    _, ours = library.cache_latents(folder, family)
    assert ours.batches == theirs.batches
    assert len(caches(folder)) == 7
    assert caches(folder) == caches(upstreams)

    _, again = library.cache_latents(folder, family)
    assert not again.batches

    data, _ = library.cache_latents(folder, family, to_disk=False)
    expected, _ = library.cache_latents(folder, family, to_disk=False, patched=False)
    for key, info in data.image_data.items():
        for name in ("latents", "latents_flipped", "alpha_mask"):
            assert torch.equal(getattr(info, name), getattr(expected.image_data[key], name))
        assert info.latents_crop_ltrb == expected.image_data[key].latents_crop_ltrb


def outputs(captions):
    return [
        {
            "hidden_state1": np.full((3, 4), len(caption), np.float32),
            "hidden_state2": np.ones(5, np.float32),
            "pool2": np.ones(2),
        }
        for caption in captions
    ]


def test_text_encoder_outputs_are_upstreams(library, folder):
    upstreams = copied(folder, "upstream")
    library.cache_texts(upstreams, "sdxl", patched=False, outputs=outputs)
    library.cache_texts(folder, "sdxl", outputs=outputs)
    assert len(caches(folder)) == 7
    assert caches(folder) == caches(upstreams)
    library.cache_texts(folder, "sdxl", outputs=None)  # would fail


@pytest.mark.newest
def test_second_start_opens_no_file(library, folder, monkeypatch):
    library.cache_latents(folder, "flux")
    library.cache_texts(folder, "sdxl", outputs=outputs)

    def fail(path, *args, **kwargs):
        raise AssertionError(path)

    monkeypatch.setattr(np, "load", fail)
    library.cache_latents(folder, "flux", vae=object())
    library.cache_texts(folder, "sdxl", outputs=None)


@pytest.mark.newest
def test_a_file_without_an_index_is_read_once(library, folder):
    library.cache_latents(folder, "flux", patched=False)
    before = caches(folder)
    _, vae = library.cache_latents(folder, "flux")
    assert not vae.batches
    assert caches(folder) == before
    entries = (folder / file_index.CACHES).read_text().split()
    assert [entries.count(name) for name in before] == [2] * len(before)  # that it is sound, and of which image


def read_npz(folder):
    return {file.stem: dict(np.load(file)) for file in folder.glob("*.npz")}


def read_safetensors(folder):
    return {file.stem: safetensors_file.read(str(file)) for file in folder.glob("*.safetensors")}


def assert_equal(ours, theirs):
    """Assert that all arrays of all files are equal."""
    assert ours.keys() == theirs.keys()
    for file, arrays in theirs.items():
        assert ours[file].keys() == arrays.keys()
        for name, array in arrays.items():
            assert ours[file][name].dtype == array.dtype
            assert np.array_equal(ours[file][name], array)


SAFETENSORS = {"cache_format": "safetensors"}


@pytest.mark.parametrize("family", ["sdxl", "anima", "hunyuan-image"])
@pytest.mark.newest
def test_safetensors_have_the_arrays_of_npz_files(library, folder, family):
    upstreams = copied(folder, "upstream")
    library.cache_latents(upstreams, family, patched=False)
    data, _ = library.cache_latents(folder, family, **SAFETENSORS)
    assert len(read_npz(upstreams)) == 7
    assert_equal(read_safetensors(folder), read_npz(upstreams))
    assert not list(folder.glob("*.npz"))
    assert {Path(info.latents_npz).suffix for info in data.image_data.values()} == {".safetensors"}
    library.cache_latents(folder, family, vae=object(), **SAFETENSORS)  # would fail


@pytest.mark.newest
def test_safetensors_of_texts_have_the_arrays_of_npz_files(library, folder):
    upstreams = copied(folder, "upstream")
    library.cache_texts(upstreams, "sdxl", patched=False, outputs=outputs)
    library.cache_texts(folder, "sdxl", outputs=outputs, **SAFETENSORS)
    assert_equal(read_safetensors(folder), read_npz(upstreams))
    library.cache_texts(folder, "sdxl", outputs=None, **SAFETENSORS)


@pytest.mark.parametrize(("dtype", "bits"), [("bf16", 8), ("fp16", 11)])
@pytest.mark.newest
def test_16_bits_round_each_value_and_halve_the_file(library, folder, dtype, bits):
    upstreams = copied(folder, "upstream")
    for path, options in ((upstreams, {"patched": False}), (folder, {**SAFETENSORS, "cache_dtype": dtype})):
        library.cache_latents(path, "flux", **options)
    exact = read_npz(upstreams)
    for file, arrays in read_safetensors(folder).items():
        for name, array in arrays.items():
            assert array.dtype == exact[file][name].dtype
            if name.startswith("latents"):
                difference = np.abs(array - exact[file][name])
                assert difference.max() > 0
                assert (difference <= np.abs(exact[file][name]) * 2.0**-bits + 2.0**-25).all()
            else:
                assert np.array_equal(array, exact[file][name])


@pytest.mark.newest
def test_npz_files_are_read_with_either_format(library, folder):
    library.cache_latents(folder, "flux")
    before = caches(folder)
    data, _ = library.cache_latents(folder, "flux", vae=object(), **SAFETENSORS)
    assert caches(folder) == before
    assert {Path(info.latents_npz).suffix for info in data.image_data.values()} == {".npz"}


def truncate(file):
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def edited(change):
    def edit(file):
        with np.load(file) as arrays:
            contents = dict(arrays)
        change(contents)
        np.savez(file, **contents)

    return edit


def first_latents(contents):
    return next(name for name in contents if name.startswith("latents"))


@edited
def write_nan(contents):
    contents[first_latents(contents)][0, 0, 0] = np.nan


@edited
def write_other_channels(contents):
    contents[first_latents(contents)] = contents[first_latents(contents)][:4]


@pytest.mark.parametrize(
    ("damage", "options"),
    [
        (truncate, {}),
        (flip_a_bit, {}),
        (write_nan, {}),
        (write_other_channels, {}),
        (truncate, SAFETENSORS),
        (flip_a_bit, SAFETENSORS),
    ],
)
@pytest.mark.newest
def test_a_damaged_file_is_created_again(library, folder, damage, options, capsys):
    vae = Vae(16, 8, noise=0)
    library.cache_latents(folder, "flux", vae=vae, **options)
    whole = caches(folder)
    damaged = folder / next(iter(whole))
    damage(damaged)
    assert caches(folder) != whole
    vae.batches.clear()
    library.cache_latents(folder, "flux", vae=vae, **options)
    assert caches(folder) == whole
    assert [batch[0] for batch in vae.batches] == [1, 1]  # the image and its mirror image
    assert f"{damaged}" in capsys.readouterr().err


@pytest.mark.newest
def test_text_outputs_that_are_not_finite_are_created_again(library, folder, capsys):
    library.cache_texts(folder, "sdxl", outputs=outputs)
    whole = caches(folder)
    file = folder / next(iter(whole))
    edited(lambda contents: contents["pool2"].fill(np.inf))(file)
    library.cache_texts(folder, "sdxl", outputs=outputs)
    assert caches(folder) == whole
    assert "not finite" in capsys.readouterr().err


def test_outputs_of_an_edited_caption_are_created_again(library, folder, capsys):
    library.cache_texts(folder, "sdxl", outputs=outputs)
    before = caches(folder)
    library.caption = "edited: a caption of {}"
    library.cache_texts(folder, "sdxl", outputs=outputs)
    assert all(caches(folder)[name] != content for name, content in before.items())
    assert "the image, the caption or the text encoders have changed" in capsys.readouterr().err
    library.cache_texts(folder, "sdxl", outputs=None)  # would fail


@pytest.mark.newest
def test_upstreams_outputs_are_created_again_if_the_caption_is_newer(library, folder):
    library.cache_texts(folder, "sdxl", outputs=outputs, patched=False)
    newer, encoded = folder / "3.txt", []
    os.utime(folder / "3_te_outputs.npz", (0, 0))
    newer.write_text("edited")

    def record(captions):
        encoded.extend(captions)
        return outputs(captions)

    library.cache_texts(folder, "sdxl", outputs=record)
    library.cache_texts(folder, "sdxl", outputs=record)
    assert encoded == ["a caption of 3.png"]


@pytest.mark.newest
def test_latents_of_an_edited_image_are_created_again(library, folder):
    library.cache_latents(folder, "flux")
    before = caches(folder)
    with Image.open(folder / "1.png") as image:
        edited = ImageOps.invert(image.convert("RGB"))
    edited.save(folder / "1.png")
    _, vae = library.cache_latents(folder, "flux", vae=Vae(16, 8, noise=0))
    assert [batch[0] for batch in vae.batches] == [1, 1]  # the image and its mirror image
    assert [name for name, content in caches(folder).items() if content != before[name]] == ["1_0128x0128_flux.npz"]


@pytest.mark.newest
def test_latents_that_are_not_finite_are_reported(library, folder, capsys):
    library.cache_latents(folder, "sdxl", vae=Vae(4, 8, noise=float("nan")))
    assert "cached latents cannot be trained on" in capsys.readouterr().err


@pytest.mark.newest
def test_a_damaged_image_is_named_and_the_images_before_it_are_cached(library, folder, capsys):
    data = library.dataset(folder)
    last = max(data.image_data.values(), key=lambda info: info.bucket_reso[0] * info.bucket_reso[1])
    last = [info for info in data.image_data.values() if info.bucket_reso == last.bucket_reso][-1]
    truncate(Path(last.absolute_path))
    with pytest.raises(OSError, match="truncated"):
        library.cache_latents(folder, "flux", batch_size=1)
    assert f"cannot cache {last.absolute_path}: OSError" in capsys.readouterr().err
    assert len(caches(folder)) == 6


@pytest.mark.newest
def test_zero_workers_leave_caching_to_upstream(library, folder):
    library.cache_latents(folder, "flux", caching_workers=0)
    assert len(caches(folder)) == 7
    assert not (folder / file_index.CACHES).exists()


@pytest.fixture
def start(library, folder, _fork_server):
    """Start a process that caches the folder with a VAE that takes some seconds for each batch."""

    def run(seconds):
        command = ["-m", "tests.real.caching", str(library.checkout.path), str(folder), str(seconds)]
        return starting.start_forked(command, {**os.environ, "PYTHONPATH": environment.python_path()}, ROOT)

    return run


forks = pytest.mark.skipif(not starting.FORKS, reason="needs a fork server and SIGKILL")


@forks
@pytest.mark.newest
def test_a_killed_run_leaves_whole_files_and_is_continued(library, folder, start):
    expected = copied(folder, "expected")
    library.cache_latents(expected, "flux", vae=Vae(16, 8, noise=0))
    process = start(0.2)
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*.npz"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    written = {file.name: file.read_bytes() for file in folder.glob("*.npz")}
    assert 3 <= len(written) < 7
    assert written.items() <= caches(expected).items()
    _, vae = library.cache_latents(folder, "flux", vae=Vae(16, 8, noise=0))
    assert caches(folder) == caches(expected)
    assert 0 < sum(batch[0] for batch in vae.batches) <= 2 * (7 - len(written))


@forks
@pytest.mark.newest
def test_two_runs_cache_the_same_folder(library, folder, start):
    expected = copied(folder, "expected")
    library.cache_latents(expected, "flux", vae=Vae(16, 8, noise=0))
    processes = [start(0.02) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert caches(folder) == caches(expected)
    _, vae = library.cache_latents(folder, "flux", vae=Vae(16, 8, noise=0))
    assert not vae.batches


#: Upstream's reentrant checkpointing rounds differently than ours.
CHECKPOINTING = ("--gradient_checkpointing",)

#: The script that each generation runs.
SCRIPTS = {"v0.10": "flux_train_network.py", "v0.11": "sdxl_train_network.py"}


def test_training_on_new_caches_equals_upstream(checkout, train, images):
    def remove_caches():
        for file in [*images.rglob("*.npz"), *images.rglob(file_index.CACHES)]:
            file.unlink()

    script = SCRIPTS[checkout.layout]
    files, runs = [], []
    remove_caches()  # of other tests' runs, which share the images
    for start in ("plain", "launcher"):
        run = train(checkout, script, *CACHED, "--vae_batch_size", "2", start=start, without=CHECKPOINTING)
        assert run.code == 0, run.output[-4000:]
        runs.append(run)
        files.append({file.name: file.read_bytes() for file in images.rglob("*.npz")})
        remove_caches()
    upstream, ours = (run.tensors for run in runs)
    assert "parallel_caching" in {row["patch"] for row in runs[1].report["patches"] if row["status"] == "applied"}
    assert "caching latents: " in runs[1].output
    assert len(files[0]) == 8
    assert files[0] == files[1]
    assert ours.keys() == upstream.keys()
    assert all(torch.equal(tensor, upstream[key]) for key, tensor in ours.items())


@pytest.mark.slow
def test_training_on_safetensors_equals_training_on_npz_files(checkout, train, images):
    script = SCRIPTS[checkout.layout]
    safetensors = ("--cache_format", "safetensors")
    runs = []
    for more in (
        (),
        safetensors,
        safetensors,
    ):  # the last one reads the files of the one before, without a VAE's random numbers
        run = train(checkout, script, *CACHED, "--max_data_loader_n_workers", "2", *more, without=CHECKPOINTING)
        assert run.code == 0, run.output[-4000:]
        runs.append(run)
        for file in [*images.rglob("*.npz"), *images.rglob(file_index.CACHES)]:
            file.unlink()
    for file in images.rglob("*.safetensors"):
        file.unlink()
    assert "caching latents: " not in runs[2].output
    assert all(torch.equal(tensor, runs[1].tensors[key]) for key, tensor in runs[0].tensors.items())
