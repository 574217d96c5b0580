"""A fine-tune of SD 3 with cached text encoder outputs writes its final model, also with accelerate 1.7 and newer."""

import pytest

from tests.real.test_losing_nothing import read, same

pytestmark = pytest.mark.thorough


@pytest.mark.newest
def test_fine_tune_of_sd3_with_cached_texts_writes_its_final_model(checkout, train):
    run = train(checkout, "sd3_train.py", "--cache_text_encoder_outputs", "--save_every_n_steps", "4")
    assert same(run.tensors, read(run.folder / "tiny-step00000004.safetensors"))
