"""--profile_steps in real runs: results are unchanged, and the table knows the model's parts."""

import gzip
import json

import pytest

from kohya_ext.tiny.arguments import OUTPUT_NAME
from tests.real.test_journal import lines_of, log_of
from tests.real.test_losing_nothing import LORA

torch = pytest.importorskip("torch")

STEPS = ("--max_train_steps", "6", "--gradient_accumulation_steps", "2")


@pytest.mark.slow
@pytest.mark.newest
def test_profiled_run_has_the_same_losses_and_files(checkout, train):
    plain = train(checkout, LORA, *STEPS, env={"SPY_LOSSES": "1"})
    run = train(checkout, LORA, *STEPS, "--profile_steps", "3:5", "--save_every_n_steps", "4", env={"SPY_LOSSES": "1"})
    assert run.code == 0, run.output[-3000:]
    assert run.losses == plain.losses
    assert run.tensors.keys() == plain.tensors.keys()
    assert all(torch.equal(run.tensors[name], tensor) for name, tensor in plain.tensors.items())

    (line,) = [line for line in lines_of(run) if line["kind"] == "profile"]
    assert (line["first"], line["last"], line["steps"], line["device"]) == (3, 4, 2, "cpu")
    assert sum(line["shares"].values()) == pytest.approx(1, abs=0.01)
    assert line["shares"]["saving"] > 0
    parts = {row["name"]: row for row in line["blocks"]}
    assert {"text encoder forward", "BasicTransformerBlock forward", "ResnetBlock2D forward", "optimizer"} <= parts.keys()
    assert {"BasicTransformerBlock recompute", "BasicTransformerBlock backward"} <= parts.keys()
    assert parts["U-Net forward"]["count"] == 2  # one for each micro-batch
    assert parts["optimizer"]["count"] == 1
    assert line["peak"] > 0
    assert line["memory"]

    assert line["verdict"] in run.output
    table = (run.folder / f"{OUTPUT_NAME}.profile-3-4.txt").read_text()
    assert line["verdict"] in table
    trace = json.loads(gzip.decompress((run.folder / f"{OUTPUT_NAME}.profile-3-4.json.gz").read_bytes()))
    assert {"step 3", "step 4"} <= {event.get("name") for event in trace["traceEvents"]}
    assert log_of(run).profile["limit"] == line["limit"]


@pytest.mark.newest
def test_run_continues_when_the_profiler_fails(checkout, train):
    run = train(checkout, LORA, "--profile_steps", "2:4", env={"SPY_PROFILER_FAILS": "1"})
    assert run.code == 0, run.output[-3000:]
    assert run.output.count("training continues without a profile") == 1
    assert [line["step"] for line in lines_of(run) if line["kind"] == "step"] == [1, 2, 3, 4]


@pytest.mark.newest
def test_steps_after_the_end_are_reported(checkout, train):
    run = train(checkout, LORA, "--profile_steps", "9:12")
    assert run.code == 0, run.output[-3000:]
    assert "profile: the run ended before step 9; nothing was recorded" in run.output


@pytest.mark.slow
@pytest.mark.newest
def test_compiled_blocks_are_not_compiled_again(checkout, train):
    options = ("--max_train_steps", "5", "--selective_torch_compile")
    plain, run = (train(checkout, LORA, *options, *more, env={"SPY_LOSSES": "1"}) for more in ((), ("--profile_steps", "3:5")))
    assert run.code == 0, run.output[-3000:]
    assert (run.losses, run.graphs) == (plain.losses, plain.graphs)
    (line,) = [line for line in lines_of(run) if line["kind"] == "profile"]
    assert {"BasicTransformerBlock forward", "BasicTransformerBlock backward"} <= {row["name"] for row in line["blocks"]}
