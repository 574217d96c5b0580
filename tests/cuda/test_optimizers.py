"""Optimizer steps wait for the GPU only as often as they need its values."""

import pytest

pytest.importorskip("bitsandbytes")
pytest.importorskip("prodigyopt")


def test_steps_do_not_wait_once_per_parameter(printed_on_gpu):
    results = printed_on_gpu("optimizer_steps.py")
    parameters = results["parameters"]
    ours, theirs = ({name: syncs for name, (syncs, _) in results[side].items()} for side in ("ours", "theirs"))
    assert theirs == {
        "AdamW8bit": parameters,
        "Lion8bit": parameters,
        "PagedAdamW8bit": parameters + 1,
        "Prodigy": 2 * parameters,
    }
    assert ours == {"AdamW8bit": 0, "Lion8bit": 0, "PagedAdamW8bit": parameters + 1, "Prodigy": 1}
    for name, (_, launches) in results["ours"].items():
        assert launches <= results["theirs"][name][1] + (name == "Prodigy"), "one launch gathers Prodigy's sums"
