"""The bookkeeping of non-reentrant checkpointing with half the Python; what is recomputed, and when, stays torch's own.

torch notes every tensor that a block would save: a metadata dictionary under ``no_grad`` in forward, an entry in a dictionary
of weak keys and a wrapper against tracing in the recompute, both again in a check, and two look-ups when it is taken. An SDXL
LoRA saves 5,402 a step. Where Python is all that a step waits for, as it may be on a fast card at batch 1, torch's own makes
0.76 of the steps of upstream's reentrant kind, and this 0.88 (``python -m benchmarks.run patches``).
Of torch's frame, which holds inputs, random state and autocast, only the hooks are replaced.

Kept: a tensor is freed when it is taken, and never kept when nobody can ask for it; recomputing stops early; another number of
tensors, or one of another shape, type or device, is a CheckpointError. Other than with torch, what is asked for twice is
recomputed twice instead of refused.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.sdscripts.fingerprints import known_bodies

_FRAME = ["recompute_fn", "early_stop", "unpack_error_cb", "metadata_fn"]


_recomputed = Counter({"blocks": 0, "tensors": 0})


def _facts() -> Mapping[str, object]:
    return {f"recomputed_{what}": count for what, count in _recomputed.items()}


class _Slot:
    """What autograd holds in place of a saved tensor."""

    __slots__ = ("__weakref__", "device", "dtype", "shape", "value")
    shape: Any
    dtype: Any
    device: Any
    value: Any
    """The recomputed tensor; not there before, and after it was taken."""


def _lean(original: Any, settings: Settings) -> Any:
    import torch

    module = sys.modules[original.__module__]
    hooks: Any = original.__bases__[0]
    stop: Any = module._StopRecomputationError
    run_untraced: Callable[..., Any] = getattr(module, "_run_fn_with_dynamo_disabled", lambda function, *args: function(*args))

    class _checkpoint_hook(original):  # type: ignore[misc]  # noqa: N801  named as what it replaces
        def __init__(self, frame: Any) -> None:
            if frame.unpack_error_cb is not None or _is_grouped(torch):  # debugging, and backward passes that overlap
                super().__init__(frame)
                return
            slots: list[weakref.ref[_Slot]] = []

            def pack(tensor: Any) -> _Slot:
                slot = _Slot()
                slot.shape, slot.dtype, slot.device = tensor.shape, tensor.dtype, tensor.device
                slots.append(weakref.ref(slot))
                return slot

            def unpack(slot: _Slot) -> Any:
                if not hasattr(slot, "value"):
                    recompute()
                value = slot.value
                del slot.value
                return value

            def recompute() -> None:
                _recomputed.update(blocks=1, tensors=len(slots))
                count = 0

                def keep(tensor: Any) -> Any:
                    nonlocal count
                    if count == len(slots):
                        if not frame.forward_completed:  # asked for within forward, which has not come further yet
                            return tensor.detach()
                        raise module.CheckpointError(f"the recomputation saves more than the {count} tensors of forward")
                    slot = slots[count]()
                    count += 1
                    # With its history it would keep the whole recomputation alive; and an operator that saves its own
                    # output would keep itself alive, for good: nothing collects a cycle through the graph.
                    value = tensor.detach() if tensor.requires_grad else tensor
                    if slot is not None:
                        if slot.shape != tensor.shape or slot.dtype != tensor.dtype or slot.device != tensor.device:
                            raise module.CheckpointError(_differs(slot, tensor, count))
                        slot.value = value
                    if frame.early_stop and count == len(slots):
                        raise stop
                    return value

                _leave_untraced(keep)
                try:
                    with hooks(keep, lambda tensor: tensor), torch.enable_grad():
                        run_untraced(frame.recompute_fn, *_inputs(frame))
                except stop:
                    pass
                if count != len(slots):
                    raise module.CheckpointError(f"the recomputation saves {count} tensors where forward saved {len(slots)}")

            _leave_untraced(pack)
            hooks.__init__(self, pack, unpack)

    return _checkpoint_hook


def _leave_untraced(hook: Any) -> None:
    """Mark a hook as checkpointing's own for torch, and for dynamo, which may be tracing around it, as none of its business."""
    from torch._dynamo.decorators import skip  # checkpoint() itself has imported dynamo

    hook._checkpoint_internal = True
    skip(hook)


def _is_grouped(torch: Any) -> bool:
    ask = getattr(torch._C, "_get_graph_exec_group", None)
    return ask is not None and ask() is not None


def _inputs(frame: Any) -> Any:
    """The block's inputs, as torch has saved them. They were the saved tensors of a node before torch 2.10 or so."""
    if hasattr(frame, "get_inputs"):
        return frame.get_inputs()
    node = frame.input_saver.grad_fn
    return node.get_args(node.saved_tensors)


def _differs(slot: _Slot, tensor: Any, number: int) -> str:
    before, now = (f"{tuple(one.shape)} {one.dtype} on {one.device}" for one in (slot, tensor))
    return f"saved tensor {number} of a checkpointed block is {now} when it is recomputed, and was {before}"


def _unless_known(original: Any) -> str | None:
    surprise = takes("self", "frame", exactly=True)(original.__init__)
    if surprise is not None:
        return surprise
    frame = sys.modules[original.__module__]._CheckpointFrame
    parameters = [name for name in inspect.signature(frame).parameters if name != "self"]
    if parameters != _FRAME:
        return f"its frame takes {parameters}"
    return None


#: Every second release of torch changes something here: a message, how inputs are kept, what dynamo is told.
_BODIES = known_bodies(
    "7a1d76b80427",  # 2.6, 2.7
    "64dcd818aa55",  # 2.8, 2.9
    "68d1850b444d",  # 2.10, 2.11
    "dfd6205b9eb7",  # 2.12, 2.13
    "d2168ea3fb52",  # 2.14
    helpers={
        "_CheckpointFrame": ("1596492033aa", "dc9c1edf4403", "07ff98697405"),
        "_recomputation_hook": ("d843c10e1c41", "a8228041f1fd", "6662c813f700", "3526423dfbad", "fd390b8f6114"),
    },
    releases="torch 2.6 to 2.14",
)

PATCH = Patch(
    name="fast_checkpoint_hooks",
    summary="gradient checkpointing with half of its Python for each saved tensor",
    targets=(Target("torch.utils.checkpoint", "_checkpoint_hook", _lean, _unless_known, body=_BODIES),),
    exactness="exact",
    held_to="the gradients and the memory of torch's own non-reentrant checkpointing, bit for bit",
    idea="https://github.com/pytorch/pytorch/blob/main/torch/utils/checkpoint.py",
    facts=_facts,
)
