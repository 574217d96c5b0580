"""Record the forward and backward pass of a model once per input size, and replay the recordings.

A replay runs the recorded kernels with one launch, without Python, autograd or dispatch. The recorded part is the model alone.
Its loss, clipping, gradient scaler, accumulation and optimizer run as before, because a replay is a node of the autograd graph
and delivers gradients as autograd does.

- A recording always reads and writes the same addresses. Inputs are copied in, and outputs and gradients are copied out.
- All recordings share one pool of memory, so one overwrites what another has saved for backward. A second forward pass before
  backward runs eager.
- The largest size is recorded first, because smaller ones fit into its memory. A larger one discards all earlier recordings.
- Values that Python computed are constants of a recording. A first run under :class:`HostAccess` finds reads of the device's
  results and random numbers from the CPU; :class:`ModuleValues` finds changes of what the modules hold.
- Recordings must leave the memory that the rest of a step needs. Any error, such as one of memory, falls back to the original
  forward.

The device's part is a :class:`Recorder`: `cuda_recorder` for CUDA graphs, and an interpreter of recorded operations in tests.
"""

from __future__ import annotations

import math
import random
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy
import torch

from kohya_ext.compiling.eager_steps import Clock
from kohya_ext.compiling.host_access import HostAccess
from kohya_ext.compiling.module_values import ModuleValues

#: The most input sizes that are recorded. The driver keeps memory for each kernel of each recording.
MAX_SIZES = 24

#: GPU memory that recordings leave free besides what the rest of a step needs, in bytes.
RESERVE = 512 * 2**20

#: Micro-batches that wait for the dataset's largest size to be recorded first.
WAIT = 100

#: How often the modules may replace an object, and the number of states that their numbers and flags may have.
MOST_REPLACED, MOST_STATES = 2, 16

#: Seconds of eager passes, divided by a replay's, that make recordings worth their memory.
LEAST_GAIN = 1.03

#: Micro-batches between two works that drop recordings, for each recording: fewer do not pay for its five passes.
WORTHWHILE = 10

_CHECKPOINTING = "gradient_checkpointing"

_KEEPS_TENSORS = "the model keeps tensors of each image size"

#: The part of a difference between two runs that rounding of the comparison itself may cause.
_ROUNDING = 1e-6

#: The part of the output by which two eager runs of one batch differ only with random numbers of the model's own.
_UNREPEATED = 0.1


class RecordingError(Exception):
    """A reason why a model cannot be recorded."""


class NoRoomError(RecordingError):
    """Recordings leave too little memory."""


class Recording(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Run the work again, on the same addresses."""


class Recorder(Clock, Protocol):
    """Records and replays work on one device."""

    device: torch.device
    generators: tuple[Any, ...]
    """The random number generators that a replay advances as the recorded work would."""

    def in_pool(self) -> AbstractContextManager[None]:
        """Run eager work inside the block, with memory from the recordings' pool."""

    def record(self) -> AbstractContextManager[Recording]:
        """Record the work inside the block."""

    def free_bytes(self) -> int:
        """Return the free memory of the device."""

    def return_unused(self) -> None:
        """Return unused memory outside of the pool to the device."""

    def pool_bytes(self) -> int:
        """Return the bytes of tensors in the recordings' pool."""

    def release(self) -> None:
        """Return the pool's memory, after all recordings have been dropped."""


@dataclass(eq=False)
class _Call:
    """A call of the model, in terms of its tensors."""

    forward: Callable[..., Any]
    tensors: list[torch.Tensor]
    key: Any
    """Equal for calls that can share a recording."""
    constants: list[Any]
    """All arguments, with None in place of tensors."""
    places: list[int]
    """The places of the tensors among the arguments."""
    names: tuple[str, ...]
    """The names of the last arguments."""
    precision: tuple[bool, torch.dtype]
    """Whether autocast is on, and its type. In backward, where passes may run again, it is off."""

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Call the model with other tensors, in the call's precision."""
        values = list(self.constants)
        for place, tensor in zip(self.places, tensors, strict=True):
            values[place] = tensor
        positional = len(values) - len(self.names)
        device = tensors[0].device.type
        # Autocast's cache would keep casts of the weights of one recording for the next.
        enabled, dtype = self.precision
        with torch.autocast(device, dtype, enabled, cache_enabled=False):
            return self.forward(*values[:positional], **dict(zip(self.names, values[positional:], strict=True)))


@dataclass(eq=False)
class _Size:
    """One size of inputs: static tensors, and how its passes run."""

    call: _Call
    inputs: list[torch.Tensor]
    """Copies of the call's tensors, which the passes read."""
    output: Any = None
    """The model's output. Its tensor is replaced in a copy for each call."""
    trained: list[int] = field(default_factory=list)
    """The numbers of the trained weights that get a gradient."""
    forward_recording: Recording | None = None
    backward_recording: Recording | None = None
    result: torch.Tensor | None = None
    """The output's tensor: of the recording, or with its graph between the eager passes of a size that is not recorded."""
    output_gradient: torch.Tensor | None = None
    pool_bytes: int | None = None
    """Bytes of tensors in the pool before the first eager pass."""
    is_checked: bool = False
    """Whether the eager passes are known to leave nothing there."""

    @property
    def is_recorded(self) -> bool:
        return self.forward_recording is not None

    def set_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.inputs, list(tensors))

    @property
    def input_gradients(self) -> list[torch.Tensor | None]:
        return [tensor.grad for tensor in self.inputs]


class RecordedModel:
    """Runs a model's forward and backward passes from recordings.

    ``trained``: all trained weights of the run. ``modules``: the model, and the networks that change its layers.
    ``report`` receives one line if the model is not recorded after all, or not for further sizes. ``occurrences``: at which
    occurrence a size is recorded. ``is_largest`` returns whether the present batch is the dataset's largest; None if that is
    unknown. ``must_gain``: whether the first recording is dropped unless it is faster. ``watch`` runs a replay.
    """

    def __init__(
        self,
        recorder: Recorder,
        modules: Sequence[torch.nn.Module],
        trained: Sequence[torch.Tensor],
        report: Callable[[str], None],
        max_sizes: int = MAX_SIZES,
        reserve: int = RESERVE,
        occurrences: int = 1,
        is_largest: Callable[[], bool | None] = lambda: None,
        must_gain: bool = False,
        watch: Callable[[Callable[[], None]], None] = lambda replay: replay(),
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Sizes recorded, micro-batches replayed, micro-batches that ran eager, and times that a larger size came or that
        recordings were dropped for the work between steps."""
        self.off: str | None = None
        """Why the model runs eager; None if it is recorded."""
        self.needed = 0
        """Bytes that the rest of a step needs next to the recordings."""
        self._recorder, self._report, self._reserve = recorder, report, reserve
        self._occurrences, self._is_largest, self._watch = occurrences, is_largest, watch
        self._must_gain = must_gain
        self._modules, self._trained = modules, [weight for weight in trained if weight.requires_grad]
        self._max_sizes = max_sizes
        self._switches = [vars(part) for module in modules for part in module.modules() if _CHECKPOINTING in vars(part)]
        self._values = ModuleValues(modules)
        self._replaced = 0
        self._states: set[Any] = set()
        self._weights: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._sizes: dict[Any, _Size] = {}
        self._seen: Counter[Any] = Counter()
        self._waited = 0
        self._staged: dict[int, torch.Tensor] = {}
        """Number of a trained weight -> where all recordings leave its gradient."""
        self._generation = 0
        """Counts passes that overwrite the pool."""
        self._waiting: Callable[[], Any] = lambda: None
        """Returns the node of the last forward pass while it may still run backward."""
        # An output needs a gradient although no input does.
        self._hook = torch.zeros((), device=recorder.device, requires_grad=True)

    def __call__(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return ``forward(*args, **kwargs)``, from a recording where possible."""
        passes = self._size_for(forward, args, kwargs) if self.off is None else None
        if passes is not None:
            states = RandomStates(self._recorder.generators)
            try:
                size, tensors = passes
                result = _Passes.apply(self, size, states, self._hook, *tensors)
            except Exception as error:  # such as one of memory, in an eager pass between the recordings
                reason = _reason(error)
                _forget_frames(error)
            else:
                self.counts["replayed" if size.is_recorded else "not_recorded"] += 1
                return with_tensor(size.output, result)
            del passes, size, tensors
            self._switch_off(reason)
            states.restore()
        self.counts["eager"] += 1
        return forward(*args, **kwargs)

    def check_state(self) -> None:
        """Notice what changes between eager steps before the first recording."""
        if self.off is None:
            try:
                self._state()
            except RecordingError as error:
                self._switch_off(str(error))

    def leave_room(self, needed: int | None, interval: float) -> None:
        """Drop the recordings before work between steps, unless the ``needed`` bytes are free next to them.

        The memory that the work needs is not known before it has run once. Recordings are made again when their sizes come,
        but not where the micro-batches from one such work to the next, ``interval`` on average, do not pay for them.
        """
        if not self._sizes:
            return
        self._recorder.return_unused()
        if needed is not None and self._recorder.free_bytes() >= needed + self._reserve:
            return
        pays = WORTHWHILE * self.counts["recorded"]
        if needed is not None and interval < pays:
            self._switch_off(
                f"sample images or validation every {interval:.0f} batches drop the recordings, which pay only from {pays} on"
            )
        else:
            self._discard()
            self.counts["released"] += 1

    def release(self) -> None:
        """Drop all recordings and return their memory."""
        self._sizes.clear()
        self._staged.clear()
        self._recorder.release()

    def _switch_off(self, reason: str) -> None:
        self.off = reason
        self.release()
        self._report(f"{reason}; training continues without CUDA graphs")

    # --- which recording ---------------------------------------------------------------------------------------------

    def _size_for(
        self, forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[_Size, list[torch.Tensor]] | None:
        if self._waiting() is not None:  # an earlier forward pass still needs what it has saved
            return None
        try:
            call = self._describe(forward, args, kwargs)
            size = self._size(call)
            return None if size is None else (size, call.tensors)
        except Exception as error:  # a recording can break in any way, and training continues without it
            reason = _reason(error)
            _forget_frames(error)
        self._switch_off(reason)
        return None

    def _size(self, call: _Call) -> _Size | None:
        """Return the passes of a size: recorded, eager between recordings, or None without recordings."""
        size = self._sizes.get(call.key)
        if size is not None and size.is_recorded:
            return size
        is_due = self._is_due(call.key)
        if self._sizes and _elements(call.tensors) > max(_elements(each.inputs) for each in self._sizes.values()):
            self._discard()
            self.counts["larger"] += 1
            is_due = True
        if is_due:
            return self._recorded(call)
        if self._sizes and size is None:
            size = self._sizes[call.key] = _copied(call)
        return size

    def _is_due(self, key: Any) -> bool:
        """Return whether a size is recorded now: at its n-th occurrence, but the dataset's largest one at its first."""
        self._seen[key] += 1
        if self.counts["recorded"] >= self._max_sizes:
            return False
        is_largest = self._is_largest() if self._occurrences > 1 else None
        if is_largest is False and not self._sizes and self._waited < WAIT:
            self._waited += 1
            return False
        return bool(is_largest) or self._seen[key] >= self._occurrences

    def _recorded(self, call: _Call) -> _Size | None:
        """Return a new recording; None without room for a further one."""
        recorded = self.counts["recorded"]
        try:
            self._sizes[call.key] = self._new_size(call)
            return self._sizes[call.key]
        except NoRoomError as error:
            if recorded == 0:
                raise
            self._max_sizes = recorded
            reason = str(error)
            _forget_frames(error)
        self._discard()
        self._report(f"{reason}; at most {recorded} image sizes are recorded")
        return None

    def _describe(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> _Call:
        values = [*args, *kwargs.values()]
        places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
        tensors = [values[place] for place in places]
        constants = [None if isinstance(value, torch.Tensor) else value for value in values]
        for constant in constants:
            if not isinstance(constant, (bool, int, float, str, type(None))):
                raise RecordingError(f"an input of the model is a {type(constant).__name__}")
        for tensor in tensors:
            if tensor.device != self._recorder.device:
                raise RecordingError(f"an input of the model is on {tensor.device}")
        kinds = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors]
        device = self._recorder.device.type
        precision = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        key = (tuple(kwargs), *places, *constants, *kinds, *precision, self._state())
        return _Call(forward, tensors, key, constants, places, tuple(kwargs), precision)

    def _state(self) -> Any:
        """Return the state of the modules. Raises RecordingError if recordings cannot follow its changes."""
        if any(weight._backward_hooks or weight._post_accumulate_grad_hooks for weight in self._trained):
            raise RecordingError("a hook of a trained weight would run with the gradients of a recording")
        state = self._values.state()
        if self._values.replaced > self._replaced:
            self._replaced, self._addresses = self._values.replaced, []
            if self._replaced > MOST_REPLACED:
                raise RecordingError(f"{self._values.last_replaced} is replaced between steps")
            if self._sizes:
                self._discard()
        self._states.add(state)
        if len(self._states) > MOST_STATES:
            raise RecordingError(f"{self._values.last_changed} changes between steps")
        if not self._addresses:
            held = (
                *(t for module in self._modules for t in (*module.parameters(), *module.buffers())),
                *self._values.tensors(),
            )
            self._weights = list(dict.fromkeys(held))
        addresses = [weight.data_ptr() for weight in self._weights]
        if addresses != (self._addresses or addresses):
            raise RecordingError("weights of the model have moved in memory")
        self._addresses = addresses
        return state

    def _discard(self) -> None:
        """Drop all recordings. Those that are needed are made again."""
        self._sizes.clear()
        self._recorder.release()
        self.counts["recorded"] = self._waited = 0

    # --- recording ---------------------------------------------------------------------------------------------------

    def _new_size(self, call: _Call) -> _Size:
        """Record the passes of a size."""
        size = _copied(call)
        call.tensors, tensors = [], call.tensors
        self._unshare()
        _renew_accumulators(self._trained)
        gradients = [weight.grad for weight in self._trained]
        random_states = RandomStates(self._recorder.generators)
        try:
            self._prepare(size, random_states.of_device)
        finally:
            random_states.restore()
            for weight, gradient in zip(self._trained, gradients, strict=True):
                weight.grad = gradient
            call.tensors = tensors
        return size

    def _prepare(self, size: _Size, states: Sequence[torch.Tensor]) -> None:
        self._recorder.return_unused()  # of eager passes, next to which the pool might not fit
        # The first pass sets up what later passes reuse, such as tables and workspaces.
        first = self._warm_up(size)
        draws = any(
            not torch.equal(generator.get_state(), state)
            for generator, state in zip(self._recorder.generators, states, strict=True)
        )
        if draws and any(values[_CHECKPOINTING] is True for values in self._switches):
            raise RecordingError("dropout with gradient checkpointing restores random states, which cannot be recorded")
        self._set_random_state(states)
        second = self._warm_up(size, HostAccess(self._recorder.device))
        _check_repeated(first, second)
        self._add_staging_buffers(size)
        self._set_random_state(states)
        eager = self._seconds(partial(self._run_eager, size)) if self._must_gain else None
        self._set_random_state(states)
        self._recorder.return_unused()
        before = self._recorder.free_bytes()
        self._record(size)
        self._set_random_state(states)
        _check_replay(first, second, self._replay_once(size))
        if eager is not None:
            self._check_gain(eager, self._seconds(partial(self._replay, size)))
        self._check_room(before)

    def _seconds(self, passes: Callable[[], object]) -> float:
        """Return the seconds from the start of both passes until the device has finished them."""
        start = self._recorder.mark()
        passes()
        return self._recorder.seconds(start, self._recorder.mark())[1]

    def _check_gain(self, eager: float, replayed: float) -> None:
        """Compare the seconds of both passes. Raises RecordingError if a replay is not faster."""
        measured = f"forward and backward take {replayed:.2f} s replayed and {eager:.2f} s eager"
        if replayed * LEAST_GAIN > eager:
            raise RecordingError(f"{measured}, so there is nothing to gain")
        self._must_gain = False
        self._report(measured)

    def _check_room(self, before: int) -> None:
        """Count a recording, before which ``before`` bytes were free. Raises NoRoomError if it leaves too little."""
        free, needed, recorded = self._recorder.free_bytes(), self._reserve + self.needed, self.counts["recorded"] + 1
        if free < needed:
            raise NoRoomError(f"recordings leave {_mib(free)} of GPU memory free, and the rest of a step needs {_mib(needed)}")
        self.counts["recorded"] = recorded
        if free < needed + max(before - free, 0) and recorded < self._max_sizes:
            self._max_sizes = recorded
            self._report(f"{_mib(free)} of GPU memory are free; image sizes after the first {recorded} run eager")

    def _set_random_state(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self._recorder.generators, states, strict=True):
            generator.set_state(state)

    def _warm_up(self, size: _Size, access: HostAccess | None = None) -> _Results:
        """Run both passes eager."""
        used = self._recorder.pool_bytes()
        random_state = _host_random_state(self._recorder.device)
        with access or nullcontext():
            result = self._run_eager(size)
        results = _Results(result, [self._trained[number].grad for number in size.trained], size.input_gradients)
        del result
        for tensor in (*self._trained, *size.inputs):
            tensor.grad = None
        if access is not None and access.reason is not None:
            raise RecordingError(access.reason)
        if _host_random_state(self._recorder.device) != random_state:
            raise RecordingError("the model draws random numbers on the CPU, as module_dropout and DyLoRA do")
        if self.counts["recorded"] and self._recorder.pool_bytes() > used:
            # Its memory in the pool is free in earlier recordings, which overwrite it.
            raise RecordingError(_KEEPS_TENSORS)
        return results

    def _run_eager(self, size: _Size) -> torch.Tensor:
        """Run both passes eager in the pool, with a test gradient; return the output."""
        with self._recorder.in_pool():
            result = self._forward(size)
            self._backward(size, result, test_gradient(result))
        return result

    def _forward(self, size: _Size) -> torch.Tensor:
        with torch.enable_grad():
            size.output = size.call.run(size.inputs)
            result = tensor_of(size.output)
        size.output = with_tensor(size.output, None)
        if not result.requires_grad:
            raise RecordingError("the model's output needs no gradient")
        return result

    def _backward(self, size: _Size, result: torch.Tensor, gradient: torch.Tensor) -> None:
        """Compute the gradients of inputs and trained weights."""
        for tensor in (*self._trained, *size.inputs):
            tensor.grad = None
        device = self._recorder.device.type
        # The script runs backward outside of autocast, and this one inside of its forward pass.
        with torch.autocast(device, enabled=False, cache_enabled=False):
            result.backward(gradient)
        size.trained = [number for number, weight in enumerate(self._trained) if weight.grad is not None]

    def _add_staging_buffers(self, size: _Size) -> None:
        """Allocate staging buffers, outside of the pool: recordings overwrite each other's memory there."""
        for number in size.trained:
            if number not in self._staged:
                self._staged[number] = torch.empty_like(self._trained[number])

    def _stage(self, size: _Size) -> None:
        """Move the gradients of trained weights to the staging buffers."""
        gradients = [self._trained[number].grad for number in size.trained]
        if gradients:
            torch._foreach_copy_([self._staged[number] for number in size.trained], gradients)
        for number in size.trained:
            self._trained[number].grad = None

    def _record(self, size: _Size) -> None:
        with self._recorder.record() as size.forward_recording:
            result = self._forward(size)
        size.output_gradient = torch.zeros_like(result)
        with self._recorder.record() as size.backward_recording:
            self._backward(size, result, size.output_gradient)
            self._stage(size)
        size.result = result.detach()

    def _replay(self, size: _Size) -> None:
        """Replay both passes with a test gradient."""
        assert size.forward_recording is not None
        assert size.backward_recording is not None
        assert size.output_gradient is not None
        assert size.result is not None
        self._watch(size.forward_recording.replay)
        size.output_gradient.copy_(test_gradient(size.result))
        self._watch(size.backward_recording.replay)

    def _replay_once(self, size: _Size) -> _Results:
        self._replay(size)
        assert size.result is not None
        return _Results(size.result, [self._staged[number] for number in size.trained], size.input_gradients)

    # --- the passes of a training step -------------------------------------------------------------------------------

    def begin(self, node: Any, size: _Size, states: RandomStates, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run the forward pass of an autograd node. ``states``: those before it."""
        self._generation += 1
        node.generation, node.states = self._generation, states
        size.set_inputs(tensors)
        if size.forward_recording is not None:
            self._watch(size.forward_recording.replay)
            assert size.result is not None
            output = size.result.clone()
        else:
            if not size.is_checked:
                size.pool_bytes = self._recorder.pool_bytes()
            with self._recorder.in_pool():
                size.result = self._forward(size)
            output = size.result.detach().clone()
        self._waiting = weakref.ref(node)
        return output

    def end(self, node: Any, size: _Size | None, gradient: torch.Tensor) -> list[torch.Tensor | None]:
        """Run the backward pass of an autograd node: accumulate the gradients of weights, return those of inputs."""
        if node.generation != self._generation:
            raise RuntimeError("backward ran twice for one forward pass, whose memory is already in use; use --no-cuda_graphs")
        assert size is not None, "a size is kept until its backward pass"
        self._generation += 1
        self._waiting = lambda: None
        before = [weight.grad for weight in self._trained]
        try:
            self._unshare()
            before = [weight.grad for weight in self._trained]
            self._compute_gradients(size, gradient)
            gradients = [None if each is None else each.clone() for each in size.input_gradients]
        except Exception as error:  # such as one of memory, in an eager pass between the recordings
            reason = _reason(error)
            _forget_frames(error)
        else:
            self._deliver(size)
            self._check_kept(size)
            return gradients
        for weight, earlier in zip(self._trained, before, strict=True):
            weight.grad = earlier
        size.result = size.forward_recording = size.backward_recording = None
        self._switch_off(reason)
        return self._run_again(size, gradient, node.states)

    def _compute_gradients(self, size: _Size, gradient: torch.Tensor) -> None:
        """Run a size's backward pass; it leaves the gradients of weights in the staging buffers."""
        if size.backward_recording is not None:
            assert size.output_gradient is not None
            size.output_gradient.copy_(gradient)
            self._watch(size.backward_recording.replay)
            return
        gradients = [weight.grad for weight in self._trained]
        result, size.result = size.result, None
        assert result is not None
        with self._recorder.in_pool():
            self._backward(size, result, gradient)
            del result
        self._add_staging_buffers(size)
        self._stage(size)
        for weight, before in zip(self._trained, gradients, strict=True):
            weight.grad = before

    def _check_kept(self, size: _Size) -> None:
        """Switch off if the first eager passes of a size have left tensors in the pool, which recordings overwrite."""
        if size.is_recorded or size.is_checked:
            return
        size.is_checked = True
        for tensor in size.inputs:
            tensor.grad = None
        if size.pool_bytes is not None and self._recorder.pool_bytes() > size.pool_bytes:
            self._switch_off(_KEEPS_TENSORS)

    def _run_again(self, size: _Size, gradient: torch.Tensor, states: RandomStates) -> list[torch.Tensor | None]:
        """Run both passes as without recordings, with the forward pass's random numbers."""
        now = RandomStates(self._recorder.generators)
        states.restore()
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in size.inputs]
        with torch.enable_grad():
            result = tensor_of(size.call.run(inputs))
        now.restore()
        with torch.autocast(self._recorder.device.type, enabled=False, cache_enabled=False):
            result.backward(gradient)
        return [tensor.grad for tensor in inputs]

    def _unshare(self) -> None:
        """Copy gradients of an earlier micro-batch out of the staging buffers, which the next backward pass overwrites."""
        shared = [number for number, buffer in self._staged.items() if self._trained[number].grad is buffer]
        if shared:
            copies = torch._foreach_mul([self._staged[number] for number in shared], 1)
            for number, gradient in zip(shared, copies, strict=True):
                self._trained[number].grad = gradient

    def _deliver(self, size: _Size) -> None:
        """Give weights their gradients: the staging buffer itself, or added to the gradients of earlier micro-batches."""
        accumulated, new = [], []
        for number in size.trained:
            weight, buffer = self._trained[number], self._staged[number]
            if weight.grad is None:
                weight.grad = buffer
            else:
                accumulated.append(weight.grad)
                new.append(buffer)
        if accumulated:
            torch._foreach_add_(accumulated, new)


class _Passes(torch.autograd.Function):  # type: ignore[misc]
    """The node that stands for a model in the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, model: RecordedModel, size: _Size, states: RandomStates, hook: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        # A script keeps its last loss, and so this node, for longer than a recording may need its memory.
        ctx.model, ctx.size = model, weakref.ref(size)
        return model.begin(ctx, size, states, tensors)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (None, None, None, None, *ctx.model.end(ctx, ctx.size(), gradient))


class RandomStates:
    """The states of all random number generators that a model can draw from."""

    def __init__(self, generators: Sequence[Any]) -> None:
        self._generators = generators
        self.of_device = [generator.get_state() for generator in generators]
        self._of_host = random.getstate(), numpy.random.get_state(), torch.get_rng_state()

    def restore(self) -> None:
        """Set the states again."""
        of_python, of_numpy, of_torch = self._of_host
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        for generator, state in zip(self._generators, self.of_device, strict=True):
            generator.set_state(state)


def _renew_accumulators(weights: Sequence[torch.Tensor]) -> None:
    """Let the next pass create new gradient accumulators of weights.

    A weight keeps its accumulator while any graph holds it, such as that of the last loss, which scripts keep. It runs on the
    stream on which it was created: for eager steps the default stream, which breaks a capture. PyTorch drops the accumulator of
    a weight whose type changes.
    """
    for weight in weights:
        data = weight.data
        weight.data = data.new_empty(0, dtype=torch.float32 if data.dtype is torch.float64 else torch.float64)
        weight.data = data


def _copied(call: _Call) -> _Size:
    """Return a size without recordings, with copies of a call's tensors."""
    return _Size(call, [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in call.tensors])


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def _elements(inputs: Sequence[torch.Tensor]) -> int:
    """Return the number of elements of a call's tensors, by which sizes are compared."""
    return sum(tensor.numel() for tensor in inputs)


# --- the self-check --------------------------------------------------------------------------------------------------


class _Results:
    """The output of both passes and the norm of each gradient, on the CPU."""

    def __init__(
        self, output: torch.Tensor, gradients: Sequence[torch.Tensor | None], input_gradients: Sequence[torch.Tensor | None]
    ) -> None:
        self.output = output.detach().float().cpu()
        computed = [gradient for gradient in (*gradients, *input_gradients) if gradient is not None]
        norms = [gradient.float().norm() for gradient in computed]
        self.gradient_norms = torch.stack(norms).cpu() if norms else torch.zeros(1)


def test_gradient(result: torch.Tensor) -> torch.Tensor:
    """Return a gradient of the output for a run without a loss: all magnitudes and both signs."""
    numbers = torch.arange(result.numel(), device=result.device, dtype=torch.float32)
    return numbers.cos().reshape(result.shape).to(result.dtype)


def _check_repeated(first: _Results, second: _Results) -> None:
    """Raise RecordingError if two eager runs of one batch differ by more than the order of their sums can cause."""
    share = _difference(first, second, "output") / (float(first.output.norm()) or 1)
    if math.isfinite(share) and share > _UNREPEATED:
        raise RecordingError(f"two eager passes with the same random state differ (by {share:.2g} of the output's norm)")


def _difference(results: _Results, others: _Results, part: str) -> float:
    return float((getattr(results, part) - getattr(others, part)).norm())


def _check_replay(first: _Results, second: _Results, replayed: _Results) -> None:
    """Raise RecordingError if a replay differs from an eager run by more than another eager run does.

    Kernels with atomic additions differ between two eager runs, too.
    """
    for part in ("output", "gradient_norms"):
        scale = float(getattr(second, part).norm())
        allowed = 2 * _difference(first, second, part) + _ROUNDING * scale
        difference = _difference(replayed, second, part)
        # A batch that is not finite cannot be compared, and is not the recording's fault.
        if math.isfinite(scale) and not difference <= allowed:
            share = difference / (scale or 1)
            raise RecordingError(f"a replay differs from the eager pass ({part.replace('_', ' ')}: {share:.2g} of the norm)")


# --- outputs and errors ----------------------------------------------------------------------------------------------


def tensor_of(output: Any) -> torch.Tensor:
    """Return the tensor of a model's output: the output itself, or its attribute ``sample``."""
    tensor = getattr(output, "sample", output)
    if not isinstance(tensor, torch.Tensor):
        raise RecordingError(f"the model's output is a {type(output).__name__}")
    return tensor


def with_tensor(output: Any, tensor: torch.Tensor | None) -> Any:
    """Return an output of the same kind with another tensor."""
    if output is None or isinstance(output, torch.Tensor):
        return tensor
    output = copy(output)
    output.sample = tensor
    return output


def _host_random_state(device: torch.device) -> tuple[Any, ...]:
    """Return the states of the CPU's generators that a recording cannot advance."""
    of_numpy: Any = numpy.random.get_state()
    _, words, *rest = of_numpy
    cpu = torch.get_rng_state().numpy().tobytes() if device.type != "cpu" else None
    return random.getstate(), words.tobytes(), *rest, cpu


def _reason(error: BaseException) -> str:
    """Return one line about an error: its own, or that of the error that broke the recording."""
    while not isinstance(error, RecordingError) and error.__context__ is not None:
        error = error.__context__
    if isinstance(error, RecordingError):
        return str(error)
    sentence = next(iter(str(error).splitlines()), "").partition(". ")[0]
    return f"{type(error).__name__}: {sentence}"


def _forget_frames(error: BaseException | None) -> None:
    """Drop the frames of an error, which hold the tensors that a broken pass has saved."""
    while error is not None:
        error.__traceback__ = None
        error.__context__, error = None, error.__context__
