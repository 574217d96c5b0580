"""A step with the extension costs no more than upstream's: waiting for the GPU, launches and memory, on the virtual GPU."""

import json
import re

import pytest

from tests.cuda.configurations import CONFIGURATIONS, RELEASE

torch = pytest.importorskip("torch")

#: Leaves out the options of the extension that need launches and memory of their own.
WITHOUT_ADDED_WORK = pytest.mark.configurations(lambda configuration: not configuration.adds_work)

#: The files of the extension that read values by a copy, which waits. Others read them after waiting for the stream.
READING = ("patches/optimizer_syncs.py", "patches/weight_norm_limit.py")


def test_gpu_knows_every_call(pair):
    assert pair.ours.unknown_calls == {}
    assert pair.upstream.unknown_calls == {}


def test_patches_are_reached(pair):
    assert pair.configuration.reached - pair.ours.reached == set()


def test_no_step_waits_more_often_than_upstream(pair):
    for number, (ours, theirs) in enumerate(zip(pair.ours.later_steps, pair.upstream.later_steps, strict=True), 2):
        more = {place: count for place, count in ours.sync_places.items() if count > theirs.sync_places.get(place, 0)}
        # Weights are checked before they are saved.
        checks = 1 if pair.configuration.saves and set(more) & set(ours.own_syncs) else 0
        assert ours.syncs <= theirs.syncs + checks, f"step {number}: waits more often at {more}"


@pytest.mark.configurations(lambda configuration: not configuration.saves)  # the weights are checked before they are saved
def test_extension_waits_once_per_step_to_read_its_values(pair):
    """It waits instead of the script and the optimizer, whose own reading no longer waits."""
    for number, step in enumerate(pair.ours.later_steps, 2):
        others = {place: count for place, count in step.own_syncs.items() if not place.startswith(READING)}
        assert others == {}, f"step {number}"
        assert max(step.own_syncs.values(), default=0) <= 1, f"step {number}"


def test_random_numbers_are_those_of_upstream(pair):
    for number, (ours, theirs) in enumerate(zip(pair.ours.steps, pair.upstream.steps, strict=True), 1):
        assert ours.random_state == theirs.random_state, f"step {number}"


@WITHOUT_ADDED_WORK
def test_no_step_launches_more_than_upstream(pair):
    for number, (ours, theirs) in enumerate(zip(pair.ours.steps, pair.upstream.steps, strict=True), 1):
        # Prodigy's sums are stacked before they are read, instead of a wait for each.
        stacks = -(-(theirs.syncs - ours.syncs) // 64)
        assert ours.launches <= theirs.launches + stacks, f"step {number}"


@WITHOUT_ADDED_WORK
def test_no_step_leaves_more_memory_than_upstream(pair):
    for number, (ours, theirs) in enumerate(zip(pair.ours.steps, pair.upstream.steps, strict=True), 1):
        assert ours.bytes <= theirs.bytes, f"step {number}"
    assert pair.ours.peak <= pair.upstream.peak + 1024  # scalars


@pytest.mark.configurations(lambda configuration: "--scale_weight_norms" in configuration.options)
def test_norms_of_all_modules_are_read_together(pair):
    for ours, theirs in zip(pair.ours.later_steps, pair.upstream.later_steps, strict=True):
        assert ours.syncs < theirs.syncs / 5


@pytest.mark.configurations(lambda configuration: "--gradient_checkpointing_ratio" in configuration.extension_options)
def test_checkpointing_fewer_blocks_launches_less(pair):
    assert all(ours.launches < theirs.launches for ours, theirs in zip(pair.ours.steps, pair.upstream.steps, strict=True))


@pytest.mark.configurations(lambda configuration: "--gradient_release" in configuration.extension_options)
def test_released_gradients_take_no_memory(pair):
    """Upstream keeps the gradient of every weight, as large as all weights, up to the step."""
    ours, theirs = (run.peak - run.steps[-1].bytes for run in (pair.ours, pair.upstream))
    assert ours < 0.8 * theirs  # 0.7: activations remain


def test_progress_bar_shows_reserved_memory(pair):
    shown = re.findall(r"[ \[]memory=([\d.]+)/([\d.]+)GB\]", pair.ours.output)
    (journal,) = pair.ours.folder.glob("*.journal.jsonl")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    reserved = {f"{line['reserved'] / 1e9:.1f}" for line in lines if line["kind"] == "step"}
    assert {size for size, _ in shown} == reserved
    assert {total for _, total in shown} == {f"{lines[0]['gpu']['memory'] / 1e9:.1f}"}
    assert "memory=" not in pair.upstream.output


@pytest.mark.configurations(lambda configuration: "tensorboard" in configuration.options)
def test_trackers_get_the_journals_memory(pair):
    from tests.real.test_notifications import scalars

    (journal,) = pair.ours.folder.glob("*.journal.jsonl")
    steps = [line for line in map(json.loads, journal.read_text().splitlines()) if line["kind"] == "step"]
    ours, theirs = scalars(pair.ours.folder / "logs"), scalars(pair.upstream.folder / "logs")
    for name in ("allocated", "reserved", "peak_allocated", "peak_reserved"):
        expected = [(line["step"], pytest.approx(line[name] / 1e9)) for line in steps]
        assert ours[f"memory/{name}_GB"] == expected
    assert {name: ours[name] for name in theirs} == theirs


def test_memory_does_not_grow(pair):
    """What a step leaves differs by its batch and its place in the accumulation. It must not grow more than upstream's."""
    places = pair.configuration.accumulation
    ours, theirs = (
        [step.bytes - run.later_steps[index % places].bytes for index, step in enumerate(run.later_steps)]
        for run in (pair.ours, pair.upstream)
    )
    assert all(grown <= max(expected, 0) for grown, expected in zip(ours, theirs, strict=True)), (ours, theirs)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("sdxl-lora-bf16", "sdxl-lora-fp16", "flux-lora-bf16", RELEASE)]


@pytest.mark.thorough
@pytest.mark.oldest
@pytest.mark.parametrize("name", ["sdxl-finetune-fused", *SLOW])
def test_skipped_step_frees_its_memory(checkout, name, train_both, train_on_gpu):
    configuration = CONFIGURATIONS[name]
    finite = train_both(checkout, configuration).ours
    options = (*configuration.options, *configuration.extension_options)
    skipping = train_on_gpu(checkout, configuration.script, *options, env={"SPY_NOT_FINITE_AT": "2"})
    assert skipping.output.count("step 2 skipped") == 1, skipping.output[-4000:]
    for number, (skips, trains) in enumerate(zip(skipping.steps, finite.steps, strict=True), 1):
        assert skips.bytes <= trains.bytes, f"after step {number}"
    assert skipping.peak <= finite.peak
