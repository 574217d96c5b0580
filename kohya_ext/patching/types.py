"""Types of the objects that a training script passes around, as far as patches and estimates use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

if TYPE_CHECKING:
    import torch
    from torch.nn import Module


class Batch(TypedDict, total=False):
    """A micro-batch as sd-scripts' datasets return it."""

    images: torch.Tensor | None
    """Pixels from -1 to 1, of shape (batch, 3, height, width). None if latents are cached."""
    latents: torch.Tensor | None
    """Cached latents, of shape (batch, channels, height, width) in latent pixels. None without a cache."""
    input_ids_list: Sequence[torch.Tensor] | None
    """Token ids for each tokenizer. None if text encoder outputs are cached."""
    text_encoder_outputs_list: Sequence[torch.Tensor] | None
    """Cached outputs of the text encoders. None without a cache."""
    loss_weights: torch.Tensor
    """Factors of the images' losses, of shape (batch,)."""
    original_sizes_hw: torch.Tensor
    """Sizes of the image files, of shape (batch, 2). Read by SDXL, as are the next two."""
    crop_top_lefts: torch.Tensor
    target_sizes_hw: torch.Tensor
    kohya_ext_files: list[str]
    """Paths of the images, if a patch adds them."""


class BucketManager(Protocol):
    """The image sizes of a dataset."""

    resos: Sequence[tuple[int, int]]
    """(width, height) of each bucket in pixels."""
    buckets: Sequence[Sequence[str]]
    """Keys of the images in each bucket."""


class DataSet(Protocol):
    """A dataset of sd-scripts that has sorted its images into buckets."""

    batch_size: int
    bucket_manager: BucketManager


class Accelerator(Protocol):
    """See https://huggingface.co/docs/accelerate/package_reference/accelerator."""

    deepspeed_plugin: Any
    """The configuration of DeepSpeed; None without it."""
    device: torch.device
    distributed_type: Any
    gradient_accumulation_steps: int
    gradient_state: Any
    scaler: Any
    """The gradient scaler of fp16 training; None without one."""
    is_main_process: bool
    is_local_main_process: bool
    mixed_precision: str
    """``no``, ``fp16`` or ``bf16``."""
    log: Callable[..., None]
    """Send values to the trackers."""
    num_processes: int
    process_index: int
    optimizer_step_was_skipped: bool
    step: int
    """Micro-batches of this epoch, which decide with gradient accumulation when the optimizer steps."""
    sync_gradients: bool
    """Whether the current batch ends with an optimizer step, which depends on gradient accumulation."""
    trackers: list[Any]
    """The trackers that the script has created."""
    _dataloaders: list[Any]
    _models: list[Module]
    _optimizers: list[Any]

    def load_state(self, input_dir: str) -> None:
        """Load models, optimizers, schedulers and random state from a saved state's folder."""

    def accumulate(self, *models: Any) -> AbstractContextManager[None]:
        """Run one micro-batch of gradient accumulation inside the block."""

    def autocast(self) -> AbstractContextManager[None]:
        """Run operations inside the block in the precision of mixed-precision training."""

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute the gradients of a loss."""

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2) -> torch.Tensor | None:
        """Scale gradients down to a total norm; return the norm before."""

    def end_training(self) -> None:
        """Close the trackers."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all processes, concatenated along the first dimension."""

    def prepare(self, *objects: Any) -> Any:
        """Return models, optimizers and loaders, wrapped for the process's device and precision."""

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        """Return the sum or mean of a tensor over all processes."""

    def register_load_state_pre_hook(self, hook: Callable[[list[Module], str], None]) -> Any:
        """Call a function with the models and the folder before a state is loaded."""

    def register_save_state_pre_hook(self, hook: Callable[[list[Module], list[Any], str], None]) -> Any:
        """Call a function with the models, their weights and the folder before a state is saved."""

    def save_state(self, output_dir: str | None = None) -> Any:
        """Write models, optimizers, schedulers and random states to a folder."""

    def unwrap_model(self, model: Module) -> Module:
        """Return a model without the wrappers of distributed training."""

    def wait_for_everyone(self) -> None:
        """Wait for all processes."""
