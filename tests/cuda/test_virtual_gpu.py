"""The virtual GPU itself: what PyTorch sees of it, and what it counts."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from virtual_gpu import build

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]


def start(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "virtual_gpu", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("gpu_libraries")
def test_torch_sees_two_gpus(tmp_path):
    script = str(Path(__file__).with_name("two_gpus.py"))
    counters = tmp_path / "counters.json"
    options = ("--memory", "8GiB", "--gpus", "2", "--json", str(counters))
    done = start("3060", *options, "--", "env", f"PYTHONPATH={ROOT}", sys.executable, script)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert (seen["gpus"], seen["name"], seen["total"]) == (2, "NVIDIA GeForce RTX 3060", 8 * 2**30)
    assert seen["left"][1] == -(2**30), "the tensor is on the second GPU"
    assert seen["left"][0] == 0
    assert seen["peer"] is False, "GeForce cards cannot read each other's memory"
    assert seen["moved"] == "cuda:0"
    assert "same device" in seen["mixed"]
    assert "GPU 0 has a total capacity of 8.00 GiB" in seen["too_large"]
    assert seen["launches"] == seen["by_kernel"] > seen["convolutions"] == 2, "forward and the weight's gradient"
    assert seen["syncs"] == [0, 2], "reading a number waits for the GPU"
    assert (seen["loss"], seen["gradient_is_finite"]) == (0, True)
    assert (seen["loss_is_nan"], seen["gradient_is_finite_then"]) == ("nan", False)
    assert seen["replayed"] == 2
    assert "capture" in seen["captured_sync"]
    assert any(name.startswith("cusolver") for name in seen["unknown"])
    assert done.stderr.count(f"virtual_gpu: {next(iter(seen['unknown']))} is not implemented") == 1
    assert json.loads(counters.read_text())["launches"] > 0


def test_command_without_words_is_an_error():
    done = start("4090", "--")
    assert done.returncode == 2
    assert "no command given" in done.stderr


def test_missing_compiler_is_the_reason(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "install g++" in build.missing()
    with pytest.raises(build.BuildError, match="g\\+\\+"):
        build.library_folder()


def test_other_system_is_the_reason(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert "Linux on x86-64" in build.missing()


def test_torch_without_cuda_is_the_reason(monkeypatch):
    monkeypatch.setattr(build, "_packages", lambda: [ROOT])
    assert "CUDA build of torch" in build.missing()


def test_only_managed_host_memory_is_freed_as_device_memory(printed_on_gpu):
    codes = printed_on_gpu("managed.py")
    assert codes.pop("pinned freed as device memory") != 0
    assert set(codes.values()) == {0}


def test_kernels_take_the_time_that_is_made_up(printed_on_gpu):
    seen = printed_on_gpu("timed_kernels.py", VIRTUAL_GPU_KERNEL_NS="library=50000000,2000000")
    expected = {"eager": 0.2, "streams": 0.1, "graph": 0.04, "products": 0.05}
    for name, seconds in expected.items():
        work = seen[name]
        assert (work["is_done"], work["is_done_then"]) == (False, True)
        assert work["launched"] < seconds <= work["on_gpu"] + 1e-6
        assert work["on_gpu"] < seconds + work["launched"] + 0.001
        assert work["waited"] >= seconds
