"""When one segment for all image sizes is reserved, and of which size, with the allocator's counters invented."""

from types import SimpleNamespace

import pytest

from kohya_ext.config.settings import Settings

torch = pytest.importorskip("torch")

from kohya_ext.patches import bucket_memory  # noqa: E402

GIB = 2**30


class GPU:
    """A GPU whose allocator reports the counters that a test sets."""

    def __init__(self, free=20 * GIB, limit=None):
        self.free, self.limit, self.segments = free, limit, []
        self.set(0, 0, 0)

    def set(self, allocated, peak, reserved, retries=0):
        self.counters = {
            "allocated_bytes": {"all": {"current": allocated, "peak": peak}},
            "reserved_bytes": {"all": {"current": reserved}},
            "num_alloc_retries": retries,
        }

    def allocate(self, size, **kwargs):
        if self.limit is not None and size > self.limit:
            raise torch.OutOfMemoryError
        self.segments.append(size)


@pytest.fixture
def gpu(monkeypatch):
    gpu = GPU()
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: gpu.counters)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: gpu.counters["reserved_bytes"]["all"]["current"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gpu.free, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bucket_memory, "current_batch", lambda: {"latents": LATENTS})
    monkeypatch.setattr(torch, "empty", gpu.allocate)
    return gpu


LATENTS = torch.zeros(1, 4, 8, 16)


def accelerator(buckets=(["a"], ["b"], ["c", "c"])):
    """Return a run whose largest batch has four times the pixels of :data:`LATENTS`."""
    manager = SimpleNamespace(resos=[(128, 64), (64, 128), (128, 128)], buckets=buckets)
    loader = SimpleNamespace(dataset=SimpleNamespace(bucket_manager=manager, batch_size=2))
    return SimpleNamespace(_dataloaders=[loader], sync_gradients=True)


def after_first_step(gpu, run, allocated=6 * GIB, peak=9 * GIB, reserved=10 * GIB, caching=5 * GIB, **counters):
    """Return a run's callback after a first step with these counters; 5 GiB are resident before it."""
    callback = bucket_memory._Segment(0)
    gpu.set(5 * GIB, caching, 5 * GIB)
    callback.before_batch(run)
    gpu.set(allocated, peak, reserved, **counters)
    callback.after_batch(run)
    return callback


def test_segment_has_the_activations_of_the_largest_batch(gpu):
    after_first_step(gpu, accelerator())
    assert gpu.segments == [4 * (9 - 5) * GIB]


def test_segment_has_the_unused_memory_if_caching_needed_more_than_the_step(gpu):
    after_first_step(gpu, accelerator([["a"], ["b"], []]), caching=9 * GIB)
    assert gpu.segments == [(10 - 6) * GIB]


@pytest.mark.parametrize(
    ("run", "counters"),
    [
        (accelerator([["a"], [], []]), {}),
        (accelerator(), {"reserved": 9.1 * GIB}),
        (accelerator(), {"peak": 5.05 * GIB}),
        (accelerator(), {"retries": 1}),
        (accelerator(), {"peak": 9.9 * GIB, "reserved": 11 * GIB}),
    ],
    ids=["one size", "no gaps", "small activations", "out of memory before", "more than is free"],
)
def test_no_segment(gpu, run, counters):
    gpu.free = 19 * GIB
    assert after_first_step(gpu, run, **counters).ended
    assert gpu.segments == []


@pytest.mark.parametrize(("spills", "free", "segments"), [(True, 17.1, 0), (True, 17.3, 1), (False, 16.1, 1), (False, 15.9, 0)])
def test_5_percent_stay_free_where_the_driver_spills(gpu, monkeypatch, spills, free, segments):
    """The segment has 16 GiB, and 5 percent of the GPU are 1.2 GiB."""
    monkeypatch.setattr(bucket_memory, "may_spill", lambda: spills)
    gpu.free = free * GIB
    after_first_step(gpu, accelerator())
    assert len(gpu.segments) == segments


def test_limit_below_the_gpus_memory_is_no_error(gpu):
    gpu.limit = GIB
    assert after_first_step(gpu, accelerator()).ended


def test_segment_is_reserved_again_only_after_it_was_returned(gpu):
    run = accelerator()
    callback = after_first_step(gpu, run)
    gpu.set(6 * GIB, 9 * GIB, 22 * GIB)
    callback.reserved = 22 * GIB
    for reserved, segments in ((22 * GIB, 1), (6 * GIB, 2), (6 * GIB, 2)):
        gpu.set(6 * GIB, 9 * GIB, reserved)
        callback.before_batch(run)
        callback.after_batch(run)
        assert len(gpu.segments) == segments


@pytest.mark.parametrize(
    ("settings", "variables", "device"),
    [
        ({"vram_budget": "8GB"}, {}, "cuda"),
        ({"cuda_graphs": True}, {}, "cuda"),
        ({"expandable_segments": True}, {}, "cuda"),
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, "cuda"),
        ({}, {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "cuda"),
        ({}, {}, "cpu"),
    ],
)
def test_stands_aside(monkeypatch, settings, variables, device):
    for name in bucket_memory._SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run = SimpleNamespace(device=torch.device(device))
    assert bucket_memory._start(SimpleNamespace(), run, Settings(**settings)) is None
