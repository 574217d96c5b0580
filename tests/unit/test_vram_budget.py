"""--vram_budget and spill_watch on a simulated GPU."""

from types import SimpleNamespace

import pytest
from kohya_ext.patches import spill_watch, vram_budget

from kohya_ext.config.settings import Settings
from kohya_ext.estimate.result import CONTEXT_BYTES
from kohya_ext.gpu import out_of_memory, spill

torch = pytest.importorskip("torch")

GB = 10**9


@pytest.fixture
def gpu(monkeypatch):
    """A simulated GPU of 16 GB with 15 GB free, without a device index as in accelerate. ``share`` is the capped fraction."""
    gpu = SimpleNamespace(device=torch.device("cuda"), free=15 * GB, total=16 * GB, reserved=0, share=None)
    answers = {
        "mem_get_info": lambda: (gpu.free, gpu.total),
        "memory_reserved": lambda: gpu.reserved,
        "memory_allocated": lambda: gpu.reserved - GB,
        "max_memory_allocated": lambda: gpu.reserved,
        "get_device_properties": lambda: SimpleNamespace(total_memory=gpu.total),
        "set_per_process_memory_fraction": lambda share: setattr(gpu, "share", share),
    }
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for name, answer in answers.items():
        # Some of torch's functions require a device index.
        monkeypatch.setattr(torch.cuda, name, lambda *given, answer=answer: answer(*given[:-1]) if given[-1] == 3 else None)
    return gpu


def test_the_budget_includes_the_context_and_auto_leaves_a_margin(gpu, capsys):
    assert vram_budget._cap(8 * GB, gpu.device) == 8 * GB - CONTEXT_BYTES
    assert gpu.share == pytest.approx((8 * GB - CONTEXT_BYTES) / gpu.total)
    assert vram_budget._cap("auto", gpu.device) == 15 * GB - 0.05 * gpu.total
    assert gpu.share == pytest.approx(14.2 / 16)
    assert "14.20 GB for tensors on a GPU of 16.00 GB with 15.00 GB free" in capsys.readouterr().err


def test_budget_above_free_memory_is_a_warning_and_one_below_the_context_an_error(gpu, capsys):
    vram_budget._cap(20 * GB, gpu.device)
    assert gpu.share == 1
    assert "--vram_budget 20.00 GB exceeds the 15.00 GB free on this GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exited:
        vram_budget._cap(CONTEXT_BYTES, gpu.device)
    assert exited.value.code == 2
    gpu.free = GB // 10
    with pytest.raises(SystemExit):
        vram_budget._cap("auto", gpu.device)


def test_missing_gpu_skips_the_cap_with_a_warning(capsys):
    cpu = torch.device("cpu")
    assert vram_budget._cap(14 * GB, cpu) == 14 * GB
    assert "no CUDA GPU is used, so memory is not capped" in capsys.readouterr().err
    assert vram_budget._cap("auto", cpu) is None


def test_memory_report_lists_reserved_and_free_memory(gpu):
    gpu.reserved, gpu.free = 12 * GB, 3 * GB
    assert out_of_memory.usage(gpu.device) == (
        "GPU memory: 16.00 GB; this run reserves 12.00 (11.00 in tensors, peak 12.00), "
        "other programs and CUDA use 1.00, and 3.00 are free"
    )


def test_slow_steps_on_a_full_gpu_are_a_warning_once(gpu, capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(spill, "may_spill", lambda: True)
    monkeypatch.setattr(spill_watch.time, "monotonic", lambda: now)
    accelerator = SimpleNamespace(device=gpu.device, sync_gradients=True)
    watch = spill_watch._start(SimpleNamespace(), accelerator, Settings())
    for seconds in (*[1.1] * 10, *[53.0] * 10):
        watch.before_batch(accelerator)
        now += seconds
        gpu.reserved, gpu.free = 15 * GB, GB // 10
        watch.after_batch(accelerator)
    (line,) = capsys.readouterr().err.splitlines()
    assert "steps take 53.0 s, the fastest took 1.1 s" in line
    assert "--vram_budget auto --resume auto" in line


def test_cap_is_removed_after_the_run(gpu):
    args = SimpleNamespace(gradient_checkpointing=True)
    accelerator = SimpleNamespace(device=gpu.device, distributed_type="DistributedType.DEEPSPEED")
    budget = vram_budget._start(args, accelerator, Settings(vram_budget=8 * GB))
    assert gpu.share < 1
    budget.on_end()
    assert gpu.share == 1
