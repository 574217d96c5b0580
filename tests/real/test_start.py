"""A real training script gives upstream's own result, in every way of starting it."""

import json

import pytest

from tests.real.conftest import Run

torch = pytest.importorskip("torch")


def same(left: Run, right: Run) -> bool:
    assert left.tensors.keys() == right.tensors.keys()
    return all(torch.equal(left.tensors[name], right.tensors[name]) for name in left.tensors)


@pytest.fixture(scope="session")
def upstream() -> dict[str, Run]:
    return {}


@pytest.mark.parametrize("start", ["launcher", "accelerate", "environment"])
def test_with_patches_off_the_file_is_upstreams_bit_for_bit(checkout, train, upstream, start):
    script = "sdxl_train_network.py"
    if checkout.layout not in upstream:
        upstream[checkout.layout] = train(checkout, script, start="plain")
    ours = train(checkout, script, "--report", "report.json", start=start, env={"KOHYA_EXT_DISABLE": "*"})
    assert same(ours, upstream[checkout.layout])
    report = json.loads((ours.folder / "report.json").read_text())
    assert {row["status"] for row in report["patches"]} == {"skipped"}
    assert report["script"] == script
