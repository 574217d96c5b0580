"""Real runs on photographs: one that over-fits is marked where its validation turned, and one that does not is not marked."""

import pytest

from kohya_ext.reporting.history import History
from kohya_ext.run.journal_reader import JournalReader
from kohya_ext.tiny.arguments import OUTPUT_NAME

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")
image = pytest.importorskip("PIL.Image")
skimage = pytest.importorskip("skimage")

pytestmark = [pytest.mark.slow, pytest.mark.newest, pytest.mark.timeout(3600)]

SCRIPT = "flux_train.py"
PHOTOGRAPHS = ("astronaut", "coffee", "chelsea", "rocket", "camera", "coins", "page", "retina", "immunohistochemistry", "brick")

#: Of FLUX's autoencoder: latents = SCALE * (its output - SHIFT).
SCALE, SHIFT = 0.3611, 0.1159


def write_photographs(folder, count=20):
    """Write random squares of photographs, 64 pixels wide."""
    folder.mkdir(parents=True)
    generator = numpy.random.default_rng(0)
    for number in range(count):
        photograph = numpy.asarray(getattr(skimage.data, PHOTOGRAPHS[number % len(PHOTOGRAPHS)])())
        side = min(photograph.shape[:2]) // 2
        top, left = (generator.integers(0, length - side) for length in photograph.shape[:2])
        square = image.fromarray(photograph[top : top + side, left : left + side])
        square.convert("RGB").resize((64, 64)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a photo")


def with_unit_latents(file, folder, images):
    """Write an autoencoder whose latents of the images have mean 0 and deviation 1, as a trained one's do."""
    from safetensors.torch import load_file, save_file

    caches = [numpy.load(cache) for cache in images.glob("*_flux.npz")]
    latents = numpy.concatenate(
        [cache[next(name for name in cache.files if name.startswith("latents"))].reshape(16, -1) for cache in caches], axis=1
    )
    weights = load_file(file)
    mean, deviation = (torch.tensor(value).float() for value in (latents.mean(1) / SCALE + SHIFT, latents.std(1)))
    weight, bias = weights["encoder.conv_out.weight"], weights["encoder.conv_out.bias"]
    weight[:16] /= deviation.view(16, 1, 1, 1)
    bias[:16] = (bias[:16] - mean) / deviation + SHIFT
    weight[16:], bias[16:] = 0, -20  # no noise
    save_file(weights, folder / "ae.safetensors")
    for cache in images.glob("*_flux.npz"):
        cache.unlink()
    return folder / "ae.safetensors"


@pytest.fixture(scope="module")
def run(models, tmp_path_factory):
    """Train on photographs: (checkout, train, split, steps) -> the journal's history."""
    images = tmp_path_factory.mktemp("photographs") / "1_photo"
    write_photographs(images)
    files = {}

    def of(checkout, train, split, steps):
        given = (
            "--train_data_dir",
            str(images.parent),
            "--resolution",
            "64,64",
            "--cache_latents_to_disk",
            "--learning_rate",
            "1e-3",
        )
        given += ("--cache_text_encoder_outputs",)
        if not files:
            first = train(checkout, SCRIPT, *given, "--max_train_steps", "1")
            assert first.code == 0, first.output[-3000:]
            files["ae"] = with_unit_latents(models("flux").files["ae"], tmp_path_factory.mktemp("ae"), images)
        given += (
            "--ae",
            str(files["ae"]),
            "--validation_split",
            str(split),
            "--validation_seed",
            "1",
            "--validate_every_n_epochs",
        )
        given += (str(round(80 / (20 * (1 - split)))), "--save_every_n_steps", "80", "--max_train_steps", str(steps))
        done = train(checkout, SCRIPT, *given, bare=True, without=("--gradient_checkpointing",))
        assert done.code == 0, done.output[-3000:]
        reader = JournalReader(done.folder / f"{OUTPUT_NAME}.journal.jsonl", History)
        reader.update()
        return reader.latest

    return of


def test_a_run_that_overfits_is_marked_where_validation_turned(checkout, train, run):
    history = run(checkout, train, split=0.8, steps=2400)
    validations = history.evaluations()
    print([(each.step, round(each.loss, 4)) for each in validations])
    assert len(validations[0].losses) == 16
    marked = history.overfitting()
    assert marked is not None
    lowest = min(validations, key=lambda each: each.loss)
    assert abs(marked.step - lowest.step) <= 2 * 80, "not where validation turned"
    file, best = history.best_file()
    assert best.step == lowest.step
    assert file.name == f"{OUTPUT_NAME}-step{best.step:08d}.safetensors"


def test_a_run_that_still_learns_is_not_marked(checkout, train, run):
    history = run(checkout, train, split=0.2, steps=800)
    print([(each.step, round(each.loss, 4)) for each in history.evaluations()])
    assert history.evaluations()[0].held_out
    assert history.overfitting() is None
