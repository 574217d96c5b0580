"""The attention of a run: a missing package is replaced, and the table of head dimensions is upstream's."""

import json
from argparse import Namespace

import pytest

from kohya_ext.gpu.attention import HEADS, shapes
from kohya_ext.sdscripts.families import BY_NAME
from tests.real.conftest import ROOT

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.thorough


@pytest.mark.newest
def test_missing_xformers_is_replaced_before_the_model_is_loaded(checkout, train):
    run = train(checkout, "sdxl_train_network.py", "--xformers", without=("--sdpa",))
    assert run.code == 0, run.output[-3000:]
    assert run.output.count("xformers cannot be imported (ModuleNotFoundError") == 1
    expected = train(checkout, "sdxl_train_network.py").tensors
    assert all(torch.equal(tensor, expected[name]) for name, tensor in run.tensors.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HEADS if name != "chroma"])
def test_heads_are_those_of_the_full_size_models(checkout, call, name):
    done = call(ROOT / "tests" / "real" / "probes" / "attention.py", checkout.path, name)
    assert done.returncode == 0, done.stderr[-2000:]
    heads = json.loads(done.stdout.split("JSON", 1)[1].splitlines()[0])
    expected = shapes(BY_NAME[name], Namespace(train_batch_size=1))
    assert {(shape.head, shape.masked) for shape in expected} <= set(map(tuple, heads))
