"""Names and commands in the documentation are those of the code."""

import ast
import re
from pathlib import Path

import pytest

from kohya_ext import commands
from kohya_ext.config import preset_files
from kohya_ext.config.settings import AUTO
from kohya_ext.patching.patch import Patch, Target
from kohya_ext.patching.training_loop import Stage, TrainingCallback
from kohya_ext.sdscripts import families

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_and_scripts_exist(page):
    scripts = {script for family in families.FAMILIES for script in family.scripts}
    words = re.findall(r"python -m kohya_ext ((?:--\S+ )*)(\S+)", page.read_text("utf-8"))
    named = {name.strip("`.,;:|") for options, name in words if not options and re.match("[a-z]", name)}
    assert named <= {*commands.names(), *scripts}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_presets_of_commands_are_those_of_their_scripts(page):
    commands_in_code = re.findall(r"(\w+\.py)((?: [^`\n|]*?)?) --preset ([\w/-]+)(?![\w./-])", page.read_text("utf-8"))
    for script, _, preset in commands_in_code:
        if preset != AUTO:
            preset_files.load([preset], script)


def _prose():
    page = (ROOT / "docs" / "developers.md").read_text("utf-8")
    return re.sub(r"```.*?```", "", page, flags=re.DOTALL)


def _unknown_names(prose):
    """Return every mention of a call or a keyword argument that is neither imported by a patch nor a field of one."""
    modules = [ast.parse(file.read_text("utf-8")) for file in (ROOT / "patches").glob("*.py")]
    imports = [node for module in modules for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    imported = {name.name for node in imports if (node.module or "").startswith("kohya_ext") for name in node.names}
    fields = {*Patch.__dataclass_fields__, *Target.__dataclass_fields__, *vars(TrainingCallback)}
    code = re.findall(r"`([^`\n]+)`", prose)
    called = [name for part in code for name in re.findall(r"(?<![.\w])(\w+)\(", part)]
    keywords = [name for part in code for name in re.findall(r"(?<![-.\w])(\w+)=", part)]
    return [*(name for name in called if name not in imported | fields), *(name for name in keywords if name not in fields)]


def test_names_in_the_developer_documentation_exist():
    prose = _prose()
    assert _unknown_names(prose) == []
    order = re.search(r"`Stage` defines the order: (.*?)\. ", prose, re.DOTALL)
    assert re.findall(r"`(\w+)`", order[1]) == [stage.name for stage in Stage]


def test_every_wrong_mention_is_found():
    """Also next to a right one, and where another module has a function of that name."""
    assert _prose().count("known_bodies(") == 2
    assert _unknown_names(_prose().replace("known_bodies(", "known(", 1)) == ["known"]
    assert _unknown_names("`known_bodies(a)`, `body=known(known_bodies(b))`, `bodies=step_value()`") == [
        "known",
        "step_value",
        "bodies",
    ]
