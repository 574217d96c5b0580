"""The estimate command as far as it needs no torch: the package's table, the presets' own figures, cards, bad input."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kohya_ext import console
from kohya_ext.__main__ import main
from kohya_ext.commands import estimate as command
from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate import cache, measurement
from kohya_ext.estimate.memory_config import MemoryConfig, normalized, read
from kohya_ext.estimate.result import CONTEXT_BYTES, Estimate
from kohya_ext.planning import tiers
from kohya_ext.planning.checkpointing_ratio import smallest_ratio
from tests.unit.test_console import Listener

LORA = "sdxl_train_network.py"
SCRIPTS = {"sdxl-lora": "sdxl_train_network.py", "sdxl-finetune": "sdxl_train.py"}
TIERS = {tier.name: tier for tier in tiers.tiers()}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like sd-scripts v0.11 when only read, with the options that an estimate reads."""
    library = tmp_path / "sd-scripts" / "library"
    library.mkdir(parents=True)
    options = "\n".join(
        f'parser.add_argument("--{key}")' for key in (*MemoryConfig.__dataclass_fields__, "output_name", "seed")
    )
    for name in ("train_util.py", "args.py", "accelerator_setup.py"):
        (library / name).write_text(options)
    for name in ("train_network.py", *SCRIPTS.values()):
        (library.parent / name).write_text("read_config_from_file(args, parser)")
    return library.parent


def shipped(family: str, *argv: str) -> Estimate:
    script = SCRIPTS[family]
    return Estimate(**cache.shipped(normalized(read(CommandLine(Path(script), argv, {}))[0])))


@pytest.mark.parametrize("name", TIERS)
def test_every_tier_fits_its_card_and_leaves_no_room_for_a_faster_choice(name):
    tier = TIERS[name]
    assert tiers.problem(tier) is None  # else: another preset, or python benchmarks/vram_table.py
    assert sum(tier.found.parts.values()) == tier.found.allocated
    assert tier.found.allocated in tier.found.moments.values()


@pytest.mark.parametrize("layout", ["v0.10", "v0.11"])
def test_the_table_answers_on_a_generation_where_it_was_made_or_came_out_the_same(layout):
    missing = [tier.name for tier in TIERS.values() if cache.shipped(tier.choices, layout) is None]
    assert not missing  # else: python benchmarks/vram_table.py --layout v0.10


@pytest.mark.parametrize("name", ["sdxl-lora/12gb", "flux-lora/16gb", "flux-lora/24gb"])
def test_a_tier_made_20_percent_too_big_or_needlessly_small_is_found(name):
    tier = TIERS[name]
    bigger = replace(tier.found, reserved=round(tier.found.reserved * 1.2))
    assert tiers.problem(replace(tier, found=bigger)).startswith("it needs")
    beside = [other for other in TIERS.values() if other.family == tier.family]
    smaller = max((other for other in beside if other.card < tier.card), key=lambda other: other.card)
    on_this_card = replace(tier, choices=smaller.choices, found=smaller.found)
    assert tiers.problem(on_this_card).startswith("it is needlessly small")


def test_batch_2_on_12_gb_as_it_once_was_is_found_to_be_needlessly_small():
    batch = replace(TIERS["sdxl-lora/8gb"].choices, train_batch_size=2)
    once = replace(TIERS["sdxl-lora/12gb"], choices=batch, found=replace(TIERS["sdxl-lora/8gb"].found, reserved=8_390_705_152))
    assert tiers.faster(once) == replace(batch, train_batch_size=4)


def test_a_usual_question_is_answered_from_the_table_without_torch(checkout):
    code = (
        "import sys; from kohya_ext.__main__ import main;"
        f"code = main(['estimate', '--sd-scripts', {str(checkout)!r}, 'sdxl_train_network.py', '--preset', '8gb', '--json',"
        " '--output_name', 'x', '--seed', '3']);"
        "assert 'torch' not in sys.modules and 'rich.table' in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["reserved"] == shipped("sdxl-lora", "--preset", "8gb").reserved
    assert said["card"] == 8 * 2**30
    assert said["margin"] == said["card"] - said["reserved"] - said["context_and_workspaces"]
    assert said["calibrated_on_cuda"] is False


def test_it_says_in_words_what_it_is_worth_and_exits_1_when_it_does_not_fit(checkout, capsys):
    arguments = ["estimate", "sdxl_train.py", "--preset", "24gb", "--sd-scripts", str(checkout)]
    assert main(arguments) == 0
    assert main([*arguments, "--vram", "16 GB"]) == 1
    said = capsys.readouterr().out
    assert "not calibrated on CUDA" in said
    assert "The 16 GB GPU (17.18e9 bytes) is short of" in said


def test_a_chart_is_a_picture(checkout, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "c.png"
    assert main(["estimate", "sdxl_train.py", "--preset", "24gb", "--sd-scripts", str(checkout), "--chart", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 5_000


def test_a_chart_without_matplotlib_is_refused_before_the_estimate_is_made(checkout, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ["sdxl_train.py", "--preset", "24gb", "--sd-scripts", str(checkout)]
    assert main(["estimate", *arguments, "--chart", str(tmp_path / "c.png")]) == 2
    assert main(["budget", *arguments, "--plot", str(tmp_path / "c.png")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("drawing needs matplotlib") == 2


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["sdxl_train.py"], "--resolution"),
        (["sdxl_train.py", "--preset", "6gb"], "no preset 6gb"),
        (["sdxl_train.py", "--preset", "16gb", "--vram", "lots"], "--vram: must be the size that the GPU is sold as"),
        (["no_script.py"], "no script no_script.py"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(checkout, capsys, argv, named):
    assert main(["estimate", "--sd-scripts", str(checkout), *argv]) == 2
    assert named in capsys.readouterr().err


def test_an_estimate_that_must_be_made_is_announced_beside_the_json(checkout, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "stderr", heard := Listener())
    monkeypatch.setattr(console, "_PATIENCE", 0.0)
    row = cache.shipped(TIERS["sdxl-lora/8gb"].choices)

    def make(*asked):
        assert heard.written.wait(10), "nothing was reported"
        return Estimate(**row)

    monkeypatch.setattr(measurement, "make", make)
    words = ["estimate", "--sd-scripts", str(checkout), LORA, "--preset", "8gb", "--network_dim", "77", "--json"]
    assert main(words) == 0
    assert heard.getvalue() == f"kohya_ext: estimating the memory of {LORA} (usually 10 to 60 s) ...\n"
    assert json.loads(capsys.readouterr().out)["reserved"] == row["reserved"]


@pytest.fixture
def by_share(monkeypatch):
    """Estimates by a formula: 7 GB with every block checkpointed, 15 with none."""

    def formula(checkout, command, fresh):
        choices = normalized(read(command)[0])
        share = (choices.gradient_checkpointing_ratio or 1.0) if choices.gradient_checkpointing else 0.0
        size = round(15e9 - 8e9 * share)
        return Estimate(
            choices.key(), size, size, size, "forward", {}, {}, 1, 0, {"sd_scripts": "", "torch": "", "kohya_ext": ""}, ""
        )

    monkeypatch.setattr(command, "estimate", formula)


def test_prompts_that_cannot_be_read_are_named(checkout, capsys, tmp_path, by_share):
    argv = ["--preset", "8gb", "--sample_prompts", str(tmp_path / "none.txt"), "--sample_at_first"]
    assert main(["estimate", "--sd-scripts", str(checkout), LORA, *argv]) == 0
    said = capsys.readouterr().err
    assert "none.txt: No such file or directory; its pictures are taken to be 512x512" in said


@pytest.mark.parametrize(
    ("budget", "more", "fits", "share", "words"),
    [
        # 97 percent of 11.4 GB hold a share of 0.49; shares are tried in sixteenths.
        ("12GB", (), True, 0.5, "12.00 GB leaves 11.40 GB for tensors; about 50% of the blocks stay checkpointed"),
        ("12GB", ("--no-gradient_checkpointing",), True, 0.5, "about 50% of the blocks stay checkpointed"),
        ("7GB", (), False, 1.0, "7.00 GB leaves 6.40 GB for tensors, and the run needs 7.00 GB: it would be out of memory"),
        (
            "12GB",
            ("--gradient_checkpointing_ratio", "0.75"),
            True,
            None,
            "nothing of it is spent: --gradient_checkpointing_ratio says how",
        ),
        ("10GB", ("--selective_torch_compile",), True, None, "then 2.12 GB are left for what compiled blocks keep"),
        ("auto", ("--vram", "12"), True, 0.5, "auto leaves 11.64 GB for tensors"),
    ],
)
def test_a_budget_is_spent_on_paper_too(checkout, capsys, by_share, budget, more, fits, share, words):
    given = ["estimate", "--sd-scripts", str(checkout), LORA, "--preset", "8gb", "--vram_budget", budget, "--vram", "80", *more]
    assert main(given) == int(not fits)
    assert words in capsys.readouterr().out
    assert main([*given, "--json"]) == int(not fits)
    said = json.loads(capsys.readouterr().out)
    assert (said["vram_budget"]["fits"], said["vram_budget"]["gradient_checkpointing_ratio"]) == (fits, share)


def test_a_budget_that_is_the_cards_own_needs_a_card(checkout, capsys):
    argv = ["estimate", "--sd-scripts", str(checkout), LORA, "--resolution", "512", "--vram_budget", "auto"]
    assert main(argv) == 2
    assert "--vram_budget auto needs the GPU's size" in capsys.readouterr().err


def test_figures_are_kept_for_exactly_what_determines_them(checkout, tmp_path, monkeypatch):
    from kohya_ext.sdscripts import checkouts

    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path / "cache"))
    found = checkouts.describe(checkout, "here")
    argv = ("--resolution", "512")
    asked = normalized(read(CommandLine(Path("sdxl_train.py"), argv, {}))[0])
    made = Estimate(json.loads(json.dumps(asked.key())), 1, 2, 2, "forward", {"weights": 1}, {"forward": 1}, 3, 4, {}, "v0.11")
    assert cache.find(found, asked, ()) is None
    cache.keep(found, made, ())
    assert Estimate(**cache.find(found, asked, ())) == made
    assert cache.find(found, asked, ("*",)) is None
    monkeypatch.setattr(cache, "METHOD", cache.METHOD + 1)
    assert cache.find(found, asked, ()) is None


def test_a_card_is_filled_with_the_smallest_share_that_fits():
    asked = []

    def ask(share):
        asked.append(share)
        return Estimate({}, 0, int(10_000 * (1 - share)), 0, "", {}, {}, 0, 0, {}, "v0.11")

    for room, expected in ((10_000, 0.0), (5_000, 0.5), (4_999, 0.5625), (600, 1.0), (0, 1.0)):
        asked.clear()
        share, found = smallest_ratio(ask, room + CONTEXT_BYTES)
        assert (share, found.reserved) == (expected, 10_000 * (1 - expected))
        assert len(asked) <= 6
    assert smallest_ratio(ask, CONTEXT_BYTES - 1) is None


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["sdxl_train.py", "--resolution", "512", "--fill"], "give --vram"),
        (["sdxl_train.py", "--resolution", "512", "--fill", "--vram", "16"], "give --gradient_checkpointing"),
    ],
)
def test_filling_says_what_it_needs(checkout, capsys, argv, named):
    assert main(["estimate", "--sd-scripts", str(checkout), *argv]) == 2
    assert named in capsys.readouterr().err
