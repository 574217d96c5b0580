"""The allocator over a run: caching, the first steps, and what each of them leaves behind."""

from dataclasses import replace

from kohya_ext.estimate.events import RELEASE, Event, Kind
from kohya_ext.estimate.recording import Recording
from kohya_ext.estimate.replay import repeated, replay, tensor_peak
from kohya_ext.estimate.step import SAMPLING, Log
from kohya_ext.estimate.tracker import BACKWARD, FORWARD, STEP

MIB = 2**20


def alive(events: list[Event]) -> dict[int, int]:
    """Return the bytes of each storage that the events leave allocated."""
    sizes: dict[int, int] = {}
    for event in events:
        sizes[event.storage] = sizes.get(event.storage, 0) + event.bytes
    return {storage: size for storage, size in sizes.items() if size}


def test_the_first_step_creates_the_optimizer_state_where_it_is_used() -> None:
    weight, state = Event(0, 8, FORWARD), Event(1, 16, FORWARD)
    step = [Event(2, 4, FORWARD), Event(2, -4, BACKWARD), Event(1, 0, STEP)]
    events = [*repeated(step, {0: weight, 1: state}, once=(), count=2, storages=3)]
    assert events[:3] == [Event(2, 4, FORWARD), Event(2, -4, BACKWARD), Event(1, 16, STEP)]
    assert [event.bytes for event in events[3:]] == [4, -4], "the second step uses the same state"


def test_what_a_step_keeps_replaces_that_of_the_step_before() -> None:
    workspace, norms = Event(0, 8, BACKWARD), Event(1, 4, STEP)
    events = [*repeated([workspace, norms], {}, once={0}, count=3, storages=2)]
    assert [event.bytes for event in events] == [8, 4, 4, -4, 4, -4]
    assert sum(alive(events).values()) == 12


def test_the_batch_of_the_last_micro_step_is_replaced_by_that_of_the_next_step() -> None:
    first, last = Event(0, 8, FORWARD), Event(1, 8, FORWARD)
    step = [first, last, Event(0, -8, FORWARD), Event(2, 4, BACKWARD), Event(2, -4, BACKWARD)]
    events = [*repeated(step, {}, once=(), count=2, storages=3, replaces={0: [1]})]
    assert [(event.storage, event.bytes) for event in events[5:7]] == [(3, 8), (1, -8)], "at its first batch, not at its last"
    assert alive(events) == {4: 8}


def test_accumulated_gradients_are_allocated_again_for_the_next_step() -> None:
    events = [*repeated([Event(0, -8, STEP)], {0: Event(0, 8, FORWARD)}, once=(), count=3, storages=1)]
    assert [event.bytes for event in events] == [-8, 8, -8, 8, -8]


def test_state_in_the_gaps_of_the_first_step_makes_the_second_reserve_more() -> None:
    step = [Event(0, 40 * MIB, FORWARD), Event(0, -40 * MIB, BACKWARD), Event(1, 0, STEP)]
    log = Log([Event(1, 12 * MIB, FORWARD), *step], [Kind.TEMPORARY, Kind.OPTIMIZER_STATE], 1, 0)
    memory = replay({}, log)["step"]
    assert memory.reserved == 80 * MIB, "the state takes a part of the 40 MiB, so the next step needs a new segment"
    assert memory.allocated == {FORWARD: 52 * MIB, BACKWARD: 12 * MIB, STEP: 12 * MIB}


def test_caching_leaves_only_the_workspace() -> None:
    caching = Log([Event(0, 30 * MIB, FORWARD), Event(1, 8 * MIB, FORWARD)], [Kind.VAE, Kind.WORKSPACE], 1, 0)
    step = Log([Event(0, 8 * MIB, FORWARD), Event(1, 12 * MIB, FORWARD)], [Kind.WORKSPACE, Kind.WEIGHT], 2, 0)
    memory = replay({"caching latents": caching}, step)
    assert memory["caching latents"].reserved == 50 * MIB
    # The workspace keeps its segment of 20 MiB, in which the weight fits.
    assert memory["step"].reserved == 20 * MIB
    assert memory["caching latents"].allocated == {"caching latents": 38 * MIB}


def test_loading_may_return_unused_segments() -> None:
    moved = [Event(0, 30 * MIB, FORWARD), Event(0, -30 * MIB, FORWARD)]
    weight = Event(1, 12 * MIB, FORWARD)
    for release, segment in (([], 30), ([Event(0, 0, RELEASE)], 12)):
        events = [*moved, *release, weight]
        log = Log(events, [Kind.WEIGHT, Kind.WEIGHT], len(events), 0)
        assert replay({}, log)["step"].reserved == segment * MIB
        assert RELEASE not in replay({}, log)["step"].allocated


def test_models_of_caching_that_leave_late_share_segments_with_the_trained_model() -> None:
    caching = Log([Event(0, 8 * MIB, FORWARD)], [Kind.TEXT_ENCODER], 1, 0)
    temporary = [Event(1, 9 * MIB, FORWARD), Event(1, -9 * MIB, BACKWARD)]
    step = Log([Event(0, 9 * MIB, FORWARD), *temporary], [Kind.WEIGHT, Kind.TEMPORARY], 1, 0)
    assert replay({"caching": caching}, step)["step"].reserved == 20 * MIB
    late = replace(caching, leaves_late=True)
    # The weight is after the text encoder, whose 8 MiB are too few for the next tensor.
    assert replay({"caching": late}, step)["step"].reserved == 40 * MIB


def test_recorded_passes_keep_their_pool_and_run_once() -> None:
    events = [
        Event(0, 100 * MIB, FORWARD),  # weight
        Event(1, 30 * MIB, FORWARD),  # optimizer state
        Event(2, 10 * MIB, FORWARD),  # static input
        Event(3, 60 * MIB, FORWARD),  # saved by the recorded forward pass
        Event(4, 12 * MIB, BACKWARD),  # cuBLAS's workspace
        Event(3, -60 * MIB, BACKWARD),
        Event(5, 20 * MIB, FORWARD),  # staging buffer
        Event(6, 24 * MIB, FORWARD),  # output
        Event(6, -24 * MIB, STEP),
        Event(1, 0, STEP),
    ]
    kinds = [Kind.WEIGHT, Kind.OPTIMIZER_STATE, Kind.TEMPORARY, Kind.ACTIVATION, Kind.WORKSPACE, Kind.GRADIENT, Kind.TEMPORARY]
    log = Log(events, kinds, 2, 0, recording=Recording(inputs=2, start=3, end=6, staged=7, kernels=5))
    memory = replay({}, log)["step"]
    pool = 60 + 12
    # The first step, which runs eager, leaves the state in the segment of its activations, and a workspace.
    assert memory.reserved == (100 + 10 + 20 + 60 + 12 + pool) * MIB
    assert memory.allocated[BACKWARD] == (100 + 10 + 20 + 30 + 12 + pool) * MIB
    peak = tensor_peak(log)
    assert peak.bytes == (100 + 10 + 20 + 30 + pool) * MIB
    assert peak.parts[Kind.OPTIMIZER_STATE] == 30 * MIB
    # Sample images take the pool's place.
    sampling = Log([*events[:2], Event(7, 150 * MIB, SAMPLING)], [*kinds, Kind.TEMPORARY], 2, 0)
    assert replay({}, log, {SAMPLING: sampling})[SAMPLING].reserved == (100 + 10 + 20 + 60 + 12 + 150) * MIB


def test_recording_with_less_memory_than_later_steps() -> None:
    passes = [Event(1, 4 * MIB, FORWARD), Event(1, -4 * MIB, BACKWARD)]
    events = [Event(0, 10 * MIB, FORWARD), *passes, Event(2, 50 * MIB, STEP), Event(2, -50 * MIB, STEP), Event(0, 0, STEP)]
    log = Log(events, [Kind.OPTIMIZER_STATE, Kind.ACTIVATION, Kind.TEMPORARY], 1, 0, recording=Recording(1, 1, 3, 3, 2))
    assert tensor_peak(log).bytes == 60 * MIB
    assert tensor_peak(log).parts == {Kind.OPTIMIZER_STATE: 10 * MIB, Kind.TEMPORARY: 50 * MIB}


def test_sampling_runs_in_what_the_steps_have_reserved_and_moves_their_weights() -> None:
    weight, gradient = Event(0, 12 * MIB, FORWARD), [Event(1, 40 * MIB, BACKWARD), Event(1, -40 * MIB, STEP)]
    kinds = [Kind.WEIGHT, Kind.GRADIENT]
    # The first tensor fits the gradient's segment; the weight leaves; after the release the second needs a segment of its own.
    sampled = [Event(2, 30 * MIB, SAMPLING), Event(0, -12 * MIB, SAMPLING), Event(2, -30 * MIB, SAMPLING), Event(1, 0, RELEASE)]
    log = Log([weight, *sampled, Event(3, 60 * MIB, SAMPLING)], [*kinds, *kinds], 1, 0)
    memory = replay({}, Log([weight, *gradient], kinds, 1, 0), {SAMPLING: log})
    assert memory["step"].reserved == (12 + 40) * MIB
    assert memory[SAMPLING].reserved == 60 * MIB
    assert memory[SAMPLING].allocated == {SAMPLING: 60 * MIB}
