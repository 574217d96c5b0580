"""A run with ``--deepspeed`` without DeepSpeed: the script's models and optimizer are divided as :mod:`zero` does.

accelerate then knows nothing of DeepSpeed. What DeepSpeed's engine would do in ``prepare``, ``backward`` and ``step`` is done
here, for the first of the run's processes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import accelerate
import torch
import wrapt
from accelerate.optimizer import AcceleratedOptimizer

from kohya_ext.dry_run import zero
from kohya_ext.dry_run.device import GPU
from kohya_ext.dry_run.gathered_weights import GatheredWeights
from kohya_ext.dry_run.tracker import STEP, Tracker
from kohya_ext.errors import UserError

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class ZeroRun:
    """What DeepSpeed keeps in one of ``processes``, from ``prepare`` on."""

    def __init__(self, tracker: Tracker, processes: int) -> None:
        self.tracker, self.processes = tracker, processes
        self.trained: list[Any] = []
        """The weights that are trained."""
        self.divided: zero.Divided
        self._gathered: GatheredWeights | None = None
        self._arguments = Namespace()

    @property
    def host(self) -> dict[str, int]:
        """Bytes in host memory of the process, by purpose."""
        return {**self.divided.host.bytes}

    def install(self) -> None:
        """Replace what accelerate would leave to DeepSpeed, for the rest of the process."""
        wrapt.register_post_import_hook(self._replace_plugin, "library.deepspeed_utils")
        prepare, accumulate, backward = accelerate.Accelerator.prepare, accelerate.Accelerator.accumulate, torch.Tensor.backward

        def prepare_and_divide(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            model = next((each for each in args if type(each).__name__ == "DeepSpeedWrapper"), None)
            optimizer = next((each for each in args if isinstance(each, torch.optim.Optimizer)), None)
            if model is not None:
                self._move(model)
            prepared = prepare(accelerator, *args, **kwargs)
            if model is not None:
                self._divide(optimizer)
            return prepared

        def begin(*args: Any, **kwargs: Any) -> Any:
            self.divided.begin()
            return accumulate(*args, **kwargs)

        def run_backward(loss: Any, *args: Any, **kwargs: Any) -> None:
            backward(loss, *args, **kwargs)
            self.divided.end_backward(self._arguments.gradient_accumulation_steps > 1)
            if self._gathered is not None:
                self._gathered.end_recording()

        def step(optimizer: Any, *_: Any, **__: Any) -> None:
            if optimizer.gradient_state.sync_gradients:
                with self.tracker.during(STEP):
                    self.divided.step()

        accelerate.Accelerator.prepare, accelerate.Accelerator.accumulate = prepare_and_divide, begin
        accelerate.Accelerator.clip_grad_norm_ = _ignore
        torch.Tensor.backward = run_backward
        AcceleratedOptimizer.step, AcceleratedOptimizer.zero_grad = step, _ignore

    def _replace_plugin(self, module: Any) -> None:
        def prepare_deepspeed_plugin(arguments: Namespace) -> None:
            self._arguments = arguments
            devices = (arguments.offload_optimizer_device, arguments.offload_param_device)
            if "nvme" in devices:
                raise UserError("offloading to nvme cannot be estimated; use cpu")
            if arguments.zero_stage == 0:
                raise UserError("--zero_stage 0 cannot be estimated; use 1, 2 or 3, or remove --deepspeed")
            offloads = (device is not None for device in devices)
            self._division = zero.Division(arguments.zero_stage, self.processes, *offloads)
            if arguments.mixed_precision in _DTYPES:
                torch.set_autocast_dtype("cuda", _DTYPES[arguments.mixed_precision])  # as the extension does

        module.prepare_deepspeed_plugin = prepare_deepspeed_plugin
        module.prepare_deepspeed_args = _ignore  # it asks for a process that loads images

    def _move(self, model: Any) -> None:
        """Cast the models, and for ZeRO-3 leave none of their weights on the GPU."""
        model.to(_DTYPES.get(self._arguments.mixed_precision, torch.float32))
        if self._division.stage < 3:
            return
        for buffer in model.buffers():
            buffer.data = buffer.data.to(GPU)
        for weight in model.parameters():
            weight.data = weight.data.to(GPU)
            self.tracker.offload([weight])  # each is divided before the next one is moved
        self._gathered = GatheredWeights(
            self.tracker, [*model.models.values()], self.processes, self._division.offloads_weights
        )
        self._gathered.watch()

    def _divide(self, optimizer: Any) -> None:
        self.trained = [weight for weight in _weights(optimizer) if weight.requires_grad]
        self.divided = zero.divide(self._division, optimizer, self._gathered, self.tracker)


def _weights(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _ignore(*_: Any, **__: Any) -> None: ...
