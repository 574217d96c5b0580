"""``--output_preservation sks=person``: hold the LoRA's output on class captions to the base model's.

The class caption has the class instead of the trigger word. Before each micro-batch's own loss, the model predicts twice on the
class captions, with the noise and timesteps of the micro-batch: without the LoRA, which needs no gradients, and with it. The
mean squared error between both, times --output_preservation_multiplier, is added to the gradient. Its backward pass has ended
before upstream's own forward pass begins, so one graph is alive at a time. Upstream's loss is computed as without this patch.

Predictions are those of upstream's own ``process_batch``, which encodes the texts, draws the noise and calls the model. Its
loss on class captions is not used.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, cast

from kohya_ext.caching import class_captions
from kohya_ext.caching.cached_datasets import datasets_of
from kohya_ext.caching.class_captions import ClassWord
from kohya_ext.config.settings import Option, Settings
from kohya_ext.console import note, stop
from kohya_ext.patching.attributes import Replacement, replace_attribute, replaced
from kohya_ext.patching.patch import Patch, moved, takes
from kohya_ext.patching.step_loss import callers, local_names, variables
from kohya_ext.patching.training_loop import Stage, TrainingCallback, step_values, unobserved_backward
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import ranks
from kohya_ext.run.journal_lines import PRESERVATION_LOSS
from kohya_ext.run.validation import preserved_random_state
from kohya_ext.sdscripts.constraints import CACHED_TEXT, PRESERVATION, VARIANTS


def _multiplier(value: object) -> float:
    """Read a number, 0 or more. Raises ValueError for anything else."""
    try:
        number = float(cast(Any, value))
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, bool) or not 0.0 <= number < math.inf:
        raise ValueError(f"must be a number, 0 or more, not {value!r}")
    return number


def _class_word(value: object) -> str:
    """Read TRIGGER=CLASS. Raises ValueError for anything else."""
    word = ClassWord.read(value)
    return f"{word.trigger}={word.word}"


OUTPUT_PRESERVATION = Option[str | None](
    PRESERVATION,
    None,
    _class_word,
    "train LoRAs that leave the output on a class as it was: sks=person compares captions with person instead of sks to the "
    "base model",
    metavar="TRIGGER=CLASS",
)
OUTPUT_PRESERVATION_MULTIPLIER = Option(
    "output_preservation_multiplier",
    1.0,
    _multiplier,
    "weight of the loss of --output_preservation",
    metavar="NUMBER",
)

_METHODS = ("process_batch", "get_noise_pred_and_target", "on_validation_step_end")
"""The methods of a LoRA script's trainer that are called or replaced."""


@dataclass
class _Preservation(TrainingCallback):
    accelerator: Accelerator
    word: ClassWord
    multiplier: float
    trainer: Any
    _replaced: list[Replacement] = field(default_factory=list)

    def watch(self) -> None:
        """Let the trainer's method preserve before it computes the loss of a training batch."""
        method = self.trainer.process_batch
        signature = inspect.signature(method)

        @wraps(method)
        def process_batch(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            if call.arguments["is_train"]:
                self._preserve(method, call.arguments)
            return method(*args, **kwargs)

        self._replaced.append(replace_attribute(self.trainer, "process_batch", process_batch))

    def _preserve(self, method: Callable[..., Any], given: Mapping[str, Any]) -> None:
        """Add the gradient of the preservation loss. Leaves all random states as they are."""
        from torch.nn.functional import mse_loss

        prior = self._prior(method, given)
        with preserved_random_state():
            loss = mse_loss(self._prediction(method, given, is_train=True).float(), prior.float())
            unobserved_backward(self.accelerator, loss * self.multiplier)
        step_values().record(PRESERVATION_LOSS, loss)

    def _prior(self, method: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        """Return the prediction of the base model."""
        network = self.accelerator.unwrap_model(given["network"])
        if not (hasattr(network, "set_multiplier") and hasattr(network, "multiplier")):
            stop(f"--{PRESERVATION} needs a network with a multiplier, such as networks.lora, not {type(network).__module__}")
        multiplier = network.multiplier
        network.set_multiplier(0.0)
        try:
            with preserved_random_state():
                return self._prediction(method, given, is_train=False)
        finally:
            network.set_multiplier(multiplier)
            # Brings swapped blocks back, as no backward pass does so.
            names = inspect.signature(self.trainer.on_validation_step_end).parameters
            self.trainer.on_validation_step_end(**{name: given[name] for name in names})

    def _prediction(self, method: Callable[..., Any], given: Mapping[str, Any], is_train: bool) -> Any:
        """Return the model's prediction on the class captions of a batch."""
        predict, predictions = self.trainer.get_noise_pred_and_target, []

        @wraps(predict)
        def kept(*args: Any, **kwargs: Any) -> Any:
            result = predict(*args, **kwargs)
            predictions.append(result[0])
            return result

        batch = self._class_batch(given["batch"], given["tokenize_strategy"])
        with replaced(self.trainer, "get_noise_pred_and_target", kept):
            method(**{**given, "batch": batch, "is_train": is_train})
        return predictions.pop()

    def _class_batch(self, batch: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
        """Return a copy of a batch with class captions, their tokens, and their cached outputs if there are any."""
        captions = [self.word.of(caption) for caption in batch["captions"]]
        outputs = batch.get(class_captions.OUTPUTS)
        return {
            **batch,
            "captions": captions,
            "input_ids_list": None if batch["input_ids_list"] is None else _tokens(tokenizer, captions),
            "text_encoder_outputs_list": None if outputs is None else [*outputs],
            "custom_attributes": [{} for _ in captions],  # upstream's own preservation resets the multiplier
        }

    def on_end(self) -> None:
        """Restore the trainer's method."""
        while self._replaced:
            self._replaced.pop().undo()


def _tokens(tokenizer: Any, captions: list[str]) -> list[Any]:
    """Return the token ids of captions as the dataset stacks them, one tensor for each tokenizer."""
    import torch

    rows = [[ids[0] for ids in tokenizer.tokenize(caption)] for caption in captions]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Preservation:
    word = ClassWord.read(settings[OUTPUT_PRESERVATION])
    if ranks.is_deepspeed(accelerator):
        stop(f"--{PRESERVATION} does not support DeepSpeed, whose engine counts every backward pass; remove one of the two")
    functions = (each for each in callers(sys._getframe(1)) if "prepare_accelerator" in each.f_code.co_names)
    frame = next((each for each in functions if "self" in local_names(each.f_code)), None)
    started = {} if frame is None else variables(frame)
    trainer = started.get("self")
    if not all(hasattr(trainer, name) for name in _METHODS):
        stop(f"--{PRESERVATION} does not support this script: its trainer has no {' or '.join(_METHODS)}; remove it")
    ignored = any(getattr(args, name, None) for name in CACHED_TEXT) and settings[VARIANTS] is None
    _check_captions(started.get("train_dataset_group"), word, () if ignored else ("caption_prefix", "caption_suffix"))
    preservation = _Preservation(accelerator, word, settings[OUTPUT_PRESERVATION_MULTIPLIER], trainer)
    preservation.watch()
    return preservation


def _check_captions(group: Any, word: ClassWord, added: tuple[str, ...]) -> None:
    """Print how many captions lack the trigger, and exit if all do. ``added``: what subsets add to their captions."""
    captions = [
        " ".join(filter(None, (info.caption, *(getattr(dataset.image_to_subset[key], name, None) for name in added))))
        for dataset in datasets_of(group)
        for key, info in dataset.image_data.items()
    ]
    missing = [caption for caption in captions if not word.is_in(caption)]
    if missing and len(missing) == len(captions):
        stop(
            f"--{PRESERVATION}: no caption contains the trigger {word.trigger!r}; correct it, or the captions, of which the "
            f"first is {missing[0]!r}"
        )
    if missing:
        note(
            f"--{PRESERVATION}: {len(missing)} of {len(captions)} captions do not contain {word.trigger!r}; the output on them "
            "is preserved as well"
        )


def _cache(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def new_cache_text_encoder_outputs(self: Any, models: Any, accelerator: Any) -> None:
        original(self, models, accelerator)
        word, datasets = ClassWord.read(settings[OUTPUT_PRESERVATION]), datasets_of(self)
        images = [class_captions.images_of(dataset, word) for dataset in datasets]
        with contextlib.ExitStack() as stack:
            for dataset, of_captions in zip(datasets, images, strict=True):
                own = {info.image_key: info for info in of_captions.values()}
                stack.enter_context(replaced(dataset, "image_data", own))
            original(self, models, accelerator)
        for dataset, of_captions in zip(datasets, images, strict=True):
            setattr(dataset, class_captions.OUTPUTS, class_captions.outputs_of(of_captions))

    return new_cache_text_encoder_outputs


def _getitem(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def getitem(self: Any, index: Any) -> Any:
        outputs = getattr(self, class_captions.OUTPUTS, None)
        if outputs is None:
            return original(self, index)
        images = class_captions.Recorded(self.image_data)
        with replaced(self, "image_data", images):
            example = original(self, index)
        example[class_captions.OUTPUTS] = class_captions.collated(self, partial(original, self, index), images.taken, outputs)
        return example

    return getitem


def _problems(script: str, args: Any, settings: Settings) -> Iterator[str]:
    if getattr(args, "dataset_class", None):
        yield f"--{PRESERVATION} needs sd-scripts' own datasets, whose captions it reads; remove it, or --dataset_class"


PATCH = Patch(
    name="output_preservation",
    summary="--output_preservation: hold the LoRA's output on class captions to the base model's",
    targets=(
        *moved(
            "DatasetGroup.new_cache_text_encoder_outputs",
            "library.dataset",
            _cache,
            takes("self", "models", "accelerator", exactly=True),
            body="runs",
        ),
        *moved("BaseDataset.__getitem__", "library.dataset", _getitem, takes("self", "index", exactly=True), body="runs"),
    ),
    options=(OUTPUT_PRESERVATION, OUTPUT_PRESERVATION_MULTIPLIER),
    wanted=lambda settings: settings[OUTPUT_PRESERVATION] is not None,
    exactness="close",
    held_to="one backward pass of the sum of both losses; with a multiplier of 0 the run without it, bit for bit",
    idea="https://github.com/ostris/ai-toolkit",
    stage=Stage.FUSE,
    problems=_problems,
    only_trains=True,  # `tune` records the losses of the step's own passes
    on_start=_start,
)
