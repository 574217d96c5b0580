"""The memory of one of several processes with DeepSpeed's ZeRO, on small models."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.dry_run import gathered_weights, zero, zero_run  # noqa: E402
from kohya_ext.dry_run.allocator import CachingAllocator  # noqa: E402
from kohya_ext.dry_run.events import Event, Kind  # noqa: E402
from kohya_ext.dry_run.tracker import BACKWARD, Tracker  # noqa: E402
from kohya_ext.errors import UserError  # noqa: E402

WIDTH, LAYERS = 512, 8
WEIGHTS = LAYERS * WIDTH**2


def model(dtype=torch.bfloat16):
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(LAYERS)))


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Buckets of two layers, so that they fill up."""
    monkeypatch.setattr(zero, "REDUCE_BUCKET", 2 * WIDTH**2)


@pytest.fixture
def tracker():
    return Tracker()


def backward(layers, tracker):
    with tracker.during(BACKWARD):
        layers(torch.ones(1, WIDTH, dtype=layers[0].weight.dtype)).sum().backward()


def alive(tracker, *kinds):
    return sum(event.bytes for event in tracker.events if tracker.kinds[event.storage] in kinds)


def highest(tracker, kind):
    size = most = 0
    for event in tracker.events:
        if tracker.kinds[event.storage] is kind:
            size += event.bytes
            most = max(most, size)
    return most


def divided(tracker, layers, stage, processes=2, optimizer=False, weights=False, gathered=None):
    division = zero.Division(stage, processes, optimizer, weights)
    return zero.divide(division, torch.optim.AdamW(layers.parameters()), gathered, tracker)


def gathering(tracker, layers, from_host=False):
    """Return the weights of a model, of which none is on the GPU, after the pass that records their order."""
    gathered = gathered_weights.GatheredWeights(tracker, [layers], 2, from_host)
    gathered.watch()
    backward(layers, tracker)
    gathered.end_recording()
    layers.zero_grad()
    with tracker:
        tracker.mark(layers.parameters(), Kind.WEIGHT)
        tracker.offload(layers.parameters())
    return gathered


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_process_keeps_its_part_of_optimizer_state_and_gradients(tracker, stage, processes):
    layers = model()
    with tracker:
        state = divided(tracker, layers, stage, processes)
        assert alive(tracker, Kind.TRAINED_WEIGHT) == 2 * WEIGHTS
        assert alive(tracker, Kind.MASTER_WEIGHT) == 4 * WEIGHTS / processes
        backward(layers, tracker)
        state.end_backward(accumulates=False)
    assert alive(tracker, Kind.GRADIENT) == 2 * WEIGHTS / processes
    assert alive(tracker, Kind.BUCKET) == 0
    assert highest(tracker, Kind.BUCKET) == 2 * 2 * WIDTH**2
    # ZeRO-1 reduces after the backward pass, when all gradients are there.
    assert (highest(tracker, Kind.GRADIENT) >= 2 * WEIGHTS) == (stage == 1 or processes == 1)


def test_gradients_of_micro_batches_are_added(tracker):
    layers = model()
    with tracker:
        state = divided(tracker, layers, 2)
        for _ in range(3):
            backward(layers, tracker)
            state.end_backward(accumulates=True)
    assert alive(tracker, Kind.GRADIENT) == 2 * WEIGHTS / 2
    state.step()
    assert all(weight.grad is None for weight in layers.parameters())


def test_the_offloaded_optimizer_is_in_host_memory(tracker):
    layers = model()
    with tracker:
        state = divided(tracker, layers, 2, optimizer=True)
        backward(layers, tracker)
        state.end_backward(accumulates=False)
        state.step()
    assert alive(tracker, *Kind) == alive(tracker, Kind.TRAINED_WEIGHT, Kind.BUCKET, Kind.WORKSPACE)
    host = state.host.bytes
    on_its_way = 2 * WIDTH**2
    part = WEIGHTS / 2
    assert host["fp32 weights"] == 4 * part
    assert host["gradients"] == 4 * part + on_its_way
    assert host["weights on their way to the GPU"] == 2 * part
    assert host["optimizer state"] == pytest.approx(8 * part, abs=16)


@pytest.mark.parametrize("offloads", [False, True])
def test_zero_3_divides_weights_too(tracker, offloads):
    layers = model()
    gathered = gathering(tracker, layers, offloads)
    with tracker:
        state = divided(tracker, layers, 3, 2, offloads, offloads, gathered)
        part = WEIGHTS / 2
        assert alive(tracker, Kind.TRAINED_WEIGHT) == (0 if offloads else 2 * part)
        assert alive(tracker, Kind.MASTER_WEIGHT) == (0 if offloads else 4 * part)
        state.begin()
        backward(layers, tracker)
        state.end_backward(accumulates=False)
        state.step()
    host = sum(size for name, size in state.host.bytes.items() if "pinned" not in name)
    assert host == pytest.approx((20 if offloads else 0) * part, abs=16)
    assert alive(tracker, Kind.BUCKET) == 2 * 2 * WIDTH**2
    assert alive(tracker, Kind.GATHERED) == 0


@pytest.mark.parametrize(("distance", "layers_kept"), [(1, 3), (3 * WIDTH**2, 4), (10**9, LAYERS)])
def test_gathered_weights_stay_for_their_next_use(tracker, monkeypatch, distance, layers_kept):
    monkeypatch.setattr(gathered_weights, "REUSE_DISTANCE", distance)
    monkeypatch.setattr(gathered_weights, "PREFETCHED", 1)
    layers = model()
    gathered = gathering(tracker, layers)
    with tracker:
        gathered.begin()
        backward(layers, tracker)
        gathered.end()
    assert highest(tracker, Kind.GATHERED) == layers_kept * 2 * WIDTH**2


def test_pinned_memory_is_rounded_up_to_a_power_of_two():
    host = zero.HostMemory()
    host.add("weights", 5)
    host.add("weights", 8)
    host.add("state", 5, pinned=False)
    assert host.bytes == {"weights": 13, "rounding of pinned memory": 3, "state": 5}


def test_streams_do_not_share_memory_and_return_it_to_the_driver():
    allocator = CachingAllocator()
    size = 32 * 2**20
    allocator.replay([Event(0, size, "forward"), Event(0, -size, "forward"), Event(1, size, "forward", -1)])
    assert allocator.reserved == 2 * size
    allocator.free(1)
    allocator.release_unused()
    assert allocator.reserved == 0


@pytest.mark.parametrize("changes", [{"zero_stage": 0}, {"zero_stage": 3, "offload_param_device": "nvme"}])
def test_what_cannot_be_estimated_is_an_error(tracker, changes):
    upstream = SimpleNamespace()
    zero_run.ZeroRun(tracker, 2)._replace_plugin(upstream)
    options = {"offload_optimizer_device": None, "offload_param_device": None, "mixed_precision": "bf16"}
    with pytest.raises(UserError, match="cannot be estimated"):
        upstream.prepare_deepspeed_plugin(Namespace(**{**options, **changes}))
