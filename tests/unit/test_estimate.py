"""The estimate command without torch: the package's table, the tiers, GPU sizes and invalid input."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kohya_ext import console
from kohya_ext.__main__ import main
from kohya_ext.config.command_line import CommandLine
from kohya_ext.dry_run import estimation
from kohya_ext.estimate import cache
from kohya_ext.estimate.memory_config import MemoryConfig, normalized, read
from kohya_ext.estimate.result import CONTEXT_BYTES, Estimate
from kohya_ext.planning import tiers
from kohya_ext.planning.checkpointing_ratio import smallest_ratio
from tests.unit.test_console import Listener

LORA = "sdxl_train_network.py"
SCRIPTS = {"sdxl-lora": "sdxl_train_network.py", "sdxl-finetune": "sdxl_train.py"}
TIERS = {tier.name: tier for tier in tiers.tiers()}
EXPERIMENTAL = {tier.name: tier for tier in tiers.tiers(experimental=True)}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the files by which sd-scripts v0.11 is recognised, and the options that an estimate reads."""
    library = tmp_path / "sd-scripts" / "library"
    library.mkdir(parents=True)
    options = "\n".join(
        f'    parser.add_argument("--{key}")' for key in (*MemoryConfig.__dataclass_fields__, "output_name", "seed")
    )
    for name in ("train_util.py", "args.py", "accelerator_setup.py"):
        (library / name).write_text(f"def add_arguments(parser):\n{options}")
    for name in ("train_network.py", *SCRIPTS.values()):
        (library.parent / name).write_text("def setup_parser():\n    add_arguments()\n    read_config_from_file(args, parser)")
    return library.parent


def shipped(family: str, *argv: str) -> Estimate:
    script = SCRIPTS[family]
    return Estimate(**cache.shipped(normalized(read(CommandLine(Path(script), argv, {}))[0])))


@pytest.mark.parametrize("name", [*TIERS, *EXPERIMENTAL])
def test_every_tier_fits_its_gpu_and_no_faster_change_does(name):
    tier = {**TIERS, **EXPERIMENTAL}[name]
    assert tiers.problem(tier) is None  # otherwise change the preset, or run python tools/make_estimate_table.py
    assert sum(tier.estimate.parts.values()) == tier.estimate.allocated
    assert tier.estimate.allocated in tier.estimate.phase_peaks.values()


@pytest.mark.parametrize("layout", ["v0.10", "v0.11"])
def test_the_table_covers_both_generations(layout):
    missing = [tier.name for tier in [*TIERS.values(), *EXPERIMENTAL.values()] if cache.shipped(tier.config, layout) is None]
    assert not missing  # otherwise run python tools/make_estimate_table.py --layout v0.10


@pytest.mark.parametrize("name", ["sdxl-lora/12gb", "flux-lora/16gb", "flux-lora/24gb"])
def test_a_tier_of_the_wrong_size_is_a_problem(name):
    tier = TIERS[name]
    bigger = replace(tier.estimate, reserved=round(tier.estimate.reserved * 1.2))
    assert tiers.problem(replace(tier, estimate=bigger)).startswith("it needs")
    siblings = [other for other in TIERS.values() if other.family == tier.family]
    smaller = max((other for other in siblings if other.card < tier.card), key=lambda other: other.card)
    on_this_card = replace(tier, config=smaller.config, estimate=smaller.estimate)
    assert tiers.problem(on_this_card).startswith("it is smaller than necessary")


def test_batch_2_on_12_gb_is_too_small():
    batch = replace(TIERS["sdxl-lora/8gb"].config, train_batch_size=2)
    once = replace(
        TIERS["sdxl-lora/12gb"], config=batch, estimate=replace(TIERS["sdxl-lora/8gb"].estimate, reserved=8_390_705_152)
    )
    assert tiers.faster(once) == replace(batch, train_batch_size=4)


def test_a_preset_is_estimated_from_the_table_without_torch(checkout):
    code = (
        "import sys; from kohya_ext.__main__ import main;"
        f"code = main(['estimate', '--sd-scripts', {str(checkout)!r}, 'sdxl_train_network.py', '--preset', '8gb', '--json',"
        " '--output_name', 'x', '--seed', '3']);"
        "assert 'torch' not in sys.modules and 'rich.table' in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert output["reserved"] == shipped("sdxl-lora", "--preset", "8gb").reserved
    assert output["card"] == 8 * 2**30
    assert output["margin"] == output["card"] - output["reserved"] - output["context_and_workspaces"]
    assert output["calibrated_on_cuda"] is False


@pytest.mark.parametrize(
    ("more", "printed"),
    [
        ([], True),
        (["--gradient_accumulation_steps", "1"], False),
        (["--no-enable_bucket"], False),
        (["--expandable_segments"], False),
    ],
)
def test_images_of_several_sizes_are_mentioned_where_they_reserve_more(checkout, capsys, formula_estimates, more, printed):
    words = ["--preset", "8gb", "--gradient_accumulation_steps", "2", *more]
    main(["estimate", "sdxl_train_network.py", "--sd-scripts", str(checkout), *words])
    assert ("--expandable_segments prevents it" in capsys.readouterr().out) == printed


@pytest.mark.parametrize(
    "command", [["estimate", LORA, "--preset", "16gb"], ["plan", LORA, "--vram", "16"]], ids=["estimate", "plan"]
)
def test_a_model_that_cannot_be_trained_is_a_warning(checkout, tmp_path, capsys, command):
    row = {"cond_stage_model.transformer.x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    header = json.dumps(row).encode()
    other = tmp_path / "other.safetensors"
    other.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    warned = {}
    for model in (str(other), str(tmp_path / "missing.safetensors"), "stabilityai/sdxl"):
        assert main([*command, "--json", "--sd-scripts", str(checkout), "--pretrained_model_name_or_path", model]) == 0
        warned[Path(model).stem] = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    (line,) = warned["other"]
    assert f"is a checkpoint of SD 1.5, but {LORA} trains SDXL" in line
    (line,) = warned["missing"]
    assert "missing.safetensors does not exist. This estimate is for a usual checkpoint of SDXL" in line
    assert warned["sdxl"] == []


def test_exit_code_1_when_the_run_does_not_fit(checkout, capsys):
    arguments = ["estimate", "sdxl_train.py", "--preset", "24gb", "--sd-scripts", str(checkout)]
    assert main(arguments) == 0
    assert main([*arguments, "--vram", "16 GB"]) == 1
    output = capsys.readouterr().out
    assert "not on a GeForce GPU" in output
    assert "The 16 GB GPU (17.18e9 bytes) lacks" in output
    assert "--gradient_checkpointing --fit" not in output
    assert "`python -m kohya_ext plan sdxl_train.py` with your other options" in output


@pytest.mark.parametrize(
    ("more", "fits", "advice"), [(0.051, True, None), (0.049, False, "--fit checkpoints as few"), (-0.1, False, "--fit")]
)
def test_a_run_fits_with_5_percent_left_free_as_for_plan(checkout, capsys, more, fits, advice):
    total = shipped("sdxl-lora", "--preset", "12gb").total
    card = round(total / (1 - more))
    words = ["sdxl_train_network.py", "--preset", "12gb", "--sd-scripts", str(checkout), "--vram", str(card)]
    assert main(["estimate", *words]) == (0 if fits else 1)
    printed = capsys.readouterr().out
    assert ("less than the 5 percent" in printed) == (not fits and more > 0)
    assert advice is None or advice in printed
    assert ("kohya_ext plan" in printed) is not fits


def test_a_dimension_that_is_not_a_rank_is_mentioned(checkout, capsys, formula_estimates):
    words = ["estimate", "sdxl_train_network.py", "--sd-scripts", str(checkout), "--preset", "8gb", "--network_dim", "8"]
    main([*words, "--network_module", "networks.oft"])
    line = "--network_dim 8 is not a rank, but the number of blocks of each layer with networks.oft, and is counted as that."
    assert line in capsys.readouterr().out
    main([*words, "--network_module", "networks.lora_fa"])
    assert "not a rank" not in capsys.readouterr().out


def test_a_chart_is_a_png(checkout, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "c.png"
    assert main(["estimate", "sdxl_train.py", "--preset", "24gb", "--sd-scripts", str(checkout), "--chart", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 5_000


def test_a_chart_without_matplotlib_fails_before_the_estimate(checkout, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ["sdxl_train.py", "--preset", "24gb", "--sd-scripts", str(checkout)]
    assert main(["estimate", *arguments, "--chart", str(tmp_path / "c.png")]) == 2
    assert main(["budget", *arguments, "--plot", str(tmp_path / "c.png")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("drawing needs matplotlib") == 2


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["sdxl_train.py"], "--resolution"),
        (["sdxl_train.py", "--preset", "6gb"], "no preset 6gb"),
        (["sdxl_train.py", "--preset", "16gb", "--vram", "lots"], "--vram: must be the advertised size of the GPU"),
        (["no_script.py"], "no script no_script.py"),
    ],
)
def test_invalid_input_is_one_line_and_exit_code_2(checkout, capsys, argv, named):
    assert main(["estimate", "--sd-scripts", str(checkout), *argv]) == 2
    assert named in capsys.readouterr().err


def test_a_new_estimate_is_announced_on_standard_error(checkout, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "stderr", stream := Listener())
    monkeypatch.setattr(console, "_PROGRESS_DELAY", 0.0)
    row = cache.shipped(TIERS["sdxl-lora/8gb"].config)

    def measure(*arguments):
        assert stream.written.wait(10), "nothing was reported"
        return {**row, "passes": []}

    monkeypatch.setattr(estimation, "measure", measure)
    words = ["estimate", "--sd-scripts", str(checkout), LORA, "--preset", "8gb", "--network_dim", "77", "--json"]
    assert main(words) == 0
    assert stream.getvalue() == f"kohya_ext: estimating the memory of {LORA} by a dry run (usually 20 to 60 s) ...\n"
    assert json.loads(capsys.readouterr().out)["reserved"] == row["reserved"]


@pytest.fixture
def formula_estimates(monkeypatch):
    """Replace estimates by a formula: 7 GB with every block checkpointed, 15 GB with none."""

    def formula(checkout, command, fresh, timed):
        config = normalized(read(command)[0])
        ratio = (config.gradient_checkpointing_ratio or 1.0) if config.gradient_checkpointing else 0.0
        size = round(15e9 - 8e9 * ratio)
        return Estimate(
            config.key(), size, size, size, "forward", {}, {}, 1, 0, {"sd_scripts": "", "torch": "", "kohya_ext": ""}, ""
        )

    monkeypatch.setattr(estimation, "estimate", formula)


def test_unreadable_prompts_are_a_warning(checkout, capsys, tmp_path, formula_estimates):
    argv = ["--preset", "8gb", "--sample_prompts", str(tmp_path / "none.txt"), "--sample_at_first"]
    assert main(["estimate", "--sd-scripts", str(checkout), LORA, *argv]) == 0
    output = capsys.readouterr().err
    assert "none.txt: No such file or directory; assuming 512x512 images" in output


@pytest.mark.parametrize(
    ("budget", "more", "fits", "ratio", "words"),
    [
        # 97 percent of 11.4 GB allow a ratio of 0.49; ratios are multiples of 1/16.
        ("12GB", (), True, 0.5, "12.00 GB leaves 11.40 GB for tensors; about 50% of the blocks stay checkpointed"),
        ("12GB", ("--no-gradient_checkpointing",), True, 0.5, "about 50% of the blocks stay checkpointed"),
        ("7GB", (), False, 1.0, "7.00 GB leaves 6.40 GB for tensors, but the run needs 7.00 GB and would be out of memory"),
        (
            "12GB",
            ("--gradient_checkpointing_ratio", "0.75"),
            True,
            None,
            "no blocks are freed: --gradient_checkpointing_ratio takes precedence",
        ),
        ("10GB", ("--selective_torch_compile",), True, None, "then compiled blocks may save 2.12 GB more"),
        ("auto", ("--vram", "12"), True, 0.5, "auto leaves 11.64 GB for tensors"),
    ],
)
def test_a_budget_changes_the_estimate(checkout, capsys, formula_estimates, budget, more, fits, ratio, words):
    given = ["estimate", "--sd-scripts", str(checkout), LORA, "--preset", "8gb", "--vram_budget", budget, "--vram", "80", *more]
    assert main(given) == int(not fits)
    assert words in capsys.readouterr().out
    assert main([*given, "--json"]) == int(not fits)
    output = json.loads(capsys.readouterr().out)
    assert (output["vram_budget"]["fits"], output["vram_budget"]["gradient_checkpointing_ratio"]) == (fits, ratio)


def test_the_automatic_budget_needs_a_gpu_size(checkout, capsys):
    argv = ["estimate", "--sd-scripts", str(checkout), LORA, "--resolution", "512", "--vram_budget", "auto"]
    assert main(argv) == 2
    assert "--vram_budget auto needs the GPU's size" in capsys.readouterr().err


def test_the_cache_key_covers_everything_that_changes_an_estimate(checkout, tmp_path, monkeypatch):
    from kohya_ext.sdscripts import checkouts

    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path / "cache"))
    described = checkouts.describe(checkout, "here")
    argv = ("--resolution", "512")
    config = normalized(read(CommandLine(Path("sdxl_train.py"), argv, {}))[0])
    estimate = Estimate(
        json.loads(json.dumps(config.key())), 1, 2, 2, "forward", {"weights": 1}, {"forward": 1}, 3, 4, {}, "v0.11"
    )
    assert cache.find(described, config, ()) is None
    cache.keep(described, estimate, ())
    assert Estimate(**cache.find(described, config, ())) == estimate
    assert cache.find(described, config, ("*",)) is None
    monkeypatch.setattr(cache, "METHOD", cache.METHOD + 1)
    assert cache.find(described, config, ()) is None


def test_smallest_ratio_that_fits():
    ratios = []

    def ask(asked):
        ratios.extend(asked)
        return [Estimate({}, 0, int(10_000 * (1 - ratio)), 0, "", {}, {}, 0, 0, {}, "v0.11") for ratio in asked]

    for together, most in ((1, 6), (2, 8), (4, 12)):
        for usable, expected in ((10_000, 0.0), (5_000, 0.5), (4_999, 0.5625), (600, 1.0), (0, 1.0)):
            ratios.clear()
            ratio, estimate = smallest_ratio(ask, usable + CONTEXT_BYTES, together)
            assert (ratio, estimate.reserved) == (expected, 10_000 * (1 - expected))
            assert len(ratios) <= most
    assert smallest_ratio(ask, CONTEXT_BYTES - 1) is None


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["sdxl_train.py", "--resolution", "512", "--fit"], "give --vram"),
        (["sdxl_train.py", "--resolution", "512", "--fit", "--vram", "16"], "give --gradient_checkpointing"),
    ],
)
def test_fit_needs_a_size_and_checkpointing(checkout, capsys, argv, named):
    assert main(["estimate", "--sd-scripts", str(checkout), *argv]) == 2
    assert named in capsys.readouterr().err
