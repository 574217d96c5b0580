"""The report is short without problems, and shows each problem."""

import io

import pytest
from rich.console import Console

from kohya_ext.commands import doctor
from kohya_ext.patching.patch import registry
from kohya_ext.sdscripts import checkouts
from tests.unit.test_checkouts import make_tree


def row(patch, target, status="applied", reason="", surprise=False):
    about = {
        "summary": f"what {patch} does",
        "exactness": "exact",
        "held_to": "upstream",
        "engine": False,
        "options": [],
        "until": None,
    }
    return {"patch": patch, "target": target, "status": status, "reason": reason, "surprise": surprise, **about}


def labels(patch):
    return [*(target.label for target in patch.targets), *filter(None, [patch.callback_label])]


#: As many patches, targets and callbacks as there are.
ALL = [row(name, label) for name, patch in registry().items() for label in labels(patch)]


@pytest.fixture
def rendered_lines():
    """(show, rows) -> the lines that are printed at 100 columns."""

    def lines(show, rows):
        console = Console(file=io.StringIO(), width=100, highlight=False)
        show(console, rows)
        return console.file.getvalue().splitlines()

    return lines


def test_the_report_lists_every_patch_in_few_lines(rendered_lines):
    off = [
        {**outcome, "status": "skipped", "reason": "not enabled"}
        for outcome in ALL
        if outcome["patch"] in ("ema", "spill_watch")
    ]
    on = [outcome for outcome in ALL if outcome["patch"] not in ("ema", "spill_watch")]
    lines = rendered_lines(doctor._show_patches, on + off)
    assert len(lines) < len(registry()) / 3
    printed = " ".join(" ".join(lines).split())
    assert f"{len(registry()) - 2} patches on activation_memory_budget, " in printed
    assert "2 off not enabled: ema, spill_watch" in printed
    assert len(rendered_lines(doctor._show_targets, on + off)) > 100


def test_a_problem_is_shown_with_a_solution(rendered_lines):
    rows = [
        row("one", "library.a:f", "skipped", "its parameters are ['x']", surprise=True),
        row("two", "library.b:g", "failed", "TypeError: [bold]"),
        row("three", "library.c:h", "waiting", "library.c cannot be imported: no toml"),
        row("three", "library.c:i"),
        row("four", "library.d:j", "skipped", "disabled by the user"),
    ]
    printed = "\n".join(rendered_lines(doctor._show_patches, rows))
    assert "skipped one, library.a:f: its parameters are ['x']" in printed
    assert "failed two, library.b:g: TypeError: [bold]" in printed
    assert "waiting three, library.c:h: library.c cannot be imported: no toml" in printed
    assert "1 patches on  three" in printed
    assert "1 off         disabled by the user: four" in printed
    assert "python -m kohya_ext setup" in printed
    assert "Report it" in printed
    assert not doctor._is_healthy({"patches": rows})
    assert doctor._is_healthy({"patches": ALL})
    assert not doctor._is_healthy({"patches": []})


def test_the_options_of_a_patch_and_its_last_release_are_shown(rendered_lines):
    patch = {**row("one", "library.a:f"), "options": ["depth", "width"], "until": "0.12.0"}
    printed = rendered_lines(doctor._show_targets, [patch])
    assert "  options  --depth, --width" in printed
    assert "  until    sd-scripts v0.12.0" in printed


def test_the_engines_patches_are_shown_with_their_targets_and_not_counted(rendered_lines):
    rows = [{**row("options", "library.args:f"), "engine": True}, row("one", "library.a:f")]
    assert "1 patches on one" in " ".join(" ".join(rendered_lines(doctor._show_patches, rows)).split())
    assert "  applied  library.args:f" in rendered_lines(doctor._show_targets, rows)


@pytest.mark.parametrize(
    ("layout", "version", "words"),
    [
        ("v0.11", "0.11.1", "v0.11.1, layout"),
        ("v0.11", "99.0.0", "v99.0.0 (newer than the tested v0.11.1), layout"),
        ("sd3", "0.10.0", "v0.10.0 (older than the tested v0.10.1), layout"),
    ],
)
def test_a_release_that_is_newer_or_older_than_tested_is_named(tmp_path, layout, version, words):
    checkout = checkouts.describe(make_tree(tmp_path / "tree", layout, version), "here")
    assert doctor._checkout_words(doctor._checkout(checkout)).startswith(words)
