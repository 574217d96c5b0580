"""--vram_budget and the watch for spills, on a card that is not there: what is capped, what is said."""

from types import SimpleNamespace

import pytest
from kohya_ext.patches import spill_watch, vram_budget

from kohya_ext.settings import Settings
from kohya_ext.vram import spill
from kohya_ext.vram.estimate import CONTEXT_BYTES

torch = pytest.importorskip("torch")

GB = 10**9


@pytest.fixture
def card(monkeypatch):
    """A card of 16 GB with 15 free; keeps the share that the process is capped to."""
    card = SimpleNamespace(device=torch.device("cuda", 0), free=15 * GB, total=16 * GB, reserved=0, share=None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (card.free, card.total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: card.reserved)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=card.total))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: setattr(card, "share", share))
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


def test_slow_steps_on_a_full_card_are_named_once(card, capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(spill, "may_spill", lambda: True)
    monkeypatch.setattr(spill_watch.time, "monotonic", lambda: now)
    monkeypatch.setattr(spill_watch, "_clock", None)
    accelerator = SimpleNamespace(device=card.device, sync_gradients=True)
    spill_watch._start(SimpleNamespace(), accelerator, Settings())
    for seconds in (*[1.1] * 10, *[53.0] * 10):
        spill_watch._before(accelerator)
        now += seconds
        card.reserved, card.free = 15 * GB, GB // 10
        spill_watch._after(accelerator)
    (line,) = capsys.readouterr().err.splitlines()
    assert "steps take 53.0 s, and the fastest one took 1.1 s" in line
    assert "--vram_budget auto --resume auto" in line
