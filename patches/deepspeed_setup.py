"""Set up DeepSpeed as upstream's options ask: any ZeRO stage, autocast in the type of --mixed_precision, the chosen optimizer.

- ZeRO-3 ends with "Cannot copy out of meta tensor": transformers builds partitioned text encoders while accelerate's
  configuration says ZeRO-3, and sd-scripts then loads whole tensors into them. Models are loaded whole here, and DeepSpeed
  partitions them in ``deepspeed.initialize``.
- Upstream's wrapper opens ``torch.autocast(device_type)`` without a type: fp16 on CUDA, also with ``--mixed_precision bf16``.
- DeepSpeed prepares a micro-batch when the wrapper of all models is called. sd-scripts calls each model instead. With ZeRO-3 a
  model that reads a weight's shape then sees an empty one, and only the last of several accumulated gradients counts. Here each
  micro-batch counts as a call of the wrapper.
- accelerate clips gradients to a norm of 1 with ``--max_grad_norm 0``, which turns clipping off.
- A single process that no launcher has started ends with ``KeyError: 'WORLD_SIZE'``. Here it is a run of one process.
- ZeRO-3 moves the whole model to each GPU before it divides it. Here each weight is moved, divided and freed in turn.
- With ``--offload_optimizer_device``, accelerate replaces every optimizer except AdamW, Adagrad and bitsandbytes' 32-bit Lion
  by Adam with L2 regularization, without a message. Here DeepSpeed steps the chosen optimizer on the host.
"""

from __future__ import annotations

import os
import socket
from argparse import Namespace
from dataclasses import dataclass
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.console import stop
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current
from kohya_ext.patching.types import Accelerator
from kohya_ext.preflight.deepspeed import optimizer_of
from kohya_ext.run import ranks

#: The optimizers of --optimizer_type, in lower case, that accelerate maps to DeepSpeed's equal one for the host.
_HAS_HOST_VERSION = ("", "adam", "adamw", "adagrad")


@dataclass
class _WholePass(TrainingCallback):
    """Does around a micro-batch what a call of DeepSpeed's engine, and of the wrapper in it, does."""

    is_open: bool = False

    def before_batch(self, accelerator: Accelerator) -> None:
        """Begin a pass."""
        self.is_open = True
        for engine in accelerator._models:
            if hasattr(engine.optimizer, "clear_backward_seen_flag"):  # since DeepSpeed 0.18
                engine.optimizer.clear_backward_seen_flag()
            wrapper = engine.module
            for number, hook in wrapper._forward_pre_hooks.items():
                hook(wrapper, (), *([{}] if number in wrapper._forward_pre_hooks_with_kwargs else []))

    def end(self, accelerator: Accelerator) -> None:
        """End a pass before its backward."""
        if not self.is_open:
            return
        self.is_open = False
        for engine in accelerator._models:
            wrapper = engine.module
            for number, hook in wrapper._forward_hooks.items():
                hook(wrapper, (), *([{}] if number in wrapper._forward_hooks_with_kwargs else []), None)


def _prepare_plugin(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def prepare_deepspeed_plugin(args: Any) -> Any:
        if args.deepspeed and "WORLD_SIZE" not in os.environ:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            single = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in single.items()} | {"MASTER_ADDR": "127.0.0.1"})
        return original(args)

    return prepare_deepspeed_plugin


def _backward(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def backward(self: Any, loss: Any, **kwargs: Any) -> Any:
        if (whole := current(_WholePass)) is not None:
            whole.end(self)
        return original(self, loss, **kwargs)

    return backward


def _configure_model(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def _configure_distributed_model(self: Any, model: Any) -> Any:
        if self.zero_optimization_partition_weights():
            for buffer in model.buffers():
                buffer.data = buffer.data.to(self.device)
            self.dont_change_device = True  # DeepSpeed's zero.Init moves the weights
        return original(self, model)

    return _configure_distributed_model


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _WholePass | None:
    if not ranks.is_deepspeed(accelerator):
        if getattr(args, "deepspeed", False):
            stop("accelerate ignores --deepspeed on CPUs, so each process would train alone; remove it, or ACCELERATE_USE_CPU")
        return None
    if not getattr(args, "deepspeed", False):
        stop(
            "accelerate's configuration enables DeepSpeed, which fails without --deepspeed; add --deepspeed and "
            "--zero_stage, or set distributed_type to MULTI_GPU in the configuration"
        )
    import torch
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    types = {"fp16": torch.float16, "bf16": torch.bfloat16}
    if (type_ := types.get(args.mixed_precision)) is not None:
        torch.set_autocast_dtype(accelerator.device.type, type_)
    optimizer = optimizer_of(args).lower().removeprefix("torch.optim.")
    if args.offload_optimizer_device is not None and optimizer not in _HAS_HOST_VERSION:
        accelerator.deepspeed_plugin.deepspeed_config["zero_force_ds_cpu_optimizer"] = False
    if not args.max_grad_norm:
        accelerator.deepspeed_plugin.deepspeed_config["gradient_clipping"] = 0.0
    return _WholePass()


PATCH = Patch(
    name="deepspeed_setup",
    summary="with --deepspeed, make ZeRO-3 work, autocast to the type of --mixed_precision, and keep the chosen optimizer",
    targets=(
        Target(
            "library.deepspeed_utils", "prepare_deepspeed_plugin", _prepare_plugin, takes("args", exactly=True), body="runs"
        ),
        Target(
            "deepspeed.runtime.engine",
            "DeepSpeedEngine._configure_distributed_model",
            _configure_model,
            takes("self", "model", exactly=True),
            optional=True,
            body="runs",
        ),
        Target("accelerate.accelerator", "Accelerator.backward", _backward, takes("self", "loss"), body="runs"),
    ),
    exactness="close",
    held_to="the same run with DistributedDataParallel, losses within 1e-4",
    idea="https://github.com/kohya-ss/sd-scripts/pull/1101",
    stage=Stage.RECORD,
    on_start=_start,
    in_dry_runs=False,  # which have their own DeepSpeed
)
