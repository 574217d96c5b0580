"""nonreentrant_checkpointing gives the gradients without checkpointing, also where reentrant checkpointing loses some."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.thorough

PROBE = Path(__file__).parent / "probes" / "checkpointing.py"

#: Whether text encoders have reentrant checkpointing by default. transformers 5 changed that.
REENTRANT_TEXT_ENCODERS = Version(version("transformers")) < Version("5")

#: Case -> how upstream's reentrant checkpointing fails, or None.
UPSTREAM = {
    "lora": None,
    "locon": "gradients are missing",
    "lllite": "does not require grad",
    "control_net": None,
    "text_encoder_lora": "does not require grad" if REENTRANT_TEXT_ENCODERS else None,
    "textual_inversion": None,
    "distributed": "Expected to mark a variable ready only once",
}


@pytest.fixture(scope="session")
def gradients(checkout, call):
    """Case -> result of the probe with this checkout."""
    done = call(PROBE, checkout.path, *UPSTREAM)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.rpartition("RESULT ")[2])


@pytest.mark.newest
@pytest.mark.parametrize("case", UPSTREAM)
def test_gradients_are_bit_identical_to_those_without_checkpointing(gradients, case):
    result = gradients[case]
    assert result["gradients"] > 0
    assert result["patched"] == {"missing": 0, "different": 0}
    failure = UPSTREAM[case]
    if failure is None:
        assert result["upstream"]["missing"] == 0
    elif failure == "gradients are missing":
        assert result["upstream"]["missing"] > 0
    else:
        assert failure in result["upstream"]["error"]


#: Script -> way to start it. In each, upstream uses reentrant checkpointing at least for the text encoders.
RUNS = {
    "sdxl_train_network.py": "launcher",
    "sdxl_train.py": "accelerate",
    "train_network.py": "environment",
    "flux_train_network.py": "launcher",
    "lumina_train_network.py": "environment",
}

#: Script -> the generation of the default suite; the other scripts have checkpointed blocks that these have, too.
DEFAULT = {
    "sdxl_train_network.py": pytest.mark.newest,
    "lumina_train_network.py": pytest.mark.newest,
}


@pytest.mark.parametrize("script", [pytest.param(script, marks=DEFAULT.get(script, pytest.mark.slow)) for script in RUNS])
def test_real_script_recomputes_upstreams_blocks_and_trains_its_tensors(checkout, train, upstream, script):
    if not (REENTRANT_TEXT_ENCODERS or script.startswith("sdxl")):
        pytest.skip("only text encoders had reentrant checkpointing there, and transformers 5 changed that")
    theirs, ours = upstream(checkout, script), train(checkout, script, start=RUNS[script])
    assert theirs.checkpoint_calls["reentrant"] > 0
    assert ours.checkpoint_calls == theirs.checkpoint_calls
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        torch.testing.assert_close(ours.tensors[name], tensor, rtol=0, atol=1e-6)
    statuses = {row["patch"]: row["status"] for row in ours.report["patches"]}
    assert statuses["selective_checkpointing"] == "skipped"
    assert statuses["nonreentrant_checkpointing"] == statuses["fast_checkpoint_hooks"] == "applied"
    blocks = ours.report["facts"]["nonreentrant_checkpointing"]
    # The last layer of a text encoder is not recomputed if the penultimate one's output is used.
    assert blocks["checkpointed_blocks"] == theirs.checkpoint_calls["reentrant"] >= blocks["recomputed_blocks"] > 0
