"""DeepSpeed with two processes on CPUs: the losses of DistributedDataParallel, whole files, and nothing lost after a stop."""

import json
import os
import shlex
import shutil
import signal
from pathlib import Path

import pytest

from kohya_ext.run import resume
from kohya_ext.tiny import environment
from tests.real import starting
from tests.real.conftest import SITE
from tests.real.test_journal import lines_of, log_of
from tests.real.test_losing_nothing import FULL, LORA, TWO, assert_all_complete, posix, same, write_images_with_nan
from tests.real.test_ranks import end_rank

torch = pytest.importorskip("torch")
from kohya_ext.dry_run import zero  # noqa: E402
from kohya_ext.dry_run.events import Kind  # noqa: E402
from kohya_ext.dry_run.gathered_weights import GatheredWeights  # noqa: E402
from kohya_ext.dry_run.tracker import BACKWARD, Tracker  # noqa: E402
from tests.fake_tensors import fake_tensors  # noqa: E402

pytest.importorskip("deepspeed", reason="deepspeed is not installed (it is in the extra test)")

pytestmark = [posix, pytest.mark.thorough]

PROBE = Path(__file__).parent / "probes" / "zero_bytes.py"
PROBE_WEIGHTS = 20 * 1024**2

#: DeepSpeed's own CPU accelerator; see DEEPSPEED_ON_CPU in tests/real/site.
ON_CPU = {"DS_ACCELERATOR": "cpu", "DEEPSPEED_ON_CPU": "1", "SPY_LOSSES": "1"}
UPSTREAM = {"WRAP_AS_ON_GPUS": "1", "SPY_LOSSES": "1"}
STATES = ("--save_every_n_steps", "2", "--save_state")
OFFLOAD = ("--offload_optimizer_device", "cpu")
STAGES = {
    "1": ("1",),
    "2": ("2",),
    "2-offload": ("2", *OFFLOAD),
    "3": ("3",),
    "3-offload": ("3", *OFFLOAD, "--offload_param_device", "cpu"),
}


def deepspeed(train, checkout, script, stage, *more, env=None, **options):
    words = ("--deepspeed", "--zero_stage", *STAGES[stage], *more)
    return train(checkout, script, *words, ranks=2, env={**ON_CPU, **(env or {})}, **options)


def assert_same_training(run, reference):
    """AdamW amplifies rounding noise in weights, so that they are only compared with those of SGD."""
    assert run.losses == pytest.approx(reference.losses, abs=1e-4)
    assert run.tensors.keys() == reference.tensors.keys()
    assert all(tensor.shape == reference.tensors[name].shape for name, tensor in run.tensors.items())


@pytest.fixture(scope="module")
def with_ddp(train):
    """(checkout, script, more arguments) -> upstream's run with DistributedDataParallel; each runs once."""
    runs = {}

    def of(checkout, script, *more):
        key = (checkout.layout, script, more)
        if key not in runs:
            runs[key] = train(checkout, script, *more, start="plain", env=UPSTREAM, ranks=2)
        return runs[key]

    return of


@pytest.mark.parametrize("stage", ["2", *(pytest.param(stage, marks=pytest.mark.slow) for stage in STAGES if stage != "2")])
def test_a_fine_tune_trains_as_with_ddp(checkout, train, with_ddp, stage):
    run = deepspeed(train, checkout, FULL, stage)
    assert_same_training(run, reference := with_ddp(checkout, FULL))
    for name, tensor in run.tensors.items():
        assert (tensor - reference.tensors[name]).abs().max() < 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["2-offload", "3-offload"])
def test_adamw_on_the_host_follows_the_schedule(checkout, train, with_ddp, stage):
    rates = ("--optimizer_type", "AdamW", "--learning_rate", "1e-3", "--lr_scheduler", "cosine")
    assert_same_training(deepspeed(train, checkout, FULL, stage, *rates), with_ddp(checkout, FULL, *rates))


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_accumulated_batches_count_alike_and_clipping_can_be_off(checkout, train, with_ddp, stage):
    # DeepSpeed's runs have one data loader worker, which draws other random numbers in the second epoch than this process.
    words = ("--gradient_accumulation_steps", "2", "--max_grad_norm", "0", "--max_data_loader_n_workers", "1")
    assert_same_training(deepspeed(train, checkout, FULL, stage, *words), with_ddp(checkout, FULL, *words))


@pytest.mark.slow
@pytest.mark.parametrize("script", [LORA, "flux_train.py"])
@pytest.mark.parametrize("stage", ["2", "3"])
def test_other_scripts_train_as_with_ddp(checkout, train, with_ddp, script, stage):
    more = ("--fused_operations", *STATES) if script == LORA else STATES
    assert_same_training(deepspeed(train, checkout, script, stage, *more), with_ddp(checkout, script))


@pytest.mark.slow
@pytest.mark.newest
def test_processes_on_cpus_do_not_train_alone(checkout, train):
    run = train(checkout, FULL, "--deepspeed", ranks=2)
    assert run.code == 2, run.output[-3000:]
    assert "accelerate ignores --deepspeed on CPUs" in run.output


@pytest.mark.newest
def test_deepspeed_of_accelerates_configuration_needs_the_option(checkout, train):
    run = train(checkout, FULL, env={**ON_CPU, "ACCELERATE_USE_DEEPSPEED": "true"}, ranks=2)
    assert run.code == 2, run.output[-3000:]
    assert "add --deepspeed and --zero_stage" in run.output
    assert "load StableDiffusion checkpoint" not in run.output


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["2-offload", "3"])
def test_a_stopped_run_resumes_bit_identically(checkout, train, tmp_path, stage):
    steps = ("--max_train_steps", "8")
    uninterrupted = deepspeed(train, checkout, FULL, stage, *STATES, *steps)

    stop = {"at_step": 2, "act": end_rank(1, signal.SIGTERM), "output": tmp_path}
    stopped = deepspeed(train, checkout, FULL, stage, *STATES, *steps, **stop)
    assert stopped.code == 143, stopped.output[-4000:]
    assert stopped.output.count("to resume: ") == 1
    step = lines_of(stopped)[-1]["step"]
    state = resume.newest_state(tmp_path, "tiny")
    assert state.name == f"tiny-step{step:08d}-state"
    assert_all_complete(tmp_path)

    resumed = deepspeed(train, checkout, FULL, stage, *STATES, *steps, "--resume", "auto", output=tmp_path)
    assert f"resumed after step {step}" in resumed.output
    assert "will differ" not in resumed.output
    assert same(resumed.tensors, uninterrupted.tensors)


@pytest.mark.slow
def test_rolling_states_have_the_shards_of_all_processes(checkout, train, tmp_path):
    rolling = ("--save_state_every_n_minutes", "0", "--save_last_n_timed_states", "2")
    run = deepspeed(train, checkout, FULL, "2", *rolling, output=tmp_path)
    assert run.code == 0, run.output[-4000:]
    states = sorted(tmp_path.glob("*rolling*"))
    assert [state.name for state in states] == ["tiny-rolling00000003-state", "tiny-rolling00000004-state"]
    for state in states:
        assert resume.state_problem(state) is None
        assert len(list(state.rglob("*optim_states.pt"))) == 2
        assert {file.name for file in state.glob("random_states_*")} == {"random_states_0.pkl", "random_states_1.pkl"}
    shutil.rmtree(states[1])
    resumed = deepspeed(train, checkout, FULL, "2", "--resume", "auto", output=tmp_path)
    assert "resumed after step 3" in resumed.output
    assert same(resumed.tensors, run.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["2", "3"])
def test_all_processes_skip_a_step_that_is_not_finite(checkout, train, tmp_path, stage):
    write_images_with_nan(tmp_path)
    data = ("--train_data_dir", str(tmp_path), "--cache_latents_to_disk", "--caching_workers", "0")
    run = deepspeed(train, checkout, FULL, stage, *data, "--max_train_steps", "8", "--nan_patience", "8")
    assert run.code == 0, run.output[-5000:]
    assert "skipped: loss or gradient is not finite" in run.output
    assert all(tensor.isfinite().all() for tensor in run.tensors.values())


@pytest.mark.slow
@pytest.mark.newest
def test_a_process_out_of_memory_ends_all_and_says_what_is_kept(checkout, train, tmp_path):
    exhausted = {"SPY_OUT_OF_MEMORY_AT": "3", "SPY_ONLY_RANK": "1"}
    options = {"env": exhausted, "output": tmp_path, "without": ("--gradient_checkpointing",)}
    run = deepspeed(train, checkout, FULL, "2", *STATES, "--max_train_steps", "8", **options)
    assert run.code == 1, run.output[-4000:]
    assert "rank 1" in log_of(run).summary()["reason"]
    assert "out of memory" in log_of(run).summary()["reason"]
    assert "newest state: " in run.output
    assert "add --gradient_checkpointing, or reduce --train_batch_size" in run.output
    assert resume.newest_state(tmp_path, "tiny").name == "tiny-step00000002-state"


@pytest.mark.slow
@pytest.mark.newest
def test_a_killed_process_ends_the_others(checkout, train, tmp_path):
    kill = {"at_step": 3, "act": end_rank(1, signal.SIGKILL), "output": tmp_path}
    run = deepspeed(train, checkout, FULL, "2", *STATES, "--max_train_steps", "500", **kill)
    assert run.code not in (0, -signal.SIGKILL), run.output[-3000:]
    assert log_of(run).summary()["status"] == "FAILED"
    assert resume.state_problem(resume.newest_state(tmp_path, "tiny")) is None


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize("stage", ["2-offload", "3"])
def test_one_process_needs_no_launcher(checkout, train, upstream, stage):
    words = ("--deepspeed", "--zero_stage", *STAGES[stage])
    run = train(checkout, FULL, *words, env={**ON_CPU, "CUDA_VISIBLE_DEVICES": ""})
    for name, tensor in run.tensors.items():
        assert (tensor - upstream(checkout, FULL).tensors[name]).abs().max() < 1e-6, name


#: Stage, offloaded parts -> bytes per weight in each of two processes after backward: fp32 and bf16. See docs/multi_gpu.md.
STATE_BYTES = {
    ("1",): (12 / 2, 2 + 2 / 2),
    ("2",): (12 / 2, 2 + 2 / 2),
    ("2", "optimizer"): (16 / 2, 2 + 2 / 2),
    ("3",): (12 / 2, 2 / 2 + 2 / 2),
    ("3", "optimizer", "weights"): (16 / 2, 2 / 2 + 2 / 2),
}


def bytes_per_weight(tmp_path, words):
    """Return data type -> bytes per weight of the tensors of real DeepSpeed in one of two processes, after backward."""
    variables = {**os.environ, **ON_CPU, "PYTHONPATH": environment.python_path(SITE), "SPY_FILE": str(tmp_path / "spy.json")}
    processes = starting.start_ranks([str(PROBE), *words], variables, tmp_path, 2)
    with open(processes[0].output, "rb") as printed:
        lines = printed.read().decode().splitlines()
    assert [process.wait() for process in processes] == [0, 0], lines
    return json.loads(next(line for line in lines if line.startswith("{")))


@pytest.mark.slow
@pytest.mark.usefixtures("_fork_server")
@pytest.mark.parametrize("words", STATE_BYTES, ids="-".join)
def test_bytes_per_weight_are_those_of_the_documentation(tmp_path, words):
    measured = bytes_per_weight(tmp_path, words)
    full, half = STATE_BYTES[words]
    bucket = 2 * 5e8 / PROBE_WEIGHTS if words[0] == "3" else 0  # DeepSpeed's reduce_bucket_size, in bf16
    assert measured["float32"] == pytest.approx(full, rel=0.02)
    # The gradients of a layer or three are on their way to another process or to the host.
    assert measured["bfloat16"] == pytest.approx(half + bucket, abs=3 * 2 / 20)


@pytest.mark.slow
@pytest.mark.usefixtures("_fork_server")
@pytest.mark.parametrize("words", STATE_BYTES, ids="-".join)
def test_predicted_bytes_are_within_2_percent_of_those_of_deepspeed(tmp_path, words):
    measured = sum(bytes_per_weight(tmp_path, words).values()) * PROBE_WEIGHTS
    assert predicted_bytes(int(words[0]), "optimizer" in words, "weights" in words) == pytest.approx(measured, rel=0.02)


def predicted_bytes(stage, offloads_optimizer, offloads_weights):
    """Return the bytes of the probe's second step after backward, on GPU and host together, as an estimate predicts them."""
    division = zero.Division(stage, 2, offloads_optimizer, offloads_weights)
    tracker = Tracker()
    with fake_tensors() as assumptions:
        tracker.run = assumptions.run
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(20)))
        optimizer = torch.optim.AdamW(model.parameters())
        gathered = GatheredWeights(tracker, [model], 2, offloads_weights) if stage == 3 else None
        with tracker:
            tracker.mark(model.parameters(), Kind.TRAINED_WEIGHT)
            if gathered is not None:
                tracker.offload(model.parameters())
                gathered.watch()
            divided = zero.divide(division, optimizer, gathered, tracker)
            for is_last in (False, True):
                divided.begin()
                with tracker.during(BACKWARD):
                    model(torch.randn(1, 1024, dtype=torch.bfloat16)).float().square().mean().backward()
                divided.end_backward(accumulates=False)
                if not is_last:
                    divided.step()
                    if gathered is not None:
                        gathered.end_recording()
            kinds = tracker.kinds  # without cuBLAS's workspaces, which CPUs have not
            allocated = sum(event.bytes for event in tracker.events if kinds[event.storage] is not Kind.WORKSPACE)
    host = {name: size for name, size in divided.host.bytes.items() if "pinned" not in name}  # CPUs pin nothing
    return allocated + sum(host.values())


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize(
    ("script", "presets"),
    [
        (FULL, ("zero2-offload",)),
        (FULL, ("24gb", "zero3")),
        ("flux_train.py", ("zero2-offload",)),
        ("flux_train.py", ("24gb", "zero3")),
    ],
)
def test_presets_train(checkout, train, script, presets):
    words = [word for preset in presets for word in ("--preset", preset)]
    omitted = ("--optimizer_type", "AdamW", "--mixed_precision", "no", "--learning_rate", "1e-4")
    run = train(checkout, script, *words, "--optimizer_type", "AdamW", env=ON_CPU, ranks=2, without=omitted)
    assert "deepspeed, zero_stage=" in run.output
    assert all(tensor.isfinite().all() for tensor in run.tensors.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "option"),
    [
        ((FULL,), "--ddp_gradient_as_bucket_view"),
        ((FULL, "--optimizer_type", "AdamW", "--no-full_bf16"), "--deepspeed"),
        (("flux_train.py",), "--deepspeed"),
    ],
)
def test_answers_of_plan_train(checkout, call, train, argv, option):
    """The printed command, and tiny models. accelerate starts no DeepSpeed on CPUs, so that the test starts its processes.

    At full size, the answers run in benchmarks.full_size on the virtual GPU (benchmarks/README.md).
    """
    asked = ("plan", "--sd-scripts", checkout.path, "--gpus", "2x24GB", "--json", *argv)
    command = shlex.split(json.loads(call("-m", "kohya_ext", *asked).stdout)["command"])
    launcher, script, words = command[:5], command[5], command[6:]
    assert launcher == ["python", "-m", "kohya_ext", "--num_processes", "2"]
    started = {"env": ON_CPU, "ranks": 2} if "--deepspeed" in option else {**TWO, "before": tuple(launcher[3:])}
    omitted = ("--optimizer_type", "AdamW", "--mixed_precision", "no", "--learning_rate", "1e-4")
    run = train(checkout, script, *words, without=omitted, **started)
    assert run.code == 0, run.output[-4000:]
    assert all(tensor.isfinite().all() for tensor in run.tensors.values())
    assert (option == "--deepspeed") == ("deepspeed, zero_stage=" in run.output)
