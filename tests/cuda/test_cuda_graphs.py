"""--cuda_graphs on the virtual GPU: capture rules, launches, waiting and memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.configurations import CONFIGURATIONS, LORA

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]

#: Names of configurations.
REPLAYED = (
    "sdxl-lora-bf16",
    "flux-lora-fp16",
    "sdxl-lora-fp16",
    "flux-lora-bf16",
    "accumulation",
    "validation",
    "fused-operations",
    "compiled",
    "checkpointing-ratio",
    "train_network-sd15-AdamW8bit-bf16",
    "sdxl_train_network-sdxl-Prodigy-bf16",
    "anima_train_network-anima-AdamW-bf16",
)
#: Record from the third step on.
RECORDED = ("--cuda_graphs", "--cuda_graphs_always")

#: By default SDXL is trained by the replayer, in tests/real.
DEFAULT = ("flux-lora-fp16",)


@pytest.mark.newest
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.slow) for name in REPLAYED])
def test_later_steps_replay_their_launches_and_wait_no_more(checkout, name, train_both, train_on_gpu):
    configuration = CONFIGURATIONS[name]
    eager = train_both(checkout, configuration).ours
    options = (*configuration.options, *configuration.extension_options, "--max_train_steps", "7")
    replayed = train_on_gpu(checkout, configuration.script, *options, *RECORDED, family=configuration.family)
    assert replayed.record["unknown_calls"] == {}
    assert "without CUDA graphs" not in replayed.output, replayed.output[-4000:]
    # On a GPU a gradient accumulator of the eager steps breaks the capture.
    assert "AccumulateGrad node's stream" not in replayed.output, replayed.output[-4000:]
    *earlier, last = replayed.later_steps
    # The rest is the text encoders' and the optimizer's.
    assert last.launches_in_graphs > 0.3 * last.launches
    # Copies of inputs, outputs and gradients; accumulation also copies each gradient out of its staging buffer.
    assert last.launches <= max(step.launches for step in eager.later_steps) + 100
    assert last.syncs <= max(step.syncs for step in eager.later_steps)
    assert last.own_syncs.keys() <= {place for step in eager.later_steps for place in step.own_syncs}
    assert last.bytes <= max(step.bytes for step in earlier) + 2**16


@pytest.mark.newest
@pytest.mark.slow
@pytest.mark.parametrize("network", ["loha", "lokr"])
def test_networks_of_the_newer_release_are_recorded(checkout, network, train_on_gpu):
    if not (checkout.path / "networks" / f"{network}.py").exists():
        assert checkout.layout == "v0.10"
        return
    run = train_on_gpu(checkout, LORA, "--mixed_precision", "bf16", "--network_module", f"networks.{network}", *RECORDED)
    assert "without CUDA graphs" not in run.output, run.output[-4000:]
    assert run.steps[-1].launches_in_graphs > 0


@pytest.mark.newest
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "reason"),
    [
        ("sdxl_train_network.py", ("--network_args", "module_dropout=0.5"), "module_dropout skips layers at random"),
        ("sdxl_train_network.py", ("--network_dropout", "0.1"), "dropout with gradient checkpointing"),
        ("sdxl_train_network.py", ("--vram_budget", "12GB"), "--vram_budget is not supported"),
        ("sd3_train_network.py", (), "the model copies data between CPU and GPU in every step (sd3_models.py"),
        ("lumina_train_network.py", (), "the model copies data between CPU and GPU in every step (lumina_models.py"),
        ("sdxl_train.py", (), "only networks such as LoRA are supported"),
    ],
)
def test_other_runs_train_eager_and_print_the_reason(checkout, script, options, reason, train_on_gpu):
    run = train_on_gpu(checkout, script, "--mixed_precision", "bf16", *options, *RECORDED)
    assert run.code == 0, run.output[-4000:]
    assert run.output.count("training continues without CUDA graphs") == 1
    assert f"cuda_graphs: {reason}" in run.output
    assert run.steps[-1].launches_in_graphs == 0


@pytest.mark.newest
def test_recordings_are_dropped_for_samples_and_validation_and_made_again(checkout, train_on_gpu, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat --w 64 --h 64 --s 2\n")
    options = (
        *("--mixed_precision", "bf16", "--no-cache_latents", "--max_train_steps", "13"),
        *("--sample_prompts", str(prompts), "--sample_every_n_steps", "6"),
        *("--validation_split", "0.5", "--max_validation_steps", "1"),
        *("--validate_every_n_steps", "6", "--validate_every_n_epochs", "9"),
    )
    run = train_on_gpu(checkout, LORA, *options, *RECORDED)
    assert "without CUDA graphs" not in run.output, run.output[-4000:]
    # The first samples' need is unknown; the second ones fit next to the recordings.
    recorded = [step.launches_in_graphs > 0 for step in run.steps]
    assert recorded == [False, False, *[True] * 10]
    recordings = [step.launches_in_graphs for step in run.steps]
    assert recordings[2] > recordings[3] < recordings[6] > recordings[7] == recordings[11]


@pytest.fixture(scope="module")
def on_8_gib(gpu_libraries):
    """(way of training) -> the results of room_for_recordings.py on a GPU of 8 GiB."""

    def run(way):
        script = str(Path(__file__).with_name("room_for_recordings.py"))
        words = ["4090", "--memory", "8GiB", "--", "env", f"PYTHONPATH={ROOT}", sys.executable, script, way]
        done = subprocess.run([sys.executable, "-m", "virtual_gpu", *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_no_step_fails_that_passes_without_recordings(on_8_gib):
    eager, graphs = on_8_gib("eager"), on_8_gib("graphs")
    assert [name for name, result in {**eager, **graphs}.items() if "failed" in result] == []
    # The memory of the larger phase, and what recordings take more of it than eager passes: not the sum of 3.5 GiB and 4.3 GiB.
    assert graphs["samples"]["reserved"] < eager["samples"]["reserved"] + 0.6
    assert graphs["samples"]["counts"] == {"recorded": 1, "replayed": 24, "released": 2}
    assert graphs["small samples"]["counts"] == {"recorded": 1, "replayed": 10}, "the first ones come before the recording"
    assert graphs["frequent samples"]["off"].startswith("sample images or validation every 2 batches drop the recordings, ")
    assert graphs["images in each step"]["off"].startswith("recordings leave ")
    assert graphs["small images in each step"]["counts"] == {"recorded": 1, "replayed": 6}
    assert graphs["sizes near the limit"]["off"] is not None
    assert graphs["a size at the limit"]["off"] is not None


@pytest.mark.usefixtures("gpu_libraries")
def test_broken_recordings_leave_nothing_behind():
    script = str(Path(__file__).with_name("broken_recordings.py"))
    words = ["4090", "--memory", "8GiB", "--", "env", f"PYTHONPATH={ROOT}", sys.executable, script]
    done = subprocess.run([sys.executable, "-m", "virtual_gpu", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results.pop("none") == {"lines": [], "counts": {"recorded": 1, "replayed": 3}, "left": 0, "capturing": False}
    recorded = {"lines": [], "left": 0, "capturing": False}
    signals = {"interrupted": False, "signals": 1}
    assert results.pop("signal while capturing") == {**recorded, "counts": {"recorded": 1, "replayed": 3}, **signals}
    interrupted = results.pop("interrupt while capturing")
    assert (interrupted["interrupted"], interrupted["capturing"], interrupted["left"]) == (True, False, 0)
    larger = results.pop("larger size")
    assert (larger["left"], larger["capturing"], len(larger["lines"])) == (0, False, 1)
    assert larger["counts"] == {"recorded": 0, "larger": 1, "replayed": 1, "eager": 2}
    assert "OutOfMemoryError" in larger["lines"][0]
    reasons = {name: result["lines"] for name, result in results.items()}
    for name, result in results.items():
        assert len(result["lines"]) == 1, reasons
        assert result["counts"] == {"eager": 3}, name
        assert result["left"] == 0, name
        assert not result["capturing"], name
    assert "reads results on the CPU" in reasons["read"][0]
    assert reasons["error while capturing"] == ["ValueError: of the model; training continues without CUDA graphs"]
    assert "OutOfMemoryError" in reasons["memory while capturing"][0]
