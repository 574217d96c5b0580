"""A failed sample or validation is a warning, and leaves everything as it was before."""

import math
import random
from argparse import Namespace
from types import SimpleNamespace

import pytest
from kohya_ext.patches import sampling_failures

from kohya_ext.config.settings import Settings

torch = pytest.importorskip("torch")

ARGS = Namespace(sample_every_n_steps=1, sample_every_n_epochs=None, sample_at_first=False)


def accelerator(processes=1, kind="NO"):
    return SimpleNamespace(num_processes=processes, distributed_type=f"DistributedType.{kind}", device=torch.device("cpu"))


class Model(torch.nn.Module):
    """A model that only knows its device, and the swapped blocks that it has moved back."""

    def __init__(self, blocks_to_swap=0):
        super().__init__()
        self.device, self.blocks_to_swap, self.moved_back = torch.device("cpu"), blocks_to_swap, 0

    def parameters(self, recurse=True):
        return iter([self])

    def to(self, device):
        assert not self.blocks_to_swap
        self.device = torch.device(device)
        return self

    def prepare_block_swap_before_forward(self):
        self.moved_back += 1


class Rotating(Model):
    """A model that upstream switches for sampling and back, such as Anima."""

    trains = False

    def switch_block_swap_for_training(self):
        self.trains = True


def fail(*args, **kwargs):
    raise ValueError("no prompt")


def test_a_failed_sample_restores_random_state_and_devices(capsys):
    vae, swapped = Model(), Model(blocks_to_swap=2)

    def sample_images(accelerator, args, models):
        torch.manual_seed(1)
        random.seed(1)
        vae.to("meta")
        fail()

    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(1), random.random()
    torch.manual_seed(5)
    random.seed(5)
    guarded = sampling_failures._sample(sample_images, Settings())
    assert guarded(accelerator(), ARGS, [vae, swapped]) is None
    assert (torch.rand(1), random.random()) == expected
    assert vae.device.type == "cpu"
    assert swapped.moved_back == 1
    assert "sampling failed, training continues without it: ValueError: no prompt" in capsys.readouterr().err


def test_blocks_rotate_for_training_again_only_after_the_last_sample():
    def sample_images(*args):
        fail()

    def sample_image_inference(*args):
        fail()

    model = Rotating(blocks_to_swap=2)
    sampling_failures._sample(sample_image_inference, Settings())(accelerator(), ARGS, model)
    assert (model.trains, model.moved_back) == (False, 1)
    sampling_failures._sample(sample_images, Settings())(accelerator(), ARGS, model)
    assert (model.trains, model.moved_back) == (True, 1)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP"])
def test_processes_that_sample_together_end_together(kind):
    with pytest.raises(ValueError, match="no prompt"):
        sampling_failures._sample(fail, Settings())(accelerator(2, kind), ARGS)


def test_a_gpu_that_cannot_be_used_ends_the_run(monkeypatch):
    monkeypatch.setattr(sampling_failures, "gpu_problem", lambda device: "CUDA error")
    with pytest.raises(ValueError, match="no prompt"):
        sampling_failures._sample(fail, Settings())(accelerator(), ARGS)


class Trainer:
    """A trainer of sd-scripts v0.10, which validates in its training function."""

    calls = 0

    def sample_images(self, *args):
        fail()

    def process_batch(self, batch, is_train=True):
        self.calls += 1
        return torch.tensor(1.0) if is_train else fail()


def test_validation_before_v0_11_gives_no_loss_and_ends(capsys):
    trainer, evaluations = Trainer(), sampling_failures._Evaluations(ARGS, accelerator())
    evaluations.guard(trainer)
    assert trainer.process_batch({}).item() == 1
    assert [math.isnan(trainer.process_batch({}, is_train=False)) for _ in range(3)] == [True] * 3
    assert trainer.calls == 2  # the rest of a failed validation is skipped
    assert capsys.readouterr().err.count("validation failed") == 1
    evaluations.before_batch(accelerator())
    assert math.isnan(trainer.process_batch({}, is_train=False))
    assert trainer.calls == 3
    trainer.sample_images()
    assert "sampling failed" in capsys.readouterr().err

    evaluations.on_end()
    assert not {"process_batch", "sample_images"} & set(vars(trainer))


def test_validation_batches_end_where_one_cannot_be_loaded(capsys):
    def batches():
        yield {"at": 1}
        fail()

    evaluations = sampling_failures._Evaluations(ARGS, accelerator())
    assert list(evaluations.other_batches(batches)) == [{"at": 1}]
    assert "validation failed" in capsys.readouterr().err


def test_validation_in_several_processes_ends_the_run():
    evaluations = sampling_failures._Evaluations(ARGS, accelerator(2, "MULTI_GPU"))
    trainer = Trainer()
    evaluations.guard(trainer)
    with pytest.raises(ValueError, match="no prompt"):
        trainer.process_batch({}, is_train=False)
