"""--cuda_graphs: recorded passes train bit for bit as eager ones, and stand aside where they cannot."""

import copy
import random
import signal
import threading
import weakref
from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import pytest

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from kohya_ext.patches import cuda_graphs  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.utils.checkpoint import checkpoint  # noqa: E402

from kohya_ext.compiling import cuda_recorder, graphs, replay_watch  # noqa: E402
from kohya_ext.compiling.eager_steps import EagerSteps  # noqa: E402
from kohya_ext.compiling.graphs import RecordedModel  # noqa: E402
from kohya_ext.compiling.replay_watch import ReplayWatch  # noqa: E402
from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.speed import hang  # noqa: E402
from tests.replayer import CpuRecorder, Recording  # noqa: E402

WIDTH = 16

with_cuda = pytest.mark.skipif(not hasattr(torch._C, "_cuda_getAllocatorBackend"), reason="a build of PyTorch without CUDA")


class Adapter(torch.nn.Module):
    """A low-rank change of a frozen layer."""

    def __init__(self, layer, dropout=0.0):
        super().__init__()
        self.down, self.up = torch.nn.Linear(WIDTH, 4, bias=False), torch.nn.Linear(4, WIDTH, bias=False)
        torch.nn.init.normal_(self.up.weight, std=0.1)
        self.multiplier, self.dropout, self.original = 1.0, dropout, layer.forward
        layer.forward = self.forward

    def forward(self, x):
        return self.original(x) + self.up(F.dropout(self.down(x), self.dropout)) * self.multiplier


class Model(torch.nn.Module):
    """A frozen model of two blocks, and an unused layer."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gradient_checkpointing = False
        self.before_output = self.clear
        self.requires_grad_(False)

    def forward(self, sample, timestep, context=None, scale=1.0):
        x = sample.flatten(2).transpose(1, 2) * scale + timestep[:, None, None]
        x = x if context is None else x + context.mean(1, keepdim=True)
        for layer in self.layers[:2]:
            x = checkpoint(self.block, layer, x, use_reentrant=False) if self.gradient_checkpointing else self.block(layer, x)
        return self.before_output(x).transpose(1, 2).reshape(sample.shape)

    def clear(self, x):
        x[x > 1e9] = 0
        return x

    def block(self, layer, x):
        return x + F.silu(layer(x))


class Training:
    """A training loop, recorded or eager."""

    def __init__(self, recorded, dropout=0.0, network=Adapter, **limits):
        torch.manual_seed(0)
        self.model = Model()
        self.network = torch.nn.ModuleList(network(layer, dropout) for layer in self.model.layers)
        self.text_encoder = torch.nn.Linear(WIDTH, WIDTH)
        self.weights = [*self.network.parameters(), *self.text_encoder.parameters()]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.precision, self.set_to_none = torch.bfloat16, True
        self.lines, self.losses = [], []
        self.recorder = CpuRecorder(**limits.pop("memory", {}))
        modules = (self.model, self.network)
        self.recorded = RecordedModel(self.recorder, modules, self.weights, self.lines.append, **limits) if recorded else None
        self.data = torch.Generator().manual_seed(1)

    def __call__(self, *args, **kwargs):
        with torch.autocast("cpu", self.precision):
            if self.recorded is None or not torch.is_grad_enabled():
                return self.model(*args, **kwargs)
            return self.recorded(partial(Model.forward, self.model), args, kwargs)

    def inputs(self, height=2):
        sample = torch.randn(1, WIDTH, height, 3, generator=self.data)
        return sample, torch.rand(1, generator=self.data), torch.randn(1, 5, WIDTH, generator=self.data)

    def micro_batch(self, height=2, scale=1.0, factor=1.0, trains_text=False):
        sample, timestep, context = self.inputs(height)
        if trains_text:
            context = self.text_encoder(context)
        output = self(sample, timestep, context=context, scale=scale)
        loss = (output.float() - sample).square().mean() * factor
        self.scaler.scale(loss).backward()
        self.losses.append(loss.item())

    def step(self, *heights, norm=0.1, **options):
        for height in heights or (2,):
            self.micro_batch(height, **options)
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.weights, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=self.set_to_none)

    @property
    def state(self):
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [torch.tensor(self.losses), *(weight.detach().clone() for weight in self.weights), *moments]


def _sizes(training):
    for number in range(6):
        training.step(2 + number % 2)


def _accumulation(training):
    for _ in range(3):
        training.step(2, 3, 2, factor=1 / 3)


def _zeroed_gradients(training):
    training.set_to_none = False
    for _ in range(3):
        training.step(2, 3)


def _scaler(training):
    training.precision = torch.float16
    training.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for factor in (1.0, 1e6, 1.0, 1.0):  # the second step overflows
        training.step(factor=factor)


def _sampling(training):
    for number in range(4):
        training.step(2)
        with torch.no_grad():
            training.losses.append(training(*training.inputs(2 + number)).sum().item())


def _not_finite(training):
    training.step()
    training.micro_batch(factor=float("nan"))
    training.optimizer.zero_grad()
    training.step()
    training.step()


def _first_not_finite(training):
    training.micro_batch(scale=float("nan"))
    training.optimizer.zero_grad()
    training.step()


def _text_encoder(training):
    for number in range(4):
        training.step(2 + number % 2, trains_text=True)


def _checkpointing(training):
    training.model.gradient_checkpointing = True
    _text_encoder(training)


def _multiplier(training):
    for multiplier in (1.0, 0.5, 1.0):
        for adapter in training.network:
            adapter.multiplier = multiplier
        training.step()


def _abandoned_pass(training):
    training.step()
    training(*training.inputs())  # never runs backward
    training.step()


LOOPS = [
    *(_sizes, _accumulation, _zeroed_gradients, _scaler, _sampling, _not_finite, _first_not_finite, _text_encoder),
    *(_checkpointing, _multiplier, _abandoned_pass),
]


@pytest.mark.parametrize("loop", LOOPS)
def test_recorded_training_is_bit_identical(loop):
    eager, recorded = Training(False), Training(True)
    for training in (eager, recorded):
        torch.manual_seed(2)
        loop(training)
    assert recorded.lines == []
    assert recorded.recorded.counts["recorded"] >= 1
    assert recorded.recorded.counts["replayed"] >= 2
    assert recorded.recorded.counts["eager"] == 0
    assert all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in zip(eager.state, recorded.state, strict=True))


def test_replay_draws_the_numbers_of_the_eager_pass():
    eager, recorded = Training(False, dropout=0.3), Training(True, dropout=0.3)
    for training in (eager, recorded):
        torch.manual_seed(2)
        _sizes(training)
    assert recorded.recorded.counts["replayed"] == 6
    assert all(torch.equal(a, b) for a, b in zip(eager.state, recorded.state, strict=True))


def test_second_pass_before_backward_runs_eager():
    states = []
    for training in (Training(False), Training(True)):
        for _ in range(3):
            first, second = training(*training.inputs()), training(*training.inputs())
            (first.square().mean() + second.square().mean()).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
        states.append(training.state)
    assert training.recorded.counts == {"recorded": 1, "replayed": 3, "eager": 3}
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_second_backward_is_an_error():
    training = Training(True)
    loss = training(*training.inputs()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran twice"):
        loss.backward()


def test_gradients_of_a_step_do_not_change_with_the_next_replay():
    training = Training(True)
    training.micro_batch()
    first = [weight.grad.clone() for weight in training.network.parameters() if weight.grad is not None]
    training.micro_batch()
    eager = Training(False)
    eager.micro_batch()
    eager.micro_batch()
    grads, expected = ([w.grad for w in each.network.parameters() if w.grad is not None] for each in (training, eager))
    assert len(grads) == 4, "the unused layer's adapter has no gradient"
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in zip(grads, expected, first, strict=True))


# --- standing aside --------------------------------------------------------------------------------------------------


def _read(x):
    return x if x.sum().item() > -1e9 else x * 2


def _mask(x):
    return x[x > -1e9].reshape(x.shape)


def _draw(x):
    return x * (2 if random.random() < 2 else 1)


def _draw_from_numpy(x):
    return x * (2 if numpy.random.rand() < 2 else 1)


_OWN = torch.Generator().manual_seed(5)


def _draw_from_own_generator(x):
    return x * torch.rand(x.shape, generator=_OWN)


def _fail_while_recording(x):
    mode = torch.utils._python_dispatch._get_current_dispatch_mode()
    if type(mode).__name__ == "Recording":
        raise ValueError("broken capture")
    return x


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_read, "the model reads results on the CPU in every step (test_cuda_graphs.py:"),
        (_mask, "the model selects elements by a mask"),
        (_draw, "the model draws random numbers on the CPU, as module_dropout and DyLoRA do"),
        (_draw_from_numpy, "the model draws random numbers on the CPU, as module_dropout and DyLoRA do"),
        (_fail_while_recording, "ValueError: broken capture"),
    ],
)
def test_model_that_cannot_be_recorded_trains_eager(change, reason):
    states = []
    for training in (Training(False), Training(True)):
        training.model.before_output = change
        random.seed(3)
        numpy.random.seed(3)
        torch.manual_seed(3)
        training.step(2, 2)
        training.step()
        drawn = torch.tensor([random.random(), numpy.random.rand()])
        states.append([*training.state, torch.rand(1), drawn])
    assert len(training.lines) == 1
    assert training.lines[0].startswith(reason)
    assert training.lines[0].endswith("; training continues without CUDA graphs")
    assert training.recorded.counts == {"eager": 3}
    assert training.recorder.released == 1
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_model_with_a_random_generator_of_its_own_trains_eager():
    training = Training(True)
    training.model.before_output = _draw_from_own_generator
    training.step()
    assert training.lines[0].startswith("two eager passes with the same random state differ (by ")
    assert training.recorded.counts == {"eager": 1}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_a_recording_does_not_break_it(number):
    received, training = [], Training(True)

    def send(x):
        if type(torch.utils._python_dispatch._get_current_dispatch_mode()).__name__ == "Recording":
            signal.raise_signal(number)
        return x

    training.model.before_output = send
    before = signal.signal(number, lambda *_: received.append(number))
    try:
        training.step()
    finally:
        signal.signal(number, before)
    assert received == [number]
    assert training.lines == []
    assert training.recorded.counts == {"recorded": 1, "replayed": 1}


def test_interrupted_recording_ends_the_run_with_its_gradients_and_random_state():
    training = Training(True)
    training.micro_batch(2)
    values = [None if weight.grad is None else weight.grad.clone() for weight in training.weights]
    state = torch.get_rng_state()

    def interrupt(x):
        if type(torch.utils._python_dispatch._get_current_dispatch_mode()).__name__ == "Recording":
            raise KeyboardInterrupt
        return x * torch.rand(1)

    training.model.before_output = interrupt
    with pytest.raises(KeyboardInterrupt):
        training(*training.inputs(3))
    assert torch.equal(torch.get_rng_state(), state)
    for weight, value in zip(training.weights, values, strict=True):
        assert weight.grad is None if value is None else torch.equal(weight.grad, value)


def test_broken_recording_keeps_earlier_gradients_and_frees_its_tensors():
    training = Training(True)
    training.micro_batch(2)
    before = [weight.grad for weight in training.weights]
    values = [None if gradient is None else gradient.clone() for gradient in before]
    kept = []

    def fail(x):
        if type(torch.utils._python_dispatch._get_current_dispatch_mode()).__name__ == "Recording":
            saved = torch.zeros(3)
            kept.append(weakref.ref(saved))
            raise ValueError("broken capture")
        return x

    training.model.before_output = fail
    training(*training.inputs(3))
    assert training.lines == ["ValueError: broken capture; training continues without CUDA graphs"]
    assert kept[0]() is None
    for weight, value in zip(training.weights, values, strict=True):
        assert weight.grad is None if value is None else torch.equal(weight.grad, value)


def test_replay_that_differs_is_not_used(monkeypatch):
    original = Recording.replay

    def replay(self):
        original(self)
        for *_, results, _ in self.operations[-2:]:
            for tensor in results:
                tensor.mul_(1.01)

    monkeypatch.setattr(Recording, "replay", replay)
    training = Training(True)
    training.step()
    assert training.lines[0].startswith("a replay differs from the eager pass (output: 0.0")


def test_moved_weights_end_the_recording():
    training = Training(True)
    training.step()
    training.model.layers[0].weight.data = training.model.layers[0].weight.data.clone()
    training.step()
    assert training.lines == ["weights of the model have moved in memory; training continues without CUDA graphs"]


def test_dropout_with_checkpointing_stands_aside():
    training = Training(True, dropout=0.3)
    training.model.gradient_checkpointing = True
    training.step()
    assert training.lines[0].startswith("dropout with gradient checkpointing restores random states")


def test_sizes_beyond_the_limit_run_eager_and_exact():
    eager, recorded = Training(False), Training(True, max_sizes=1)
    for training in (eager, recorded):
        for height in (4, 3, 4, 2, 3):
            training.step(height, 4, trains_text=True)
    assert recorded.recorded.counts == {"recorded": 1, "replayed": 7, "not_recorded": 3}
    assert all(torch.equal(a, b) for a, b in zip(eager.state, recorded.state, strict=True))


def test_larger_size_discards_the_recordings_of_smaller_ones():
    eager, recorded = Training(False), Training(True)
    for training in (eager, recorded):
        training.step(2)
        training.micro_batch(2)
        training.step(4)  # with gradients of a smaller size in the staging buffers
        training.step(3, 2, trains_text=True)
        training.step(4, 3, 2)
    assert recorded.recorded.counts == {"recorded": 5, "larger": 1, "replayed": 8}
    assert recorded.recorder.released == 1
    assert len(recorded.recorder.recordings) == 2 * 5
    assert recorded.lines == []
    assert all(torch.equal(a, b) for a, b in zip(eager.state, recorded.state, strict=True))


def test_larger_size_is_recorded_beyond_the_limit():
    training = Training(True, max_sizes=1)
    loss = training(*training.inputs(2)).sum()  # a script's variable keeps it until the next step
    loss.backward()
    discarded = [weakref.ref(recording) for recording in training.recorder.recordings]
    for height in (4, 2, 4):
        training.step(height)
        assert [recording() for recording in discarded] == [None, None]
    assert training.recorded.counts == {"recorded": 1, "larger": 1, "replayed": 3, "not_recorded": 1}


def test_little_free_memory_ends_recording():
    training = Training(True, memory={"free": 10 * 2**20, "bytes_per_recording": 2**20}, reserve=5 * 2**20)
    for height in (4, 3, 2):
        training.step(height)
    # After the first size 8 MiB are free; a second one would leave 6, and a third one less than the reserve.
    assert training.recorded.counts == {"recorded": 2, "replayed": 2, "not_recorded": 1}
    assert training.lines == ["6 MiB of GPU memory are free; image sizes after the first 2 run eager"]


def test_too_little_free_memory_for_the_rest_of_a_step_ends_recording():
    training = Training(True, memory={"free": 10 * 2**20, "bytes_per_recording": 2**20}, reserve=5 * 2**20)
    training.recorded.needed = 4 * 2**20
    training.step()
    reason = "recordings leave 8 MiB of GPU memory free, and the rest of a step needs 9 MiB"
    assert training.lines == [f"{reason}; training continues without CUDA graphs"]
    assert training.recorded.counts["eager"] == 1


def test_size_that_takes_the_rest_of_a_step_its_memory_limits_the_number_of_sizes():
    eager, recorded = Training(False), Training(True, memory={"free": 2**30, "bytes_per_recording": 0}, reserve=5 * 2**20)
    for training in (eager, recorded):
        training.step(4)
        training.recorder.free = 2**20  # another program has started
        training.step(3)
        training.recorder.free = 2**30
        training.step(4, 3)
    assert recorded.recorded.counts == {"recorded": 1, "eager": 1, "replayed": 2, "not_recorded": 1}
    assert recorded.lines == [
        "recordings leave 1 MiB of GPU memory free, and the rest of a step needs 5 MiB; at most 1 image sizes are recorded"
    ]
    assert all(torch.equal(a, b) for a, b in zip(eager.state, recorded.state, strict=True))


class _OutOfMemory:
    """Fails in one pass between recordings: in its n-th call from now on."""

    def __init__(self):
        self.calls = None

    def __call__(self, x):
        if self.calls is not None:
            self.calls -= 1
            if self.calls == 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. More")
        return x + torch.rand(1)


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fail):
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.fail(gradient) * 1.0, None


def _fails_in_backward(fail, x):
    return _FailsInBackward.apply(x + torch.rand(1), fail)


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_out_of_memory_between_recordings_falls_back(place):
    states = []
    for training in (Training(False), Training(True, max_sizes=1)):
        fail = _OutOfMemory()
        training.model.before_output = fail if place == "forward" else partial(_fails_in_backward, fail)
        torch.manual_seed(4)
        training.step(4)
        training.micro_batch(3)
        if training.recorded is not None:
            fail.calls = 1
        training.micro_batch(2)
        training.step(3, 4)
        states.append([*training.state, torch.rand(3)])
    reason = "OutOfMemoryError: CUDA out of memory"
    assert training.lines == [f"{reason}; training continues without CUDA graphs"]
    assert training.recorder.recordings == []
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_tensors_that_an_eager_pass_leaves_in_the_pool_end_recording():
    training = Training(True, max_sizes=1)

    def keep(x):
        training.recorder.used += 100 * (x.shape[1] == 2 * 3)
        return x

    training.model.before_output = keep
    training.step(4, 3)
    assert training.lines == []
    training.step(2)
    assert training.lines == ["the model keeps tensors of each image size; training continues without CUDA graphs"]


# --- when recordings begin, and what they make room for --------------------------------------------------------------


def test_sizes_are_recorded_at_their_third_occurrence():
    eager, recorded = Training(False), Training(True, occurrences=3)
    for training in (eager, recorded):
        training.step(3, 2, 3, 4, 3, 3)
        training.step(2, 2, 4, 4)
    # The larger size comes after the first recording: it is recorded immediately, and 3 before it is lost.
    assert recorded.recorded.counts == {"recorded": 1, "larger": 1, "replayed": 5, "not_recorded": 1, "eager": 4}
    assert all(torch.equal(a, b) for a, b in zip(eager.state, recorded.state, strict=True))


def test_largest_size_of_the_data_is_recorded_first():
    eager, recorded = Training(False), Training(True, occurrences=3, is_largest=lambda: height == 4)
    for height in (3, 2, 3, 3, 3, 4, 3, 2, 2):
        eager.step(height)
        recorded.step(height)
    # 3 waits for 4 and then replays immediately, because it came often; 2 is recorded at its third occurrence.
    assert recorded.recorded.counts == {"recorded": 3, "eager": 5, "replayed": 3, "not_recorded": 1}
    assert all(torch.equal(a, b) for a, b in zip(eager.state, recorded.state, strict=True))


def test_rare_largest_size_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(graphs, "WAIT", 4)
    training = Training(True, occurrences=3, is_largest=lambda: False)
    for _ in range(7):
        training.step(2)
    assert training.recorded.counts == {"recorded": 1, "eager": 4, "replayed": 3}


@pytest.mark.parametrize(("needed", "released"), [(None, 1), (2**20, 0), (2**31, 1)])
def test_recordings_make_room_for_work_between_steps(needed, released):
    eager, recorded = Training(False), Training(True, memory={"free": 2**30}, reserve=2**20)
    for training in (eager, recorded):
        training.step(3)
        if training.recorded is not None:
            training.recorded.leave_room(needed, 10)
            assert len(training.recorder.recordings) == 2 - 2 * released
        training.step(3)
        training.step(2)
    assert recorded.recorder.released == released
    assert recorded.recorded.counts["released"] == released
    assert recorded.recorded.counts["replayed"] == 3
    assert recorded.lines == []
    assert all(torch.equal(a, b) for a, b in zip(eager.state, recorded.state, strict=True))


@pytest.mark.parametrize(("interval", "made_again"), [(19, False), (20, True)])
def test_recordings_are_made_again_only_if_the_batches_between_works_pay_for_it(interval, made_again):
    training = Training(True)
    training.step(3, 2)  # two sizes
    training.recorded.leave_room(2**41, interval)  # more than all memory
    training.step(3)
    assert len(training.recorder.recordings) == 2 * made_again
    expected = {"recorded": 1, "released": 1, "replayed": 3} if made_again else {"recorded": 2, "replayed": 2, "eager": 1}
    assert training.recorded.counts == expected
    reason = "sample images or validation every 19 batches drop the recordings, which pay only from 20 on"
    assert training.lines == ([] if made_again else [f"{reason}; training continues without CUDA graphs"])


# --- values that modules hold ----------------------------------------------------------------------------------------


def _number(training, step):
    training.network[0].multiplier = (0.5, 1.0)[step % 2]


def _same_number(training, step):
    training.network[0].multiplier = float("1.0")


def _new_mode(training, step):
    training.network[0].dropout = 0.5 if step == 2 else 0.0
    training.network.train(step != 2)


FOLLOWED = [_number, _same_number, _new_mode]


@pytest.mark.parametrize("change", FOLLOWED)
def test_changed_numbers_and_modes_have_their_own_recordings(change):
    eager, recorded = Training(False), Training(True)
    for training in (eager, recorded):
        torch.manual_seed(2)
        for step in range(5):
            change(training, step)
            training.step()
    assert recorded.lines == []
    assert recorded.recorded.counts["replayed"] == 5
    assert all(torch.equal(a, b) for a, b in zip(eager.state, recorded.state, strict=True))


class _Perturbed(Adapter):
    """Adds what was set between two steps, as LoRA-GGPO does."""

    def __init__(self, layer, dropout=0.0):
        super().__init__(layer, dropout)
        self.norms, self.table, self.listed = None, {"a": None}, [None]
        self.register_buffer("buffer", torch.zeros(1))

    def forward(self, x):
        added = [value for value in (self.norms, self.table["a"], self.listed[0], self.buffer) if value is not None]
        return super().forward(x) + sum(added)


def _attribute(network, value):
    network.norms = value


def _entry(network, value):
    network.table["a"] = value


def _element(network, value):
    network.listed[0] = value


def _buffer(network, value):
    network.buffer = value


def _parameter(network, value):
    network.up.weight = torch.nn.Parameter(network.up.weight.detach() + value)


def _layer(network, value):
    network.down = copy.deepcopy(network.down)


def _forward_of_a_layer(network, value):
    before = network.down.forward
    network.down.forward = lambda x: before(x) + value


def _hook(network, value):
    network.register_forward_hook(lambda module, args, output: output + value)


REPLACED = {
    "_Perturbed.norms": _attribute,
    "_Perturbed.table": _entry,
    "_Perturbed.listed": _element,
    "_Perturbed.buffer": _buffer,
    "Linear.weight": _parameter,
    "_Perturbed.down": _layer,
    "forward of a layer": _forward_of_a_layer,
    "_Perturbed._forward_hooks": _hook,
}


@pytest.mark.parametrize(("name", "replace"), REPLACED.items(), ids=REPLACED.keys())
def test_objects_that_are_replaced_between_steps_end_recording(name, replace):
    eager, recorded = Training(False, network=_Perturbed), Training(True, network=_Perturbed)
    for training in (eager, recorded):
        for step in range(5):
            training.step()
            replace(training.network[1], torch.full((1,), 0.1 * step))
    assert recorded.lines == [f"{name} is replaced between steps; training continues without CUDA graphs"]
    assert recorded.recorded.counts["replayed"] == 3
    assert all(torch.equal(a, b) for a, b in zip(eager.state, recorded.state, strict=True))


def test_number_that_changes_in_every_step_ends_recording(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_STATES", 2)
    training = Training(True)
    for step in range(4):
        training.network[0].multiplier = 1.0 + step
        training.step()
    assert training.lines == ["Adapter.multiplier changes between steps; training continues without CUDA graphs"]


def test_new_entry_of_a_table_is_no_change():
    training = Training(True, network=_Perturbed)
    for step in range(3):
        training.step()
        training.network[0].table[step] = torch.zeros(1)
    assert training.lines == []
    assert training.recorded.counts == {"recorded": 1, "replayed": 3}


def test_hook_of_a_trained_weight_runs_on_its_own_gradients_alone():
    states, calls = [], []
    for training in (Training(False), Training(True)):
        seen = []
        training.network[0].up.weight.register_post_accumulate_grad_hook(
            lambda weight, seen=seen: seen.append(weight.grad.sum())
        )
        training.step()
        training.step()
        states.append(training.state)
        calls.append(torch.stack(seen))
    assert training.lines[0].startswith("a hook of a trained weight would run with the gradients of a recording; ")
    assert torch.equal(*calls)
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


# --- the eager steps before -------------------------------------------------------------------------------------------


class _Meter:
    """Has measured these bytes."""

    def __init__(self, *parts):
        self.parts, self.begun = iter(parts), 0

    def begin(self):
        self.begun += 1

    def end(self):
        return next(self.parts)


def _run_eager_steps(eager, count):
    weight = torch.nn.Parameter(torch.ones(2))
    for _ in range(count):
        eager.before_batch()
        eager.run(lambda: weight * 2).sum().backward()
        eager.after_batch(True)


def test_eager_steps_measure_the_memory_of_what_else_a_step_does():
    # Before the passes, such as the VAE's, and after them, such as the optimizer's.
    eager = EagerSteps(CpuRecorder(), _Meter(300, 100))
    _run_eager_steps(eager, 3)
    assert not eager.done
    assert eager.meter.begun == 0
    _run_eager_steps(eager, 1)
    assert eager.done
    assert (eager.needed, eager.meter.begun) == (330, 2)


@pytest.mark.parametrize("busy", [0.5, 4.0])
def test_eager_steps_time_the_host_and_the_gpu(busy):
    eager = EagerSteps(CpuRecorder(busy=busy), _Meter(0, 0))
    _run_eager_steps(eager, 4)
    host, gpu = eager.seconds()
    assert host > 0
    assert gpu == pytest.approx(busy * host)


def test_eager_steps_are_fewer_without_timing():
    eager = EagerSteps(CpuRecorder(), _Meter(1, 2), timed=0)
    _run_eager_steps(eager, 2)
    assert eager.done
    assert eager.seconds() is None


# --- a replay that does not end --------------------------------------------------------------------------------------


class _Event:
    """An event of a GPU, which counts its answers."""

    def __init__(self, done=False):
        self.done, self.looks = done, 0

    def record(self):
        pass

    def query(self):
        self.looks += 1
        if self.done == "error":
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self.done


def _watched(event, replay=lambda: None, looks=3):
    hung = threading.Event()
    watch = ReplayWatch(lambda: event, hung.set, interval=0.001, looks=looks)
    watch.replay(replay)
    return watch, hung


def test_replay_that_does_not_end_is_noticed():
    _, hung = _watched(_Event())
    assert hung.wait(60)


def test_replay_that_blocks_its_own_launch_is_noticed():
    """The event is then that of the replay before, which has ended."""
    hung = threading.Event()
    watch = ReplayWatch(lambda: _Event(True), hung.set, interval=0.001, looks=3)
    watch.replay(lambda: None)
    watch.replay(lambda: hung.wait(60))
    assert hung.is_set()


@pytest.mark.parametrize("done", [True, "error"])
def test_replay_that_ends_is_not_reported(done):
    event = _Event(done)
    watch, hung = _watched(event)
    while event.looks < 10:
        threading.Event().wait(0.001)
    watch.end()
    watch._thread.join()
    assert not hung.is_set()


@with_cuda
def test_gpu_that_hung_is_not_recorded_again(monkeypatch, tmp_path):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path))
    gpu = "NVIDIA GeForce RTX 5090 Laptop GPU"
    assert replay_watch.reason_forbidden(gpu) is None
    file = replay_watch.forbid(gpu, "torch 2.13.0, CUDA 13.0")
    assert " with torch 2.13.0, CUDA 13.0; after a driver update, delete " in replay_watch.reason_forbidden(gpu)
    assert replay_watch.reason_forbidden("NVIDIA GeForce RTX 4090") is None
    file.write_text("{")
    assert "a replay did not end on this GPU earlier" in replay_watch.reason_forbidden(gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    accelerator = SimpleNamespace(device=torch.device("cuda"), num_processes=1)
    assert cuda_graphs.PATCH.on_start(Namespace(**_NETWORK), accelerator, Settings(cuda_graphs=True)) is None
    file.unlink()
    assert cuda_graphs.PATCH.on_start(Namespace(**_NETWORK), accelerator, Settings(cuda_graphs=True)) is not None


def test_hung_run_ends_with_how_to_resume(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 5090")
    codes = []
    monkeypatch.setattr(hang.os, "_exit", codes.append)
    args = Namespace(**_NETWORK, output_dir=str(tmp_path), output_name="cat")
    hang.end_process(args, torch.device("cuda"))
    printed = capsys.readouterr().err
    assert codes == [1]
    assert "a replay of CUDA graphs has not ended for 5 minutes: the NVIDIA GeForce RTX 5090 or its driver hangs" in printed
    assert "this run has saved no state" in printed
    assert replay_watch.reason_forbidden("NVIDIA GeForce RTX 5090") is not None


# --- the patch -------------------------------------------------------------------------------------------------------

_NETWORK = {"network_module": "networks.lora"}


@with_cuda
@pytest.mark.parametrize(
    ("args", "run", "settings", "reason"),
    [
        (_NETWORK, {"device": torch.device("cpu")}, {}, "the model runs on cpu"),
        (_NETWORK, {"num_processes": 2}, {}, "the run has several processes"),
        ({}, {}, {}, "only networks such as LoRA are supported"),
        ({**_NETWORK, "blocks_to_swap": 4}, {}, {}, "--blocks_to_swap is not supported"),
        ({**_NETWORK, "cpu_offload_checkpointing": True}, {}, {}, "--cpu_offload_checkpointing is not supported"),
        ({**_NETWORK, "deepspeed": True}, {}, {}, "--deepspeed is not supported"),
        (
            _NETWORK,
            {},
            {"selective_torch_compile": True, "compile_mode": "max-autotune"},
            "--compile_mode max-autotune uses CUDA graphs itself",
        ),
        (_NETWORK, {}, {"vram_budget": "8GB"}, "--vram_budget is not supported"),
        (_NETWORK, {}, {"output_preservation": "sks=person"}, "--output_preservation runs the model three times in a step"),
    ],
)
def test_patch_stands_aside_with_a_line(args, run, settings, reason, capsys):
    accelerator = SimpleNamespace(**{"device": torch.device("cuda"), "num_processes": 1, **run})
    assert cuda_graphs.PATCH.on_start(Namespace(**args), accelerator, Settings(cuda_graphs=True, **settings)) is None
    assert f"cuda_graphs: {reason}" in capsys.readouterr().err


@with_cuda
@pytest.mark.parametrize("more", [{}, {"selective_torch_compile": True}])
def test_patch_takes_part_in_the_training_of_a_network(more, capsys):
    accelerator = SimpleNamespace(device=torch.device("cuda"), num_processes=1)
    assert cuda_graphs.PATCH.on_start(Namespace(**_NETWORK), accelerator, Settings(cuda_graphs=True, **more)) is not None
    assert capsys.readouterr().err == ""


class _Run:
    """The loop of a script around the patch, with its model's forward replaced as the patch does."""

    def __init__(self, monkeypatch, busy=1.0, always=False):
        monkeypatch.setattr(cuda_recorder, "CudaRecorder", lambda device: CpuRecorder(busy=busy))
        self.training = Training(False)
        training = self.training
        self.accelerator = SimpleNamespace(
            device=torch.device("cpu"),
            num_processes=1,
            sync_gradients=True,
            _models=[training.model, training.network],
            _optimizers=[training.optimizer],
            _dataloaders=[],
            unwrap_model=lambda model: model,
        )
        self.graphs = cuda_graphs._Graphs(Namespace(), self.accelerator, always)
        monkeypatch.setattr(training.model, "forward", partial(self.forward, training.model))

    def forward(self, model, *args, **kwargs):
        if not torch.is_grad_enabled():
            self.graphs.forward_without_gradients(model)
            return Model.forward(model, *args, **kwargs)
        return self.graphs.forward(Model.forward, model, args, kwargs)

    def steps(self, count):
        for _ in range(count):
            self.graphs.before_batch(self.accelerator)
            self.training.step(2)
            self.graphs.after_batch(self.accelerator)

    @property
    def counts(self):
        return self.graphs.recorded.counts


def _counted(method, calls):
    def counted(self, *args):
        calls.append(method.__name__)
        return method(self, *args)

    return counted


def test_patch_records_after_four_eager_steps_and_two_occurrences(monkeypatch, capsys):
    run = _Run(monkeypatch)
    run.steps(8)
    assert run.counts == {"recorded": 1, "eager": 2, "replayed": 2}
    assert "cuda_graphs: forward and backward take 0.00 s replayed and" in capsys.readouterr().err


def test_patch_drops_recordings_that_are_not_faster(monkeypatch, capsys):
    """A GPU that is the limit throttles the host, whose seconds are then nearly the GPU's: only replays show the gain."""
    run = _Run(monkeypatch, busy=1.0)
    recorder = CpuRecorder(busy=1.0, replayed=1e6)
    monkeypatch.setattr(cuda_recorder, "CudaRecorder", lambda device: recorder)
    run.steps(8)
    assert run.counts["replayed"] == run.counts["recorded"] == 0
    assert recorder.released == 1
    printed = capsys.readouterr().err
    assert "so there is nothing to gain; training continues without CUDA graphs" in printed
    assert "forward and backward take" in printed


def test_patch_does_not_record_where_the_gpu_is_the_limit(monkeypatch, capsys):
    run = _Run(monkeypatch, busy=3.0)
    run.steps(8)
    assert run.counts == {"eager": 1}, "the later ones are not even counted"
    printed = capsys.readouterr().err
    assert "so there is nothing to gain; training continues without CUDA graphs (--cuda_graphs_always" in printed
    forced = _Run(monkeypatch, busy=3.0, always=True)
    forced.steps(4)
    assert forced.counts == {"recorded": 1, "replayed": 2}


def test_patch_makes_room_for_the_first_work_between_steps(monkeypatch):
    run = _Run(monkeypatch, always=True)
    run.steps(3)
    with torch.no_grad():
        run.training(*run.training.inputs(2))
        run.training(*run.training.inputs(2))
    assert run.counts["released"] == 1
    run.steps(1)
    assert run.counts == {"recorded": 1, "released": 1, "replayed": 2}


@pytest.mark.parametrize(("every", "recordings"), [(2, 1), (10, 5)])
def test_patch_records_again_only_if_samples_come_seldom_enough(monkeypatch, every, recordings):
    run = _Run(monkeypatch, always=True)
    # More than all memory: what samples need is never free next to recordings. It is known from samples in the eager steps.
    monkeypatch.setattr(run.graphs, "_meter", lambda: SimpleNamespace(begin=int, end=lambda: 2**41, release=int))
    calls = []
    monkeypatch.setattr(RecordedModel, "_new_size", _counted(RecordedModel._new_size, calls))
    for _ in range(5):
        run.steps(every)
        with torch.no_grad():
            run.training(*run.training.inputs(2))
    assert len(calls) == recordings
    assert (run.graphs.recorded.off is None) == (every == 10)


def test_patch_keeps_recordings_in_passes_without_gradients_of_a_step(monkeypatch):
    run = _Run(monkeypatch, always=True)
    run.steps(3)
    run.graphs.before_batch(run.accelerator)
    with torch.no_grad():  # as the prior of upstream's preservation of classes
        run.training(*run.training.inputs(2))
    assert run.counts["released"] == 0
