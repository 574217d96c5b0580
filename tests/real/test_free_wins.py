"""The patches that take waste out of a step: on by default, reached, and bit for bit the training without them."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches import snr_lookup  # noqa: E402

from kohya_ext.patching import Patcher  # noqa: E402
from kohya_ext.settings import Settings  # noqa: E402

WINS = ("lean_checkpointing", "needless_gradients", "single_process_reduce", "snr_lookup")

#: Case -> script, and arguments with which the patches have something to do there.
RUNS = {
    "sdxl": ("sdxl_train_network.py", "--train_batch_size", "2", "--min_snr_gamma", "5"),
    "sdxl, U-Net alone": ("sdxl_train_network.py", "--network_train_unet_only", "--cache_text_encoder_outputs"),
    "flux": ("flux_train_network.py",),
    "lumina": ("lumina_train_network.py",),
    "sd3": ("sd3_train_network.py",),
    "sd15": ("train_network.py", "--train_batch_size", "2", "--debiased_estimation_loss"),
}


@pytest.mark.parametrize("case", ["sdxl", *(pytest.param(name, marks=pytest.mark.slow) for name in [*RUNS][1:])])
def test_the_real_script_trains_the_same_bits(checkout, train, case):
    ours = train(checkout, *RUNS[case])
    without = train(checkout, *RUNS[case], before=("--disable_patch", ",".join(WINS)))
    assert not set(WINS) & set(without.report["facts"])
    facts = {name: ours.report["facts"].get(name, {}) for name in WINS}
    assert facts["lean_checkpointing"]["recomputed_blocks"] >= 4
    assert facts["needless_gradients"]["inputs"] >= 4
    assert facts["single_process_reduce"]["gradients_not_copied"] >= 4
    if case == "sdxl":
        assert facts["needless_gradients"]["embeddings"] == 4, "token and position embeddings of two text encoders"
    if case == "sdxl, U-Net alone":
        assert facts["needless_gradients"]["inputs"] == 12, "latents, text and pooled text in each of four steps"
    if case in ("sdxl", "sd15"):
        assert facts["snr_lookup"]["gathers"] == 4
    assert ours.tensors.keys() == without.tensors.keys()
    for name, tensor in without.tensors.items():
        assert torch.equal(ours.tensors[name], tensor), name


@pytest.mark.slow
def test_where_checkpointing_is_reentrant_every_gradient_stays(checkout, train, upstream):
    """The reentrant kind needs them; and with it, all other patches leave upstream's bits."""
    theirs = upstream(checkout, "sdxl_train_network.py")
    ours = train(checkout, "sdxl_train_network.py", before=("--disable_patch", "nonreentrant_checkpointing"))
    assert ours.report["facts"]["needless_gradients"] == {}
    assert ours.checkpoint_calls == theirs.checkpoint_calls
    for name, tensor in theirs.tensors.items():
        assert torch.equal(ours.tensors[name], tensor), name


class _Waits(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts what makes the CPU wait for a GPU: reading a number out of a tensor."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def functions(checkout, library):
    """sd-scripts' loss weights, patched and as they are."""
    module = library("custom_train_functions")
    patcher = Patcher({snr_lookup.PATCH.name: snr_lookup.PATCH}, Settings(), checkout)
    originals = {target.attribute: getattr(module, target.attribute) for target in snr_lookup.PATCH.targets}
    patcher.arm()
    assert {outcome.status for outcome in patcher.outcomes.values()} == {"applied"}
    yield {name: (getattr(module, name), original) for name, original in originals.items()}
    patcher.undo()


def test_loss_weights_are_the_same_bits_and_nothing_waits(functions):
    timesteps = torch.tensor([0, 7, 7, 999])
    scheduler = SimpleNamespace(all_snr=torch.linspace(5, -5, 1000).exp())
    given = {
        "apply_snr_weight": (torch.rand(4), timesteps, scheduler, 5),
        "get_snr_scale": (timesteps, scheduler),
        "apply_debiased_estimation": (torch.rand(4), timesteps, scheduler),
    }
    for name, (patched, original) in functions.items():
        results = []
        for function, waits in ((patched, 0), (original, len(timesteps))):
            with _Waits() as counter:
                results.append(function(*given[name]))
            assert counter.count == waits, name
        assert torch.equal(*results)
