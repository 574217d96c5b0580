"""Leave the frozen weights of a network's training in their mapped checkpoints while they are on the host.

sd-scripts maps safetensors files, and then copies most of their weights: it casts them to another precision on the host, and
it moves text encoders and VAE back to the host when their outputs are cached. For FLUX that is up to 12 GB for ``--fp8_base``
and 10 GB for T5-XXL, for SDXL 14 GB of float32.

A cast is postponed until its weight moves to the GPU, and then takes the memory of one tensor. Weights that come back to the
host before the first step are the file's again, with the casts that they had. Both give the same bits, because the weights
are frozen. A weight that is read or changed on the host is computed for good.

With --lowram SDXL's U-Net is loaded on the GPU, where its weights keep the precision of the file until the script casts them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, program
from kohya_ext.patching.types import Accelerator
from kohya_ext.sdscripts.families import BY_NAME, of

if TYPE_CHECKING:
    from kohya_ext.weights.postponed import History

_SDXL = BY_NAME["sdxl"]


@dataclass(frozen=True)
class _Place:
    """A parameter of a module."""

    module: Any
    name: str

    @property
    def parameter(self) -> Any:
        return self.module._parameters[self.name]

    def set(self, tensor: Any) -> None:
        """Replace the parameter, and keep whether it needs a gradient."""
        import torch

        self.module._parameters[self.name] = torch.nn.Parameter(tensor, self.parameter.requires_grad)


@dataclass(frozen=True)
class _Copy:
    """A copy of a file's weight on the GPU."""

    history: History
    version: int
    address: int

    def is_copied_by(self, parameter: Any) -> bool:
        """Return whether a parameter still has this copy's values."""
        facts = (parameter.dtype, parameter._version, parameter.data_ptr())
        return facts == (self.history.dtype, self.version, self.address)


@dataclass
class _Weights(TrainingCallback):
    """The frozen weights of a run up to its first step."""

    device: Any
    """The run's device."""
    keeps_precision: bool
    """Whether the script casts SDXL's U-Net after it has loaded it on the GPU."""
    copies: Any = field(default_factory=lambda: _by_identity())
    """GPU parameter -> _Copy."""
    postponed: int = 0
    """Tensors of checkpoints whose casts are postponed."""
    returned: int = 0
    """Weights that came back to the host without a copy."""
    is_loading: bool = True

    def before_batch(self, accelerator: Accelerator) -> None:
        self.is_loading = False
        self.copies.clear()

    def postpone(self, tensors: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
        """Return a file's tensors on the host, with a postponed cast to a precision; None keeps the file's."""
        from kohya_ext.weights.postponed import PostponedCast, history_of

        self.postponed += len(tensors)
        histories = {name: history_of(tensor) for name, tensor in tensors.items()}
        return {name: PostponedCast(each if dtype is None else each.cast(dtype)) for name, each in histories.items()}

    def move(self, module: Any, original: Any, args: Any, kwargs: Any) -> Any:
        """Move or cast a module as ``module.to(*args, **kwargs)``, without copies on the host."""
        import torch

        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        places = [(place, history) for place in _places(module) if (history := self._history(place)) is not None]
        if device is not None and device.type == "cpu" and self.device.type != "cpu":
            self._return(places)
        result = original(module, *args, **kwargs)
        for place, history in places:
            self._follow(place, history, device)
        return result

    def _history(self, place: _Place) -> History | None:
        """Return what a parameter's values are made of, if that is a file's tensor."""
        from kohya_ext.weights.postponed import PostponedCast

        parameter = place.parameter
        if isinstance(parameter, PostponedCast):
            return parameter.history
        copy = self.copies.get(parameter)
        return copy.history if copy is not None and copy.is_copied_by(parameter) else None

    def _return(self, places: list[tuple[_Place, History]]) -> None:
        """Replace copies on the GPU by the file's weights."""
        from kohya_ext.weights.postponed import PostponedCast

        for place, history in places:
            if place.parameter.device.type != "cpu":
                place.set(PostponedCast(history))
                self.returned += 1

    def _follow(self, place: _Place, history: History, device: Any) -> None:
        """Record a copy on the GPU. On the run's device no cast stays postponed, which on a CPU is the last one."""
        from kohya_ext.weights.postponed import PostponedCast

        parameter = place.parameter
        if not isinstance(parameter, PostponedCast):
            if not history.is_read:
                self.copies[parameter] = _Copy(history.cast(parameter.dtype), parameter._version, parameter.data_ptr())
        elif device is not None and device.type == self.device.type:
            place.set(parameter.history.value())


def _by_identity() -> Any:
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()


def _places(module: Any) -> Iterator[_Place]:
    """Yield the places of all parameters."""
    for part in module.modules():
        yield from (_Place(part, name) for name, parameter in part._parameters.items() if parameter is not None)


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Weights | None:
    script = program().command.name
    family = of(script or "", vars(args))
    if family is None or script != family.lora or getattr(args, "deepspeed", False):
        return None
    known = getattr(args, "network_module", None) in _SDXL.networks and not getattr(args, "base_weights", None)
    return _Weights(accelerator.device, known)


def _load_file(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def load_safetensors(
        path: Any, device: Any, disable_mmap: bool = False, dtype: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        weights = current(_Weights)
        if weights is None or not weights.is_loading or disable_mmap or str(device) != "cpu":
            return original(path, device, disable_mmap, dtype, *args, **kwargs)
        return weights.postpone(original(path, device, disable_mmap, None, *args, **kwargs), dtype)

    return load_safetensors


def _load_sdxl(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def load_state_dict_on_device(model: Any, state_dict: Any, device: Any, dtype: Any = None) -> Any:
        import torch

        weights = current(_Weights)
        if weights is not None and weights.is_loading:
            kinds = {tensor.dtype for tensor in state_dict.values()}
            if str(device) == "cpu":
                # The original takes the tensors out of the caller's dict, and casts them to float32 by default.
                state_dict.update(weights.postpone(state_dict, None))
            elif weights.keeps_precision and dtype is None and type(model).__name__ == _SDXL.model and len(kinds) == 1:
                (dtype,) = kinds & {torch.float16, torch.bfloat16} or {None}
        return original(model, state_dict, device, dtype)

    return load_state_dict_on_device


def _move(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights = current(_Weights)
        if weights is None or not weights.is_loading:
            return original(self, *args, **kwargs)
        return weights.move(self, original, args, kwargs)

    return to


def _facts() -> Mapping[str, object]:
    weights = current(_Weights)
    return {"postponed": weights.postponed, "returned": weights.returned} if weights is not None else {}


PATCH = Patch(
    name="mapped_weights",
    summary="leave the frozen weights under a network in their mapped checkpoints while they are on the host",
    targets=(
        Target(
            "library.safetensors_utils",
            "load_safetensors",
            _load_file,
            takes("path", "device", "disable_mmap", "dtype"),
            body="runs",
        ),
        Target(
            "library.sdxl_model_util",
            "_load_state_dict_on_device",
            _load_sdxl,
            takes("model", "state_dict", "device", "dtype", exactly=True),
            body="runs",
        ),
        Target("torch.nn.modules.module", "Module.to", _move, takes("self"), body="runs"),
    ),
    exactness="exact",
    held_to="training without it, bit for bit",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/library/sdxl_model_util.py",
    facts=_facts,
    stage=Stage.COMPUTE,
    on_start=_start,
)
