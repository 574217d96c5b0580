"""Count the kernels, the bytes through memory and the FLOPs of a step, on tensors without data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate import measurement, step
from kohya_ext.estimate.tracker import STEP, Tracker
from kohya_ext.estimate.triton_kernels import counted_kernels
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.sdscripts.introspect import importable


@dataclass
class Traffic(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Counts operators that compute something, and the bytes they read and write: each operand once, without caches.

    The optimizer is left out, because torch uses other kernels for it on a GPU.
    """

    tracker: Tracker
    kernels: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __hash__(self) -> int:
        return id(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it unless it returns a view."""
        result = func(*args, **(kwargs or {}))
        into = {argument.name for argument in func._schema.arguments if argument.is_out}  # written, not read
        given = {name: value for name, value in (kwargs or {}).items() if name not in into}
        read, written = _storages((args, given)), _storages(result)
        name = func._overloadpacket.__name__
        is_work = func._schema.is_mutable or (written.keys() - read.keys() and "empty" not in name)
        if is_work and self.tracker.phase != STEP:
            self.kernels[name] += 1
            self.moved[name] += sum(read.values()) + sum(written.values())
        return result


def _storages(values: Any) -> dict[int, int]:
    """Return the bytes of each storage, capped at the sizes of its tensors."""
    tensors = [value for value in tree_iter(values) if isinstance(value, torch.Tensor)]
    sizes: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = sizes.get(storage._cdata, 0) + min(tensor.numel() * tensor.element_size(), storage.nbytes())
    return sizes


def count(checkout: Checkout, command: CommandLine, without: Sequence[str]) -> dict[str, Any]:
    """Return the counts of forward, recomputation and backward of one step, without the patches in ``without``.

    ``kernels``, ``moved_bytes`` and ``flops`` (a multiply-add counts as two), and the first two by operator.
    """
    with importable(checkout), measurement.patched(checkout, command.settings.with_(disable_patch=tuple(without))):
        choices, arguments, trainer = measurement.read(checkout, command)
        step.configure(choices, arguments, trainer)
        with step.fake_tensors() as assumptions, counted_kernels(eight_bits=choices.base_precision is not None):
            training = step.prepare(choices, arguments, trainer)
            assumptions.integer = training.models.caption_tokens
            tracker = Tracker()
            with tracker:
                step.allocate_resident(training, tracker)
                with Traffic(tracker) as traffic:
                    flops, _ = step.run_step(training, tracker)
    operators = {name: {"kernels": traffic.kernels[name], "moved_bytes": size} for name, size in traffic.moved.most_common()}
    return {
        "kernels": traffic.kernels.total(),
        "moved_bytes": traffic.moved.total(),
        "flops": flops,
        "operators": operators,
    }
