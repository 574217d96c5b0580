"""Every figure in the prose of users' pages follows from a result: no other quantity with a unit is left on these pages."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from kohya_ext.commands import presets
from kohya_ext.config import preset_files
from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate import cache, memory_config
from kohya_ext.estimate.result import CONTEXT_BYTES
from kohya_ext.patching.patch import registry
from kohya_ext.planning import tiers

ROOT = Path(__file__).parents[2]
EVIDENCE = (ROOT / "benchmarks" / "README.md").read_text("utf-8")

#: A quantity that somebody measured, counted or predicted. Sizes of GPUs and times of a person are none.
FIGURE = re.compile(r"\d[\d.,]*(?:%| (?:GB(?! GPU)|MB|TB|ms|s|TFLOP|kernels|times)\b)")

#: Quantities that are definitions or settings, not results.
SETTINGS = ("GPUs of 6 to 80 GB", "and 1 GB for gradients", "1 GB for gradients, and the gathered layers")

#: Words that a page may have.
LIMITS = {
    "docs/speed.md": 2500,
    "docs/caching.md": 500,
    "docs/memory.md": 1500,
    "docs/multi_gpu.md": 2500,
    "docs/which_preset.md": 500,
    "docs/faq.md": 700,
}


def results(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text("utf-8"))


def prose(page: str) -> str:
    """Return a page in one line, without code, targets of links and generated parts."""
    text = (ROOT / page).read_text("utf-8")
    text = re.sub(r"<!-- generated .*?<!-- end -->|```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`\n]*`", "``", text))
    return re.sub(r"\s+", " ", text)


def row(*cells: str) -> list[str]:
    """Return the other cells of the first row of the evidence's generated tables that begins with these."""
    line = next(line for line in EVIDENCE.splitlines() if line.startswith("| " + " | ".join(cells) + " |"))
    return [cell.strip() for cell in line.split("|")][1 + len(cells) : -1]


def host_memory(lora: str, kind: str) -> str:
    return f"{results('host_memory.json')['0.11.1'][lora][kind]['peak'] / 1e9:.1f}"


def readme() -> Iterator[str]:
    rows = {each.name: each for each in presets.rows() if each.family == "sdxl-lora"}
    usual, eight = rows["12gb"], rows["12gb-int8"]
    times = [presets.seconds_text(value) for value in (usual.seconds, eight.seconds, usual.upstream)]
    yield f"on an {usual.gpu} an SDXL LoRA is predicted to take {times[0]} per image, and {times[1]} with"
    yield f"sd-scripts alone is predicted to take {times[2]} with its fastest options that fit"
    whole = next(each for each in presets.rows(only="sdxl-finetune") if each.name == "12gb")
    ours, theirs = presets.seconds_text(whole.seconds), presets.seconds_text(whole.upstream)
    yield f"A full fine-tune of SDXL is predicted to take {ours.removesuffix(' s')} instead of {theirs}"
    sdxl = host_memory("sdxl-lora", "default"), host_memory("sdxl-lora", "upstream")
    flux = host_memory("flux-lora", "default"), host_memory("flux-lora", "upstream")
    yield "of an SDXL LoRA needs {} instead of {} GB of host memory, of a FLUX LoRA {} instead of {} GB".format(*sdxl, *flux)
    smallest = min(tier.about["vram_gb"] for tier in tiers.tiers("sdxl-finetune"))
    yield f"full fine-tunes of SDXL (from {smallest} GB) and FLUX"
    yield f"A full fine-tune of SDXL with AdamW is predicted to need {fine_tune('optimizer states on the host')} GB of the GPU"


def fine_tune(kind: str) -> str:
    row = results("dry_runs.json")["rows"][f"{kind}, fine-tune of SDXL"]
    return f"{(row['predicted']['reserved'] + CONTEXT_BYTES) / 1e9:.1f}"


def fine_tunes() -> Iterator[str]:
    usual, eight, host = map(
        fine_tune, ("gradient release with AdamW", "gradient release with AdamW8bit", "optimizer states on the host")
    )
    yield f"| `` | 27.7 GB | {usual} GB |"
    yield f"| `` | 17.5 GB | {eight} GB |"
    places = (" of AdamW", ", a quarter of the states on the host", ", half of the states on the host")
    fused, quarter, half = (fine_tune(f"fused steps{place}") for place in places)
    yield f"| states on the GPU | {fused} GB |"
    yield f"| `` | {quarter} GB | 2.6 GB | "
    yield f"| `` | {half} GB | 5.1 GB | "
    yield f"| `` | {host} GB | 10.3 GB | "
    smallest = next(each for each in presets.rows(only="sdxl-finetune") if each.name == "8gb")
    fused = presets.seconds_text(smallest.seconds)
    yield f"{presets.seconds_text(smallest.windows[0])} per step on an {smallest.gpu}, {fused} with [fused steps]"


def caching() -> Iterator[str]:
    start = results("caching.json")["rows"]["First start: until the first step"]
    yield f"600 images took {median(start['ours']):.0f} instead of {median(start['upstream']):.0f} s"
    waits = results("data_wait.json")["0.11.1"]["cached latents and texts"]
    before, after = (1e3 * waits[name]["wait"] for name in ("upstream's, 2 workers", "--auto_data_loader, 2 workers"))
    yield f"the wait for a batch falls from {before:.1f} to {after:.1f} ms"
    # Values of the longest text that the scripts encode by default, as their strategies store them.
    values = (77 * (768 + 1280) + 1280, 512 * 1024, 256 * 2304, 77 * 2048 + 256 * 4096 + 2048, 512 * 4096 + 768)
    sizes = dict(
        zip(("SDXL", "Anima", "Lumina 2", "SD 3", "FLUX"), (f"{4 * count / 1e6:.1f} MB" for count in values), strict=True)
    )
    *others, last = (f"{size} for {name}" for name, size in sizes.items())
    yield f"A text takes {', '.join(others)} and {last}."


def speed() -> Iterator[str]:
    typed = results("gpu_commands_h200.json")["rows"]
    upstream, ours = (typed[f"sdxl-lora/16gb {variant}"] for variant in ("upstream", "auto"))
    gain = upstream[-1]["seconds"] / next(run["seconds"] for run in ours if run["visit"] == upstream[-1]["visit"])
    yield f"trained an SDXL LoRA {gain:.1f} times as fast as upstream with the same options"
    (*_, moved, launches), (*_, less, fewer) = row("sdxl-lora", "upstream", "1"), row("sdxl-lora", "fused graphs", "1")
    (*_, of_flux, _), (*_, less_of_flux, _) = row("flux-lora", "upstream", "1"), row("flux-lora", "fused graphs", "1")
    yield f"A FLUX LoRA step moves {less_of_flux} instead of {of_flux} GB"
    yield f"an SDXL one {less} of {moved} GB with {fewer} of {launches} kernels"
    (whole, *_), (first, second, *_) = row("sdxl-lora", "upstream"), row("sdxl-lora", "selective")
    yield f"The first start of an SDXL LoRA takes {first} longer, where upstream's `` takes {whole}, and later starts {second}"
    errors = map(output_errors, ("int8", "fp8", "upstream"))
    yield "a block's output differs from fp32's by {}, with `` by {}, with upstream's 8 bits by {}".format(*errors)
    total = results("budget_sdxl_lora.json")["total"]
    kept = [f"{total[key]['kept'] / 1e9:.2f}" for key in ("0.25", "eager")]
    operations = [f"{total[key]['flops'] / total['eager']['flops']:.2f}" for key in ("0.25", "checkpointing")]
    yield "keeps {} instead of {} GB, for {} times the FLOPs; gradient checkpointing takes {} times".format(*kept, *operations)
    kinds = "later start with a cache", "default"
    starts = [host_memory(f"{lora}, --base_precision int8", kind) for lora in ("sdxl-lora", "flux-lora") for kind in kinds]
    yield "at the start: {} instead of {} GB with SDXL, {} instead of {} GB with FLUX".format(*starts)
    yield stated("Expect an error of 10 to 15%")


def output_errors(base: str) -> str:
    """Return the range of a base's errors of a block's output, over all families."""
    measured = (block.get(base) for block in results("base_weights_quality.json")["blocks"].values())
    errors = [100 * each["outliers 20, depth 1"]["output"][0] for each in measured if each]
    return f"{min(errors):.1f} to {max(errors):.1f}%"


def stated(sentence: str) -> str:
    """Return a judgement that the evidence explains."""
    assert sentence in EVIDENCE
    return sentence


_LLLITE = "LLLite Anima"


def memory() -> Iterator[str]:
    config = memory_config.read(CommandLine(Path("sdxl_train_network.py"), ["--preset", "12gb"], {}))[0]
    yield f"predicts {cache.shipped(memory_config.normalized(config))['flops'] / 1e12:.1f} TFLOP per step"
    yield f"{preset_accuracy()[0]} configurations at full size | within 0.1%"
    dry = {name: each["error_percent"] for name, each in results("dry_runs.json")["rows"].items()}
    above = math.ceil(10 * dry[_LLLITE]["reserved"]) / 10
    others = [each for name, each in dry.items() if name != _LLLITE]
    assert all(abs(error) < 0.5 for each in others for error in each.values())
    worst = math.ceil(10 * max(abs(error) for each in others for error in each.values())) / 10
    yield f"dry runs of {len(dry)} command lines | LLLite of Anima {above}% above, all others within {worst}%"
    line = next(text for text in EVIDENCE.split("\n- ") if text.startswith("On an H100, predicted and measured GB"))
    pairs = re.findall(r"([\d.]+) and\s+([\d.]+)(?= reserved|;|,\s+\d|$|\s+\(|\.)", line)
    assert len(pairs) == 12  # allocated and reserved memory of six runs
    above = [100 * (float(used) / float(predicted) - 1) for predicted, used in pairs[1::2]]
    yield f"{min(above):.1f} to {max(above):.1f}% above the estimate"


def preset_accuracy() -> tuple[int, int]:
    """Return the numbers of configurations, all of which are within 0.1%, and of presets among them."""
    shipped = {f"{family}/{name}" for family, name, _ in preset_files.shipped() if not name.endswith("-int8")}
    rows = {name: each for name, each in results("full_size.json")["rows"].items() if name.partition(" ")[0] in shipped}
    assert all(abs(each["predicted"]["reserved"] / each["used"]["reserved"] - 1) < 0.001 for each in rows.values())
    return len(rows), sum(" " not in name for name in rows)


def several_gpus() -> Iterator[str]:
    table = EVIDENCE.partition("## Predicted memory of several GPUs")[2].partition("\n- ")[0]
    allocated = [re.split(", ", line.split("|")[2]) for line in table.splitlines() if re.search(r"\d, \d", line)]
    assert all(abs(float(used) / float(predicted) - 1) < 0.01 for predicted, used in allocated)
    yield "predicts allocated memory within 1% of what the real script uses"
    assert "1%" in registry()["gradient_averaging"].held_to
    yield "updates within 1%"


@pytest.mark.parametrize(
    ("page", "held"),
    [
        pytest.param(
            "README.md", readme, marks=pytest.mark.linux("steps are predicted for this system, and the figure is Linux'")
        ),
        ("docs/speed.md", speed),
        ("docs/caching.md", caching),
        ("docs/memory.md", memory),
        ("docs/multi_gpu.md", several_gpus),
        ("docs/which_preset.md", tuple),
        ("docs/faq.md", tuple),
    ],
)
def test_figures_in_prose_follow_from_results(page, held):
    text = prose(page)
    sentences = list(held())
    assert [sentence for sentence in sentences if sentence not in text] == []
    for sentence in (*sentences, *SETTINGS):
        text = text.replace(sentence, "")
    tables = re.sub(r"\| [^|]*\d+ (?:to|and) \d+ GB[^|]*\|", "|", text)  # sizes of GPUs
    assert FIGURE.findall(tables) == []


def test_memory_of_fine_tunes_follows_from_results():
    text = prose("docs/fine_tunes.md")
    assert [sentence for sentence in fine_tunes() if sentence not in text] == []


def test_accuracy_in_the_evidence():
    rows, shipped = preset_accuracy()
    text = re.sub(r"\s+", " ", EVIDENCE)
    assert f"all {shipped} presets run" in text
    assert f"their {rows - shipped} next faster choices is within 0.1% of the allocator's" in text


def test_host_memory_while_a_model_is_loaded():
    names = {"SDXL": "sdxl-lora", "FLUX": "flux-lora", "Lumina 2": "lumina-lora", "SD 1.5": "sd15-lora"}
    names["FLUX with `--fp8_base`, 5 swapped blocks"] = "flux-lora, --fp8_base"
    measured = results("host_memory.json")
    page = (ROOT / "docs" / "memory.md").read_text("utf-8")
    for title, name in names.items():
        runs = [
            f"{measured[each][name][kind]['peak'] / 1e9:.1f}"
            for each in ("0.11.1", "0.10.1")
            for kind in ("upstream", "default")
        ]
        assert f"| {title} | {' | '.join(runs)} |" in EVIDENCE
        assert f"| {title} | {' | '.join(runs[:2])} |" in page


def test_every_size_is_listed_for_those_who_choose_a_preset():
    page = (ROOT / "docs" / "which_preset.md").read_text("utf-8")
    for family in {family for family, _, _ in preset_files.shipped()} - {preset_files.ANY}:
        names = [name for each, name, _ in preset_files.shipped() if each == family]
        sizes = sorted(int(name.removesuffix("gb")) for name in names if re.fullmatch(r"\d+gb", name))
        assert sizes[0] <= 12, "the README says that it fits a 12 GB GPU"
        script = preset_files.scripts(family)[0]
        assert re.search(rf"`{script}`[^|]*\| {sizes[0]} (to|and) {sizes[-1]} GB", page), family


@pytest.mark.parametrize(("page", "words"), LIMITS.items())
def test_pages_for_users_are_short(page, words):
    assert len((ROOT / page).read_text("utf-8").split()) <= words
