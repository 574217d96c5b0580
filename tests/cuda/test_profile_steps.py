"""--profile_steps on the virtual GPU, which has no CUPTI: host times, memory and one line that kernel times are missing."""

import json

import pytest

from kohya_ext.run.journal import SUFFIX
from kohya_ext.tiny.arguments import OUTPUT_NAME
from tests.cuda.configurations import LORA

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.thorough


@pytest.mark.newest
@pytest.mark.parametrize("options", [("--speed", "off"), ("--cuda_graphs", "--cuda_graphs_always")], ids=["eager", "graphs"])
def test_without_cupti_there_are_host_times_and_memory(checkout, train_on_gpu, options):
    options = ("--mixed_precision", "bf16", "--max_train_steps", "5", *options)
    run = train_on_gpu(checkout, LORA, *options, "--profile_steps", "3:5")
    assert run.code == 0, run.output[-4000:]
    lines = [json.loads(line) for line in (run.folder / f"{OUTPUT_NAME}{SUFFIX}").read_text().splitlines()]
    (profile,) = [line for line in lines if line["kind"] == "profile"]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4, 5]
    assert run.output.count("CUPTI") == 1
    assert "profiler_start" not in run.output
    assert (profile["device"], profile["limit"], profile["busy"]) == ("cuda", None, None)
    parts = {row["name"]: row["host"] for row in profile["blocks"]}
    assert {"text encoder forward", "U-Net forward", "optimizer"} <= parts.keys()
    peaks = [line["peak_allocated"] for line in lines if line["kind"] == "step"]
    assert 0 < profile["peak"] <= max(peaks)
    if "--cuda_graphs" not in options:
        assert profile["peak"] > 0.9 * max(peaks)
        assert {"BasicTransformerBlock recompute", "BasicTransformerBlock backward"} <= parts.keys()
