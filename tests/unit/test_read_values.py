"""Results of the estimate that are kept by what their computation read."""

from types import SimpleNamespace

import pytest

from kohya_ext.estimate.read_values import Recorded, same_for


def test_what_was_read_is_compared_and_nothing_else():
    recorded = Recorded(SimpleNamespace(side=512, batch=2))
    assert recorded.side == 512
    assert same_for(recorded, SimpleNamespace(side=512, batch=4))
    assert not same_for(recorded, SimpleNamespace(side=768, batch=2))
    assert not same_for(recorded, SimpleNamespace(batch=2))


def test_a_missing_attribute_counts():
    recorded = Recorded(SimpleNamespace())
    assert getattr(recorded, "side", 512) == 512
    with pytest.raises(AttributeError):
        recorded.side  # noqa: B018
    assert same_for(recorded, SimpleNamespace(batch=4))
    assert not same_for(recorded, SimpleNamespace(side=512))


def test_what_is_set_stays_in_the_recording():
    source = SimpleNamespace(side=512)
    recorded = Recorded(source)
    recorded.side = 768
    assert (recorded.side, source.side) == (768, 512)
    assert same_for(recorded, SimpleNamespace(side=64))
