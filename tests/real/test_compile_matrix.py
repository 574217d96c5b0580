"""Compare compiled and eager training over twenty steps of every script and network: the same losses and file, no graph
breaks, no recompiles after the first epoch.

    python -m pytest tests/real/test_compile_matrix.py -m slow -n 0 -s

prints a line per row, and writes it to the JSON file in the variable COMPILE_MATRIX. Eager runs use the extension too, so
that only compiling differs.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

COMMAND = "COMPILE_MATRIX=FILE python -m pytest tests/real/test_compile_matrix.py -m slow -n 0 -s -k twenty_steps"
STEPS = 20
#: Steps per epoch: 8 batches in 2 sizes, with each size at least twice.
EPOCH = 8
TOLERANCE = 1e-5
ON = ("--selective_torch_compile",)

UNET = {"BasicTransformerBlock"}
CLIP = {"CLIPEncoderLayer"}
FLUX = {"DoubleStreamBlock", "SingleStreamBlock"}
DIT_ONLY = ("--network_train_unet_only",)
#: AdamW amplifies rounding noise to full steps where the true gradient is zero, such as a key's bias.
SGD = ("--optimizer_type", "SGDNesterov", "--learning_rate", "0.01")


def network(module, *arguments):
    return ("--network_module", module, *(("--network_args", *arguments) if arguments else ()))


def lycoris(algorithm, *arguments):
    return network("lycoris.kohya", f"algo={algorithm}", "preset=attn-mlp", *arguments)


@dataclass(frozen=True)
class Row:
    """A configuration of a script."""

    name: str
    script: str
    classes: frozenset[str]
    """The compiled classes."""
    more: tuple[str, ...] = ()
    family: str | None = None
    last_compiling_step: int = EPOCH
    """The last step that may compile."""


def row(name, script, classes, *more, family=None, last_compiling_step=EPOCH):
    return Row(name, f"{script}.py", frozenset(classes), more, family, last_compiling_step)


ROWS = (
    row("sdxl", "sdxl_train_network", UNET | CLIP),
    row("sdxl-locon", "sdxl_train_network", UNET, *network("networks.lora", "conv_dim=4"), *DIT_ONLY),
    row("sdxl-dropout", "sdxl_train_network", UNET, *network("networks.lora", "rank_dropout=0.3"), "--network_dropout", "0.2",
        *DIT_ONLY),
    row("sdxl-loha", "sdxl_train_network", UNET, *network("networks.loha"), *DIT_ONLY),
    row("sdxl-lokr", "sdxl_train_network", UNET, *network("networks.lokr"), *DIT_ONLY),
    row("sdxl-lora-fa", "sdxl_train_network", UNET, *network("networks.lora_fa"), *DIT_ONLY),
    row("sdxl-oft", "sdxl_train_network", UNET, *network("networks.oft"), *DIT_ONLY),
    row("sdxl-lycoris-locon", "sdxl_train_network", UNET | CLIP, *lycoris("locon", "conv_dim=4")),
    row("sdxl-lycoris-lokr", "sdxl_train_network", UNET, *lycoris("lokr"), *DIT_ONLY),
    row("sdxl-finetune", "sdxl_train", UNET | CLIP),
    row("sdxl-controlnet", "sdxl_train_control_net", UNET, *SGD),
    row("sdxl-lllite", "sdxl_train_control_net_lllite", UNET, *SGD),
    row("sdxl-inversion", "sdxl_train_textual_inversion", UNET | CLIP),
    row("sd15", "train_network", UNET | CLIP),
    row("sd15-dreambooth", "train_db", UNET | CLIP, *SGD),
    row("sd15-finetune", "fine_tune", UNET | CLIP, *SGD),
    row("sd3", "sd3_train_network", {"MMDiTBlock"} | CLIP),
    row("sd3-finetune", "sd3_train", {"MMDiTBlock"}, *SGD),
    row("flux", "flux_train_network", FLUX | CLIP),
    row("flux-lycoris-dora", "flux_train_network", FLUX, *lycoris("locon", "dora_wd=True"), *DIT_ONLY),
    row("flux-lycoris-loha", "flux_train_network", FLUX, *lycoris("loha"), *DIT_ONLY),
    row("flux-lycoris-lokr", "flux_train_network", FLUX, *lycoris("lokr"), *DIT_ONLY),
    row("flux-lycoris-ia3", "flux_train_network", FLUX, *lycoris("ia3"), *DIT_ONLY),
    row("flux-lycoris-full", "flux_train_network", FLUX, *lycoris("full"), *DIT_ONLY),
    row("flux-lycoris-oft", "flux_train_network", FLUX, *lycoris("diag-oft"), *DIT_ONLY),
    row("flux-swap", "flux_train_network", FLUX, *DIT_ONLY, "--blocks_to_swap", "1"),
    row("flux-finetune", "flux_train", FLUX, *SGD),
    row("flux-controlnet", "flux_train_control_net", FLUX, *SGD),
    row("chroma", "flux_train_network", FLUX, *DIT_ONLY, family="chroma"),
    # Texts of equal and of different lengths need separate graphs, and each epoch pairs them differently.
    row("chroma-b2", "flux_train_network", FLUX, *DIT_ONLY, "--train_batch_size", "2", family="chroma", last_compiling_step=16),
    row("lumina", "lumina_train_network", {"JointTransformerBlock"}),
    row("lumina-finetune", "lumina_train", {"JointTransformerBlock"}, *SGD),
    row("hunyuan", "hunyuan_image_train_network", {"MMDoubleStreamBlock", "MMSingleStreamBlock"}),
    row("anima", "anima_train_network", {"Block"}),
    row("anima-finetune", "anima_train", {"Block"}, *SGD),
)  # fmt: skip


#: Networks that v0.10 lacks.
ONLY_NEWER = ("networks.loha", "networks.lokr")


def facts(run):
    compiling = run.report["facts"]["selective_torch_compile"]
    return compiling, {label.partition(":")[2].partition(".")[0]: block for label, block in compiling["blocks"].items()}


def compare(compiled, eager):
    """Return the numbers of a row: the differences between the runs, and the compiled graphs."""
    assert len(eager.losses) == len(compiled.losses) == STEPS
    assert compiled.tensors.keys() == eager.tensors.keys()
    assert not any("_orig_mod" in name for name in compiled.tensors)
    compiling, blocks = facts(compiled)
    return {
        "loss": max(abs(a - b) for a, b in zip(compiled.losses, eager.losses, strict=True)),
        "file": max(
            (tensor.double() - eager.tensors[name].double()).abs().max().item() for name, tensor in compiled.tensors.items()
        ),
        "graphs": {name: block["graphs"] for name, block in sorted(blocks.items())},
        "breaks": compiling["graph_breaks"],
        "last_compiled_in_step": compiled.graphs.index(compiled.graphs[-1]) + 1,
    }


@pytest.fixture(scope="session")
def record_row():
    """Print a row, and add it to the file in COMPILE_MATRIX."""

    def keep(name, checkout, backend, numbers):
        graphs = ", ".join(f"{kind} {count}" for kind, count in numbers["graphs"].items())
        print(
            f"\n{name} ({checkout.label}, {backend}): loss {numbers['loss']:.1e}, file {numbers['file']:.1e}, graphs {graphs}, "
            f"{numbers['breaks']} breaks, last compiled in step {numbers['last_compiled_in_step']} of {STEPS}"
        )
        if "COMPILE_MATRIX" in os.environ:
            file = Path(os.environ["COMPILE_MATRIX"])
            kept = json.loads(file.read_text()) if file.is_file() else {"command": COMMAND}
            key = f"sd-scripts {checkout.layout}, torch {torch.__version__.partition('+')[0]}, {backend}"
            kept.setdefault(key, {})[name] = numbers
            file.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")

    return keep


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_twenty_steps_equal_eager(checkout, train, record_row, row):
    if "lycoris.kohya" in row.more:
        pytest.importorskip("lycoris")
    module = next((word for word in row.more if word.startswith("networks.")), None)
    if checkout.layout == "v0.10" and module in ONLY_NEWER:
        rejected = train(checkout, row.script, *row.more)
        assert rejected.code == 2
        assert module in rejected.output
        return
    backend = os.environ.get("COMPILE_MATRIX_BACKEND", "aot_eager")
    given = (*row.more, "--max_train_steps", str(STEPS))
    spied = {"SPY_LOSSES": "1"}
    eager = train(checkout, row.script, *given, family=row.family, env=spied)
    compiled = train(checkout, row.script, *given, *ON, family=row.family, env={**spied, "COMPILE_BACKEND": backend})
    numbers = compare(compiled, eager)
    record_row(row.name, checkout, backend, numbers)
    assert numbers["graphs"].keys() == row.classes
    assert numbers["loss"] <= TOLERANCE
    assert numbers["file"] <= TOLERANCE
    assert numbers["breaks"] == 0
    assert numbers["last_compiled_in_step"] <= row.last_compiling_step
    assert facts(compiled)[0]["disabled_because"] is None
    assert {block["eager_because"] for block in facts(compiled)[1].values()} == {None}


NOT_COMPILED = {
    "dylora": (network("networks.dylora"), "DyLoRA draws a random rank"),
    "lycoris-dylora": (lycoris("dylora"), "DyLoRA draws a random rank"),
    "module-dropout": (network("networks.lora", "module_dropout=0.5"), "module_dropout skips layers at random"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", NOT_COMPILED)
def test_networks_with_graph_breaks_run_eager_with_a_warning(checkout, train, kind):
    more, message = NOT_COMPILED[kind]
    if "lycoris.kohya" in more:
        pytest.importorskip("lycoris")
    given = (*more, *DIT_ONLY)
    run = train(checkout, "sdxl_train_network.py", *given, *ON)
    eager = train(checkout, "sdxl_train_network.py", *given)
    assert run.output.count(f"selective compile is off: {message}") == 1
    assert facts(run)[1] == {}
    assert run.tensors.keys() == eager.tensors.keys()
    assert all(torch.equal(tensor, eager.tensors[name]) for name, tensor in run.tensors.items())


# --- bf16 -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("script", ["sdxl_train_network.py", "lumina_train_network.py"])
def test_compiled_bf16_is_as_close_to_float32_as_eager(checkout, train, script):
    """Inductor's kernels round at other places, and less often where products are not stored."""
    more = ("--max_train_steps", str(STEPS), *DIT_ONLY)
    bf16 = ("--mixed_precision", "bf16")
    exact, eager, compiled = (
        train(checkout, script, *more, *options, env={"SPY_LOSSES": "1", "COMPILE_BACKEND": "inductor"})
        for options in ((), bf16, (*bf16, *ON))
    )

    (eager_losses, eager_weights), (losses, weights) = eager.distance_from(exact), compiled.distance_from(exact)
    print(
        f"\n{script} ({checkout.label}): from float32, losses {eager_losses:.2e} eager and {losses:.2e} compiled, "
        f"weights {eager_weights:.2e} and {weights:.2e}"
    )
    assert 0 < losses < 1.5 * eager_losses
    assert 0 < weights < 1.5 * eager_weights
    assert {block["eager_because"] for block in facts(compiled)[1].values()} == {None}


# --- depth ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_graphs_do_not_grow_with_depth(checkout, checkout_module, monkeypatch, tmp_path):
    """Compares FLUX with 2 + 2 and with 6 + 12 checkpointed blocks."""
    from kohya_ext.compiling import blocks, configuration
    from kohya_ext.config.settings import Settings

    models = checkout_module("library.flux_models")
    monkeypatch.setenv(configuration.CACHE_VARIABLE, str(tmp_path))
    settings = Settings(selective_torch_compile=True)
    counts = []
    for depth, single in ((2, 2), (6, 12)):
        torch._dynamo.reset()
        run = blocks.Run(backend="aot_eager")
        monkeypatch.setattr(blocks, "RUN", run)
        for name in FLUX:
            kind = getattr(models, name)
            original = getattr(kind._forward, "__wrapped__", kind._forward)
            monkeypatch.setattr(kind, "_forward", blocks.compile_method(original, f"flux:{name}._forward", "", settings))
        sizes = {"in_channels": 64, "vec_in_dim": 8, "context_in_dim": 8, "hidden_size": 64, "mlp_ratio": 2.0, "num_heads": 2}
        shape = {"axes_dim": [8, 12, 12], "theta": 10_000, "qkv_bias": True, "guidance_embed": False}
        model = models.Flux(models.FluxParams(**sizes, **shape, depth=depth, depth_single_blocks=single))
        model.enable_gradient_checkpointing()
        for tokens in (16, 24, 32):
            inputs = {"img": torch.randn(1, tokens, 64), "txt": torch.randn(1, 6, 8), "y": torch.randn(1, 8)}
            ids = {"img_ids": torch.zeros(1, tokens, 3), "txt_ids": torch.zeros(1, 6, 3), "timesteps": torch.rand(1)}
            model(**inputs, **ids).sum().backward()
        assert run.breaks == 0
        counts.append({block.name: block.graphs for block in run.blocks.values()})
        assert {block.name: block.calls for block in run.blocks.values()} == {
            "DoubleStreamBlock": 6 * depth,
            "SingleStreamBlock": 6 * single,
        }
    torch._dynamo.reset()
    assert counts[0] == counts[1]


# --- five buckets -----------------------------------------------------------------------------------------------------

#: Width and height of five images, each in its own bucket.
SIZES = ((128, 128), (128, 64), (64, 128), (192, 64), (64, 192))


@pytest.fixture(scope="session")
def five_sizes(tmp_path_factory):
    from PIL import Image

    folder = tmp_path_factory.mktemp("five")
    (folder / "1_sks").mkdir()
    for index, size in enumerate(SIZES):
        Image.linear_gradient("L").resize(size).rotate(90 * index).convert("RGB").save(folder / "1_sks" / f"{index}.png")
        (folder / "1_sks" / f"{index}.txt").write_text(f"image {index}")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "family"),
    [
        ("sdxl_train_network.py", None),
        ("train_network.py", None),
        ("flux_train_network.py", None),
        ("flux_train_network.py", "chroma"),
        ("lumina_train_network.py", None),
        ("sd3_train_network.py", None),
        ("anima_train_network.py", None),
        ("hunyuan_image_train_network.py", None),
    ],
)
def test_five_buckets_over_three_epochs(checkout, train, five_sizes, script, family):
    """The first two epochs may compile; the third must not."""
    more = ("--train_data_dir", str(five_sizes), "--max_train_steps", "15", "--network_train_unet_only")
    run = train(checkout, script, *more, *ON, family=family, env={"SPY_LOSSES": "1", "COMPILE_BACKEND": "eager"})
    assert run.code == 0, run.output[-4000:]
    compiling, blocks = facts(run)
    counts = {name: block["graphs"] for name, block in blocks.items()}
    first, second, third = run.graphs[4], run.graphs[9], run.graphs[14]
    print(
        f"\n{script} {family or ''} ({checkout.label}): graphs after each step {run.graphs} {counts}, "
        f"{compiling['graph_breaks']} breaks, {third - second} recompiles in the third epoch"
    )
    assert first > 0
    assert third == second
    assert compiling["graph_breaks"] == 0
    assert {block["eager_because"] for block in blocks.values()} == {None}
