"""The comparison of patches with a checkout, and the table of releases that it wrote."""

import importlib.util
import json
import re

import pytest

pytest.importorskip("torch")

from kohya_ext.patching import patch as patching
from kohya_ext.patching.patch import Patch, Target, moved, registry, takes
from kohya_ext.sdscripts import checkouts, releases
from kohya_ext.sdscripts.fingerprints import fingerprint, known_bodies
from tests.unit.test_checkouts import make_tree
from tools import new_release

CODE = '''\ufeff
import torch

if torch.cuda.is_available():
    import apex
else:
    class Norm(torch.nn.Module):
        """Doc."""

        @torch.no_grad()
        def forward(self, x: "torch.Tensor", eps: float = 1e-6) -> "torch.Tensor":
            return x + eps

class Half(Norm):
    @staticmethod
    def scale(x, by=2, *, also=None): return x * by
'''


@pytest.fixture
def a_file(tmp_path):
    file = tmp_path / "some_model.py"
    file.write_text(CODE, encoding="utf-8")
    return file


@pytest.mark.parametrize("name", ["Norm.forward", "Half.forward", "Half.scale", "Half"])
def test_a_skeleton_has_the_fingerprints_and_parameters_of_the_imported_module(a_file, name):
    spec = importlib.util.spec_from_file_location("some_model", a_file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    skeleton = new_release.skeleton(a_file)

    both = [patching.function_of(*patching.owner_of(each, name))[0] for each in (module, skeleton)]
    assert fingerprint(both[0]) == fingerprint(both[1]) is not None
    if name != "Half":
        assert takes("self", "x", "eps", exactly=True)(both[0]) == takes("self", "x", "eps", exactly=True)(both[1])


def same(original, settings):
    return original


def the_patches(*targets):
    return {"one": Patch("one", "", targets, exactness="exact", held_to="", idea="")}


#: What a release does to the target -> the file of the target and another one, in the tested checkout and in the new one.
ONE, OTHER = "def f(x):\n    return x\n", "def f(x):\n    return 2 * x\n"
RENAMED, NOTHING = "def f(y):\n    return y\n", ""


@pytest.mark.parametrize(
    ("new", "elsewhere", "body", "state", "words"),
    [
        (ONE, "", "runs", "same", ""),
        (ONE, "", "known", "same", ""),
        (OTHER, "", "runs", "body", "+    return 2 * x"),
        (OTHER, "", "known", "changed", "-    return x"),
        (RENAMED, "", "runs", "changed", "-def f(x):"),
        (NOTHING, ONE, "runs", "moved", "to library.elsewhere"),
        (NOTHING, "", "runs", "missing", ""),
    ],
)
def test_a_target_is_compared_with_the_tested_checkout(tmp_path, monkeypatch, new, elsewhere, body, state, words):
    trees = {name: make_tree(tmp_path / name, version="0.11.1" if name == "old" else "0.12.0") for name in ("old", "new")}
    for name, code in (("old", ONE), ("new", new)):
        (trees[name] / "library" / "thing.py").write_text(code)
    (trees["new"] / "library" / "elsewhere.py").write_text(elsewhere)
    old, newer = (checkouts.describe(trees[name], "") for name in ("old", "new"))
    known = fingerprint(new_release.skeleton(trees["old"] / "library" / "thing.py").f)
    bodies = "runs" if body == "runs" else known_bodies({known: "since v0.11.1"})
    target = Target("library.thing", "f", same, takes("x", exactly=True), body=bodies)
    monkeypatch.setattr(new_release, "registry", lambda: the_patches(target))

    (row,) = [row for row in new_release.compare(newer, old) if row.patch == "one"]
    assert row.state == state
    assert words in f"{row.why}\n{row.difference}"
    printed = []
    vars(newer)["commit"] = "c" * 40
    new_release._show_lines_to_add(newer, [row], printed.append)
    assert f'Release("v0.12.0", "{"c" * 40}"),' in printed[0]
    assert any('": "since v0.12.0"' in line for line in printed) == (state == "changed" and body == "known")


def test_a_target_that_moved_earlier_counts_once(tmp_path, monkeypatch):
    targets = moved("f", "library.args", same, body="runs")
    monkeypatch.setattr(new_release, "registry", lambda: the_patches(*targets))
    for layout, module in (("v0.11", "library.args"), ("v0.10", "library.train_util")):
        tree = make_tree(tmp_path / layout, layout)
        (row,) = [row for row in new_release.compare(checkouts.describe(tree, ""), None) if row.patch == "one"]
        assert (row.target.module, row.state) == (module, "missing")


# --- the table of releases -------------------------------------------------------------------------------------------

ROWS = json.loads(new_release.RESULTS.read_text(encoding="utf-8"))
NAMES = [release.name for release in releases.RELEASES]
KNOWN = {
    (value, text)
    for patch in registry().values()
    for target in patch.targets
    if target.body != "runs" and target.body.package == "sd-scripts"
    for bodies in (target.body.fingerprints, *target.body.helpers.values())
    for value, text in bodies.items()
}


def test_every_release_was_compared():
    assert list(ROWS) == NAMES
    assert {name: row["commit"] for name, row in ROWS.items()} == {each.name: each.commit for each in releases.RELEASES}
    assert {row["layout"] for row in ROWS.values()} == {layout.name for layout in releases.LAYOUTS}


def test_the_tested_releases_have_every_target_that_their_generation_has():
    for layout in releases.LAYOUTS:
        if layout.tested:
            assert ROWS[layout.tested]["changed"] == []
            assert ROWS[layout.tested]["targets"]["body"] == 0


@pytest.mark.parametrize(("value", "text"), sorted(KNOWN))
def test_a_known_body_names_the_releases_that_have_it(value, text):
    having = [name for name in NAMES if value in ROWS[name]["bodies"]]
    first, last = having[0], having[-1]
    assert text == (f"since {first}" if last == NAMES[-1] else first if first == last else f"{first} to {last}")


def test_releases_are_listed_by_commit():
    assert all(re.fullmatch(r"[0-9a-f]{40}", release.commit) for release in releases.RELEASES)
    assert set(releases.TAGS) >= {layout.tested for layout in releases.LAYOUTS if layout.tested}
