"""Halve the Python overhead of non-reentrant checkpointing; recompute the same tensors at the same time as torch.

For each saved tensor, torch creates a metadata dictionary in forward. In the recomputation it adds an entry to a weak-key
dictionary and a wrapper against tracing, checks both, and looks the tensor up twice. An SDXL LoRA saves 5,402 tensors per step.
Only the hooks are replaced; inputs, random state and autocast stay in torch's frame.

As in torch, a tensor is freed on first use and dropped when no longer reachable, and recomputation stops early. Another number
of tensors, shape, dtype or device is a CheckpointError. Unlike in torch, a second use of a tensor recomputes it instead of
raising an error.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.sdscripts.fingerprints import known_bodies

_FRAME = ["recompute_fn", "early_stop", "unpack_error_cb", "metadata_fn"]

_recomputed = Counter({"blocks": 0, "tensors": 0})


def _facts() -> Mapping[str, object]:
    return {f"recomputed_{kind}": count for kind, count in _recomputed.items()}


class _Slot:
    """A placeholder that autograd holds for a saved tensor."""

    __slots__ = ("__weakref__", "device", "dtype", "shape", "value")
    shape: Any
    dtype: Any
    device: Any
    value: Any
    """The recomputed tensor; unset before the recomputation and after its first use."""


class _Forward:
    """Forward hook that saves an empty slot for each tensor of a checkpointed block.

    A hook is an object, not a bound method, because torch sets attributes on it.
    """

    _checkpoint_internal = True

    def __init__(self, frame: Any, module: Any, hooks: Any, attention: Any) -> None:
        self.frame, self.module, self.hooks, self.attention = frame, module, hooks, attention
        self.slots: list[weakref.ref[_Slot]] = []

    def __call__(self, tensor: Any) -> _Slot:
        slot = _Slot()
        slot.shape, slot.dtype, slot.device = tensor.shape, tensor.dtype, tensor.device
        self.slots.append(weakref.ref(slot))
        return slot

    def unpack(self, slot: _Slot) -> Any:
        """Return the tensor of a slot; recompute the block if the slot is empty."""
        if not hasattr(slot, "value"):
            with self.attention.replayed() if self.attention is not None else nullcontext():
                _Recomputation(self.frame, self.module, self.slots).run(self.hooks)
        value = slot.value
        del slot.value
        return value


class _Recomputation:
    """Recomputation hook that stores the tensors of a checkpointed block in its slots."""

    _checkpoint_internal = True

    def __init__(self, frame: Any, module: Any, slots: list[weakref.ref[_Slot]]) -> None:
        self.frame, self.module, self.slots, self.count = frame, module, slots, 0

    def run(self, hooks: Any) -> None:
        """Run the block again. Raises CheckpointError if its saved tensors differ from those of forward."""
        import torch

        _recomputed.update(blocks=1, tensors=len(self.slots))
        run_untraced = getattr(self.module, "_run_fn_with_dynamo_disabled", lambda function, *args: function(*args))
        try:
            with hooks(self, lambda tensor: tensor), torch.enable_grad():
                run_untraced(self.frame.recompute_fn, *_inputs(self.frame))
        except self.module._StopRecomputationError:
            pass
        if self.count != len(self.slots):
            raise self.module.CheckpointError(f"the recomputation saves {self.count} tensors; forward saved {len(self.slots)}")

    def __call__(self, tensor: Any) -> Any:
        if self.count == len(self.slots):
            if not self.frame.forward_completed:  # recomputed during forward, before forward saves the rest
                return tensor.detach()
            raise self.module.CheckpointError(f"the recomputation saves more than the {self.count} tensors of forward")
        slot = self.slots[self.count]()
        self.count += 1
        # A tensor with its history would keep the whole recomputation alive. An operator that saves its own output would
        # leak, because Python does not collect cycles through the graph.
        value = tensor.detach() if tensor.requires_grad else tensor
        if slot is not None:
            if slot.shape != tensor.shape or slot.dtype != tensor.dtype or slot.device != tensor.device:
                raise self.module.CheckpointError(_differs(slot, tensor, self.count))
            slot.value = value
        if self.frame.early_stop and self.count == len(self.slots):
            raise self.module._StopRecomputationError
        return value


@cache
def _skip_tracing() -> None:
    """Prevent dynamo from tracing the hooks when it traces code around a checkpoint."""
    from torch._dynamo.decorators import skip  # checkpoint() itself has imported dynamo

    for hook in (_Forward, _Recomputation):
        skip(hook.__call__)


def _with_fast_hooks(original: Any, settings: Settings) -> Any:
    import torch

    module = sys.modules[original.__module__]
    hooks: Any = original.__bases__[0]

    from kohya_ext.patching.kept_attention import Store

    class _checkpoint_hook(original):  # type: ignore[misc]  # noqa: N801  the name that it replaces
        _attention: Any = None

        def __init__(self, frame: Any) -> None:
            if frame.unpack_error_cb is not None or _is_grouped(torch):  # debug mode or overlapping backward passes
                super().__init__(frame)
                return
            _skip_tracing()
            store = Store() if settings["keep_attention"] else None
            self._attention = store.recorded() if store is not None else None
            hook = _Forward(frame, module, hooks, store)
            hooks.__init__(self, hook, hook.unpack)

        def __enter__(self) -> Any:
            if self._attention is not None:
                self._attention.__enter__()
            return super().__enter__()

        def __exit__(self, *error: Any) -> Any:
            if self._attention is not None:
                self._attention.__exit__(*error)
            return super().__exit__(*error)

    return _checkpoint_hook


def _is_grouped(torch: Any) -> bool:
    current_group = getattr(torch._C, "_get_graph_exec_group", None)
    return current_group is not None and current_group() is not None


def _inputs(frame: Any) -> Any:
    """Return the block's saved inputs. Before about torch 2.10 they are saved tensors of an autograd node."""
    if hasattr(frame, "get_inputs"):
        return frame.get_inputs()
    node = frame.input_saver.grad_fn
    return node.get_args(node.saved_tensors)


def _differs(slot: _Slot, tensor: Any, number: int) -> str:
    before, after = (f"{tuple(item.shape)} {item.dtype} on {item.device}" for item in (slot, tensor))
    return f"saved tensor {number} of a checkpointed block is {after} when recomputed but was {before} in forward"


def _expect_known_frame(original: Any) -> str | None:
    surprise = takes("self", "frame", exactly=True)(original.__init__)
    if surprise is not None:
        return surprise
    frame = sys.modules[original.__module__]._CheckpointFrame
    parameters = [name for name in inspect.signature(frame).parameters if name != "self"]
    if parameters != _FRAME:
        return f"its frame takes {parameters}"
    return None


#: About every second release of torch changes a message, the storage of inputs, or the tracing rules.
_BODIES = known_bodies(
    {
        "7a1d76b80427": "2.6 to 2.7",
        "64dcd818aa55": "2.8 to 2.9",
        "68d1850b444d": "2.10 to 2.11",
        "dfd6205b9eb7": "2.12 to 2.13",
        "d2168ea3fb52": "2.14 to 2.15",
    },
    helpers={
        "_CheckpointFrame": dict.fromkeys(("1596492033aa", "dc9c1edf4403", "07ff98697405"), "2.6 to 2.15"),
        "_recomputation_hook": dict.fromkeys(
            ("d843c10e1c41", "a8228041f1fd", "6662c813f700", "3526423dfbad", "fd390b8f6114"), "2.6 to 2.15"
        ),
    },
    package="torch",
)

PATCH = Patch(
    name="fast_checkpoint_hooks",
    summary="halve the Python overhead of gradient checkpointing per saved tensor",
    targets=(Target("torch.utils.checkpoint", "_checkpoint_hook", _with_fast_hooks, _expect_known_frame, body=_BODIES),),
    torch="2.6",
    exactness="exact",
    held_to="the gradients, bit for bit, and the memory of torch's non-reentrant checkpointing",
    idea="https://github.com/pytorch/pytorch/blob/main/torch/utils/checkpoint.py",
    facts=_facts,
)
