"""A resumed run draws the batches that an undisturbed one draws, from every step and every end of an epoch."""

import multiprocessing
import random
import sys
from types import SimpleNamespace

import pytest

from kohya_ext.run import data_order, resume

torch = pytest.importorskip("torch")
loaders = pytest.importorskip("accelerate.data_loader")

EPOCHS, LENGTH = 3, 4


class Captions(torch.utils.data.Dataset):
    """Shuffles like upstream's datasets: once per epoch, with its own seed, when the collate function names the epoch."""

    def __init__(self):
        self.order, self.seed, self.current_epoch, self.current_step = list(range(LENGTH)), 7, 0, 0

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return self.order[index], random.random(), self.current_step

    def set_seed(self, seed):
        self.seed = seed

    def set_current_epoch(self, epoch):
        while self.current_epoch < epoch:
            self.current_epoch += 1
            random.seed(self.seed + self.current_epoch)
            random.shuffle(self.order)

    def set_current_step(self, step):
        self.current_step = step


class Collate:
    def __init__(self, dataset):
        self.dataset = dataset
        self.current_epoch, self.current_step = multiprocessing.Value("i", 0), multiprocessing.Value("i", 0)

    def __call__(self, examples):
        worker = torch.utils.data.get_worker_info()
        dataset = self.dataset if worker is None else worker.dataset
        dataset.set_current_epoch(self.current_epoch.value)
        dataset.set_current_step(self.current_step.value)
        return examples[0]


def train(folder, workers, state=None):
    """Train for three epochs, with a state after each step and epoch; return step -> batch."""
    args = SimpleNamespace(gradient_accumulation_steps=1, max_train_steps=99, resume=state)
    accelerator = SimpleNamespace(is_main_process=True, num_processes=1, process_index=0, _models=[], _optimizers=[], log=None)
    running, collate = resume.Position(args, accelerator), Collate(Captions())
    options = {"shuffle": True, "collate_fn": collate, "num_workers": workers, "persistent_workers": workers > 0}
    loader = loaders.DataLoaderShard(collate.dataset, **options)
    if state is not None:
        running.on_state_load(state)
    random.seed(0)
    torch.manual_seed(0)
    global_step, drawn = 0, {}
    for epoch in range(EPOCHS):
        collate.current_epoch.value = epoch + 1
        for batch in running.batches(loader, lambda: loaders.DataLoaderShard.__iter__(loader), sys._getframe()):
            collate.current_step.value = global_step
            global_step += 1
            item, noise, step = batch
            # Upstream's workers read the step at a time that differs between runs.
            drawn[global_step] = (item, noise, step if workers == 0 else None)
            running.after_batch(SimpleNamespace(num_processes=1, sync_gradients=True))
            save(running, folder / f"step{global_step}")
        if running._target is None:
            save(running, folder / f"epoch{epoch + 1}")
    return drawn


def save(running, state):
    state.mkdir(parents=True)
    running.on_state_save(state)
    random.random()  # as rich 14.1 does for each line logged about the save


@pytest.mark.linux("starts each worker in a new interpreter")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_from_every_state_continues_with_the_next_batch(workers, tmp_path):
    expected = train(tmp_path / "whole", workers)
    assert len(expected) == EPOCHS * LENGTH
    assert len({item for item, _, _ in expected.values()}) == LENGTH
    steps = range(1, 11) if workers == 0 else (3, 5, 10)
    for name, trained in (*((f"step{step}", step) for step in steps), ("epoch1", LENGTH), ("epoch2", 2 * LENGTH)):
        resumed = train(tmp_path / f"from-{name}", workers, tmp_path / "whole" / name)
        assert resumed == {step: batch for step, batch in expected.items() if step > trained}, name


def test_a_state_of_an_earlier_version_has_no_steps():
    loader = SimpleNamespace(dataset=Captions(), collate_fn=None)
    data_order.set_steps(loader, None)
    data_order.restore(loader, {"counters": [1, 5], "seeds": [7], "generator": None})
    assert (loader.dataset.current_epoch, loader.dataset.current_step) == (1, 5)


@pytest.mark.parametrize(
    ("subset", "workers", "persistent", "expected"),
    [
        ({"token_warmup_step": 5}, 2, False, "--token_warmup_step with data loader workers"),
        ({"token_warmup_step": 5}, 0, False, None),
        ({}, 2, True, "--train_inpainting with --persistent_data_loader_workers"),
    ],
)
def test_what_cannot_be_exact_is_named(subset, workers, persistent, expected):
    dataset = SimpleNamespace(subsets=[SimpleNamespace(**subset)], train_inpainting=True)
    lines = list(data_order.inexact(SimpleNamespace(dataset=dataset), workers, persistent))
    assert len(lines) == (expected is not None)
    assert all(line.startswith(expected) for line in lines)
