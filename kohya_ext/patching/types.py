"""The part of accelerate's ``Accelerator`` that patches use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Accelerator(Protocol):
    """See https://huggingface.co/docs/accelerate/package_reference/accelerator. Tensors, models and optimizers are torch's."""

    device: Any
    distributed_type: Any
    gradient_state: Any
    scaler: Any
    """The gradient scaler of fp16 training; None without one."""
    is_main_process: bool
    log: Callable[..., None]
    """Send values to the trackers."""
    num_processes: int
    process_index: int
    optimizer_step_was_skipped: bool
    sync_gradients: bool
    """Whether the current batch ends with an optimizer step, which depends on gradient accumulation."""
    _dataloaders: list[Any]
    _models: list[Any]
    _optimizers: list[Any]

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss."""

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Scale gradients down to a total norm; return the norm before."""

    def end_training(self) -> None:
        """Close the trackers."""

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all processes, concatenated along the first dimension."""

    def reduce(self, tensor: Any, reduction: str = "sum") -> Any:
        """Return the sum or mean of a tensor over all processes."""

    def register_load_state_pre_hook(self, hook: Callable[[list[Any], str], None]) -> Any:
        """Call a function with the models and the folder before a state is loaded."""

    def register_save_state_pre_hook(self, hook: Callable[[list[Any], list[Any], str], None]) -> Any:
        """Call a function with the models, their weights and the folder before a state is saved."""

    def save_state(self, output_dir: str | None = None) -> Any:
        """Write models, optimizers, schedulers and random states to a folder."""

    def unwrap_model(self, model: Any) -> Any:
        """Return a model without the wrappers of distributed training."""

    def wait_for_everyone(self) -> None:
        """Wait until all processes are here."""
