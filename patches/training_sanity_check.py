"""Check at the first step that exactly the intended weights are trained.

Upstream finishes each of these runs, and the saved file has no effect or a wrong one: a network that matches no module of the
U-Net, or no weight of the file that it continues, a learning rate of zero, the base model in the optimizer along with the LoRA,
adapters on another device, weights without gradients, or several processes that do not communicate or step before they do.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.console import stop, warn
from kohya_ext.patching.patch import Patch, Target, moved, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, trained_weights
from kohya_ext.patching.types import Accelerator
from kohya_ext.preflight import abbreviated
from kohya_ext.run import ranks
from kohya_ext.run.safetensors_header import read_header
from kohya_ext.sdscripts.constraints import stepping_in_backward

#: Starts of the names of weights that may have no gradient. SDXL, Lumina 2 and --clip_skip do not use the last layers of text
#: encoders.
_USUAL = ("lora_te", "text_model.encoder.layers.", "text_model.final_layer_norm.", "text_projection.")


@dataclass
class _Check(TrainingCallback):
    args: Namespace
    in_backward: str | None
    """The option with which the optimizer steps during the backward pass, which leaves no gradients to check."""
    checked: bool = False
    stepped: bool = False
    names: dict[int, str] = field(default_factory=dict)
    """``id()`` of a weight -> its name."""

    def before_batch(self, accelerator: Accelerator) -> None:
        """Check the weights and optimizers before the first step."""
        if self.checked:
            return
        self.checked = True
        models = [accelerator.unwrap_model(model) for model in accelerator._models]
        self.names = {id(weight): name for model in models for name, weight in model.named_parameters()}
        problems = [
            *_between_processes(self.in_backward, accelerator),
            *_in_optimizers(accelerator),
            *self._in_network(accelerator),
        ]
        if problems:
            stop("\n".join([*problems, "stopped before the first step; --disable_patch training_sanity_check skips this"]))

    def before_step(self, optimizer: Any) -> None:
        """Check the gradients of the first step."""
        if self.stepped or self.in_backward is not None:
            return
        self.stepped = True
        trained = [weight for weight in trained_weights([optimizer]) if weight.requires_grad]
        without = [self.names.get(id(weight), "unnamed") for weight in trained if weight.grad is None]
        if without and len(without) == len(trained):
            stop("no gradient reaches any of the trained weights; check that the network is connected to the loss")
        if unexpected := [name for name in without if not name.startswith(_USUAL)]:
            shown = abbreviated(unexpected, 3)
            warn(f"{len(unexpected)} of {len(trained)} trained weights have no gradient in the first step: {shown}")

    def _in_network(self, accelerator: Accelerator) -> Iterator[str]:
        """Yield problems of a network that is trained on a frozen model."""
        models = [accelerator.unwrap_model(model) for model in accelerator._models]
        networks = [model for model in models if hasattr(model, "unet_loras")]
        if not getattr(self.args, "network_module", None) or not networks:
            return
        if not networks[0].unet_loras and not getattr(self.args, "network_train_text_encoder_only", False):
            yield f"{self.args.network_module} matched no module of the model; check --network_args and --network_dim"
        # Only for networks: with block swap, weights of a full fine-tune may be in host memory before the first step.
        elsewhere = {str(weight.device) for weight in networks[0].parameters() if weight.device.type != accelerator.device.type}
        if elsewhere:
            yield f"the network's weights are on {', '.join(sorted(elsewhere))}, the model on {accelerator.device}"
        half = {str(weight.dtype) for weight in networks[0].parameters() if weight.dtype.itemsize == 2}
        if half and not getattr(self.args, "full_bf16", False) and not getattr(self.args, "full_fp16", False):
            warn(f"the network's weights are {', '.join(half)}: small updates are lost to rounding; use float32")
        yield from _in_files(self.args, {*networks[0].state_dict()})
        own = {id(weight) for weight in networks[0].parameters()}
        foreign = sum(id(weight) not in own for weight in _in_optimizer(accelerator))
        if foreign:
            yield f"{foreign} weights of the base model are in the optimizer; they would be trained but not saved"


def _in_files(args: Namespace, own: set[str]) -> Iterator[str]:
    """Yield a problem if the network continues a file of which it has no weight. Upstream ignores names that do not match."""
    file = getattr(args, "network_weights", None)
    if file and (names := _names(file)):
        if _is_of_another_model(names, own):
            yield (
                f"--network_weights {file} has no weight of the network, which would start from zero; it is for another model "
                "or another program"
            )
        elif left_out := names - own:
            warn(f"{len(left_out)} of {len(names)} weights in {file} are not in the network and are left out")
    for file in getattr(args, "base_weights", None) or ():
        if (names := _names(file)) and _is_of_another_model(names, own):
            warn(f"--base_weights {file} has no weight of a network for this model, so probably nothing of it was merged")


def _is_of_another_model(names: set[str], own: set[str]) -> bool:
    """Return whether a file has no weight of a network, apart from text encoders, which several models share."""
    main, its = ({name for name in each if not name.startswith("lora_te")} for each in (names, own))
    return main.isdisjoint(its) if main and its else names.isdisjoint(own)


def _names(file: str) -> set[str]:
    """Return the names of a file's tensors; empty for another format than safetensors."""
    try:
        return {*read_header(Path(file)).shapes}
    except (OSError, ValueError):
        return set()


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Check:
    if not getattr(args, "max_train_epochs", None) and getattr(args, "max_train_steps", 1) < 1:
        stop(f"nothing would be trained: --max_train_steps is {args.max_train_steps}; set it above 0")
    return _Check(args, stepping_in_backward(args, settings))


def _check_dataset(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def generate_dataset_group_by_blueprint(*args: Any, **kwargs: Any) -> Any:
        groups = original(*args, **kwargs)
        if len(groups[0] if isinstance(groups, tuple) else groups) == 0:  # upstream logs this and exits with code 0
            stop("nothing would be trained: the dataset has no images; check --train_data_dir, --in_json or --dataset_config")
        return groups

    return generate_dataset_group_by_blueprint


def _between_processes(in_backward: str | None, accelerator: Accelerator) -> Iterator[str]:
    # DistributedDataParallel averages a gradient after the hooks in which these optimizers step and free it.
    if in_backward is not None and accelerator.num_processes > 1:
        yield (
            f"--{in_backward} steps before the processes have averaged their gradients, so each would train its own weights; "
            "remove it or use one process"
        )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and accelerator.num_processes == 1:
        yield (
            f"accelerate uses no GPU, so each of {launched} processes would train alone and write the same files; "
            "remove --num_processes and --multi_gpu"
        )


def _in_optimizer(accelerator: Accelerator) -> list[Any]:
    """Return the trained weights. DeepSpeed's optimizers hold flat parts of them instead."""
    if ranks.is_deepspeed(accelerator):
        return [weight for model in accelerator._models for weight in model.parameters() if weight.requires_grad]
    return list(trained_weights(accelerator._optimizers))


def _in_optimizers(accelerator: Accelerator) -> Iterator[str]:
    weights = _in_optimizer(accelerator)
    if not any(weight.requires_grad for weight in weights):
        yield "nothing would be trained: no weight in the optimizer requires a gradient"
    groups = [group for optimizer in accelerator._optimizers for group in optimizer.param_groups]
    if groups and not any(float(group.get("initial_lr", group["lr"])) for group in groups):
        yield "nothing would be trained: every learning rate is 0; set --learning_rate"
    odd = {str(weight.dtype) for weight in weights if not weight.dtype.is_floating_point or weight.element_size() < 2}
    if odd:
        yield f"trained weights are {', '.join(sorted(odd))}, which is too coarse for updates; use bf16 or float32"


def _step(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def step(self: Any, closure: Any = None) -> Any:
        check = current(_Check)
        if check is not None and self.gradient_state.sync_gradients:
            check.before_step(self)
        return original(self, closure)

    return step


def _get_optimizer(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def get_optimizer(args: Any, trainable_params: Any) -> Any:
        if isinstance(trainable_params, list) and not any(map(_has_weights, trainable_params)):
            module = getattr(args, "network_module", None)
            cause = f": {module} matched no module, or its learning rate is 0 (--unet_lr, --network_args)" if module else ""
            stop(f"nothing would be trained{cause}")
        return original(args, trainable_params)

    return get_optimizer


def _has_weights(group: Any) -> bool:
    """Return whether a parameter group has weights; True for iterators, which a check would consume."""
    weights = group["params"] if isinstance(group, dict) else [group]
    return not isinstance(weights, list) or bool(weights)


PATCH = Patch(
    name="training_sanity_check",
    summary="check at the first step that the intended weights, and no others, are trained and get gradients",
    targets=(
        Target("library.config_util", "generate_dataset_group_by_blueprint", _check_dataset, body="runs"),
        Target("accelerate.optimizer", "AcceleratedOptimizer.step", _step, takes("self", "closure", exactly=True), body="runs"),
        *moved(
            "get_optimizer",
            "library.optimizer",
            _get_optimizer,
            takes("args", "trainable_params", exactly=True),
            body="runs",
        ),
    ),
    exactness="exact",
    held_to="the same run without the patch, if all checks pass",
    idea="https://github.com/kohya-ss/sd-scripts/issues/91",
    stage=Stage.OBSERVE,
    on_start=_start,
    only_trains=True,
)
