"""Names, commands and figures in the documentation are those of the code, its tables and the published results."""

import json
import re
from pathlib import Path
from statistics import median

import pytest

from kohya_ext import commands
from kohya_ext.config import preset_files
from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate import cache, memory_config
from kohya_ext.patching.training_loop import Stage
from kohya_ext.sdscripts import families

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def text_of(page):
    """Return a page's text in one line, without the marks of a quotation."""
    return re.sub(r"\s+(?:> )?", " ", (ROOT / page).read_text("utf-8"))


def results(name):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text("utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_scripts_exist(page):
    scripts = {script for family in families.FAMILIES for script in family.scripts}
    words = re.findall(r"python -m kohya_ext ((?:--\S+ )*)(\S+)", page.read_text("utf-8"))
    named = {name.strip("`.,;:|") for options, name in words if not options and re.match("[a-z]", name)}
    assert named <= {*commands.names(), *scripts}


def test_names_in_the_developer_documentation_exist():
    folders = ("kohya_ext", "patches", "tests", "tools", "benchmarks")
    sources = "\n".join(file.read_text("utf-8") for folder in folders for file in (ROOT / folder).rglob("*.py"))
    page = (ROOT / "docs" / "developers.md").read_text("utf-8")
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    called = set(re.findall(r"\b(\w+)\([^()]*\)`", prose))
    assert called >= {"known_bodies", "step_values"}
    assert not [name for name in called if not re.search(rf"^\s*(?:(?:def|class) {name}\b|{name}: )", sources, re.MULTILINE)]
    order = re.search(r"`Stage` defines the order: (.*?)\. ", prose, re.DOTALL)
    assert re.findall(r"`(\w+)`", order[1]) == [stage.name for stage in Stage]


def test_seconds_on_the_h100():
    rows = results("gpu_time.json")["rows"]

    def seconds(model, variant):
        return f"{median(run['seconds'] for run in rows[f'{model}-lora --gradient_checkpointing {variant}']):.2f}"

    sdxl = [seconds("sdxl", variant) for variant in ("upstream", "default", "graphs")]
    flux = [seconds("flux", variant) for variant in ("upstream", "default", "graphs", "compiled-graphs")]
    readme = text_of("README.md")
    assert (
        "SDXL, {} s in upstream's script, {} s with the default patches and {} s with `--cuda_graphs`".format(*sdxl) in readme
    )
    assert "with FLUX {}, {} and {} s, and {} s with `--selective_torch_compile`".format(*flux) in readme


def test_accuracy_of_the_presets():
    shipped = {f"{family}/{name}" for family, name, _ in preset_files.shipped() if not name.endswith("-int8")}
    rows = {name: row for name, row in results("full_size.json")["rows"].items() if name.partition(" ")[0] in shipped}
    deviations = {name: row["predicted"]["reserved"] / row["used"]["reserved"] - 1 for name, row in rows.items()}
    near = sum(abs(value) <= 0.001 for value in deviations.values())
    presets = sum(" " not in name for name in rows)
    facts = f"{near} of {len(rows)} configurations ({presets} presets and {len(rows) - presets} next faster choices)"
    assert facts in text_of("README.md")
    others = {name: 100 * value for name, value in deviations.items() if abs(value) > 0.001}
    assert all(name.startswith("hunyuan-image") for name in others)
    spread = f"{min(others.values()):.1f} to {max(others.values()):.1f}%"
    assert f"all of HunyuanImage, {spread} too high" in text_of("README.md")
    assert f"HunyuanImage, {spread} above" in text_of("docs/memory.md")


def test_host_memory_while_a_model_is_loaded():
    lines = [line.split("|") for line in (ROOT / "docs" / "memory.md").read_text("utf-8").splitlines()]
    published = {cells[1].strip(): [cell.strip() for cell in cells[2:6]] for cells in lines if len(cells) == 7}
    measured = results("host_memory.json")
    names = {"SDXL": "sdxl-lora", "FLUX": "flux-lora", "Lumina 2": "lumina-lora", "SD 1.5": "sd15-lora"}
    names["FLUX with `--fp8_base`, 5 swapped blocks"] = "flux-lora, --fp8_base"
    for title, name in names.items():
        runs = [measured[version][name][kind] for version in ("0.11.1", "0.10.1") for kind in ("upstream", "default")]
        assert published[title] == [f"{run['peak'] / 1e9:.1f}" for run in runs], title


def test_operations_of_the_12_gb_preset():
    config = memory_config.read(CommandLine(Path("sdxl_train_network.py"), ["--preset", "12gb"], {}))[0]
    row = cache.shipped(memory_config.normalized(config))
    operations = f"{row['flops'] / 1e12:.1f} TFLOP per step"
    assert f"`python -m kohya_ext estimate sdxl_train_network.py --preset 12gb` predicts {operations}" in text_of(
        "docs/memory.md"
    )
