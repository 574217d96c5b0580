"""Which tier fits, the walk where none is known, and --preset auto: no torch, no sd-scripts."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kohya_ext import units
from kohya_ext.__main__ import main
from kohya_ext.config.command_line import CommandLine
from kohya_ext.errors import UserError
from kohya_ext.estimate import cache
from kohya_ext.estimate import memory_config as choosing
from kohya_ext.estimate.result import CONTEXT_BYTES, Estimate
from kohya_ext.planning import automatic, tiers
from kohya_ext.planning import plan as planning
from kohya_ext.sdscripts import checkouts
from kohya_ext.units import GIB

LORA, FULL, FLUX = "sdxl_train_network.py", "sdxl_train.py", "flux_train_network.py"
TIERS = {tier.name: tier for tier in tiers.tiers()}


@pytest.fixture
def checkout(tmp_path: Path) -> checkouts.Checkout:
    """A folder that looks like sd-scripts v0.11 to whoever only reads it, with the options that the ladder asks for."""
    library = tmp_path / "sd-scripts" / "library"
    library.mkdir(parents=True)
    keys = [*planning.MemoryConfig.__dataclass_fields__, "network_train_unet_only", "seed", "output_name"]
    options = "\n".join(f'parser.add_argument("--{key}")' for key in keys)
    for name in ("train_util.py", "args.py", "accelerator_setup.py"):
        (library / name).write_text(options)
    for name in ("train_network.py", LORA, FULL, FLUX):
        (library.parent / name).write_text("read_config_from_file(args, parser)")
    found = checkouts.describe(library.parent, "here")
    assert found is not None
    return found


@pytest.mark.parametrize("name", TIERS)
def test_every_tier_is_what_its_own_card_gets(name):
    tier = TIERS[name]
    script = planning.preset_files.scripts(tier.family)[0]
    argv = ["--model_type", "chroma"] if tier.family == "chroma-lora" else []
    assert planning.automatic(CommandLine(Path(script), argv, {}), tier.card) == name


def test_the_usual_question_is_answered_from_the_table_with_the_two_next_best(checkout):
    made = planning.plan(checkout, CommandLine(checkout.script(LORA), ["--output_name", "mine"], {}), 16 * GIB, pytest.fail)
    assert made.answer.name == "preset sdxl-lora/16gb"
    assert made.answer.command.argv == ("--preset", "16gb", "--output_name", "mine")
    assert [one.name for one in made.others] == ["preset sdxl-lora/12gb", "preset sdxl-lora/10gb"]
    assert made.too_big[0].found.on_the_card > tiers.room(16 * GIB)
    tree = {branch.rung.name: branch.status for branch in made.tree}
    assert tree["mixed precision"] == tree["cached latents"] == "taken"
    assert tree["checkpointing"] == tree["fp8 base"] == tree["resolution"] == "not needed"
    assert tree["ZeRO offload"] == "not estimated"
    assert list(tree)[-1] == "resolution"
    smaller = planning.plan(checkout, CommandLine(checkout.script(LORA), [], {}), 12 * GIB, pytest.fail)
    branch = next(branch for branch in smaller.tree if branch.rung.name == "checkpointing")
    assert (branch.status, branch.words) == ("in part", ("--gradient_checkpointing", "--gradient_checkpointing_ratio", "0.375"))


def test_the_tree_says_what_is_copied_for_swapped_blocks(checkout):
    made = planning.plan(checkout, CommandLine(checkout.script(FLUX), [], {}), 12 * GIB, pytest.fail)
    (branch,) = [branch for branch in made.tree if branch.rung.name == "block swap"]
    assert (branch.status, branch.words) == ("in part", ("--blocks_to_swap", "18"))
    waiting = TIERS["flux-lora/24gb"].found.parts["weights"] - made.answer.found.parts["weights"]
    assert (
        f"Here: {waiting / 1e9:.2f} GB of weights wait in host memory; every batch moves {4 * waiting / 1e9:.2f} GB"
        in branch.costs
    )


@pytest.mark.parametrize(
    ("argv", "size", "status"), [(["--resolution", "1024,1024"], 80, "yours"), ([], 80, "not needed"), ([], 6, "in part")]
)
def test_resolution_is_given_up_last_and_said(checkout, modelled, argv, size, status):
    made = planning.plan(checkout, CommandLine(checkout.script(FULL), argv, {}), size * GIB, lambda line: None)
    assert (made.tree[-1].rung.name, made.tree[-1].status) == ("resolution", status)


def test_chroma_is_planned_with_its_own_tiers(checkout):
    made = planning.plan(checkout, CommandLine(checkout.script(FLUX), ["--model_type", "chroma"], {}), 24 * GIB, pytest.fail)
    assert made.answer.command.argv == ("--preset", "chroma-lora/24gb", "--model_type", "chroma")


@pytest.fixture
def modelled(monkeypatch, tmp_path):
    """Estimates by a formula, so that a walk takes no time; returns the command lines that were asked for."""
    asked: list[CommandLine] = []
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path / "cache"))

    def formula(checkout, command):
        asked.append(command)
        choices = choosing.normalized(choosing.read(command)[0])
        share = (choices.gradient_checkpointing_ratio or 1.0) if choices.gradient_checkpointing else 0.0
        rank = (choices.network_dim or 0) * 20_000_000
        width, height = choosing.size(choices)
        image = width * height * (1_000_000_000 + round(8_000_000_000 * (1 - share))) // 1024**2
        swapped = (choices.blocks_to_swap or 0) * 200_000_000
        size = 5_000_000_000 + rank + choices.train_batch_size * image - swapped
        pictures = choices.train_batch_size * choices.gradient_accumulation_steps
        work = round(15e12 * (1 + share / 2)) * pictures
        found = Estimate(choices.key(), size, size, size, "forward", {}, {}, work, 0, {}, checkout.layout)
        cache.keep(checkout, found, ())
        return found

    monkeypatch.setattr(planning, "estimate", formula)
    return asked


def walk(checkout, argv, card_size, said=None):
    return planning.plan(
        checkout,
        CommandLine(checkout.script(LORA), argv, {}),
        card_size,
        said.append if said is not None else lambda line: None,
    )


def test_what_is_not_known_is_walked_for_down_the_tree_and_back_up(checkout, modelled):
    said: list[str] = []
    made = walk(checkout, ["--network_dim", "77"], 12 * GIB, said)
    assert f"up to {planning.MOST} estimates" in said[0]
    assert [line.partition(":")[0] for line in said[1:]] == [f"estimate {n} of at most 12" for n in range(1, len(said))]
    assert len(said) - 1 == len(modelled) <= planning.MOST
    assert made.answer.command.argv[-1] == "0.5"  # 5 + 1.54 + 1 + 8 * 0.5 GB; with 0.375 a gigabyte more than there is room for
    assert made.answer.found.on_the_card <= tiers.room(12 * GIB)
    assert all(one.found.flops_a_picture >= made.answer.found.flops_a_picture for one in made.others)
    assert all(
        "--network_dim" in one.command.argv and "77" in one.command.argv for one in [made.answer, *made.others, *made.too_big]
    )
    modelled.clear()
    again: list[str] = []
    assert walk(checkout, ["--network_dim", "77"], 12 * GIB, again).answer == made.answer
    assert again == []


def test_the_fewest_swapped_blocks_that_fit_are_the_answer_and_every_row_says_what_it_gives_up(checkout, modelled):
    made = planning.plan(checkout, CommandLine(checkout.script(FLUX), ["--network_dim", "77"], {}), 6 * GIB, lambda line: None)
    # 5 + 1.54 + 1 GB, less 0.2 for each block, into 6.12 - 0.6: 11 blocks. Two thirds of the blocks would fit as well.
    assert made.answer.command.given["blocks_to_swap"] == 11
    rows = [made.answer, *made.others, *made.too_big]
    swapped = [one.found.choices.get("blocks_to_swap", 0) for one in [made.answer, *made.others]]
    assert swapped == sorted(swapped)
    assert len({one.name for one in rows}) == len(rows)
    assert made.answer.name == "--blocks_to_swap 11"
    assert made.answer.traded.startswith("captions are fixed once cached: no shuffling, no dropout; checkpointing, ")
    assert made.answer.traded.endswith(", fp8 base, block swap")
    assert all(one.traded for one in rows)


def test_with_as_many_operations_the_one_that_uses_more_memory_is_faster():
    def one(reserved, work, swap=None):
        choices = {"script": FLUX, **({"blocks_to_swap": swap} if swap else {})}
        found = Estimate(choices, reserved, reserved, reserved, "forward", {}, {}, work, 0, {}, "v0.11")
        return planning.Candidate("", CommandLine(Path(FLUX), (), {}), found)

    ranked = [one(6, 15), one(9, 16), one(5, 16), one(8, 16, 20), one(6, 16, 34)]
    assert sorted([ranked[at] for at in (3, 1, 4, 0, 2)], key=planning._slowness) == ranked


def test_a_gpu_that_is_too_small_for_everything_takes_one_estimate(checkout, modelled):
    with pytest.raises(UserError, match=r"nothing fits the 2 GB GPU"):
        walk(checkout, ["--network_dim", "77"], 2 * GIB)
    assert len(modelled) == 1
    assert "--resolution" in modelled[0].argv


def test_the_effective_batch_is_kept_and_what_the_user_fixed_is_left_alone(checkout, modelled):
    fixed = [
        "--network_dim",
        "77",
        "--train_batch_size",
        "4",
        "--gradient_accumulation_steps",
        "2",
        "--no-gradient_checkpointing",
    ]
    made = walk(checkout, fixed, 24 * GIB)
    values = made.answer.command.given
    assert values["train_batch_size"] * values["gradient_accumulation_steps"] == 8
    assert values["train_batch_size"] == 1
    for command in modelled:
        given = command.given
        assert given["gradient_checkpointing"] is False
        assert given["train_batch_size"] * given.get("gradient_accumulation_steps", 1) == 8


def test_a_card_below_the_smallest_tier_is_walked_for(checkout, modelled):
    with pytest.raises(UserError, match=r"nothing fits the 5 GB GPU"):
        walk(checkout, [], 5 * GIB)
    assert modelled


def test_nothing_that_fits_is_said_with_what_came_nearest(checkout, modelled):
    with pytest.raises(UserError, match=r"nothing fits the 4 GB GPU \(4\.29e9 bytes\) less 5 percent: the smallest, .* needs"):
        walk(checkout, ["--network_dim", "77"], 4 * GIB)


def test_auto_takes_the_tier_that_fits_with_everything_else_that_is_said():
    def auto(size, *argv):
        return planning.automatic(CommandLine(Path(LORA), argv, {}), size * GIB)

    assert auto(12) == "sdxl-lora/12gb"
    assert auto(20) == "sdxl-lora/16gb" or auto(20) == "sdxl-lora/24gb"
    # Without cached captions every tier needs more; where that is not known, the card's own size counts.
    assert auto(16, "--network_dim", "77") == "sdxl-lora/16gb"
    with pytest.raises(UserError, match=r"no preset of sdxl_train_network\.py fits the 2 GB GPU"):
        auto(2)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("anima_train.py", "anima_train.py has no presets for sizes of GPUs"),
        ("train_controlnet.py", "the memory of train_controlnet.py cannot be estimated"),
    ],
)
def test_auto_says_that_a_script_has_no_presets(script, message):
    with pytest.raises(UserError, match=message):
        _ = CommandLine(Path(script), ["--preset", "auto", "--vram", "24"], {}, automatic).presets


def test_auto_is_a_preset_like_any_other_and_says_what_it_chose(tmp_path):
    run = CommandLine(Path(LORA), ["--preset", "auto", "--preset", "quality", "--vram", "12"], {}, automatic)
    assert run.presets.label == "sdxl-lora/12gb + sdxl-lora/quality (auto: --vram, 12 GB GPU (12.88e9 bytes))"
    assert run.presets.values["gradient_checkpointing_ratio"].preset == "sdxl-lora/12gb"
    assert run.settings.gradient_checkpointing_ratio == 0.375
    by_variable = CommandLine(Path(LORA), [], {"KOHYA_EXT_PRESET": "auto", "KOHYA_EXT_VRAM": "16GiB"}, automatic)
    assert by_variable.presets.label.startswith("sdxl-lora/16gb (auto")


def test_auto_and_plan_without_a_card_say_what_to_type(checkout, monkeypatch, capsys):
    monkeypatch.setattr(units, "find", lambda: None)
    monkeypatch.setenv("KOHYA_SD_SCRIPTS", str(checkout.path))
    assert main([LORA, "--preset", "auto"]) == 2
    assert "no NVIDIA GPU found: give its size, --vram 16, or name a preset, --preset 16gb" in capsys.readouterr().err
    assert main(["plan", LORA]) == 2
    assert "--vram 16" in capsys.readouterr().err


def test_a_card_is_found_by_the_drivers_own_tool(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\ntest "$3" = --id=1 && echo "NVIDIA GeForce RTX 3060, 12288"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert units.find() == ("NVIDIA GeForce RTX 3060", 12 * GIB)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert units.find() is None


def test_the_command_ends_with_a_line_to_paste_and_json_has_it_all(checkout, capsys):
    arguments = ["plan", "--sd-scripts", str(checkout.path), LORA, "--vram", "16", "--output_name", "a name"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.rstrip().endswith(f"python -m kohya_ext {LORA} --preset 16gb --output_name 'a name'")
    assert main([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["answer"]["on_the_card"] == said["answer"]["reserved"] + CONTEXT_BYTES <= said["room"]
    assert len(said["others"]) == 2
    assert said["calibrated_on_cuda"] is False


def test_a_faster_change_is_one_step_and_its_words_make_it():
    tier = TIERS["sdxl-lora/12gb"]
    better = tiers.faster(tier)
    assert better == replace(tier.choices, gradient_checkpointing_ratio=0.125)
    assert tiers.words(tier.choices, better) == ["--gradient_checkpointing_ratio", "0.125"]
    argv = ["--preset", tier.name, *tiers.words(tier.choices, better)]
    assert tiers.read(LORA, argv) == better


def test_what_the_config_file_says_is_left_alone_too(checkout, modelled, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("network_dim = 77\ntrain_batch_size = 2\ngradient_checkpointing = false\n")
    made = walk(checkout, ["--config_file", str(file)], 24 * GIB)
    values = made.answer.command.given
    assert values["train_batch_size"] * values["gradient_accumulation_steps"] == 2
    assert not any("--gradient_checkpointing" in command.argv for command in modelled)
