"""Optimizer states on the host: those of the GPU's optimizer, whatever the streams' order, and few bytes on the GPU."""

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.optimizers import host_states  # noqa: E402
from kohya_ext.optimizers.host_states import HostMemory, HostStates  # noqa: E402
from kohya_ext.patching.page_lock import PageLock  # noqa: E402
from tests.streams import Streams  # noqa: E402

SIZE = 8192
ORDERS = pytest.mark.parametrize("order", ["early", "late"])


@pytest.fixture
def host(monkeypatch, request):
    streams = Streams(late=request.getfixturevalue("order") == "late")
    streams.install(monkeypatch.setattr)
    monkeypatch.setattr(host_states, "_AHEAD", 3 * 2 * 4 * SIZE)  # three weights' states
    yield HostStates(torch.device("cpu"), torch.cuda.Stream(), torch.cuda.Stream(), HostMemory(PageLock(0)))
    streams.remove()


def step(state, gradient):
    """Change a weight's state as an optimizer does: in place, with a small value that is not moved."""
    if not state:
        state |= {"mean": torch.zeros(SIZE), "square": torch.zeros(SIZE), "step": torch.zeros(())}
    state["mean"].mul_(0.9).add_(gradient)
    state["square"].mul_(0.99).addcmul_(gradient, gradient)
    state["step"] += 1


@ORDERS
@pytest.mark.parametrize("orders", ["same", "another in each step"])
def test_states_are_those_of_an_optimizer_on_the_gpu(host, order, orders):
    torch.manual_seed(0)
    expected, states = {}, {}
    for number in range(4):
        weights = [*range(8)]
        if orders != "same":
            weights = weights[number:] + weights[:number]
        for weight in weights:
            gradient = torch.randn(SIZE)
            step(expected.setdefault(weight, {}), gradient)
            kept = states.get(weight, {})
            state = host.fetch(weight, states)
            step(state, gradient)
            states[weight] = host.store(weight, kept, state)
            assert sum(arrival.size for arrival in host._arriving.values()) <= 4 * 2 * 4 * SIZE
            assert len(host._leaving) <= 3
        host.end_step()
    host.drain()
    for weight, state in expected.items():
        assert all(torch.equal(states[weight][name], value) for name, value in state.items())
    assert not host._leaving


@ORDERS
def test_states_stay_in_the_same_memory_of_the_host(host, order):
    states = {}
    for _ in range(3):
        kept = states.get(0, {})
        state = host.fetch(0, states)
        step(state, torch.ones(SIZE))
        states[0] = host.store(0, kept, state)
        host.end_step()
        if kept:
            assert all(states[0][name] is kept[name] for name in ("mean", "square"))
    host.drain()
    assert states[0]["mean"].tolist() == [pytest.approx(1 + 0.9 + 0.81)] * SIZE
    assert host.memory.allocated == host_states._CHUNK


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("order", ["early"])
def test_states_of_a_ratio_are_chosen_evenly(host, order, ratio):
    sizes = [(7919 * number) % 1000 + 1 for number in range(400)]
    weights = [torch.empty(size, device="meta") for size in sizes]
    host.ratio = ratio
    host.choose(weights)
    for part in (weights[:100], weights[100:200], weights):
        chosen = sum(weight.numel() for weight in part if weight in host.moved)
        assert abs(chosen - ratio * sum(weight.numel() for weight in part)) <= 1000
    assert ratio < 1 or len(host.moved) == len(weights)


def test_pieces_of_host_memory_do_not_overlap(tmp_path):
    memory = HostMemory(PageLock(0))
    tensors = [
        memory.empty_like(torch.empty(size, dtype=dtype)) for size in (5, 1000, 3) for dtype in (torch.uint8, torch.float32)
    ]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [set(tensor.tolist()) for tensor in tensors] == [{number} for number in range(len(tensors))]
    assert all(tensor.data_ptr() % 4 == 0 for tensor in tensors)
    large = memory.empty_like(torch.empty(host_states._CHUNK + 1, dtype=torch.uint8, device="meta"))
    assert large.nbytes == host_states._CHUNK + 1
    assert memory.allocated > 2 * host_states._CHUNK
    torch.save(tensors, tmp_path / "states")  # which refuses memory that is shared by two types
