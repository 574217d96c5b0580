"""--cache_size_limit keeps caches in memory that do not fit on disk, and trains on the same values."""

import re

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.run import file_index  # noqa: E402

pytestmark = pytest.mark.thorough

CACHED = ("--cache_latents_to_disk", "--cache_text_encoder_outputs", "--cache_text_encoder_outputs_to_disk")
OPTIONS = (*CACHED, "--network_train_unet_only", "--flip_aug", "--alpha_mask")

#: The script that each generation runs.
SCRIPTS = {"v0.10": "flux_train_network.py", "v0.11": "sdxl_train_network.py"}


@pytest.fixture
def caches(images):
    """Returns the sizes of the cache files by name, and removes all of them after the test."""

    def sizes():
        return {file.name: file.stat().st_size for file in images.rglob("*.npz")}

    def remove():
        for file in [*images.rglob("*.npz"), *images.rglob(file_index.CACHES)]:
            file.unlink()

    yield sizes, remove
    remove()


@pytest.mark.newest
def test_training_with_caches_in_memory_equals_training_on_files(checkout, train, caches):
    sizes, remove = caches
    script = SCRIPTS[checkout.layout]
    on_disk = train(checkout, script, *OPTIONS)
    assert on_disk.code == 0, on_disk.output[-4000:]
    latents, texts = ([size for name, size in sizes().items() if ("_te" in name) is texts] for texts in (False, True))
    assert len(latents) == len(texts) == 4

    # Half of the latents fit; or all, and one or two text encoder outputs.
    for limit, subject in ((0.6 * sum(latents), "latents"), (sum(latents) + 5e4 + 1.5 * max(texts), "text encoder outputs")):
        remove()
        run = train(checkout, script, *OPTIONS, "--cache_size_limit", f"{limit / 1e6}MB")
        assert run.code == 0, run.output[-4000:]
        (count,) = re.findall(rf": {subject} of (\d) of 4 images do not fit", run.output)
        assert 0 < int(count) < 4, (sizes(), latents, texts, limit)
        assert 0 < len(sizes()) < 8
        assert sum(sizes().values()) <= limit
        assert all(torch.equal(tensor, on_disk.tensors[name]) for name, tensor in run.tensors.items())
