"""Patches that avoid unnecessary work: on by default, applied, and bit-identical to training without them."""

import itertools
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches import skip_unit_scaling, snr_lookup  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.patching.lora_modules import NETWORKS  # noqa: E402
from kohya_ext.patching.patch import Patcher  # noqa: E402
from tests.real.test_notifications import scalars  # noqa: E402

PATCHES = (
    *("fast_checkpoint_hooks", "skip_gradient_norms", "skip_unused_gradients", "skip_unit_scaling", "single_process_reduce"),
    "snr_lookup",
)

#: Case -> script, and arguments for which the patches have an effect.
RUNS = {
    "sdxl": ("sdxl_train_network.py", "--train_batch_size", "2", "--min_snr_gamma", "5"),
    "sdxl, U-Net only": ("sdxl_train_network.py", "--network_train_unet_only", "--cache_text_encoder_outputs"),
    "flux": ("flux_train_network.py",),
    "lumina": ("lumina_train_network.py",),
    "sd3": ("sd3_train_network.py",),
    "sd15": ("train_network.py", "--train_batch_size", "2", "--debiased_estimation_loss"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS)
def test_real_script_trains_bit_identically(checkout, train, case):
    ours = train(checkout, *RUNS[case])
    without = train(checkout, *RUNS[case], before=("--disable_patch", ",".join(PATCHES)))
    assert not set(PATCHES) & set(without.report["facts"])
    facts = {name: ours.report["facts"].get(name, {}) for name in PATCHES}
    hooked = facts["fast_checkpoint_hooks"]["recomputed_blocks"]
    assert hooked == 0 if case.startswith("sdxl") else hooked >= 4, "only SDXL's and CLIP's blocks are recomputed without hooks"
    assert facts["skip_unused_gradients"]["inputs"] >= 4
    assert facts["skip_unit_scaling"]["passes"] >= 4
    assert facts["single_process_reduce"]["gradients_not_copied"] >= 4
    if case == "flux":
        assert facts["skip_gradient_norms"]["steps"] == 4
    if case == "sdxl":
        assert facts["skip_unused_gradients"]["embeddings"] == 4, (
            "expected the token and position embeddings of two text encoders"
        )
    if case == "sdxl, U-Net only":
        assert facts["skip_unused_gradients"]["inputs"] == 12, "expected latents, text and pooled text in each of four steps"
    if case in ("sdxl", "sd15"):
        assert facts["snr_lookup"]["gathers"] == 4
    assert ours.tensors.keys() == without.tensors.keys()
    for name, tensor in without.tensors.items():
        assert torch.equal(ours.tensors[name], tensor), name


GGPO = ("--network_args", "ggpo_beta=0.01", "ggpo_sigma=0.03")


@pytest.mark.thorough
@pytest.mark.newest
@pytest.mark.parametrize("reader", ["trackers", pytest.param("GGPO", marks=pytest.mark.slow)])
def test_gradient_norms_are_upstreams_where_they_are_read(checkout, train, tmp_path, reader):
    pytest.importorskip("tensorboard")
    runs = []
    for name, start in (("theirs", "plain"), ("ours", "launcher")):
        tracking = ("--log_with", "tensorboard", "--logging_dir", str(tmp_path / name)) if reader == "trackers" else GGPO
        runs.append(train(checkout, "flux_train_network.py", *tracking, start=start))
    theirs, ours = runs
    assert ours.report["facts"]["skip_gradient_norms"]["steps"] == 0
    assert all(torch.equal(ours.tensors[name], tensor) for name, tensor in theirs.tensors.items())
    if reader == "trackers":
        name = "norm/avg_grad_norm"
        expected = scalars(tmp_path / "theirs")[name]
        assert len(expected) == 4
        assert scalars(tmp_path / "ours")[name] == expected


@pytest.mark.slow
def test_reentrant_checkpointing_keeps_every_gradient(checkout, train, upstream):
    """Reentrant checkpointing needs the gradients of its inputs. The other patches are bit-identical to upstream."""
    theirs = upstream(checkout, "sdxl_train_network.py")
    ours = train(checkout, "sdxl_train_network.py", before=("--disable_patch", "nonreentrant_checkpointing"))
    assert ours.report["facts"]["skip_unused_gradients"] == {}
    assert ours.checkpoint_calls == theirs.checkpoint_calls
    for name, tensor in theirs.tensors.items():
        assert torch.equal(ours.tensors[name], tensor), name


class _Syncs(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts reads of a tensor's value, for which the CPU would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def functions(checkout, checkout_module):
    """Name -> (patched, original) function of sd-scripts' loss weights."""
    module = checkout_module("library.custom_train_functions")
    patcher = Patcher({snr_lookup.PATCH.name: snr_lookup.PATCH}, Settings(), checkout)
    originals = {target.attribute: getattr(module, target.attribute) for target in snr_lookup.PATCH.targets}
    patcher.arm()
    assert {outcome.status for outcome in patcher.outcomes.values()} == {"applied"}
    yield {name: (getattr(module, name), original) for name, original in originals.items()}
    patcher.undo()


def test_loss_weights_are_bit_identical_without_syncs(functions):
    timesteps = torch.tensor([0, 7, 7, 999])
    scheduler = SimpleNamespace(all_snr=torch.linspace(5, -5, 1000).exp())
    arguments = {
        "apply_snr_weight": (torch.rand(4), timesteps, scheduler, 5),
        "get_snr_scale": (timesteps, scheduler),
        "apply_debiased_estimation": (torch.rand(4), timesteps, scheduler),
    }
    for name, (patched, original) in functions.items():
        results = []
        for function, syncs in ((patched, 0), (original, len(timesteps))):
            with _Syncs() as counter:
                results.append(function(*arguments[name]))
            assert counter.count == syncs, name
        assert torch.equal(*results)


class _Multiplications(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts multiplications of tensors that are as wide as the layer."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mul.Tensor, torch.ops.aten.mul_.Tensor) and args[0].shape[-1] == WIDTH
        return func(*args, **(kwargs or {}))


RANK, WIDTH = 8, 96

#: alpha -> remaining multiplications of two, for dtypes with the exponent range of float32 and for float16.
REMAINING = {8: (0, 0), 2: (0, 1), 3: (1, 1)}

SPLIT = ("networks.lora_flux", "networks.lora_lumina")


@pytest.mark.parametrize(("name", "split"), [*((name, False) for name in NETWORKS), *((name, True) for name in SPLIT)])
def test_lora_is_bit_identical_with_fewer_multiplications(checkout, checkout_module, name, split):
    kind = checkout_module(name).LoRAModule
    # A network without its own class uses one that is patched.
    assert kind.__module__ in NETWORKS
    forwards = (kind.forward, skip_unit_scaling._scale_before_up(kind.forward, Settings()))
    for dtype, alpha in itertools.product((torch.float32, torch.bfloat16, torch.float16), REMAINING):
        results, counts = [], []
        for kind.forward in forwards:
            torch.manual_seed(0)
            layer = torch.nn.Linear(48, WIDTH)
            lora = kind("a", layer, 1.0, RANK, alpha, dropout=0.1, **({"split_dims": [WIDTH // 2] * 2} if split else {}))
            lora.apply_to()
            for weight in lora.parameters():
                torch.nn.init.normal_(weight, std=0.1)
            x = torch.randn(2, 5, 48, requires_grad=True)
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32), _Multiplications() as counter:
                y = layer(x)
            y.float().square().mean().backward()
            results.append([y, x.grad, *(weight.grad for weight in lora.parameters())])
            counts.append(counter.count)
        assert counts == [2, REMAINING[alpha][dtype is torch.float16]]
        for theirs, ours in zip(*results, strict=True):
            assert torch.equal(theirs, ours)
