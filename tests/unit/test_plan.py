"""Plans from the tiers, the search over memory savings, and --preset auto, without torch or sd-scripts."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kohya_ext import installed_gpus
from kohya_ext.__main__ import main
from kohya_ext.config.command_line import CommandLine, quoted_word
from kohya_ext.dry_run import estimation
from kohya_ext.errors import UserError
from kohya_ext.estimate import cache, gpus, memory_config
from kohya_ext.estimate.gpus import SIXTEEN_BITS
from kohya_ext.estimate.result import CONTEXT_BYTES, Estimate
from kohya_ext.estimate.seconds import Kernels, Work
from kohya_ext.planning import automatic, tiers, upstream
from kohya_ext.planning import plan as planning
from kohya_ext.sdscripts import checkouts
from kohya_ext.units import GIB, read_card

LORA, FULL, FLUX = "sdxl_train_network.py", "sdxl_train.py", "flux_train_network.py"
GPU = gpus.named("RTX 4070")
TIERS = {tier.name: tier for tier in tiers.tiers()}


@pytest.fixture
def checkout(tmp_path: Path) -> checkouts.Checkout:
    """A folder that is recognised as sd-scripts v0.11, with the options of the memory savings."""
    library = tmp_path / "sd-scripts" / "library"
    library.mkdir(parents=True)
    keys = [*planning.MemoryConfig.__dataclass_fields__, "network_train_unet_only", "seed", "output_name"]
    options = "\n".join(f'    parser.add_argument("--{key}")' for key in keys)
    for name in ("train_util.py", "args.py", "accelerator_setup.py"):
        (library / name).write_text(f"def add_arguments(parser):\n{options}")
    for name in ("train_network.py", LORA, FULL, FLUX):
        (library.parent / name).write_text(
            "def setup_parser():\n    add_arguments(parser)\n    read_config_from_file(args, parser)"
        )
    described = checkouts.describe(library.parent, "here")
    assert described is not None
    return described


@pytest.mark.parametrize("name", TIERS)
def test_auto_selects_each_tier_for_its_gpu(name):
    tier = TIERS[name]
    script = planning.preset_files.scripts(tier.family)[0]
    argv = ["--model_type", "chroma"] if tier.family == "chroma-lora" else []
    assert planning.automatic(CommandLine(Path(script), argv, {}), tier.card) == name


def test_a_plan_from_the_table_has_the_two_next_best(checkout):
    result = planning.plan(
        checkout, CommandLine(checkout.script(LORA), ["--output_name", "mine"], {}), 16 * GIB, GPU, pytest.fail
    )
    assert result.answer.name == "preset sdxl-lora/16gb"
    assert result.answer.command.argv == ("--preset", "16gb", "--output_name", "mine")
    assert [candidate.name for candidate in result.others] == ["preset sdxl-lora/12gb", "preset sdxl-lora/10gb"]
    assert result.too_big[0].estimate.total > tiers.usable_bytes(16 * GIB)
    tree = {branch.saving.name: branch.status for branch in result.tree}
    assert tree["mixed precision"] == tree["cached latents"] == "taken"
    assert tree["checkpointing"] == tree["fp8 base"] == tree["resolution"] == "not needed"
    assert list(tree)[-1] == "resolution"
    smaller = planning.plan(checkout, CommandLine(checkout.script(LORA), [], {}), 12 * GIB, GPU, pytest.fail)
    branch = next(branch for branch in smaller.tree if branch.saving.name == "checkpointing")
    assert (branch.status, branch.words) == ("in part", ("--gradient_checkpointing", "--gradient_checkpointing_ratio", "0.375"))


def test_the_tree_shows_the_copies_of_swapped_blocks(checkout):
    result = planning.plan(checkout, CommandLine(checkout.script(FLUX), [], {}), 12 * GIB, GPU, pytest.fail)
    (branch,) = [branch for branch in result.tree if branch.saving.name == "block swap"]
    assert (branch.status, branch.words) == ("in part", ("--blocks_to_swap", "23"))
    whole = TIERS["flux-lora/24gb"].estimate.parts["weights"]
    offloaded = whole - result.answer.estimate.parts["weights"]
    assert f"Here: {whole / 1e9:.2f} GB of weights are in host memory" in branch.costs  # of all blocks, since most are swapped
    (copied,) = re.findall(r"every batch copies (\S+) GB", branch.costs)
    assert float(copied) == pytest.approx(2 * offloaded / 1e9, abs=0.02)  # and the batch itself


@pytest.mark.parametrize(
    ("argv", "size", "status"), [(["--resolution", "1024,1024"], 80, "fixed"), ([], 80, "not needed"), ([], 6, "in part")]
)
def test_resolution_is_reduced_last(checkout, formula_estimates, argv, size, status):
    result = planning.plan(checkout, CommandLine(checkout.script(FULL), argv, {}), size * GIB, GPU, lambda line: None)
    assert (result.tree[-1].saving.name, result.tree[-1].status) == ("resolution", status)


def test_chroma_has_its_own_tiers(checkout):
    result = planning.plan(
        checkout, CommandLine(checkout.script(FLUX), ["--model_type", "chroma"], {}), 24 * GIB, GPU, pytest.fail
    )
    assert result.answer.command.argv == ("--preset", "chroma-lora/24gb", "--model_type", "chroma")


@pytest.fixture
def formula_estimates(monkeypatch, tmp_path):
    """Replace estimates by a formula, so that a search is fast; return the estimated command lines."""
    asked: list[CommandLine] = []
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path / "cache"))

    def formula(checkout, command, fresh=False, timed=False):
        asked.append(command)
        config = memory_config.normalized(memory_config.read(command)[0])
        ratio = (config.gradient_checkpointing_ratio or 1.0) if config.gradient_checkpointing else 0.0
        rank = (config.network_dim or 0) * 20_000_000
        width, height = memory_config.size(config)
        image = width * height * (1_000_000_000 + round(8_000_000_000 * (1 - ratio))) // 1024**2
        swapped = (config.blocks_to_swap or 0) * 200_000_000
        kept = round(ratio * 500_000_000) if config.keep_attention else 0
        on_gpu = 1 - config.optimizer_states_on_host * config.optimizer_states_on_host_ratio
        states = round(on_gpu * 10_000_000_000) if (config.script, config.optimizer_type) == (FULL, "AdamW") else 0
        size = 5_000_000_000 + rank + config.train_batch_size * image - swapped + kept + states
        images = config.train_batch_size * config.gradient_accumulation_steps
        work = round(15e12 * (1 + ratio / (4 if config.keep_attention else 2))) * images
        result = Estimate(config.key(), size, size, size, "forward", {}, {}, work, 0, {}, checkout.layout)
        cache.keep(checkout, result, ())
        return result

    monkeypatch.setattr(estimation, "estimate", formula)
    return asked


def search(checkout, argv, card_size, lines=None):
    command = CommandLine(checkout.script(LORA), argv, {})
    announce = lines.append if lines is not None else lambda line: None
    return planning.plan(checkout, command, card_size, GPU, announce)


def test_checkpointing_of_the_base_preset_is_reduced_where_there_is_room(checkout, formula_estimates):
    def answer(*words):
        command = CommandLine(checkout.script(FULL), ["--resolution", "960,1088", *words], {})
        return planning.plan(checkout, command, 12 * GIB, GPU, lambda line: None).answer.command

    assert answer().settings["gradient_checkpointing_ratio"] == 0.375
    assert answer("--gradient_checkpointing").settings["gradient_checkpointing_ratio"] is None


@pytest.mark.parametrize(("size", "on_host"), [(12, 0.5), (8, 0.875)])
def test_as_few_states_as_fit_are_on_the_host(checkout, formula_estimates, size, on_host):
    command = CommandLine(checkout.script(FULL), ["--optimizer_type", "AdamW"], {})
    settings = planning.plan(checkout, command, size * GIB, GPU, lambda line: None).answer.command.settings
    assert settings["optimizer_states_on_host"]
    assert (settings["optimizer_states_on_host_ratio"], settings["gradient_checkpointing_ratio"]) == (on_host, None)


@pytest.mark.parametrize(
    ("words", "ratio", "kept"),
    [((), 0.5, True), (("--no-keep_attention",), 0.5, False), (("--gradient_checkpointing_ratio", "0.75"), 0.75, True)],
)
def test_a_transformer_keeps_its_attention_where_there_is_room(checkout, formula_estimates, words, ratio, kept):
    command = CommandLine(checkout.script(FLUX), ["--network_dim", "33", *words], {})
    settings = planning.plan(checkout, command, 12 * GIB, GPU, lambda line: None).answer.command.settings
    assert (settings["gradient_checkpointing_ratio"], settings["keep_attention"]) == (ratio, kept)


def test_an_8_bit_base_is_offered_as_experimental_where_it_is_faster(checkout, formula_estimates, monkeypatch):
    """Operations of an 8-bit base count half in this formula."""
    usual = estimation.estimate

    def halved(checkout, command, *_):
        estimate = usual(checkout, command)
        factor = 1 if command.settings["base_precision"] is None else 2
        return replace(estimate, flops=estimate.flops // factor)

    monkeypatch.setattr(estimation, "estimate", halved)
    result = search(checkout, ["--network_dim", "77"], 12 * GIB)
    assert result.answer.command.settings["base_precision"] is None
    assert result.experimental.command.settings["base_precision"] == "int8"
    branch = next(branch for branch in result.tree if branch.saving.name == "8-bit base")
    assert (branch.status, branch.words) == ("not needed", ("--base_precision", "int8"))
    assert "experimental" in branch.costs
    command = CommandLine(checkout.script(LORA), ["--network_dim", "77"], {})
    old = planning.plan(checkout, command, 12 * GIB, gpus.named("RTX 2080 Ti"), lambda line: None)
    assert old.experimental is None
    assert "8-bit base" not in {branch.saving.name for branch in old.tree}
    refused = search(checkout, ["--network_dim", "77", "--network_module", "networks.oft"], 12 * GIB)
    assert refused.experimental is None


def test_upstreams_fastest_configuration_has_upstreams_options_alone(checkout, formula_estimates, monkeypatch):
    """Even where an 8-bit base would be faster, and where a part of the blocks could be checkpointed."""
    usual = estimation.estimate

    def halved(checkout, command, *_):
        estimate = usual(checkout, command)
        return replace(estimate, flops=estimate.flops // (1 if command.settings["base_precision"] is None else 2))

    monkeypatch.setattr(estimation, "estimate", halved)
    tier = TIERS["sdxl-lora/12gb"]
    assert tier.config.gradient_checkpointing_ratio is not None
    best = upstream.search(checkout, tier, lambda line: None)
    assert best.options == "--gradient_checkpointing"
    assert best.estimate.config.get("gradient_checkpointing_ratio") in (None, 1)
    assert all(command.settings["base_precision"] is None for command in formula_estimates)
    monkeypatch.setattr(upstream, "fits", lambda *_: False)
    assert upstream.search(checkout, tier, lambda line: None) is None


def test_an_8_bit_base_is_the_answer_where_nothing_else_fits(checkout, formula_estimates, monkeypatch):
    usual = estimation.estimate

    def smaller(checkout, command, *_):
        estimate = usual(checkout, command)
        size = estimate.reserved - (3_000_000_000 if command.settings["base_precision"] else 0)
        return replace(estimate, reserved=size)

    monkeypatch.setattr(estimation, "estimate", smaller)
    result = search(checkout, ["--network_dim", "77", "--resolution", "1024"], 6 * GIB)
    assert result.answer.command.settings["base_precision"] == "int8"
    assert result.answer.traded.startswith("experimental, and no GeForce GPU has run it; ")
    assert result.experimental is None
    assert next(branch for branch in result.tree if branch.saving.name == "8-bit base").status == "taken"


def test_the_search_adds_savings_and_reduces_the_last_one(checkout, formula_estimates):
    lines: list[str] = []
    result = search(checkout, ["--network_dim", "77"], 12 * GIB, lines)
    assert f"making up to {planning.MAX_ESTIMATES}" in lines[0]
    assert [line.partition(":")[0] for line in lines[1:]] == [
        f"estimate {n} of at most {planning.MAX_ESTIMATES}" for n in range(1, len(lines))
    ]
    assert len(lines) - 1 == len(formula_estimates) <= planning.MAX_ESTIMATES
    assert result.answer.command.argv[-1] == "0.5"  # 5 + 1.54 + 1 + 8 * 0.5 GB; 0.375 needs 1 GB too much
    assert result.answer.estimate.total <= tiers.usable_bytes(12 * GIB)
    assert all(candidate.estimate.flops_per_image >= result.answer.estimate.flops_per_image for candidate in result.others)
    assert all(
        "--network_dim" in candidate.command.argv and "77" in candidate.command.argv
        for candidate in [result.answer, *result.others, *result.too_big]
    )
    formula_estimates.clear()
    again: list[str] = []
    assert search(checkout, ["--network_dim", "77"], 12 * GIB, again).answer == result.answer
    assert again == []


def test_the_fewest_swapped_blocks_win_and_every_row_has_drawbacks(checkout, formula_estimates):
    result = planning.plan(
        checkout, CommandLine(checkout.script(FLUX), ["--network_dim", "77"], {}), 6 * GIB, GPU, lambda line: None
    )
    # 5 + 1.54 + 1 GB, less 0.2 for each block, into 6.12 - 0.6: 11 blocks, and 13 with 0.5 GB more for attention.
    assert result.answer.command.given["blocks_to_swap"] == 11
    rows = [result.answer, *result.others, *result.too_big]
    swapped = [candidate.estimate.config.get("blocks_to_swap", 0) for candidate in [result.answer, *result.others]]
    assert swapped == sorted(swapped)
    assert len({candidate.name for candidate in rows}) == len(rows)
    assert result.answer.name == "--blocks_to_swap 11"
    kept = [config for config, _ in map(memory_config.read, formula_estimates) if config.keep_attention]
    assert 13 in {config.blocks_to_swap for config in kept}
    assert result.answer.traded.startswith("cached captions cannot be shuffled or dropped; checkpointing, ")
    assert result.answer.traded.endswith(", fp8 base, block swap")
    assert all(candidate.traded for candidate in rows)


@pytest.mark.parametrize(
    ("size", "argv", "words"),
    [
        (6, ["--keep_attention"], ["--blocks_to_swap", "13"]),
        (6, ["--no-keep_attention"], ["--blocks_to_swap", "11"]),
        (4, ["--network_dim", "211"], ["--blocks_to_swap", "34"]),  # 4.2 GB for the rank, and 35 blocks are the most
    ],
)
def test_attention_is_kept_as_the_user_says_and_the_memory_allows(checkout, formula_estimates, size, argv, words):
    command = CommandLine(checkout.script(FLUX), ["--network_dim", "77", *argv], {})
    result = planning.plan(checkout, command, size * GIB, GPU, lambda line: None)
    assert list(result.answer.command.argv[-len(words) :]) == words, result.answer.command.argv


def candidate(reserved, flops, swap=None, work=None):
    config = {"script": FLUX, **({"blocks_to_swap": swap} if swap else {})}
    estimate = Estimate(config, reserved, reserved, reserved, "forward", {}, {}, flops, 0, {}, "v0.11", work)
    return planning.Candidate("", CommandLine(Path(FLUX), (), {}), estimate)


def test_candidates_rank_by_the_time_of_an_image():
    def timed(seconds, copied=0):
        product = Kernels(SIXTEEN_BITS, 1, seconds * 1e14, 0)
        return candidate(6, 15, 2 if copied else None, Work([product], [], copied=copied).as_row())

    slow, fast, swapping = timed(3), timed(1), timed(1, copied=1e12)
    assert planning.fastest_first([slow, swapping, fast], GPU) == [fast, slow, swapping]


def test_candidates_with_unknown_kernels_rank_by_swapped_blocks_operations_and_memory():
    ranked = [candidate(6, 15), candidate(9, 16), candidate(5, 16), candidate(8, 16, 20), candidate(6, 16, 34)]
    assert planning.fastest_first([ranked[at] for at in (3, 1, 4, 0, 2)], GPU) == ranked


def test_a_gpu_too_small_for_everything_takes_one_estimate_of_each_base(checkout, formula_estimates):
    with pytest.raises(UserError, match=r"nothing fits the 2 GB GPU"):
        search(checkout, ["--network_dim", "77"], 2 * GIB)
    assert [command.settings["base_precision"] for command in formula_estimates] == [None, "int8"]
    assert "--resolution" in formula_estimates[0].argv


def test_the_effective_batch_and_the_users_options_are_kept(checkout, formula_estimates):
    fixed = [
        "--network_dim",
        "77",
        "--train_batch_size",
        "4",
        "--gradient_accumulation_steps",
        "2",
        "--no-gradient_checkpointing",
    ]
    result = search(checkout, fixed, 24 * GIB)
    values = result.answer.command.given
    assert values["train_batch_size"] * values["gradient_accumulation_steps"] == 8
    assert values["train_batch_size"] == 1
    for command in formula_estimates:
        given = command.given
        assert given["gradient_checkpointing"] is False
        assert given["train_batch_size"] * given.get("gradient_accumulation_steps", 1) == 8


def test_a_gpu_below_the_smallest_tier_is_searched(checkout, formula_estimates):
    with pytest.raises(UserError, match=r"nothing fits the 5 GB GPU"):
        search(checkout, [], 5 * GIB)
    assert formula_estimates


def test_an_error_names_the_smallest_configuration(checkout, formula_estimates):
    with pytest.raises(
        UserError, match=r"nothing fits the 4 GB GPU \(4\.29e9 bytes\) less 5 percent; the smallest configuration, .* needs"
    ):
        search(checkout, ["--network_dim", "77"], 4 * GIB)


def test_auto_selects_the_tier_that_fits_with_the_users_arguments():
    def auto(size, *argv):
        return planning.automatic(CommandLine(Path(LORA), argv, {}), size * GIB)

    assert auto(12) == "sdxl-lora/12gb"
    assert auto(20) == "sdxl-lora/16gb" or auto(20) == "sdxl-lora/24gb"
    # Without a known estimate, the tier of the GPU's size is selected.
    assert auto(16, "--network_dim", "77") == "sdxl-lora/16gb"
    with pytest.raises(UserError, match=r"no preset of sdxl_train_network\.py fits the 2 GB GPU"):
        auto(2)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("anima_train.py", "anima_train.py has no presets for GPU sizes"),
        ("train_controlnet.py", "train_controlnet.py has no presets for GPU sizes"),
    ],
)
def test_auto_fails_without_presets_for_gpu_sizes(script, message):
    with pytest.raises(UserError, match=message):
        _ = CommandLine(Path(script), ["--preset", "auto", "--vram", "24"], {}, automatic).presets


@pytest.mark.parametrize(("size", "tier"), [("24564MiB", "24gb"), ("15360MiB", "16gb"), ("11GB", "10gb")])
def test_auto_takes_the_tier_of_the_advertised_size_where_memory_is_not_known(size, tier):
    """A driver reports slightly less than the advertised size: 24,564 MiB for an RTX 4090."""
    argv = ["--network_dim", "77", "--vram", size]
    assert planning.automatic(CommandLine(Path(LORA), argv, {}), read_card(size)) == f"sdxl-lora/{tier}"


def test_auto_combines_with_presets_and_reports_its_selection(tmp_path):
    run = CommandLine(Path(LORA), ["--preset", "auto", "--preset", "quality", "--vram", "12"], {}, automatic)
    assert run.presets.label == "sdxl-lora/12gb + sdxl-lora/quality (auto: --vram, 12 GB GPU (12.88e9 bytes))"
    assert run.presets.values["gradient_checkpointing_ratio"].preset == "sdxl-lora/12gb"
    assert run.settings["gradient_checkpointing_ratio"] == 0.375
    by_variable = CommandLine(Path(LORA), [], {"KOHYA_EXT_PRESET": "auto", "KOHYA_EXT_VRAM": "16GiB"}, automatic)
    assert by_variable.presets.label.startswith("sdxl-lora/16gb (auto")


def test_auto_and_plan_without_a_gpu_ask_for_its_size(checkout, monkeypatch, capsys):
    monkeypatch.setattr(installed_gpus, "first_gpu", lambda: None)
    monkeypatch.setenv("KOHYA_SD_SCRIPTS", str(checkout.path))
    assert main([LORA, "--preset", "auto"]) == 2
    assert "no NVIDIA GPU found; add --vram 16, or name a preset: --preset 16gb" in capsys.readouterr().err
    assert main(["plan", LORA]) == 2
    assert "--vram 16" in capsys.readouterr().err


def test_the_command_prints_the_command_line_and_json(checkout, capsys):
    arguments = ["plan", "--sd-scripts", str(checkout.path), LORA, "--vram", "16", "--output_name", "a name"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert [line.partition(":")[0] for line in printed.splitlines()[1:5]] == [
        *("time", "--speed auto", "memory", "drawbacks"),
    ]
    assert f"\nTo run it:\n  python -m kohya_ext {LORA} --preset 16gb --output_name {quoted_word('a name')}\n" in printed
    assert "too big" not in printed
    assert main([*arguments, "--verbose"]) == 0
    assert "too big: preset sdxl-lora/" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["answer"]["total"] == output["answer"]["reserved"] + CONTEXT_BYTES <= output["usable"]
    assert len(output["others"]) == 2
    assert output["calibrated_on_cuda"] is False


@pytest.mark.linux("Windows has no Triton package by default, and the choice is another one")
@pytest.mark.parametrize(
    ("script", "card", "recommended"), [(LORA, "16", True), ("sdxl_train.py", "24", True), (LORA, "6", False)]
)
def test_the_command_names_what_the_run_may_turn_on(checkout, capsys, script, card, recommended):
    assert main(["plan", "--sd-scripts", str(checkout.path), script, "--vram", card]) == 0
    assert ("\n--speed auto: fused operations, predicted" in capsys.readouterr().out) is recommended


def test_a_faster_change_is_one_step_with_its_flags():
    tier = TIERS["sdxl-lora/12gb"]
    better = tiers.faster(tier)
    assert better == replace(tier.config, gradient_checkpointing_ratio=0.125)
    assert tiers.words(tier.config, better) == ["--gradient_checkpointing_ratio", "0.125"]
    argv = ["--preset", tier.name, *tiers.words(tier.config, better)]
    assert tiers.read(LORA, argv) == better


def test_a_transformer_keeps_attention_before_it_checkpoints_fewer_blocks():
    tier = TIERS["chroma-lora/32gb"]
    assert tiers.faster(replace(tier, config=replace(tier.config, keep_attention=False))) == tier.config
    assert tiers.faster(tier) == replace(tier.config, gradient_checkpointing_ratio=0.5)


def test_the_config_files_options_are_kept(checkout, formula_estimates, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("network_dim = 77\ntrain_batch_size = 2\ngradient_checkpointing = false\n")
    result = search(checkout, ["--config_file", str(file)], 24 * GIB)
    values = result.answer.command.given
    assert values["train_batch_size"] * values["gradient_accumulation_steps"] == 2
    assert not any("--gradient_checkpointing" in command.argv for command in formula_estimates)
