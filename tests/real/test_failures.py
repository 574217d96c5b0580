"""Exceptions injected into the real scripts: nothing that was trained is lost, and resumed runs are bit-identical."""

import random
import shutil

import pytest

from kohya_ext.patching.step_save import saving_statements
from kohya_ext.run import resume
from kohya_ext.sdscripts.checkouts import is_training_script
from kohya_ext.tiny import dataset
from tests.real.test_losing_nothing import FULL, LORA, assert_all_complete, read, same

torch = pytest.importorskip("torch")

#: An epoch has six batches without the image of the validation.
STEPS = 8

OPTIONS = ("--max_train_steps", str(STEPS), "--shuffle_caption", "--save_every_n_epochs", "1", "--lr_scheduler", "cosine")

#: Places whose failure is a warning, and the number of their calls in a run.
CONTINUES = {"sampling": 2, "sample_file": 2, "validation": 8, "full_validation": 8, "journal": STEPS}
ENDS = {"tracker": STEPS, "data": STEPS, "forward": STEPS, "log": STEPS}

#: Places that one of the two scripts has. The LoRA scripts log to each tracker, the others through accelerate.
ONLY_IN = {"validation": LORA, "full_validation": FULL, "log": FULL}


@pytest.fixture(scope="module")
def extras(tmp_path_factory):
    """Options with which the run samples, validates and logs."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    prompts.write_text("a cat --w 64 --h 64 --s 2\n")
    logs = tmp_path_factory.mktemp("logs")
    sampling = ("--sample_prompts", str(prompts), "--sample_every_n_steps", "3", "--sample_sampler", "euler")
    validation = ("--validation_split", "0.25", "--validate_every_n_steps", "4", "--max_validation_steps", "1")
    return (*OPTIONS, *sampling, *validation, "--log_with", "tensorboard", "--logging_dir", str(logs))


@pytest.fixture(scope="module")
def undisturbed(train, extras):
    """(checkout, script) -> the run without a failure; each runs once."""
    runs = {}

    def of(checkout, script):
        key = checkout.layout, script
        if key not in runs:
            runs[key] = train(checkout, script, *extras)
            assert runs[key].code == 0, runs[key].output[-4000:]
            assert "Traceback" not in runs[key].output
        return runs[key]

    return of


def cases(count):
    """Return (script, place, call) for ``count`` failures at random steps, each place in turn."""
    places = [*CONTINUES, *ENDS]
    for index in range(count):
        place = places[index % len(places)]
        script = ONLY_IN.get(place, (LORA, FULL)[index // len(places) % 2])
        call = random.Random(index).randint(2, {**CONTINUES, **ENDS}[place])
        yield pytest.param(script, place, call, id=f"{index}-{place}-{call}", marks=[] if index in (0, 5) else pytest.mark.slow)


@pytest.mark.newest
@pytest.mark.parametrize(("script", "place", "call"), list(cases(20)))
def test_exception_anywhere_loses_nothing(checkout, train, extras, undisturbed, script, place, call):
    failed = train(checkout, script, *extras, env={"FAIL_IN": f"{place}:{call}"})
    assert "injected" in failed.output, failed.output[-4000:]
    assert_all_complete(failed.folder)
    if place in CONTINUES:
        assert failed.code == 0, failed.output[-4000:]
        assert same(failed.tensors, undisturbed(checkout, script).tensors)
        return
    assert failed.code == 1, failed.output[-4000:]
    state = resume.newest_state(failed.folder, "tiny")
    step = torch.load(state / resume.FILE, weights_only=True)["step"]
    model = failed.folder / f"tiny-step{step:08d}.safetensors"
    assert f"no steps lost: state after step {step} saved in {state}" in failed.output
    assert f"model after step {step} saved: {model}" in failed.output
    resumed = train(checkout, script, *extras, "--resume", "auto", output=failed.folder)
    assert resumed.code == 0, resumed.output[-4000:]
    assert same(read(resumed.file), undisturbed(checkout, script).tensors)


@pytest.mark.newest
def test_exception_within_an_accumulated_step_loses_nothing(checkout, train):
    options = ("--gradient_accumulation_steps", "2", "--max_train_steps", "3")
    undisturbed = train(checkout, LORA, *options)
    failed = {batch: train(checkout, LORA, *options, env={"FAIL_IN": f"forward:{batch}"}) for batch in (3, 4)}
    for run in failed.values():
        assert "no steps lost: state after step 1 saved" in run.output, run.output[-4000:]
        resumed = train(checkout, LORA, *options, "--resume", "auto", output=run.folder)
        assert same(read(resumed.file), undisturbed.tensors)


#: Enough steps to read a deleted file after it was deleted.
MANY = ("--max_train_steps", "40")

#: Then images are read in each step.
UNCACHED = ("--cache_latents",)


@pytest.fixture
def own_images(tmp_path):
    """Images that a test may delete."""
    folder = tmp_path / "images"
    dataset.write(folder, 4, 128)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("script", [LORA, FULL])
def test_deleted_images_lose_nothing(checkout, train, own_images, script, workers):
    copy = own_images.with_name("copy")
    shutil.copytree(own_images, copy)
    options = ("--train_data_dir", str(own_images), "--max_data_loader_n_workers", workers)
    failed = train(checkout, script, *options, *MANY, without=UNCACHED, at_step=3, act=lambda _: shutil.rmtree(own_images))
    assert failed.code == 1, failed.output[-4000:]
    assert_all_complete(failed.folder)
    step = torch.load(resume.newest_state(failed.folder, "tiny") / resume.FILE, weights_only=True)["step"]
    assert (failed.folder / f"tiny-step{step:08d}.safetensors").is_file()
    shutil.copytree(copy, own_images)
    until = (*options, "--max_train_steps", str(step + 2))
    resumed = train(checkout, script, *until, "--resume", "auto", without=UNCACHED, output=failed.folder)
    assert f"resumed after step {step}" in resumed.output, resumed.output[-4000:]
    assert same(resumed.tensors, train(checkout, script, *until, without=UNCACHED).tensors)


@pytest.mark.slow
def test_tracker_whose_folder_is_gone_loses_nothing(checkout, train, tmp_path):
    logs = tmp_path / "logs"
    options = ("--log_with", "tensorboard", "--logging_dir", str(logs))
    failed = train(checkout, LORA, *options, *MANY, at_step=2, act=lambda _: shutil.rmtree(logs))
    assert failed.code == 1, failed.output[-4000:]
    assert "no steps lost: state after step " in failed.output
    assert "model after step " in failed.output


def replaced_by_a_file(folder):
    def act(_):
        folder.rename(folder.with_name("moved"))
        folder.write_text("not a folder")

    return act


@pytest.mark.parametrize("script", [LORA, pytest.param(FULL, marks=pytest.mark.slow)])
@pytest.mark.newest
def test_output_folder_replaced_by_a_file_loses_nothing(checkout, train, tmp_path, script):
    output, cache = tmp_path / "output", tmp_path / "cache"
    options = ("--output_dir", str(output), "--disk_full_timeout", "0.01", "--save_state", "--max_train_steps", "6")
    run = train(checkout, script, *options, env={"KOHYA_EXT_CACHE": str(cache)}, at_step=2, act=replaced_by_a_file(output))
    assert run.code == 0, run.output[-4000:]
    assert "Retrying for 0.01 minutes" in run.output
    (model,) = cache.rglob("tiny.safetensors")
    (state,) = cache.rglob("tiny-state")
    assert f"Writing to {model} instead" in run.output
    assert resume.state_problem(state) is None
    assert same(read(model), train(checkout, script, "--max_train_steps", "6").tensors)


def functions_of(code):
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            yield constant
            yield from functions_of(constant)


def test_every_training_script_has_statements_that_save(checkout):
    scripts = [file for file in sorted(checkout.path.glob("*.py")) if is_training_script(file)]
    assert len(scripts) > 20
    for script in scripts:
        code = compile(script.read_text(encoding="utf-8"), str(script), "exec")
        loops = [each for each in functions_of(code) if "accumulate" in each.co_names]
        assert all(saving_statements(each) is not None for each in loops), script
