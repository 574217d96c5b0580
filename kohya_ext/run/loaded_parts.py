"""Parts of a run's state that accelerate does not save, or that upstream's scripts lose before their first step.

- With ``--fused_optimizer_groups`` and ``--blockwise_fused_optimizers`` the scripts load a state after they have prepared the
  first optimizer, and prepare the others later. The files of the others are not read.
- Schedule-free optimizers keep one of two versions of a weight in the model. Scripts switch to the other version and back after
  each step and each epoch, which rounds the weights. A resumed run does this for skipped epochs too, but not after the step
  that saved the state.
- The norms of GGPO (``--network_args ggpo_sigma=...``) are tensors of the network, but neither weights nor buffers.
- Weights with a learning rate of 0 (``--text_encoder_lr 0``, a zero in ``--block_lr``) are in no optimizer, so nothing clears
  their gradients. Upstream sums them up over all steps, and clips the others by the norm of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kohya_ext.console import stop
from kohya_ext.patching.types import Accelerator

OPTIMIZER, SCHEDULER = "optimizer", "scheduler"
"""First parts of the names of accelerate's files."""

_MODE = "train_mode"
"""The key of a schedule-free optimizer's parameter groups for the version of the weights that the model holds."""

GRADIENTS_FILE = "kohya_ext_gradients.pt"
"""The file in a state's folder for gradients that no optimizer clears; only if there are any."""

_NORMS = ("weight_norms", "combined_weight_norms", "grad_norms")


@dataclass
class _ScheduleFree:
    """The weights and modes of a schedule-free optimizer as they were saved."""

    optimizer: Any
    modes: list[bool]
    weights: list[Any]

    @classmethod
    def of(cls, optimizer: Any) -> _ScheduleFree:
        """Copy the weights to the host."""
        weights = [weight.detach().to("cpu", copy=True) for weight in _weights(optimizer)]
        return cls(optimizer, [group[_MODE] for group in optimizer.param_groups], weights)

    def restore(self, switches: bool) -> None:
        """Restore the weights and switch to the version to train, as the script did after the state was saved.

        ``switches``: the script switches after each step. A state that the extension saves is saved before that.
        """
        import torch

        with torch.no_grad():
            for weight, saved in zip(_weights(self.optimizer), self.weights, strict=True):
                weight.copy_(saved)
        for group, mode in zip(self.optimizer.param_groups, self.modes, strict=True):
            group[_MODE] = mode
        if switches:
            self.optimizer.eval()
        self.optimizer.train()


@dataclass
class LoadedParts:
    """What a resumed run restores at its position."""

    accelerator: Accelerator
    folder: Path
    norms: Mapping[str, Mapping[str, Any]]
    schedule_free: list[_ScheduleFree]

    @classmethod
    def of(
        cls, accelerator: Accelerator, folder: Path, norms: Mapping[str, Mapping[str, Any]], at_position: bool
    ) -> LoadedParts:
        """Return the parts of a state that accelerate has just loaded. ``at_position``: the run resumes where it was saved."""
        optimizers = accelerator._optimizers if at_position else []
        kept = [_ScheduleFree.of(each) for each in optimizers if all(_MODE in group for group in each.param_groups)]
        return cls(accelerator, folder, norms, kept)

    def load_late(self, kind: str, index: int, prepared: Any) -> None:
        """Load the state of the optimizer or scheduler of an index. Exits if the state has none."""
        from accelerate.utils import load

        file = self.folder / f"{kind}_{index}.bin"
        if not file.is_file():
            stop(
                f"cannot resume: {self.folder} has no {file.name}; use the --fused_optimizer_groups or "
                "--blockwise_fused_optimizers of the run that saved it"
            )
        prepared.load_state_dict(load(str(file), map_location="cpu"))

    def restore(self, switches: bool) -> None:
        """Restore weights and norms. ``switches``: the script has switched schedule-free optimizers after the step."""
        for each in self.schedule_free:
            each.restore(switches)
        for name, module in _network_modules(self.accelerator):
            for attribute, value in self.norms.get(name, {}).items():
                setattr(module, attribute, value.to(self.accelerator.device))
        self._restore_gradients()

    def _restore_gradients(self) -> None:
        import torch

        file = self.folder / GRADIENTS_FILE
        gradients = torch.load(file, map_location="cpu", weights_only=True) if file.is_file() else {}
        for name, weight in _weights_without_optimizer(self.accelerator):
            if name in gradients:
                weight.grad = gradients[name].to(weight.device)


def gradient_differences(folder: Path, position: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the gradients of a state that no optimizer clears are not those of its step. ``position``: the state's."""
    clipped = "of weights with a learning rate of 0, which count in the norm that --max_grad_norm limits"
    if not position.get("gradients"):
        return
    if not (folder / GRADIENTS_FILE).is_file():
        yield f"{folder} lacks {GRADIENTS_FILE}, the gradients {clipped}; they start from zero"
    elif position.get("within_step"):
        yield f"{folder} was saved after a failure, so it holds a part of the failed step's gradients {clipped}"


def save_gradients(accelerator: Accelerator, folder: Path) -> bool:
    """Save the gradients that no optimizer clears; return whether there are any."""
    import torch

    gradients = gradients_without_optimizer(accelerator)
    if gradients:
        torch.save({name: gradient.cpu() for name, gradient in gradients.items()}, folder / GRADIENTS_FILE)
    return bool(gradients)


def gradients_without_optimizer(accelerator: Accelerator) -> dict[str, Any]:
    """Return the gradients that no optimizer clears, by the name of the weight."""
    return {name: weight.grad for name, weight in _weights_without_optimizer(accelerator) if weight.grad is not None}


def _weights_without_optimizer(accelerator: Accelerator) -> Iterator[tuple[str, Any]]:
    stepped = {id(weight) for optimizer in accelerator._optimizers for weight in _weights(optimizer)}
    for index, model in enumerate(accelerator._models):
        for name, weight in accelerator.unwrap_model(model).named_parameters():
            if id(weight) not in stepped:
                yield f"{index}.{name}", weight


def network_norms(accelerator: Accelerator) -> dict[str, dict[str, Any]]:
    """Return the norms of GGPO, by the name of the module and of the attribute; empty without GGPO."""
    norms = {}
    for name, module in _network_modules(accelerator):
        values = {key: value.cpu() for key in _NORMS if (value := vars(module).get(key)) is not None}
        if values:
            norms[name] = values
    return norms


def _network_modules(accelerator: Accelerator) -> Iterator[tuple[str, Any]]:
    models = [accelerator.unwrap_model(model) for model in accelerator._models]
    for network in (model for model in models if hasattr(model, "unet_loras")):
        yield from network.named_modules()


def _weights(optimizer: Any) -> Iterator[Any]:
    return (weight for group in optimizer.param_groups for weight in group["params"])
