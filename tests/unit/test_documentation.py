"""Names and commands in the documentation are those of the code."""

import re
from pathlib import Path

import pytest

from kohya_ext import commands
from kohya_ext.patching.training_loop import Stage
from kohya_ext.sdscripts import families

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
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
