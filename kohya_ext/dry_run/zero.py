"""The memory of one process of DeepSpeed's ZeRO, which divides the state of training among the processes.

What DeepSpeed allocates on the GPU is allocated here as fake tensors, in its order: gradients go through a bucket, a process
keeps those of its part of the weights, and its optimizer steps fp32 copies of that part. What it keeps in host memory is only
counted. Sources: ``runtime/zero/stage_1_and_2.py``, ``stage3.py`` and ``partitioned_param_coordinator.py`` of
https://github.com/deepspeedai/DeepSpeed (0.19.8), with the configuration that accelerate makes of sd-scripts' options.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kohya_ext.dry_run.events import Kind
from kohya_ext.dry_run.gathered_weights import GatheredWeights
from kohya_ext.dry_run.tracker import Tracker

#: Elements of the bucket that gradients are reduced in (``reduce_bucket_size``).
REDUCE_BUCKET = 500_000_000

#: Elements of one process that the optimizer steps together in ZeRO-3 (``sub_group_size``).
SUB_GROUP = 1_000_000_000

#: The pool of the stream that reduces gradients in ZeRO-3; see :class:`kohya_ext.dry_run.events.Event`.
REDUCING = -2

#: Processes get equal parts of the weights, each aligned for NCCL (``nccl_start_alignment_factor``).
ALIGNMENT = 2


@dataclass(frozen=True)
class Division:
    """How the state of training is divided."""

    stage: int
    processes: int
    offloads_optimizer: bool
    offloads_weights: bool

    def part(self, elements: int) -> int:
        """Return the elements of one process, whose parts are equally large."""
        return -(-elements // self.processes)


@dataclass
class HostMemory:
    """Bytes in host memory of one process, by purpose."""

    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, purpose: str, size: int, pinned: bool = True) -> None:
        """Add a tensor. PyTorch's allocator of pinned memory rounds up to a power of two (CachingHostAllocator.h)."""
        self.bytes[purpose] += size
        if pinned:
            self.bytes["rounding of pinned memory"] += rounded(size) - size


def rounded(size: int) -> int:
    """Return the bytes that PyTorch pins for a tensor."""
    return 1 << (size - 1).bit_length() if size else 0


class DividedGradients:
    """ZeRO-1 and 2: every process has all weights, and steps its part of them in fp32."""

    def __init__(self, division: Division, optimizer: Any, tracker: Tracker) -> None:
        """Move the weights of each group of the optimizer into one tensor, and let the optimizer step this process's part."""
        self.division, self.optimizer, self.tracker = division, optimizer, tracker
        self.host = HostMemory()
        self.groups: list[list[Any]] = []
        self.own: dict[Any, int] = {}
        """Weight of which this process, the first one, has at least one element -> the number of its elements."""
        self._owners: dict[Any, set[int]] = {}
        """Weight -> the processes that have elements of it."""
        self._parts: list[Any] = []
        """The fp32 copies, one of each group."""
        self._bucket: Any = None
        self._filled = 0
        self._in_bucket: list[Any] = []
        self._waiting: list[Any] = []
        """Weights whose gradients are complete, in ZeRO-1, which reduces them after the backward pass."""
        self._reduced: Any = None
        """Gradients of this process's part, from one backward pass."""
        self._offset = 0
        self._gradients: list[Any] = []
        """The same of the whole step."""
        for group in optimizer.param_groups:
            self._flatten(group)
        if division.offloads_optimizer:
            largest = max((weight for weights in self.groups for weight in weights), key=lambda weight: weight.numel())
            self._on_its_way = torch.empty(largest.numel(), dtype=largest.dtype, device=tracker.device)
            tracker.mark([self._on_its_way], Kind.BUCKET)
            self.host.add("gradients", self._on_its_way.nbytes)
        for weights in self.groups:
            for weight in weights:
                weight.register_post_accumulate_grad_hook(self._add)

    def _flatten(self, group: dict[str, Any]) -> None:
        weights = [weight for weight in group["params"] if weight.requires_grad]
        if not weights:
            return
        self.groups.append(weights)
        elements = sum(weight.numel() for weight in weights)
        step = ALIGNMENT * self.division.processes
        flat = torch.empty(-(-elements // step) * step, dtype=weights[0].dtype, device=self.tracker.device)
        self.tracker.mark([flat], Kind.TRAINED_WEIGHT)
        size = flat.numel() // self.division.processes
        offset = 0
        for weight in weights:
            weight.data = flat.narrow(0, offset, weight.numel()).view(weight.shape)
            if offset < size:
                self.own[weight] = min(weight.numel(), size - offset)
            self._owners[weight] = {offset // size, (offset + weight.numel() - 1) // size}
            offset += weight.numel()
        part = flat.narrow(0, 0, size).clone()
        if self.division.offloads_optimizer:
            self._count_on_host(group, size, flat.dtype)
            return
        part = torch.nn.Parameter(part.to(torch.float32))
        self.tracker.mark([part], Kind.MASTER_WEIGHT)
        torch.zeros_like(part)  # DeepSpeed's first gradient, which it drops
        self._parts.append(part)
        group["params"] = [part]

    def _count_on_host(self, group: dict[str, Any], size: int, dtype: torch.dtype) -> None:
        with self.tracker.paused():
            part = torch.nn.Parameter(torch.empty(size))
            part.grad = torch.empty(size)
        self.host.add("fp32 weights", 4 * size)
        self.host.add("gradients", 4 * size)
        self.host.add("weights on their way to the GPU", size * dtype.itemsize)
        self._parts.append(part)
        group["params"] = [part]

    def begin(self) -> None:
        """Begin a pass."""

    # --- gradients ---------------------------------------------------------------------------------------------------

    def _add(self, weight: Any) -> None:
        """Take over a gradient that is complete."""
        self.tracker.mark([weight.grad], Kind.GRADIENT)
        if self._bucket is None:
            self._bucket = torch.empty(REDUCE_BUCKET, dtype=weight.dtype, device=weight.device)
            self.tracker.mark([self._bucket], Kind.BUCKET)
        if self.division.stage == 1:
            self._waiting.append(weight)
        else:
            self._put(weight)

    def _put(self, weight: Any) -> None:
        if self._filled + weight.numel() > REDUCE_BUCKET:
            self._reduce()
        place = self._bucket.narrow(0, self._filled, weight.numel()).view(weight.shape)
        weight.grad = place.copy_(weight.grad)
        self._filled += weight.numel()
        self._in_bucket.append(weight)

    def _reduce(self) -> None:
        """Reduce the bucket. Gradients of several processes' parts are copied into one tensor first."""
        if len(set().union(*(self._owners[weight] for weight in self._in_bucket))) > 1:
            self._bucket.narrow(0, 0, self._filled).clone()
        for weight in self._in_bucket:
            if weight not in self.own:
                weight.grad = None
            elif self.division.offloads_optimizer:
                part = weight.grad.view(-1).narrow(0, 0, self.own[weight])
                torch.linalg.vector_norm(part.to(torch.float64))
                part.to(torch.float32)
                weight.grad = None
            else:
                self._keep(weight)
        self._in_bucket.clear()
        self._filled = 0

    def _keep(self, weight: Any) -> None:
        if self._reduced is None:
            self._reduced = torch.empty(sum(each.numel() for each in self.own), dtype=weight.dtype, device=weight.device)
            self.tracker.mark([self._reduced], Kind.GRADIENT)
            self._offset = 0
        place = self._reduced.narrow(0, self._offset, weight.numel()).view(weight.shape)
        weight.grad = place.copy_(weight.grad)
        self._offset += weight.numel()

    def end_backward(self, accumulates: bool) -> None:
        """Reduce the gradients that are left after a backward pass. ``accumulates``: whether the step has several."""
        waiting = {*self._waiting}
        self._waiting.clear()
        for weight in (weight for weights in self.groups for weight in weights if weight in waiting):
            self._put(weight)
        if self._in_bucket:
            self._reduce()
        gradients = [weight.grad for weight in self.own if weight.grad is not None]
        for weights in self.groups:
            for weight in weights:
                weight.grad = None
        self._bucket = self._reduced = None
        if self._gradients:
            for kept, new in zip(self._gradients, gradients, strict=True):
                kept.add_(new)
        else:
            self._gradients = gradients
        if self.division.offloads_optimizer and accumulates and not self.host.bytes["accumulated gradients"]:
            for weight in self.own:  # whole ones, also at the end of a part
                self.host.add("accumulated gradients", weight.nbytes)

    def step(self) -> None:
        """Step this process's part; the others' arrive in the same memory."""
        if self.division.offloads_optimizer:
            step_on_host(self.optimizer, self.tracker, self.host)
            return
        for index in range(len(self._gradients)):  # no variable may keep a gradient
            torch.linalg.vector_norm(self._gradients[index].to(torch.float64))
        groups = self.optimizer.param_groups
        for part, weights in zip(self._parts, self.groups, strict=True):
            count = sum(weight in self.own for weight in weights)
            flat = torch.cat([gradient.view(-1) for gradient in self._gradients[:count]]).narrow(0, 0, part.numel())
            part.grad = flat.to(torch.float32)
            del flat
            del self._gradients[:count]
            part.grad.mul_(1.0)
            self.optimizer.param_groups = [group for group in groups if group["params"][0] is part]
            self.optimizer.step()
            part.grad = None
        self.optimizer.param_groups = groups


class DividedWeights:
    """ZeRO-3: every process has a part of each weight, and gathers whole ones while a step needs them."""

    def __init__(self, division: Division, optimizer: Any, gathered: GatheredWeights, tracker: Tracker) -> None:
        """Divide the weights, and let the optimizer step this process's parts in fp32, one sub-group after the other."""
        self.division, self.optimizer, self.gathered, self.tracker = division, optimizer, gathered, tracker
        self.host = HostMemory()
        self._in_bucket: list[Any] = []
        self._filled = 0
        trained = [[weight for weight in group["params"] if weight.requires_grad] for group in optimizer.param_groups]
        self._dtype = next(weight.dtype for weights in trained for weight in weights)
        self._weights = [*self._divided_weights(trained)]
        tracker.mark(self._weights, Kind.TRAINED_WEIGHT)
        parts = []
        converted = None
        for group, weights in zip(optimizer.param_groups, trained, strict=True):
            group["params"] = []
            for size in self._sub_groups(weights):
                if division.offloads_optimizer:
                    part = self._on_host(size)
                else:
                    converted = torch.empty(size, device=tracker.device)  # replaces the one before, and is copied
                    part = torch.nn.Parameter(converted.clone())
                    tracker.mark([part], Kind.MASTER_WEIGHT)
                group["params"].append(part)
                parts.append(part)
        del converted
        if not division.offloads_optimizer:
            torch.zeros(
                max(part.numel() for part in parts), device=tracker.device
            )  # first fp32 gradients, which DeepSpeed drops
        self._bucket = torch.empty(REDUCE_BUCKET, dtype=self._dtype, device=tracker.device)
        tracker.mark([self._bucket], Kind.BUCKET)
        self._gradients = self._gradients_of(sum(part.numel() for part in parts))
        for weights in trained:
            for weight in weights:
                weight.register_post_accumulate_grad_hook(self._add)

    def _divided_weights(self, trained: Sequence[Sequence[Any]]) -> Iterator[torch.Tensor]:
        """Yield this process's parts on the GPU: of all trained weights together, and of each frozen one."""
        frozen = [weight for weight in self.gathered.all_weights if not weight.requires_grad]
        sizes = {weight: self.division.part(weight.numel()) for weight in (*itertools.chain(*trained), *frozen)}
        if not self.division.offloads_weights:
            elements = sum(sizes[weight] for weights in trained for weight in weights)
            yield torch.empty(elements, dtype=self._dtype, device=self.tracker.device)
            yield from (torch.empty(sizes[weight], dtype=weight.dtype, device=self.tracker.device) for weight in frozen)
            return
        # Each part is pinned by itself first. Later the trained ones of a group are together.
        pinned = [sizes[weight] * weight.itemsize for weight in sizes]
        for weights in trained:
            self.host.add("weights", sum(sizes[weight] for weight in weights) * self._dtype.itemsize)
        self.host.add("weights", sum(sizes[weight] * weight.itemsize for weight in frozen), pinned=False)
        self.host.bytes["unused pinned memory"] += sum(rounded(size) for size in pinned)

    def _sub_groups(self, weights: Sequence[Any]) -> Iterator[int]:
        """Yield the elements of this process's part of each sub-group of weights."""
        elements = 0
        for weight in weights:
            elements += self.division.part(weight.numel())
            if elements >= SUB_GROUP:
                yield elements
                elements = 0
        if elements:
            yield elements

    def _on_host(self, size: int) -> Any:
        """Return weights that the optimizer steps on the host."""
        with self.tracker.paused():
            part = torch.nn.Parameter(torch.empty(size))
            part.grad = torch.empty(size)
        self.host.add("fp32 weights", 4 * size, pinned=False)
        self.host.add("gradients", 4 * size)
        return part

    def _gradients_of(self, elements: int) -> torch.Tensor | None:
        """Return this process's parts of the gradients, None if they are in host memory."""
        if self.division.offloads_optimizer:
            self.host.add("gradients", elements * self._dtype.itemsize)
            return None
        gradients = torch.empty(elements, dtype=self._dtype, device=self.tracker.device)
        self.tracker.mark([gradients], Kind.GRADIENT)
        return gradients

    def begin(self) -> None:
        """Begin a pass."""
        self.gathered.begin()

    def _add(self, weight: Any) -> None:
        self.tracker.mark([weight.grad], Kind.GRADIENT)
        if self._filled + weight.numel() > REDUCE_BUCKET and self._in_bucket:
            self._reduce()
        if self._filled + weight.numel() <= REDUCE_BUCKET:
            place = self._bucket.narrow(0, self._filled, weight.numel()).view(weight.shape)
            weight.grad = place.copy_(weight.grad)
        self._in_bucket.append(weight)
        self._filled += weight.numel()

    def _reduce(self) -> None:
        """Reduce the bucket: its gradients are sorted by process in another tensor first."""
        with self.tracker.in_pool(REDUCING):
            elements = sum(self.division.part(weight.numel()) for weight in self._in_bucket) * self.division.processes
            together = self._bucket.new_empty(elements)
            for weight in self._in_bucket:
                if self.division.offloads_optimizer:
                    part = together.narrow(0, 0, self.division.part(weight.numel())).clone()
                    torch.linalg.vector_norm(part.to(torch.float64))
                    part.to(torch.float32)
                weight.grad = None
        self._in_bucket.clear()
        self._filled = 0

    def end_backward(self, accumulates: bool) -> None:
        """Reduce the gradients that are left after a backward pass."""
        if self._in_bucket:
            self._reduce()

    def step(self) -> None:
        """Step this process's parts."""
        self.gathered.end()
        if self._gradients is None:
            step_on_host(self.optimizer, self.tracker, self.host)
        else:
            self._step_on_gpu(self._gradients)
        self.gathered.keep_small()

    def _step_on_gpu(self, gradients: torch.Tensor) -> None:
        offset = 0
        for weight in self.gathered.all_weights:
            if weight.requires_grad:
                size = self.division.part(weight.numel())
                torch.linalg.vector_norm(gradients.narrow(0, offset, size).to(torch.float64))
                offset += size
        groups, offset = self.optimizer.param_groups, 0
        for group in groups:
            for part in group["params"]:
                part.grad = gradients.narrow(0, offset, part.numel()).clone().to(torch.float32)
                offset += part.numel()
                part.grad.mul_(1.0)
                self.optimizer.param_groups = [{**group, "params": [part]}]
                self.optimizer.step()
                part.grad = None
        self.optimizer.param_groups = groups


def step_on_host(optimizer: Any, tracker: Tracker, host: HostMemory) -> None:
    """Count the state in host memory that the first step of an optimizer there creates."""
    if optimizer.state:
        return
    with tracker.paused():
        optimizer.step()
    for state in optimizer.state.values():
        host.add("optimizer state", sum(each.nbytes for each in state.values() if isinstance(each, torch.Tensor)), pinned=False)


#: The state of training of one process.
Divided = DividedGradients | DividedWeights


def divide(division: Division, optimizer: Any, gathered: GatheredWeights | None, tracker: Tracker) -> Divided:
    """Divide the state of training, as ``deepspeed.initialize`` does. ``gathered``: the weights that ZeRO-3 divides."""
    if gathered is None:
        return DividedGradients(division, optimizer, tracker)
    return DividedWeights(division, optimizer, gathered, tracker)
