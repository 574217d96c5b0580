"""Compute the loss of images that are not trained on, in the fine-tuning scripts as upstream does in the LoRA scripts.

Options, timesteps, random numbers and the names in the trackers are those of ``train_network.py``: four timesteps of each
batch, with the same noise in every validation. The statements of the script's own loop compute the loss
(`kohya_ext.patching.step_loss`). All random states are restored afterwards, so training is unchanged.

Upstream splits images with captions in text files. Its two parts can share images, because it rounds the numbers of both, and
draws two splits without ``--validation_seed``; this patch validates the images that are not trained on. It also splits images
of a metadata file (``--in_json``).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from types import CodeType, FrameType
from typing import Any

from kohya_ext.config.settings import Option, Settings, fraction
from kohya_ext.console import note, stop, warn
from kohya_ext.errors import first_line
from kohya_ext.patching.attributes import replaced
from kohya_ext.patching.patch import Patch, Target, moved, takes
from kohya_ext.patching.step_loss import StepLoss, callers, local_names, step_loss, variables
from kohya_ext.patching.training_loop import Stage, current
from kohya_ext.patching.types import Accelerator
from kohya_ext.run.validation import INSTEAD_OF, Validation, paths, preserved_random_state
from kohya_ext.sdscripts.families import trains_control_net

_TIMESTEPS = 4
"""Number of timesteps of each batch, as in upstream's LoRA scripts."""


def _whole(value: object) -> int:
    """Read a whole number. Raises ValueError for anything else."""
    try:
        return int(str(value))
    except ValueError:
        raise ValueError(f"must be a whole number, not {value!r}") from None


VALIDATION_SPLIT = Option(
    "validation_split",
    0.0,
    fraction,
    "train without this fraction of the images and print their loss",
    metavar="FRACTION",
    environment=None,
)
VALIDATION_SEED = Option[int | None](
    "validation_seed",
    None,
    _whole,
    "seed of the choice of validation images and of their noise; default: --seed",
    metavar="N",
    environment=None,
)
VALIDATE_EVERY_N_STEPS = Option[int | None](
    "validate_every_n_steps",
    None,
    _whole,
    "compute the validation loss every this many steps, and after epochs",
    metavar="N",
    environment=None,
)
VALIDATE_EVERY_N_EPOCHS = Option[int | None](
    "validate_every_n_epochs",
    None,
    _whole,
    "compute the validation loss every this many epochs; default: every epoch",
    metavar="N",
    environment=None,
)
MAX_VALIDATION_STEPS = Option[int | None](
    "max_validation_steps",
    None,
    _whole,
    "largest number of batches in a validation; default: all",
    metavar="N",
    environment=None,
)


@dataclass
class _FullValidation(Validation):
    settings: Settings = field(kw_only=True)
    loop: CodeType = field(kw_only=True)
    """The script's training function."""
    step_loss: StepLoss = field(kw_only=True)
    training: Any = field(kw_only=True)
    """The dataset group of the training images."""
    _failed: bool = field(default=False, init=False)

    def on_loss(self, recorder: Any, epoch: int) -> None:
        """Validate if it is due. Called when the script has counted the step, saved, sampled and recorded its loss."""
        if self._failed or not self.accelerator.sync_gradients:
            return
        frame = next((frame for frame in callers(sys._getframe(1)) if frame.f_code is self.loop), None)
        if frame is None:
            return
        of_loop = variables(frame)
        step = of_loop["global_step"]
        ended = self.accelerator.gradient_state.end_of_dataloader or step >= self.args.max_train_steps
        every_steps, every_epochs = self.settings[VALIDATE_EVERY_N_STEPS], self.settings[VALIDATE_EVERY_N_EPOCHS] or 1
        due = {"step": bool(every_steps) and step % (every_steps or 1) == 0, "epoch": ended and (epoch + 1) % every_epochs == 0}
        kinds = [kind for kind, is_due in due.items() if is_due]
        if not kinds:
            return
        try:
            self._validate(of_loop, recorder, epoch, step, kinds)
        except Exception as problem:
            if self.accelerator.num_processes > 1:  # the other processes would wait for this one
                raise
            self._failed = True
            warn(f"validation failed, training continues without it: {first_line(problem)}")

    def _validate(self, of_loop: dict[str, Any], recorder: Any, epoch: int, step: int, kinds: Sequence[str]) -> None:
        loss = self.loss(of_loop)
        if loss is None:
            return
        divergence = loss - recorder.moving_average
        for kind in kinds if self.accelerator.is_main_process else ():
            values = {f"loss/validation/{kind}_average": loss, f"loss/validation/{kind}_divergence": divergence}
            for tracker in self.accelerator.trackers:
                # Upstream's numbers, except that Weights & Biases drops values of earlier steps.
                tracker.log(values, step=epoch + 1 if kind == "epoch" and tracker.name != "wandb" else step)

    def loss(self, variables: dict[str, Any]) -> float | None:
        """Return the mean loss of the validation batches; None without any."""
        import torch
        from tqdm import tqdm

        losses: list[float] = []
        with preserved_random_state(), self._evaluating(variables), torch.no_grad():
            self.begin()
            count, limit = len(self.images), self.settings[MAX_VALIDATION_STEPS]
            count = count if limit is None else min(count, limit)
            timesteps = self._timesteps(variables)
            hidden = not self.accelerator.is_main_process
            with tqdm(total=count * len(timesteps), desc="validation steps", leave=False, disable=hidden) as bar:
                for index in range(count):
                    batch = self.load(index)
                    for timestep in timesteps:
                        self.args.min_timestep = self.args.max_timestep = timestep  # as upstream's LoRA scripts do
                        losses.append(self.step_loss.of(variables, batch).item())
                        self.record_loss(losses[-1])
                        self._move_blocks_back()
                        bar.update()
                        bar.set_postfix(val_avg_loss=sum(losses) / len(losses))
            self.finish(together=False)
        return sum(losses) / len(losses) if losses else None

    def _timesteps(self, variables: dict[str, Any]) -> list[int]:
        import numpy

        config = getattr(variables.get("noise_scheduler"), "config", None)
        first = self.args.min_timestep or 0
        last = self.args.max_timestep
        if last is None:
            last = getattr(config, "num_train_timesteps", 1000)
        return [int(each) for each in numpy.linspace(first, last, _TIMESTEPS + 2, dtype=int)[1:-1]]

    @contextlib.contextmanager
    def _evaluating(self, variables: dict[str, Any]) -> Iterator[None]:
        """Turn dropout off inside the block, and use an optimizer's weights for evaluation."""
        models = [module for model in self.accelerator._models for module in model.modules()]
        trained = [(module, module.training) for module in models]
        timesteps = self.args.min_timestep, self.args.max_timestep
        variables.get("optimizer_eval_fn", _nothing)()
        for module in models:
            module.training = False
        try:
            yield
        finally:
            for module, training in trained:
                module.training = training
            self.args.min_timestep, self.args.max_timestep = timesteps
            variables.get("optimizer_train_fn", _nothing)()
            self._move_blocks_back()

    def _move_blocks_back(self) -> None:
        from kohya_ext.patching.swapped_blocks import move_back

        for model in map(self.accelerator.unwrap_model, self.accelerator._models):
            move_back(model)


def _nothing() -> None:
    """Do nothing."""


_NO_LOOP = "this script has no loop in which its loss can be computed for other images"
_CONTROL_NET = "upstream cannot split images with conditioning images"

_FEW = 8
"""Number of training images whose loss is measured where none are held out."""


# --- patch -----------------------------------------------------------------------------------------------------------

_split_by_datasets = False
"""Whether the configuration of a dataset splits it. Other runs must not read a frame's variables, which keeps tensors alive."""


def _training_frame() -> FrameType | None:
    """Return the frame of the script's training function, if it is running."""
    return next((each for each in callers(sys._getframe(1)) if "train_dataset_group" in local_names(each.f_code)), None)


def _validates_itself(function: CodeType) -> bool:
    """Return whether a training function is that of the LoRA scripts."""
    return "val_dataloader" in local_names(function)


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _FullValidation | None:
    global _split_by_datasets
    option = _option(settings)
    split, _split_by_datasets = option is not None or _split_by_datasets, False
    if not split:
        return None
    frame = _training_frame()
    if frame is not None and _validates_itself(frame.f_code):
        return None
    local = variables(frame) if frame is not None else {}
    images = local.get("val_dataset_group")
    if images is None and option is None:
        return None
    loss = step_loss(frame.f_code) if frame is not None and "loss_recorder" in local_names(frame.f_code) else None
    if frame is None or loss is None:
        _refuse(option, _NO_LOOP)
        return None
    if images is None or not len(images):
        splits = "val_dataset_group" in local
        _refuse(option, "the fraction is less than one image" if splits else "this sd-scripts does not split datasets")
        return None
    if getattr(args, "deepspeed", False):
        _refuse(option, "DeepSpeed is not supported")
        return None
    training = local["train_dataset_group"]
    held_out = paths(images).isdisjoint(paths(training))
    which = "images with repeats" if held_out else "training images (measures memorisation only partly)"
    note(f"validation: {images.num_train_images} {which}, {len(images)} batches, {_TIMESTEPS} timesteps each")
    seed = next(each for each in (settings[VALIDATION_SEED], args.seed, 0) if each is not None)
    return _FullValidation(
        args, accelerator, images, held_out, seed, settings=settings, loop=frame.f_code, step_loss=loss, training=training
    )


def _option(settings: Settings) -> str | None:
    """Return the option that asks for a validation, if any."""
    asked = {"validation_split": settings[VALIDATION_SPLIT] > 0, "early_stopping": settings["early_stopping"] is not None}
    return next((f"--{name}" for name, is_asked in asked.items() if is_asked), None)


def _problems(script: str, args: Namespace, settings: Settings) -> Iterator[str]:
    if (option := _option(settings)) is not None:
        reason = _CONTROL_NET if trains_control_net(script) else _NO_LOOP if "textual_inversion" in script else None
        if reason is not None:
            yield f"{option}: {reason}; remove the option"


def _refuse(option: str | None, reason: str) -> None:
    """Stop at an option; warn about a dataset's own ``validation_split``, which upstream ignores."""
    if option is not None:
        stop(f"{option}: {reason}; remove the option")
    warn(f"no validation loss: {reason}; remove validation_split from the dataset's configuration")


def _generate(original: Any, settings: Settings) -> Any:
    """Return a function that validates some of the training images with --early_stopping, where none are held out."""

    @wraps(original)
    def generate_dataset_group_by_blueprint(dataset_group_blueprint: Any) -> Any:
        frame = _training_frame()
        if frame is not None and not _validates_itself(frame.f_code):
            _seed(dataset_group_blueprint, frame)
        groups = original(dataset_group_blueprint)
        if frame is None or not isinstance(groups, tuple):
            return groups
        training, images = _split(original, dataset_group_blueprint, groups, frame, settings)
        if settings["early_stopping"] is not None:
            images = images if images is not None and len(images) else _some_of(training, settings)
        if images is not groups[1] and images is not None:
            setattr(images, INSTEAD_OF, groups[1])
        return training, images

    return generate_dataset_group_by_blueprint


def _rows(blueprint: Any) -> list[Any]:
    """Return the datasets that are split."""
    return [row for row in blueprint.datasets if 0.0 < getattr(row.params, "validation_split", 0.0) <= 1.0]


def _seed(blueprint: Any, frame: FrameType) -> None:
    """Let a run without any seed split in the same way after a resume."""
    for row in _rows(blueprint):
        if row.params.validation_seed is None and variables(frame)["args"].seed is None:
            row.params.validation_seed = 0


def _split(original: Any, blueprint: Any, groups: tuple[Any, Any], frame: FrameType, settings: Settings) -> tuple[Any, Any]:
    """Return upstream's training images, and as validation images those that are not among them.

    Upstream's own can be, because it rounds the numbers of both, and draws two splits without a seed. Datasets with metadata
    files, which upstream does not split, are split in the scripts that do not validate themselves.
    """
    global _split_by_datasets
    rows, itself = _rows(blueprint), _validates_itself(frame.f_code)
    if not rows or (itself and settings["early_stopping"] is None):
        return groups
    _split_by_datasets = not itself
    if any(row.is_controlnet for row in rows):
        _refuse("--validation_split" if settings[VALIDATION_SPLIT] > 0 else None, _CONTROL_NET)
        return groups
    training = groups[0]
    with preserved_random_state(), _all_but(training, original):
        _, images = original(blueprint)
    return (training, images) if itself else _with_metadata_files(training, images, blueprint, rows, variables(frame)["args"])


@contextlib.contextmanager
def _all_but(training: Any, original: Any) -> Iterator[None]:
    """Let upstream's function validate all images but those that are trained on, inside the block."""
    module: Any = sys.modules[sys.modules[original.__module__].DreamBoothDataset.__module__]
    trained = {info.absolute_path for data_set in training.datasets for info in data_set.image_data.values()}

    def split_train_val(paths: Any, sizes: Any, is_training_dataset: bool, *_: Any, **__: Any) -> Any:
        if is_training_dataset:
            return paths[:1], sizes[:1]  # of a dataset that nothing uses
        others = [(path, size) for path, size in zip(paths, sizes, strict=True) if path not in trained]
        return [path for path, _ in others], [size for _, size in others]

    before = logging.root.manager.disable
    logging.disable(logging.INFO)  # all of it is printed already
    try:
        with replaced(module, "split_train_val", split_train_val):
            yield
    finally:
        logging.disable(before)


def _with_metadata_files(training: Any, images: Any, blueprint: Any, rows: Sequence[Any], args: Namespace) -> tuple[Any, Any]:
    """Return the groups of training and validation images, the datasets with metadata files split."""
    of_training = (each for row, each in zip(blueprint.datasets, training.datasets, strict=True) if row in rows)
    for row, trained, validated in zip(rows, of_training, images.datasets, strict=True):
        if not row.is_dreambooth:
            keys = list(trained.image_data)
            count = round(len(keys) * row.params.validation_split)
            seed = args.seed or 0 if row.params.validation_seed is None else row.params.validation_seed
            chosen = set(random.Random(seed).sample(keys, count))
            _remove(trained, chosen)
            _remove(validated, set(keys) - chosen)
    group = type(training)
    return group(training.datasets), group(images.datasets)


def _some_of(training: Any, settings: Settings) -> Any:
    """Return a group of a few training images, each in a batch of its own; None if a dataset is of an unknown kind."""
    chosen, each = [], max(_FEW // len(training.datasets), 1)
    for data_set in training.datasets:
        keys = sorted(key for key, image in getattr(data_set, "image_data", {}).items() if not image.is_reg)
        keys = random.Random(settings[VALIDATION_SEED] or 0).sample(keys, min(each, len(keys)))
        if keys:
            chosen.append(_copied(data_set, keys))
    if not chosen:
        return None
    return type(training)(chosen)


def _copied(data_set: Any, keys: Sequence[str]) -> Any:
    """Return a dataset of some of the images of another one, once each."""
    copied = copy.copy(data_set)
    copied.image_data = {key: copy.copy(data_set.image_data[key]) for key in keys}
    copied.image_to_subset = {key: data_set.image_to_subset[key] for key in keys}
    for image in copied.image_data.values():
        image.num_repeats = 1
    copied.num_train_images, copied.batch_size = len(keys), 1
    _make_buckets(copied)
    return copied


def _remove(data_set: Any, keys: Iterable[str]) -> None:
    """Remove images from a dataset, which then has the buckets of one without them."""
    for key in keys:
        data_set.num_train_images -= data_set.image_data.pop(key).num_repeats
        del data_set.image_to_subset[key]
    _make_buckets(data_set)


def _make_buckets(data_set: Any) -> None:
    """Sort the images of a dataset into buckets, without random numbers of the run."""
    seed, data_set.seed, data_set.bucket_manager = data_set.seed, 0, None
    with preserved_random_state():
        data_set.make_buckets()
    data_set.seed = seed


def _cache(original: Any, settings: Settings) -> Any:
    """Return a method of the dataset group that also caches the validation images, without random numbers of the run."""

    @wraps(original)
    def cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self, INSTEAD_OF):  # a LoRA script caches it
            if (upstreams := getattr(self, INSTEAD_OF)) is not None:
                original(upstreams, *args, **kwargs)  # draws random numbers
            with preserved_random_state():
                return original(self, *args, **kwargs)
        result = original(self, *args, **kwargs)
        if (validation := current(_FullValidation)) is not None and self is validation.training:
            with preserved_random_state():
                original(validation.images, *args, **kwargs)
        return result

    return cache


def _add(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def add(self: Any, *, epoch: int, step: int, loss: float) -> None:
        original(self, epoch=epoch, step=step, loss=loss)
        if (validation := current(_FullValidation)) is not None:
            validation.on_loss(self, epoch)

    return add


PATCH = Patch(
    name="validation_loss",
    summary="compute the loss of --validation_split in the fine-tuning scripts, too",
    targets=(
        *moved("LossRecorder.add", "library.logging_util", _add, takes("self", "epoch"), body="runs"),
        *moved("DatasetGroup.new_cache_latents", "library.dataset", _cache, takes("self"), body="runs"),
        *moved("DatasetGroup.new_cache_text_encoder_outputs", "library.dataset", _cache, takes("self"), body="runs"),
        Target(
            "library.config_util",
            "generate_dataset_group_by_blueprint",
            _generate,
            takes("dataset_group_blueprint", exactly=True),
            body="runs",
        ),
    ),
    options=(VALIDATION_SPLIT, VALIDATION_SEED, VALIDATE_EVERY_N_STEPS, VALIDATE_EVERY_N_EPOCHS, MAX_VALIDATION_STEPS),
    exactness="exact",
    held_to="training on the same images without it, bit for bit",
    idea="https://github.com/kohya-ss/sd-scripts/pull/1638",
    stage=Stage.VALIDATE,
    problems=_problems,
    on_start=_start,
)
