"""--cuda_graphs in the real scripts, with CUDA graphs replaced by a replayer of operations on the CPU."""

import random
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.thorough

REPLAY = {"REPLAY_ON_CPU": "1"}
BF16 = ("--mixed_precision", "bf16")
LORA = "sdxl_train_network.py"


@dataclass(frozen=True)
class Case:
    """A run whose result is compared with the same run without --cuda_graphs."""

    script: str
    options: tuple[str, ...] = BF16
    without: tuple[str, ...] = ()
    family: str | None = None
    reason: str | None = None
    """Why the model is not recorded; None if it is."""
    recording: tuple[str, ...] = ("--cuda_graphs", "--cuda_graphs_always")
    """The first two steps run eager, or four and a size's first occurrences if it is measured whether the GPU waits."""


GGPO = ("--network_args", "ggpo_sigma=0.5", "ggpo_beta=0.5", "--max_train_steps", "5")

DEFAULT = ("accumulation", "ggpo")
CASES = {
    "accumulation": Case(LORA, (*BF16, "--gradient_accumulation_steps", "2", "--max_train_steps", "3")),
    "measured": Case(LORA, (*BF16, "--max_train_steps", "10"), recording=("--cuda_graphs",)),
    "ggpo": Case(
        "flux_train_network.py",
        (*BF16, *GGPO),
        without=("--gradient_checkpointing",),  # with it, random numbers are the reason
        reason="LoRAModule.combined_weight_norms is replaced between steps",
    ),
    "checkpointing-off": Case(LORA, without=("--gradient_checkpointing",)),
    "dropout": Case(
        LORA,
        (*BF16, "--network_dropout", "0.2", "--network_args", "rank_dropout=0.1"),
        without=("--gradient_checkpointing",),
    ),
    "compiled": Case(LORA, (*BF16, "--selective_torch_compile")),
    "fused-operations": Case(LORA, (*BF16, "--fused_operations")),
    "kept-attention": Case(LORA, (*BF16, "--keep_attention")),
    "flux-kept-attention": Case("flux_train_network.py", (*BF16, "--keep_attention", "--gradient_checkpointing_ratio", "0.5")),
    "ratio": Case(LORA, (*BF16, "--gradient_checkpointing_ratio", "0.5")),
    "reentrant": Case(LORA, (*BF16, "--disable_patch", "nonreentrant_checkpointing", "--network_train_unet_only")),
    "ema": Case(LORA, (*BF16, "--ema_decay", "0.9")),
    "lora-fa": Case(LORA, (*BF16, "--network_module", "networks.lora_fa")),
    "locon": Case(LORA, (*BF16, "--network_args", "conv_dim=4")),
    "prodigy": Case(LORA, (*BF16, "--optimizer_type", "Prodigy")),
    "validation": Case(
        LORA, (*BF16, "--validation_split", "0.5", "--validate_every_n_steps", "2", "--max_validation_steps", "1")
    ),
    "sd15": Case("train_network.py"),
    "flux": Case("flux_train_network.py"),
    "flux-fp8": Case("flux_train_network.py", (*BF16, "--fp8_base")),
    "sd3": Case("sd3_train_network.py"),
    "lumina": Case("lumina_train_network.py", reason="RuntimeError: tolist while capturing"),
    "anima": Case("anima_train_network.py"),
    "hunyuan-image": Case("hunyuan_image_train_network.py", (), reason="the model reads results on the CPU"),
    "chroma": Case("flux_train_network.py", family="chroma", reason="the model "),
    "dropout-checkpointing": Case(LORA, (*BF16, "--network_dropout", "0.2"), reason="dropout with gradient checkpointing"),
    "module-dropout": Case(LORA, (*BF16, "--network_args", "module_dropout=0.5"), reason="module_dropout skips layers"),
    "oft": Case(LORA, (*BF16, "--network_module", "networks.oft"), reason="OFT inverts matrices"),
    "dylora": Case(
        LORA,
        (*BF16, "--network_module", "networks.dylora", "--network_args", "unit=1"),
        without=("--gradient_checkpointing",),
        reason="DyLoRA draws a random rank",
    ),
}


@pytest.mark.newest
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=[] if name in DEFAULT else pytest.mark.slow) for name, case in CASES.items()],
)
def test_replayed_training_is_bit_identical(checkout, train, case):
    """Four steps of two sizes, with trained text encoders and gradient checkpointing unless the case changes it."""
    eager, replayed = (
        train(checkout, case.script, *case.options, *more, without=case.without, family=case.family, env=REPLAY)
        for more in ((), case.recording)
    )
    assert eager.code == replayed.code == 0, replayed.output[-4000:]
    facts = replayed.report["facts"]["cuda_graphs"]
    if case.reason is None:
        assert "off" not in facts
        assert facts["recorded"] >= 1
        assert facts["replayed"] >= 2
    else:
        assert f"cuda_graphs: {case.reason}" in " ".join(replayed.output.split())
        assert facts.get("off", case.reason).startswith(case.reason)  # a fact only where an attempt found it
        assert replayed.output.count("training continues without CUDA graphs") == 1
    assert all(torch.equal(replayed.tensors[name], expected) for name, expected in eager.tensors.items())


#: Scripts whose models are recorded on a GPU, too -> networks, and whether text encoders are trained.
RECORDED = {
    "sdxl_train_network.py": (("networks.lora", "networks.lora_fa", "networks.dylora", "networks.oft"), True),
    "train_network.py": (("networks.lora", "networks.lora_fa", "networks.dylora"), True),
    "flux_train_network.py": (("networks.lora_flux",), True),
    "anima_train_network.py": (("networks.lora_anima",), False),
}
OPTIMIZERS = ("AdamW", "Lion", "Prodigy", "DAdaptAdam", "SGDNesterov", "Adafactor")
DROPOUTS = (("--network_dropout", "0.1"), ("--network_args", "module_dropout=0.3"), ("--network_args", "rank_dropout=0.2"))
SOMETIMES = (
    ("--fused_operations",),
    ("--keep_attention",),
    ("--scale_weight_norms", "0.01"),
    ("--ema_decay", "0.9"),
    ("--max_grad_norm", "0"),
    ("--noise_offset", "0.05"),
    ("--loss_type", "huber", "--huber_schedule", "constant"),
    ("--caption_dropout_rate", "0.3"),
    ("--lr_scheduler", "cosine", "--lr_warmup_steps", "2"),
)


def random_options(script, generator):
    """Return options of a run, and default arguments that it goes without."""
    networks, trains_text_encoders = RECORDED[script]
    checkpoints = generator.random() < 0.5
    optimizer = generator.choice(OPTIMIZERS)
    # Adafactor has a schedule of its own, with which upstream refuses a warmup.
    sometimes = [option for option in SOMETIMES if optimizer != "Adafactor" or "--lr_warmup_steps" not in option]
    words = [
        *("--mixed_precision", generator.choice(("no", "bf16", "bf16"))),
        *("--network_module", network := generator.choice((networks[0], *networks))),
        *("--optimizer_type", optimizer, "--max_train_steps", str(generator.randint(3, 5))),
        *("--gradient_accumulation_steps", str(generator.randint(1, 3)), "--train_batch_size", str(generator.randint(1, 2))),
        *(word for option in sometimes if generator.random() < 0.25 for word in option),
    ]
    if network == "networks.dylora":
        words += ["--network_args", "unit=1"]
        if optimizer == "Adafactor":  # its own schedule fails where a group has no gradients, with or without the extension
            words += ["--optimizer_args", "relative_step=False", "scale_parameter=False", "warmup_init=False"]
    elif generator.random() < 0.3:
        # In v0.10, rank_dropout's mask does not have the shape of Anima's activations, with or without the extension.
        words += generator.choice(DROPOUTS[:-1] if script == "anima_train_network.py" else DROPOUTS)
    if trains_text_encoders and generator.random() < 0.5:
        words += ["--network_train_unet_only"]
    if checkpoints and generator.random() < 0.4:
        words += ["--gradient_checkpointing_ratio", "0.5"]
    return words, () if checkpoints else ("--gradient_checkpointing",)


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize("seed", range(12))
def test_training_with_random_options_is_bit_identical(checkout, train, seed):
    """Recorded or not: a model that is not recorded has one line that says why."""
    generator = random.Random(seed)
    script = generator.choice([*RECORDED])
    options, without = random_options(script, generator)
    eager, replayed = (
        train(checkout, script, *options, *more, without=without, env=REPLAY)
        for more in ((), ("--cuda_graphs", "--cuda_graphs_always"))
    )
    command = " ".join([script, *options, *(f"without {option}" for option in without)])
    assert eager.code == replayed.code == 0, f"{command}\n{eager.output[-2000:]}\n{replayed.output[-2000:]}"
    recorded = replayed.report["facts"]["cuda_graphs"].get("replayed", 0) >= 1
    assert recorded != ("training continues without CUDA graphs" in replayed.output), command
    assert all(torch.equal(replayed.tensors[name], expected) for name, expected in eager.tensors.items()), command


def _read_in_forward(module):
    """Return the attributes that a module's forward reads, with methods that it calls on itself."""
    seen, names, left = set(), set(), ["forward"]
    while left:
        code = getattr(getattr(type(module), left.pop(), None), "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        names |= {*code.co_names}
        left += [name for name in code.co_names if name not in ("forward", "__init__")]
    own = {*vars(module), *module._parameters, *module._buffers, *module._modules} - {*vars(torch.nn.Module())}
    return [*sorted(names & own), "training"]


#: Network -> arguments of its module's class beyond name, layer, multiplier, rank and alpha.
NETWORKS = {
    "networks.lora": {"dropout": 0.1, "rank_dropout": 0.1},
    "networks.lora_fa": {},
    "networks.lora_flux": {"ggpo_sigma": 0.1, "ggpo_beta": 0.1},
    "networks.lora_lumina": {},
    "networks.lora_anima": {},
    "networks.loha": {},
    "networks.lokr": {},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_recording_notices_each_value_that_a_network_reads(checkout, checkout_module, name):
    from kohya_ext.compiling.module_values import ModuleValues

    if not (checkout.path / f"{name.replace('.', '/')}.py").exists():
        assert checkout.layout == "v0.10"
        return
    module = checkout_module(name)
    kind = next(getattr(module, each) for each in ("LoRAModule", "LoHaModule", "LoKrModule") if hasattr(module, each))
    network = kind("layer", torch.nn.Linear(16, 16), 1.0, 2, 2.0, **NETWORKS[name])
    network.apply_to()
    read = _read_in_forward(network)
    assert {"multiplier", "scale", "org_forward"} <= {*read}, read
    for attribute in read:
        before = getattr(network, attribute)
        values = ModuleValues([torch.nn.ModuleList([network])])
        state = values.state()
        assert values.state() == state
        if isinstance(before, (bool, int, float)):
            setattr(network, attribute, type(before)(not before) if isinstance(before, bool) else before + 1)
        elif isinstance(before, torch.nn.Module):
            setattr(network, attribute, torch.nn.Linear(4, 4))
        elif isinstance(before, torch.nn.Parameter):
            setattr(network, attribute, torch.nn.Parameter(before.detach().clone()))
        else:
            setattr(network, attribute, before.clone() if isinstance(before, torch.Tensor) else torch.zeros(1))
        assert values.state() != state, attribute
        setattr(network, attribute, before)
