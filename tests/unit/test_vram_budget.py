"""--vram_budget and the watch for spills, on a card that is not there: what is capped, what is said."""

from types import SimpleNamespace

import pytest
from kohya_ext.patches import spill_watch, vram_budget

from kohya_ext.config.settings import Settings
from kohya_ext.estimate.result import CONTEXT_BYTES
from kohya_ext.gpu import out_of_memory, spill

torch = pytest.importorskip("torch")

GB = 10**9


@pytest.fixture
def card(monkeypatch):
    """A card of 16 GB with 15 free, named without its number, as accelerate does; keeps the share that is capped."""
    card = SimpleNamespace(device=torch.device("cuda"), free=15 * GB, total=16 * GB, reserved=0, share=None)
    answers = {
        "mem_get_info": lambda: (card.free, card.total),
        "memory_reserved": lambda: card.reserved,
        "memory_allocated": lambda: card.reserved - GB,
        "max_memory_allocated": lambda: card.reserved,
        "get_device_properties": lambda: SimpleNamespace(total_memory=card.total),
        "set_per_process_memory_fraction": lambda share: setattr(card, "share", share),
    }
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for name, answer in answers.items():
        # Not every function of torch's takes a device without a number.
        monkeypatch.setattr(torch.cuda, name, lambda *given, answer=answer: answer(*given[:-1]) if given[-1] == 3 else None)
    return card


def test_a_size_counts_the_context_and_auto_leaves_a_margin(card, capsys):
    assert vram_budget._cap(8 * GB, card.device) == 8 * GB - CONTEXT_BYTES
    assert card.share == pytest.approx((8 * GB - CONTEXT_BYTES) / card.total)
    assert vram_budget._cap("auto", card.device) == 15 * GB - 0.05 * card.total
    assert card.share == pytest.approx(14.2 / 16)
    assert "14.20 GB for tensors on a card of 16.00 GB, 15.00 GB of them free" in capsys.readouterr().err


def test_more_than_is_free_is_said_and_nothing_at_all_is_refused(card, capsys):
    vram_budget._cap(20 * GB, card.device)
    assert card.share == 1
    assert "--vram_budget 20.00 GB is more than the 15.00 GB that are free" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        vram_budget._cap(CONTEXT_BYTES, card.device)
    assert left.value.code == 2
    card.free = GB // 10
    with pytest.raises(SystemExit):
        vram_budget._cap("auto", card.device)


def test_without_a_card_nothing_is_capped_and_that_is_said(capsys):
    cpu = torch.device("cpu")
    assert vram_budget._cap(14 * GB, cpu) == 14 * GB
    assert "no CUDA card is used here, so nothing is capped" in capsys.readouterr().err
    assert vram_budget._cap("auto", cpu) is None


def test_what_lies_on_the_card_is_said(card):
    card.reserved, card.free = 12 * GB, 3 * GB
    assert out_of_memory.usage(card.device) == (
        "GPU memory: 16.00 GB; this run reserves 12.00 (11.00 in tensors, peak 12.00), "
        "other programs and CUDA use 1.00, and 3.00 are free"
    )


def test_slow_steps_on_a_full_card_are_named_once(card, capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(spill, "may_spill", lambda: True)
    monkeypatch.setattr(spill_watch.time, "monotonic", lambda: now)
    accelerator = SimpleNamespace(device=card.device, sync_gradients=True)
    watch = spill_watch._start(SimpleNamespace(), accelerator, Settings())
    for seconds in (*[1.1] * 10, *[53.0] * 10):
        watch.before_batch(accelerator)
        now += seconds
        card.reserved, card.free = 15 * GB, GB // 10
        watch.after_batch(accelerator)
    (line,) = capsys.readouterr().err.splitlines()
    assert "steps take 53.0 s, the fastest took 1.1 s" in line
    assert "--vram_budget auto --resume auto" in line


def test_the_cap_ends_with_the_run(card):
    args = SimpleNamespace(gradient_checkpointing=True)
    accelerator = SimpleNamespace(device=card.device, distributed_type="DistributedType.DEEPSPEED")
    budget = vram_budget._start(args, accelerator, Settings(vram_budget=8 * GB))
    assert card.share < 1
    budget.on_end()
    assert card.share == 1
