"""needless_masks: attention without a mask where none is needed, upstream's results, and the same training."""

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches import broadcast_masks, needless_masks  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.patching import text_lengths  # noqa: E402
from kohya_ext.patching.patch import Patcher  # noqa: E402
from kohya_ext.speed import switches  # noqa: E402

TOKENS, WIDTH, HEADS, LATENT = 7, 64, 2, 8

#: Text lengths of a batch -> whether attention over texts and images needs a mask.
BATCHES = {(5,): False, (7,): False, (4, 4): False, (3, 5): True, (7, 2): True}

#: Largest difference of outputs and gradients in float32: their sums are rounded in another order.
TOLERANCE = 1e-5


def mask_of(lengths):
    return (torch.arange(TOKENS) < torch.tensor(lengths)[:, None]).long()


def flux(modules):
    """Return a small FLUX and its inputs for some text lengths."""
    models = modules("library.flux_models")
    sizes = {"in_channels": 64, "vec_in_dim": 24, "context_in_dim": 40, "hidden_size": WIDTH, "num_heads": HEADS}
    params = models.FluxParams(
        **sizes, mlp_ratio=2.0, depth=2, depth_single_blocks=2, axes_dim=[8, 12, 12], theta=10_000, qkv_bias=True,
        guidance_embed=True,
    )  # fmt: skip

    def inputs(lengths):
        batch = len(lengths)
        return {
            "img": torch.randn(batch, 12, 64),
            "img_ids": torch.randint(4, (batch, 12, 3)).float(),
            "txt": torch.randn(batch, TOKENS, 40, requires_grad=True),
            "txt_ids": torch.zeros(batch, TOKENS, 3),
            "timesteps": torch.rand(batch),
            "y": torch.randn(batch, 24),
            "guidance": torch.ones(batch),
            "txt_attention_mask": mask_of(lengths),
        }

    return models.Flux(params), inputs


def lumina(modules):
    """Return a small Lumina 2 and its inputs for some text lengths."""
    models = modules("library.lumina_models")
    model = models.NextDiT(
        dim=WIDTH, n_layers=2, n_refiner_layers=2, n_heads=HEADS, n_kv_heads=1, qk_norm=True, cap_feat_dim=40,
        axes_dims=[8, 12, 12], axes_lens=[32, 16, 16],
    )  # fmt: skip

    def inputs(lengths):
        batch = len(lengths)
        return {
            "x": torch.randn(batch, 4, LATENT, LATENT),
            "t": torch.rand(batch),
            "cap_feats": torch.randn(batch, TOKENS, 40, requires_grad=True),
            "cap_mask": mask_of(lengths),
        }

    return model, inputs


MODELS = {"flux": flux, "lumina": lumina}


@pytest.fixture
def armed(checkout):
    """Arm the patch, and that which changes the same masks, until the end of the test."""
    patches = {patch.name: patch for patch in (needless_masks.PATCH, broadcast_masks.PATCH)}
    patchers = []

    def arm(**settings):
        patcher = Patcher(patches, Settings(**{"fused_operations": True, **settings}), checkout)
        patcher.arm()
        patchers.append(patcher)
        needless_masks._counts.clear()
        return patcher

    yield arm
    for patcher in patchers:
        patcher.undo()


@pytest.fixture
def masks(monkeypatch):
    """The masks that attention gets, in the order of its calls."""
    given = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def record(*args, attn_mask=None, **rest):
        given.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **rest)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    return given


def results(build, modules, lengths):
    """Return the output of a model, and the gradients of its text and of all of its weights."""
    torch.manual_seed(0)
    model, inputs = build(modules)
    for weight in model.parameters():  # some are zeros at first
        torch.nn.init.normal_(weight, std=0.1)
    inputs = inputs(lengths)
    y = model(**inputs)
    y.square().mean().backward()
    text = inputs["txt" if "txt" in inputs else "cap_feats"]
    return [y, text.grad, *(torch.zeros(()) if weight.grad is None else weight.grad for weight in model.parameters())]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", BATCHES)
def test_model_has_upstreams_results_and_no_needless_mask(checkout_module, armed, masks, name, lengths):
    theirs = results(MODELS[name], checkout_module, lengths)
    assert all(mask is not None for mask in masks)
    calls, context = len(masks), 2 if name == "lumina" else 0  # blocks of Lumina that refine the text
    masks.clear()
    patcher = armed()
    ours = results(MODELS[name], checkout_module, lengths)
    of_model = [outcome.status for outcome in patcher.outcomes.values() if name in outcome.target]
    assert {*of_model} == {"applied"}
    assert len(masks) == calls
    masked = [mask for mask in masks if mask is not None]
    refined = 2 if name == "lumina" else 0  # blocks of Lumina that refine the image
    assert len(masked) == (calls - refined if BATCHES[lengths] else context)
    if name == "flux" and masked:
        expected = torch.cat((mask_of(lengths)[:, : max(lengths)], torch.ones(len(lengths), 12)), 1).bool()
        assert all(torch.equal(mask[:, 0, 0], expected) for mask in masked)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=TOLERANCE, rtol=TOLERANCE)
    assert any(tensor.abs().max() > 1e-3 for tensor in ours[2:])


@pytest.mark.parametrize("name", MODELS)
def test_masks_are_left_out_while_speed_fuses_operations(checkout_module, armed, masks, name):
    theirs = results(MODELS[name], checkout_module, (5,))
    armed(fused_operations=None, speed="auto")
    switches.reset()
    masks.clear()
    for mine, other in zip(results(MODELS[name], checkout_module, (5,)), theirs, strict=True):
        assert torch.equal(mine, other)
    assert all(mask is not None for mask in masks)
    switches.use(["fused_operations"])
    masks.clear()
    for mine, other in zip(results(MODELS[name], checkout_module, (5,)), theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=TOLERANCE, rtol=TOLERANCE)
    assert None in masks
    switches.use(["fused_operations", "cuda_graphs"])
    masks.clear()
    results(MODELS[name], checkout_module, (5,))
    assert (None in masks) == (name == "lumina"), "recorded passes of FLUX need texts of one length"
    switches.reset()


def test_other_masks_of_flux_are_left_alone(checkout_module, armed, masks):
    """Padding before or within a text, and a text without tokens."""
    armed()
    torch.manual_seed(0)
    model, inputs = flux(checkout_module)
    for rows in ([[0, 1, 1, 1, 0, 0, 0]], [[1, 0, 1, 1, 1, 1, 1]], [[0] * TOKENS, [1] * TOKENS]):
        masks.clear()
        mask = torch.tensor(rows)
        model(**{**inputs([1] * len(rows)), "txt_attention_mask": mask})
        assert all(torch.equal(given[:, 0, 0, :TOKENS], mask.bool()) for given in masks)
    assert not needless_masks._counts


def test_several_texts_of_an_estimate_keep_their_mask(checkout_module, armed, masks, monkeypatch):
    armed()
    monkeypatch.setattr(text_lengths, "are_equal", lambda lengths: len(lengths) == 1)
    for name, build in MODELS.items():
        masks.clear()
        results(build, checkout_module, (7, 7))
        assert masks[-1] is not None, name


def test_texts_of_recorded_passes_are_not_cut(checkout_module, armed, masks):
    patcher = armed(cuda_graphs=True)
    assert patcher.outcomes["needless_masks", "library.flux_models:Flux.forward"].status == "skipped"
    results(flux, checkout_module, (5,))
    assert all(mask.shape[-1] == TOKENS + 12 for mask in masks)


# --- the real scripts ------------------------------------------------------------------------------------------------

UNET_ONLY = "--network_train_unet_only"
MASKED = "--apply_t5_attn_mask"

#: Case -> script and further arguments. Two of the four batches of two have texts of one length.
RUNS = {
    "flux": ("flux_train_network.py", MASKED),
    "flux, batch 2": ("flux_train_network.py", MASKED, UNET_ONLY, "--train_batch_size", "2"),
    "lumina": ("lumina_train_network.py",),
    "lumina, batch 2": ("lumina_train_network.py", UNET_ONLY, "--train_batch_size", "2"),
}
MORE_RUNS = {
    "flux, trained T5": ("flux_train_network.py", MASKED, "--network_args", "train_t5xxl=True", "--text_encoder_lr", "1e-4"),
    "flux, swapped": ("flux_train_network.py", MASKED, UNET_ONLY, "--blocks_to_swap", "2"),
    "flux, ratio": ("flux_train_network.py", MASKED, UNET_ONLY, "--gradient_checkpointing_ratio", "0.5"),
    "flux, cached": ("flux_train_network.py", MASKED, UNET_ONLY, "--cache_text_encoder_outputs"),
    "flux, fine-tune": ("flux_train.py", MASKED),
    "flux, ControlNet": ("flux_train_control_net.py", MASKED),
    "lumina, ratio": ("lumina_train_network.py", UNET_ONLY, "--gradient_checkpointing_ratio", "0.5"),
    "lumina, fine-tune": ("lumina_train.py",),
}


def _marks(case):
    return ([pytest.mark.newest] if "batch" in case else []) + ([pytest.mark.thorough] if case == "lumina" else [])


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=_marks(case)) for case in RUNS),
        *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_RUNS),
    ],
)
def test_real_script_trains_to_the_same_tensors(checkout, train, case):
    script, *more = {**RUNS, **MORE_RUNS}[case]
    without, ours = (
        train(checkout, script, *more, "--fused_operations", *flag, env={"SPY_LOSSES": "1", "SPY_MASKS": "1"})
        for flag in (("--disable_patch", "needless_masks"), ())
    )
    assert ours.losses == pytest.approx(without.losses, abs=TOLERANCE)
    assert ours.tensors.keys() == without.tensors.keys()
    assert max((tensor - without.tensors[name]).abs().max().item() for name, tensor in ours.tensors.items()) <= TOLERANCE

    facts = ours.report["facts"]["needless_masks"]
    batches = 8 if "ControlNet" in case else 4  # its model and FLUX
    assert facts.get("texts cut", 0) == (batches if "flux" in case else 0)
    assert facts["masks left out"] == (2 if "batch 2" in case else batches)
    changed = ours.masks["unmasked"] - without.masks["unmasked"]
    assert changed == without.masks["masked"] - ours.masks["masked"]
    assert changed >= 6 * facts["masks left out"], "at least one call in every block"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["flux", "lumina"])
def test_bf16_is_as_close_to_float32_as_without_the_patch(checkout, train, case):
    script, *more = (*RUNS[case], UNET_ONLY, "--max_train_steps", "20")
    bf16, off = ("--mixed_precision", "bf16", "--fused_operations"), ("--disable_patch", "needless_masks")
    exact, without, ours = (
        train(checkout, script, *more, *options, env={"SPY_LOSSES": "1"}) for options in ((), (*bf16, *off), bf16)
    )
    (losses, weights), (losses_without, weights_without) = ours.distance_from(exact), without.distance_from(exact)
    print(f"{case}: losses {losses:.2e} (without {losses_without:.2e}), weights {weights:.2e} (without {weights_without:.2e})")
    assert 0 < losses < 1.5 * losses_without
    assert 0 < weights < 1.5 * weights_without


@pytest.mark.newest
@pytest.mark.parametrize("case", ["flux", pytest.param("lumina", marks=pytest.mark.slow)])
def test_sample_images_are_close(checkout, train, tmp_path, case):
    from PIL import Image, ImageChops

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle --n a blue square on white --l 3 --w 64 --h 64 --s 2 --d 1", encoding="utf-8")
    options = ("--cache_text_encoder_outputs", "--sample_prompts", str(prompts), "--sample_every_n_steps", "4")
    script, *more = (*RUNS[case], UNET_ONLY, *options)  # with uncached texts, upstream cannot sample with Lumina 2
    without, ours = (
        train(checkout, script, *more, "--fused_operations", *flag) for flag in (("--disable_patch", "needless_masks"), ())
    )
    assert without.code == ours.code == 0, ours.output[-3000:]
    images = [sorted((run.folder / "sample").glob("*.png")) for run in (without, ours)]
    assert len(images[0]) == len(images[1]) == 1
    theirs, mine = (Image.open(files[0]).convert("RGB") for files in images)
    assert max(most for _, most in ImageChops.difference(theirs, mine).getextrema()) <= 1, "of 255"


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS)
def test_compiled_blocks_have_few_graphs_for_all_lengths(checkout, train, case):
    script, *more = RUNS[case]
    options = (UNET_ONLY, "--fused_operations", "--selective_torch_compile")
    without, ours = (
        train(checkout, script, *more, *options, "--max_train_steps", "24", *flag, env={"SPY_LOSSES": "1"})
        for flag in (("--disable_patch", "needless_masks"), ())
    )
    compiled = ours.report["facts"]["selective_torch_compile"]
    assert compiled["graph_breaks"] == 0
    assert sum(block["graphs"] for block in compiled["blocks"].values()) <= (10 if "batch 2" in case else 5)
    assert ours.graphs[-1] == ours.graphs[15], "no further graph for more lengths"
    assert ours.losses == pytest.approx(without.losses, abs=1e-4)
