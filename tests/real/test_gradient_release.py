"""``--gradient_release`` trains what upstream trains without it, in every script of a fine-tune, and resumes bit for bit."""

import pytest

from tests.real.test_losing_nothing import FULL, same, write_images_with_nan

torch = pytest.importorskip("torch")
tree_leaves = torch.utils._pytree.tree_leaves

#: Upstream's own clipping needs the norm of all gradients.
UNCLIPPED = ("--max_grad_norm", "0")
SCHEDULE = ("--lr_scheduler", "cosine", "--lr_warmup_steps", "1")
RELEASE = "--gradient_release"
BF16 = ("--mixed_precision", "bf16", "--full_bf16")

OPTIMIZERS = {
    "AdamW": (),
    "Lion": ("--optimizer_type", "Lion"),
    "SGDNesterov": ("--optimizer_type", "SGDNesterov"),
    "AdamWScheduleFree": ("--optimizer_type", "AdamWScheduleFree", "--optimizer_args", "warmup_steps=3"),
    "Adafactor": ("--optimizer_type", "Adafactor", "--optimizer_args", "relative_step=False", "scale_parameter=False"),
    "relative Adafactor": ("--optimizer_type", "Adafactor"),
    "CAME": ("--optimizer_type", "pytorch_optimizer.CAME"),
}


def assert_released(run, weights=1):
    """The patch stepped, and did not only leave the loop's step as it was."""
    assert run.code == 0, run.output[-4000:]
    assert f"{RELEASE} steps" in run.output
    assert run.report["facts"]["gradient_release"]["weights"] >= weights


def without_release(train, checkout, script, *options):
    """Run upstream, or the patches alone for SDXL, whose text encoders upstream trains with wrong gradients."""
    return train(checkout, script, *options, start="launcher" if script == FULL else "plain")


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(FULL, marks=pytest.mark.newest),
        pytest.param("flux_train.py", marks=pytest.mark.oldest),
        *(
            pytest.param(script, marks=pytest.mark.slow)
            for script in ("sd3_train.py", "lumina_train.py", "anima_train.py", "fine_tune.py", "train_db.py")
        ),
    ],
)
def test_weights_are_upstreams(checkout, train, script):
    options = (*UNCLIPPED, *SCHEDULE)
    upstream = without_release(train, checkout, script, *options)
    released = train(checkout, script, *options, RELEASE)
    assert_released(released)
    assert same(released.tensors, upstream.tensors)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer_steps_as_upstream(checkout, train, optimizer):
    options = (*UNCLIPPED, *OPTIMIZERS[optimizer])
    upstream = without_release(train, checkout, "flux_train.py", *options)
    released = train(checkout, "flux_train.py", *options, RELEASE)
    assert_released(released)
    assert same(released.tensors, upstream.tensors)


@pytest.mark.thorough
@pytest.mark.newest
def test_bf16_weights_are_upstreams_without_stochastic_rounding(checkout, train):
    options = (*UNCLIPPED, *BF16, "--optimizer_type", "AdamW")
    upstream = without_release(train, checkout, FULL, *options)
    released = train(checkout, FULL, *options, RELEASE, "--no-stochastic_rounding")
    assert_released(released)
    assert same(released.tensors, upstream.tensors)


def test_gradients_below_the_limit_are_not_changed(checkout, train):
    options = ("--max_grad_norm", "1e6")
    upstream = without_release(train, checkout, "flux_train.py", *options)
    released = train(checkout, "flux_train.py", *options, RELEASE)
    assert "clips to --max_grad_norm 1e+06 by the norm of the last step" in released.output
    assert same(released.tensors, upstream.tensors)


@pytest.mark.newest
def test_a_skipped_step_holds_schedule_and_average_back_as_without_release(checkout, train, tmp_path):
    from safetensors.torch import load_file

    def run(*more):
        write_images_with_nan(folder := tmp_path / str(len(more)))
        options = (
            "--train_data_dir",
            str(folder),
            "--cache_latents_to_disk",
            "--caching_workers",
            "0",
            "--max_train_steps",
            "8",
        )
        return train(checkout, FULL, *UNCLIPPED, "--lr_scheduler", "cosine", "--ema", *options, *more)

    usual, released = run(), run(RELEASE)
    assert_released(released)
    assert released.output.count("skipped: loss or gradient is not finite") == 2
    assert same(released.tensors, usual.tensors)
    assert same(*(load_file(each.folder / "tiny-ema.safetensors") for each in (released, usual)))


#: Case -> script and options. AdamW's states are bf16, and rounded, too; the states of Adafactor are float32, and of CAME both.
RESUMED = {
    "stochastic rounding": (FULL, (*BF16, "--optimizer_type", "AdamW")),
    "master weights": (FULL, (*BF16, "--optimizer_type", "AdamW", "--master_weights")),
    "clipping": ("flux_train.py", ("--max_grad_norm", "0.01")),
    "schedule-free": ("flux_train.py", (*UNCLIPPED, *OPTIMIZERS["AdamWScheduleFree"])),
    "float32 states": ("flux_train.py", (*UNCLIPPED, *BF16, *OPTIMIZERS["Adafactor"])),
    "CAME": ("flux_train.py", (*UNCLIPPED, *BF16, *OPTIMIZERS["CAME"])),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("stochastic rounding", marks=pytest.mark.newest),
        pytest.param("master weights", marks=pytest.mark.thorough),
        pytest.param("clipping", marks=pytest.mark.oldest),
        pytest.param("schedule-free", marks=pytest.mark.thorough),
        pytest.param("float32 states", marks=pytest.mark.newest),
        pytest.param("CAME", marks=pytest.mark.thorough),
    ],
)
def test_resume_equals_the_undisturbed_run(checkout, train, case):
    script, options = RESUMED[case]
    options = (*options, RELEASE, "--save_every_n_steps", "2", "--save_state")
    undisturbed = train(checkout, script, *options)
    assert_released(undisturbed)
    resumed = train(checkout, script, *options, "--resume", str(undisturbed.folder / "tiny-step00000002-state"))
    assert same(resumed.tensors, undisturbed.tensors)


@pytest.mark.thorough
@pytest.mark.newest
@pytest.mark.parametrize("more", [(), (RELEASE,), (RELEASE, "--master_weights")], ids=" ".join)
def test_a_state_of_float32_weights_is_resumed_with_bf16(checkout, train, more):
    options = (*UNCLIPPED, "--optimizer_type", "AdamW", "--save_every_n_steps", "2", "--save_state")
    usual = train(checkout, FULL, *options)
    resumed = train(checkout, FULL, *options, *BF16, *more, "--resume", str(usual.folder / "tiny-step00000002-state"))
    assert resumed.code == 0, resumed.output[-4000:]
    differences = [(tensor.double() - usual.tensors[name].double()).flatten() for name, tensor in resumed.tensors.items()]
    assert torch.cat(differences).abs().mean() < 1e-3  # single weights differ by steps, where a gradient is almost 0


#: The same with 8-bit states and their small tables, which stay where they are, and the states of another package.
ON_HOST = {
    "AdamW": (FULL, (*UNCLIPPED, "--optimizer_type", "AdamW")),
    "stochastic rounding": RESUMED["stochastic rounding"],
    "half of them": RESUMED["master weights"],
    "fused AdamW": (FULL, (*UNCLIPPED, *BF16, "--optimizer_type", "AdamW", "--optimizer_args", "fused=True")),
    "AdamW8bit": ("flux_train.py", (*UNCLIPPED, "--optimizer_type", "AdamW8bit")),
    "Adafactor": ("flux_train.py", (*UNCLIPPED, *OPTIMIZERS["Adafactor"])),
    "CAME": RESUMED["CAME"],
    "schedule-free": RESUMED["schedule-free"],
}


@pytest.mark.parametrize("order", [pytest.param("early", marks=pytest.mark.thorough), "late"])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param("half of them", marks=pytest.mark.newest),
        *(pytest.param(case, marks=pytest.mark.slow) for case in ON_HOST if case != "half of them"),
    ],
)
def test_states_on_the_host_are_those_on_the_gpu(checkout, train, case, order):
    script, options = ON_HOST[case]
    options = (*options, RELEASE, "--save_every_n_steps", "2", "--save_state")
    usual = train(checkout, script, *options)
    env = {"STATES_ON_CPU": order}
    half = ("--optimizer_states_on_host_ratio", "0.5") if case == "half of them" else ()
    kept = train(checkout, script, *options, "--optimizer_states_on_host", *half, env=env)
    assert_released(kept)
    assert kept.report["facts"]["gradient_release"]["host_bytes"] > 0 or case == "Adafactor"
    assert same(kept.tensors, usual.tensors)
    states = [run.folder / "tiny-step00000002-state" for run in (usual, kept)]
    resumed = train(checkout, script, *options, "--optimizer_states_on_host", "--resume", str(states[1]), env=env)
    assert same(resumed.tensors, usual.tensors)
    in_files = [tree_leaves(torch.load(state / "optimizer.bin", weights_only=True)) for state in states]
    torch.testing.assert_close(*in_files, rtol=0, atol=0)  # so either can be resumed without the option, too


@pytest.mark.newest
@pytest.mark.thorough
def test_the_preset_for_8_gb_trains(checkout, train):
    omitted = ("--optimizer_type", "AdamW", "--mixed_precision", "no", "--learning_rate", "1e-4")
    run = train(checkout, "sdxl_train.py", "--preset", "8gb", without=omitted, env={"STATES_ON_CPU": "late"})
    assert_released(run)
    assert all(tensor.isfinite().all() for tensor in run.tensors.values())
