"""Save models and states of a DeepSpeed run with all of its processes.

Upstream saves in the first process only. DeepSpeed then waits for the other processes forever (``--save_state``), and with
ZeRO-3 the model's file has no weights. Here the other processes join; see :mod:`kohya_ext.run.leading`. With ZeRO-3 the first
process gathers the weights of one module after the other in host memory, so no GPU ever holds the whole model.
"""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, current
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import leading, ranks

_SAVE_STATE, _GATHER = "save the state", "gather the weights"


@dataclass
class _Saves(leading.Leader):
    modules: tuple[Any, ...] = ()
    """The modules that hold partitioned weights, in the same order in every process; none before the training."""
    hooks: list[Any] = field(default_factory=list)

    def before_training(self, accelerator: Accelerator) -> None:
        """Find the partitioned weights: accelerate prepares the model after the start of the run."""
        modules = (module for model in accelerator._models for module in model.modules())
        self.modules = tuple(module for module in modules if _partitioned(module))
        if accelerator.is_main_process:
            numbered = enumerate(self.modules)
            self.hooks = [module.register_state_dict_post_hook(partial(self.restore, number)) for number, module in numbered]

    def on_end(self) -> None:
        super().on_end()
        for hook in self.hooks:
            hook.remove()

    def restore(self, number: int, module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Put whole weights into a state dict of the first process, where DeepSpeed leaves empty ones."""
        if self.is_together or self.has_ended:
            return
        with self.together(_GATHER, number), _gathered(module):
            for name, weight in _partitioned(module).items():
                state[prefix + name] = weight.detach().to("cpu", copy=True)

    def gather(self, number: int) -> None:
        """Take part in gathering the weights of a module."""
        with _gathered(self.modules[number]):
            pass


def _partitioned(module: Any) -> dict[str, Any]:
    """Return a module's own weights that DeepSpeed divides among the processes."""
    return {name: weight for name, weight in module._parameters.items() if hasattr(weight, "ds_id")}


def _gathered(module: Any) -> Any:
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters(list(_partitioned(module).values()))


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Saves | None:
    if not ranks.is_deepspeed(accelerator):
        return None
    saves = _Saves(accelerator, ranks.store(os.environ))
    saves.tasks = {_SAVE_STATE: accelerator.save_state, _GATHER: saves.gather}
    return saves


def _save_state(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def save_state(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        saves = current(_Saves)
        if saves is None or saves.is_together:
            return original(self, output_dir, *args, **kwargs)
        if not self.is_main_process:
            saves.join(_SAVE_STATE, str(output_dir))
            return None
        with saves.together(_SAVE_STATE, str(output_dir)):
            return original(self, output_dir, *args, **kwargs)

    return save_state


def _wait_for_everyone(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def wait_for_everyone(self: Any) -> Any:
        saves = current(_Saves)
        if saves is None or saves.is_together or saves.has_ended:
            return original(self)
        saves.meet()
        result = original(self)
        saves.expect()
        return result

    return wait_for_everyone


def _end_training(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def end_training(self: Any) -> Any:
        original(self)
        if (saves := current(_Saves)) is not None:
            saves.end()
            self.state.destroy_process_group()

    return end_training


def _destroy_process_group(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def destroy_process_group(self: Any, group: Any = None) -> Any:
        saves = current(_Saves)
        if saves is not None and not saves.has_ended:
            return None  # the scripts save their final files after accelerate's end_training
        return original(self, group)

    return destroy_process_group


PATCH = Patch(
    name="deepspeed_saves",
    summary="with --deepspeed, save states with all processes, and whole weights with ZeRO-3",
    targets=(
        Target("accelerate.accelerator", "Accelerator.save_state", _save_state, takes("self", "output_dir"), body="runs"),
        Target("accelerate.accelerator", "Accelerator.wait_for_everyone", _wait_for_everyone, takes("self"), body="runs"),
        # A decorator of accelerate 0.33 hides its parameters.
        Target("accelerate.accelerator", "Accelerator.end_training", _end_training, takes(), body="runs"),
        Target(
            "accelerate.state",
            "PartialState.destroy_process_group",
            _destroy_process_group,
            takes("self", "group", exactly=True),
            body="runs",
        ),
    ),
    exactness="exact",
    held_to="the weights that the processes hold",
    idea="https://github.com/kohya-ss/sd-scripts/issues/1139",
    stage=Stage.OBSERVE,
    on_start=_start,
    in_dry_runs=False,
)
