import importlib
import re
import sys
import types
from pathlib import Path

import pytest

from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.settings import Settings, patch_options
from kohya_ext.errors import UserError
from kohya_ext.launch.session import Session
from kohya_ext.patching.attributes import replaced
from kohya_ext.patching.patch import Patch, Patcher, Target, apply_needed, is_older_torch, moved, registry, takes
from kohya_ext.sdscripts.checkouts import Checkout

CHECKOUT = Checkout(Path("sd-scripts"), "0.11.1", "v0.11", "for the test")


def make(*targets: Target, **rest: object) -> dict[str, Patch]:
    patch = Patch("twice", "doubles", targets, exactness="exact", held_to="itself", idea="here", **rest)
    return {patch.name: patch}


def double(original, settings):
    def doubled(self, *args):
        return 2 * original(self, *args)

    return doubled


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A module that can be imported and is not imported yet."""
    (tmp_path / "a_library.py").write_text(
        "class Base:\n    def value(self):\n        return 3\nclass Child(Base):\n    pass\nFLAG = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda: importlib.import_module("a_library")
    sys.modules.pop("a_library", None)


def only(patcher: Patcher):
    (outcome,) = patcher.outcomes.values()
    return outcome


def test_a_target_is_replaced_when_it_is_imported(library):
    patcher = Patcher(make(Target("a_library", "Base.value", double, body="runs")), Settings(), CHECKOUT)
    patcher.arm()
    assert only(patcher).status == "waiting"
    assert library().Base().value() == 6
    assert only(patcher).status == "applied"
    assert [patch.name for patch in patcher.active()] == ["twice"]


def test_an_imported_target_is_replaced_immediately_and_only_once(library):
    module = library()
    patcher = Patcher(make(Target("a_library", "Base.value", double, body="runs")), Settings(), CHECKOUT)
    patcher.arm()
    patcher.arm()
    assert module.Base().value() == 6


def test_undo_restores_the_identical_object_and_arm_applies_again(library):
    module = library()
    original = vars(module.Base)["value"]
    patcher = Patcher(make(Target("a_library", "Base.value", double, body="runs")), Settings(), CHECKOUT)
    patcher.arm()
    patcher.undo()
    assert vars(module.Base)["value"] is original
    patcher.arm()
    assert module.Base().value() == 6
    patcher.undo()
    assert vars(module.Base)["value"] is original


def test_undo_leaves_no_trace_of_an_inherited_attribute(library):
    module = library()
    patcher = Patcher(make(Target("a_library", "Child.value", double, body="runs")), Settings(), CHECKOUT)
    patcher.arm()
    assert (module.Child().value(), module.Base().value()) == (6, 3)
    patcher.undo()
    assert "value" not in vars(module.Child)


def test_undo_before_the_import_cancels_the_replacement(library):
    patcher = Patcher(make(Target("a_library", "Base.value", double, body="runs")), Settings(), CHECKOUT)
    patcher.arm()
    patcher.undo()
    assert library().Base().value() == 3


def reject(original):
    return "the code has changed"


def test_an_unexpected_target_is_skipped_with_a_reason(library, capsys):
    patcher = Patcher(make(Target("a_library", "Base.value", double, reject, body="runs")), Settings(), CHECKOUT)
    patcher.arm()
    assert library().Base().value() == 3
    assert (only(patcher).status, only(patcher).reason, only(patcher).surprise) == ("skipped", "the code has changed", True)
    assert "does not recognize a_library:Base.value" in capsys.readouterr().err


def test_an_unexpected_target_is_an_error_in_strict_mode(library, capsys):
    patcher = Patcher(make(Target("a_library", "Base.value", double, reject, body="runs")), Settings(strict=True), CHECKOUT)
    patcher.arm()
    with pytest.raises(SystemExit) as leaving:
        library()
    assert leaving.value.code == 2
    assert "remove --strict to run without the patch" in capsys.readouterr().err


def test_a_missing_attribute_is_an_unexpected_target(library):
    patcher = Patcher(make(Target("a_library", "Base.gone", double, body="runs")), Settings(), CHECKOUT)
    patcher.arm()
    library()
    assert (only(patcher).status, only(patcher).reason) == ("skipped", "it does not exist")


def test_a_failing_patch_prints_one_line_and_changes_nothing(library, capsys):
    def broken(original, settings):
        raise RuntimeError("no good")

    patcher = Patcher(make(Target("a_library", "FLAG", broken, body="runs")), Settings(), CHECKOUT)
    patcher.arm()
    assert library().FLAG is True
    assert (only(patcher).status, only(patcher).reason) == ("failed", "RuntimeError: no good")
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (Settings(disable_patch=("twice",)), "disabled by the user"),
        (Settings(disable_patch=("*",)), "disabled by the user"),
        (Settings(), "not enabled"),
    ],
)
def test_a_disabled_patch_has_a_reason(library, settings, reason):
    target = Target("a_library", "FLAG", lambda original, settings: False, body="runs")
    patcher = Patcher(make(target, wanted=lambda settings: bool(settings.disable_patch)), settings, CHECKOUT)
    patcher.arm()
    assert library().FLAG is True
    assert only(patcher).reason == reason


def test_a_patch_applies_to_an_unknown_layout_only_if_the_user_allows_it(library):
    target = Target("a_library", "FLAG", lambda original, settings: False, body="runs")
    old = Checkout(Path("old"), None, "unknown", "for the test")
    patcher = Patcher(make(target), Settings(), old)
    patcher.arm()
    assert "has an unknown layout" in only(patcher).reason
    patcher = Patcher(make(target), Settings(allow_unknown_version=True), old)
    patcher.arm()
    assert library().FLAG is False


KINDS = """
class Base:
    @staticmethod
    def static(x):
        return x + 1
    @classmethod
    def of_class(cls, x):
        return cls.__name__, x
    @property
    def size(self):
        return self._size
    @size.setter
    def size(self, value):
        self._size = value
class Child(Base):
    pass
"""


def twice(original, settings):
    def replacement(*args):
        return 2 * original(*args)

    return replacement


@pytest.mark.parametrize("owner", ["Base", "Child"])
@pytest.mark.parametrize(
    ("name", "kind", "parameters", "value", "result"),
    [
        ("static", staticmethod, ["x"], lambda instance: instance.static(3), 8),
        ("of_class", classmethod, ["cls", "x"], lambda instance: len(instance.of_class(3)), 4),
        ("size", property, ["self"], lambda instance: instance.size, 10),
    ],
)
def test_a_replacement_keeps_the_kind_of_a_method(library, tmp_path, owner, name, kind, parameters, value, result):
    (tmp_path / "a_library.py").write_text(KINDS)
    module = library()
    holder = getattr(module, owner)
    before = vars(holder).get(name)
    target = Target("a_library", f"{owner}.{name}", twice, takes(*parameters, exactly=True), body="runs")
    patcher = Patcher(make(target), Settings(), CHECKOUT)
    for _ in range(2):  # the second time it is already applied
        patcher.arm()
        instance = holder()
        instance.size = 5
        assert value(instance) == result
        assert type(vars(holder)[name]) is kind
    patcher.undo()
    assert vars(holder).get(name) is before
    assert (name in vars(holder)) == (owner == "Base")


def test_a_scoped_replacement_ends_with_its_block(library):
    module = library()
    before = vars(module.Base)["value"]
    with replaced(module.Base, "value", lambda self: 7), replaced(module.Child, "value", 8):
        assert (module.Base().value(), module.Child.value) == (7, 8)
    assert vars(module.Base)["value"] is before
    assert "value" not in vars(module.Child)


@pytest.mark.parametrize(("until", "status"), [("0.11.1", "skipped"), ("0.9", "skipped"), ("0.11.2", "applied")])
def test_a_patch_is_skipped_from_the_release_that_fixes_upstream(library, until, status):
    library()
    patcher = Patcher(make(Target("a_library", "Base.value", double, body="runs"), until=until), Settings(), CHECKOUT)
    patcher.arm()
    outcome = only(patcher)
    patcher.undo()
    assert (outcome.reason == f"included in sd-scripts since v{until}") or outcome.reason == "undone"
    assert (outcome.reason == "undone") == (status == "applied")


@pytest.fixture
def torch_version(monkeypatch):
    """A function that sets the version of the installed torch."""

    def set_to(text):
        monkeypatch.setattr("kohya_ext.patching.patch.version", lambda package: text)
        monkeypatch.setattr("kohya_ext.launch.session.version", lambda package: text)
        is_older_torch.cache_clear()

    yield set_to
    is_older_torch.cache_clear()


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        ("2.4.1+cu121", "needs torch 2.6 or newer"),
        ("2.5.1", "needs torch 2.6 or newer"),
        ("2.6.0+cu124", "undone"),
        ("2.6.0a0+git1", "undone"),
        ("2.14.1", "undone"),
    ],
)
def test_a_patch_is_off_with_a_torch_that_is_too_old(library, torch_version, installed, reason):
    torch_version(installed)
    library()
    patcher = Patcher(make(Target("a_library", "Base.value", double, body="runs"), torch="2.6"), Settings(), CHECKOUT)
    patcher.arm()
    patcher.undo()
    assert (only(patcher).reason, only(patcher).surprise) == (reason, False)


def test_what_an_old_torch_turns_off_is_one_line(capsys, torch_version):
    torch_version("2.4.1+cu121")
    argv = ["--preset", "10gb-int8", "--cuda_graphs"]
    Session.start(CHECKOUT, CommandLine(Path("sdxl_train_network.py"), argv, {})).patcher.undo()
    printed = capsys.readouterr().err
    (line,) = (line for line in printed.splitlines() if "torch 2.4.1+cu121: " in line)
    off = {"base_precision", "cuda_graphs", "fast_checkpoint_hooks", "fused_operations", "nonreentrant_checkpointing", "speed"}
    assert off <= set(re.findall(r"\w+", line))
    assert line.endswith("off (needs torch 2.6 or newer)")
    alone = "--cuda_graphs does nothing: the patch cuda_graphs is off (needs torch 2.6 or newer)"  # asked for by the user
    assert (printed.count(alone), printed.count("(needs torch")) == (1, 2)


@pytest.mark.parametrize(
    ("modules", "module"), [(("train_util", "new"), "library.new"), (("train_util",), "library.train_util")]
)
def test_an_attribute_that_moved_is_replaced_where_the_checkout_has_it(tmp_path, capsys, modules, module):
    (tmp_path / "library").mkdir()
    for name in modules:
        (tmp_path / "library" / f"{name}.py").write_text("")
    checkout = Checkout(tmp_path, "0.11.1", "v0.11", "for the test")
    patcher = Patcher(make(*moved("FLAG", "library.new", double, body="runs")), Settings(), checkout)
    patcher.arm()
    assert [outcome.target for outcome in patcher.outcomes.values() if outcome.status == "waiting"] == [f"{module}:FLAG"]
    (reason,) = [outcome.reason for outcome in patcher.outcomes.values() if outcome.status == "skipped"]
    assert reason == ("moved to library.new" if "new" in modules else "not in this release of sd-scripts")
    assert not any(outcome.surprise for outcome in patcher.outcomes.values())
    assert capsys.readouterr().err == ""
    patcher.undo()


@pytest.mark.parametrize(
    ("version", "layout", "silent"),
    [("99.0.0", "unknown", False), ("99.0.0", "v0.11", False), ("0.10.0", "sd3", True), (None, "v0.9", True)],
)
def test_each_target_of_a_release_that_is_not_tested_is_checked(library, capsys, version, layout, silent):
    """An older release lacks some targets without a warning; one that a newer release lacks is reported."""
    targets = (
        Target("a_library", "Base.value", double, body="runs"),
        Target("a_library", "Base.gone", double, body="runs"),
        Target("a_library", "Gone.value", double, body="runs"),
        Target("a_library", "FLAG", double, reject, body="runs"),
    )
    patcher = Patcher(make(*targets), Settings(), Checkout(Path("sd-scripts"), version, layout, "for the test"))
    patcher.arm()
    assert library().Base().value() == 6
    assert [(outcome.status, outcome.surprise) for outcome in patcher.outcomes.values()] == [
        ("applied", False),
        ("skipped", not silent),
        ("skipped", not silent),
        ("skipped", True),
    ]
    assert capsys.readouterr().err.count("does not recognize") == (1 if silent else 3)
    patcher.undo()


@pytest.mark.parametrize("place", ["another_library:Base.value", "a_library:Child.value"])
def test_a_patch_replaces_a_function_once_where_two_of_its_targets_lead_to_it(library, tmp_path, place):
    (tmp_path / "another_library.py").write_text("from a_library import Base\n")
    module, attribute = place.split(":")
    targets = (Target("a_library", "Base.value", double, body="runs"), Target(module, attribute, double, body="runs"))
    patcher = Patcher(make(*targets), Settings(), CHECKOUT)
    patcher.arm()
    importlib.import_module(module)
    assert library().Child().value() == 6
    assert {target: outcome.status for (_, target), outcome in patcher.outcomes.items()} == {
        "a_library:Base.value": "applied",
        place: "skipped",
    }
    patcher.undo()
    assert library().Child().value() == 3


def test_an_optional_attribute_may_be_missing(library):
    library()
    patcher = Patcher(make(Target("a_library", "GONE", double, optional=True, body="runs")), Settings(strict=True), CHECKOUT)
    patcher.arm()
    outcome = only(patcher)
    assert (outcome.status, outcome.surprise) == ("skipped", False)
    assert outcome.reason == "this version of a_library does not have it"


def test_targets_in_packages_that_sd_scripts_does_not_require_are_optional():
    """Otherwise `doctor` reports an environment without them as broken."""
    required = {"library", "networks", "torch", "accelerate", "transformers", "diffusers", "safetensors", "tqdm", "toml"}
    required |= {"os", "shutil", "numpy", "PIL"}
    targets = [target for patch in registry().values() for target in patch.targets if not target.optional]
    assert {target.module.partition(".")[0] for target in targets} <= required


@pytest.mark.parametrize(
    ("answers", "status", "reason"),
    [
        ([True, False], "applied", ""),
        ([False], "skipped", "this torch does not need it"),
        ([True, True], "skipped", "it does not fix this torch"),
    ],
)
def test_a_target_with_a_probe_waits_for_it(library, answers, status, reason):
    module = library()
    original = vars(module.Base)["value"]
    target = Target("a_library", "Base.value", double, body="runs", needed=lambda: answers.pop(0))
    patcher = Patcher(make(target), Settings(), CHECKOUT)
    patcher.arm()
    assert vars(module.Base)["value"] is original
    apply_needed()
    apply_needed()
    assert (only(patcher).status, only(patcher).reason) == (status, reason)
    assert (vars(module.Base)["value"] is original) == (status == "skipped")
    assert answers == []
    patcher.undo()
    assert vars(module.Base)["value"] is original


def test_engine_patches_cannot_be_disabled_and_apply_to_every_layout(library):
    undone = []
    (own,) = make(Target("a_library", "Base.value", double, body="runs"), on_undo=lambda: undone.append(1)).values()
    fork = Checkout(Path("fork"), None, "unknown", "for the test")
    patcher = Patcher({}, Settings(disable_patch=("*",)), fork, (own,))
    patcher.arm()
    assert library().Base().value() == 6
    patcher.undo()
    assert library().Base().value() == 3
    assert undone == [1]


def test_the_engine_names_no_patch():
    """Its own modules and options may have the name of a patch."""
    options = {option.name for option in patch_options()}
    root = Path(__file__).parents[2] / "kohya_ext"
    modules = {file.stem for file in root.rglob("*.py")}
    names = "|".join(set(registry()) - options - modules)
    named = [file for file in root.rglob("*.py") if re.search(rf"\b({names})\b", file.read_text(encoding="utf-8"))]
    assert named == []


def test_every_option_has_one_name():
    names = [option.name for option in patch_options()] + [name for name in vars(Settings()) if name != "values_of_patches"]
    assert len(names) == len(set(names))


def test_an_unknown_name_to_disable_is_an_error():
    patcher = Patcher(make(), Settings(disable_patch=("twise",)), CHECKOUT)
    with pytest.raises(UserError, match=r"no patch twise to disable\. Did you mean twice\? Patches: twice"):
        patcher.arm()


def test_every_patch_is_described_without_importing_torch():
    heavy = {"torch", "transformers", "library"} - set(sys.modules)
    for name, patch in registry().items():
        assert name == patch.name
        assert patch.targets or patch.on_start
        assert patch.summary
        assert patch.held_to
        assert patch.idea.startswith("https://")
        assert isinstance(sys.modules[f"kohya_ext.patches.{name}"], types.ModuleType)
    assert not heavy & set(sys.modules)


@pytest.mark.parametrize(
    ("version", "layout", "words"),
    [
        ("0.11.1", "v0.11", "sd-scripts v0.11.1, no preset"),
        ("99.0.0", "v0.11", "sd-scripts v99.0.0 (newer than the tested v0.11.1), no preset"),
        ("99.0.0", "unknown", "sd-scripts v99.0.0 (newer than the tested v0.11.1), no preset"),
        ("0.10.0", "sd3", "sd-scripts v0.10.0 (older than the tested v0.10.1), no preset"),
        (None, "sd3", "sd-scripts of the sd3 branch, 2024-12 to 2026-01 (older than the tested v0.10.1), no preset"),
        (None, "v0.9", "sd-scripts v0.9 (older than the tested v0.10.1), no preset"),
    ],
)
def test_the_start_line_names_a_release_that_is_newer_or_older_than_tested(capsys, version, layout, words):
    checkout = Checkout(Path("sd-scripts"), version, layout, "for the test")
    Session.start(checkout, CommandLine(Path("sdxl_train.py"), [], {})).patcher.undo()
    printed = capsys.readouterr().err
    assert words in printed
    assert re.search(r"\d+ patches on, \d+ not in this release", printed)  # the folder has no files


def test_an_option_of_a_disabled_patch_is_a_warning(tmp_path, capsys):
    argv = ["--selective_torch_compile", "--disable-patch", "selective_torch_compile"]
    session = Session.start(CHECKOUT, CommandLine(Path("sdxl_train.py"), argv, {}))
    session.patcher.undo()
    printed = capsys.readouterr().err
    assert "--selective_torch_compile does nothing: the patch selective_torch_compile is off (disabled by the user)" in printed
    assert "not enabled" not in printed
