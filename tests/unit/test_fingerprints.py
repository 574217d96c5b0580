"""Fingerprints of the code that patches replace."""

import ast
import importlib
import inspect
import sys
import textwrap
from functools import wraps

import pytest

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Patcher, Target, registry
from kohya_ext.sdscripts import fingerprints
from kohya_ext.sdscripts.fingerprints import fingerprint, known_bodies
from tests.unit.test_patch import CHECKOUT

CODE = '''
import functools

class Thing:
    @functools.cache
    def value(self, x: int, *rest, key: str = "a", **more) -> int:
        """Documented."""
        # explained
        with open(x) as a, open(x) as b:
            text = f"{x!r:>{key}} and {x}" "é\\u0378"
        match rest:
            case [1, *others] if others:
                return [*others, 1.5e-7, 2j, b"x", ..., None, -1]
        return lambda: (yield)

    def plain(self, x):
        return helper(x) * 2

def helper(x):
    return x + 1
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Source code -> a module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def make(code: str = CODE):
        sys.modules.pop("some_code", None)
        (tmp_path / "some_code.py").write_text(code, encoding="utf-8")
        importlib.invalidate_caches()
        fingerprints.linecache.clearcache()
        return importlib.import_module("some_code")

    yield make
    sys.modules.pop("some_code", None)


def test_a_fingerprint_is_the_same_on_every_python(module):
    """The expected values are from Python 3.11. Bytecode and ``ast.dump`` differ on 3.10, 3.12 and 3.13."""
    loaded = module()
    assert fingerprint(loaded.Thing.plain) == "19ae380a91f9"
    assert fingerprint(vars(loaded.Thing)["value"].__wrapped__) == "3d885870f35b"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# explained", "# in other words"),
        ('"""Documented."""', '"""Documented in another branch."""'),
        (": int", ""),
        (" -> int", ""),
        ("helper(x) * 2", "(helper(x)\n            * 2)"),
        ("class Thing", "a_line_more = 1\n\n\nclass Thing"),
    ],
)
def test_edits_without_effect_do_not_change_the_fingerprint(module, before, after):
    original = fingerprint(module().Thing)
    assert original is not None
    assert fingerprint(module(CODE.replace(before, after)).Thing) == original


@pytest.mark.parametrize(
    ("before", "after"), [("* 2", "* 3"), ('"a"', '"b"'), ("helper(x) *", "x *"), ("-7", "-6"), ("@functools.cache", "")]
)
def test_edits_with_an_effect_change_the_fingerprint(module, before, after):
    original = fingerprint(module().Thing)
    assert fingerprint(module(CODE.replace(before, after)).Thing) != original


def test_code_without_source_has_no_fingerprint(module):
    compiled = {}
    exec("def function(x):\n    return x\n", compiled)
    for original in (compiled["function"], len, 3, None):
        assert fingerprint(original) is None
    assert (
        known_bodies({"a": "v1"}).surprise(sys.modules["math"], "sqrt") == "the source code of sqrt in math.py cannot be read"
    )


def triple(original, settings):
    @wraps(original)
    def plain(self, x):
        return 3 * original(self, x)

    return plain


def apply_patches(*names: str, body, strict: bool = False) -> Patcher:
    target = Target("some_code", "Thing.plain", triple, body=body)
    patches = {name: Patch(name, "triples", (target,), exactness="exact", held_to="it", idea="here") for name in names}
    patcher = Patcher(patches, Settings(strict=strict), CHECKOUT)
    patcher.arm()
    return patcher


def test_two_patches_of_one_target_both_check_the_original(module):
    loaded = module()
    patcher = apply_patches("one", "two", body=known_bodies({fingerprint(loaded.Thing.plain): "v1"}))
    assert loaded.Thing().plain(1) == 3 * 3 * 4
    patcher.undo()
    assert loaded.Thing().plain(1) == 4


def test_another_authors_wrapper_is_not_replaced(module):
    loaded = module()
    body = known_bodies({fingerprint(loaded.Thing.plain): "v1"})
    loaded.Thing.plain = triple(loaded.Thing.plain, None)
    apply_patches("one", body=body)
    assert loaded.Thing().plain(1) == 3 * 4


@pytest.mark.parametrize(("edit", "named"), [(("* 2", "* 3"), "Thing.plain"), (("x + 1", "x + 2"), "helper")])
def test_an_edited_body_is_not_replaced_and_the_reason_is_given(module, capsys, edit, named):
    loaded = module()
    body = known_bodies(
        {"0123456789ab": "v1", fingerprint(loaded.Thing.plain): "since v2"},
        helpers={"helper": {fingerprint(loaded.helper): "v1", "0123456789ab": "since v2"}},
        package="theirs",
    )
    edited = module(CODE.replace(*edit))
    own = edited.Thing.plain
    outcome = apply_patches("one", body=body).outcomes["one", "some_code:Thing.plain"]
    assert edited.Thing.plain is own
    assert (outcome.status, outcome.surprise) == ("skipped", True)
    assert (
        outcome.reason
        == f"{named} in some_code.py differs from the code of theirs v1, since v2 (edited, a fork or another release)"
    )
    assert outcome.reason in capsys.readouterr().err
    with pytest.raises(SystemExit) as leaving:
        apply_patches("one", body=body, strict=True)
    assert leaving.value.code == 2


# --- declarations of the shipped patches --------------------------------------------------------------------------------


def mentions_original(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Name) and part.id == "original" for part in ast.walk(node))


def follow(statements: list[ast.stmt], done: bool, without: list[str]) -> bool:
    """Return whether ``original`` is used on all paths; add the returns before its first use to ``without``."""
    for statement in statements:
        if isinstance(statement, ast.If):
            done = done or mentions_original(statement.test)
            branches = [follow(branch, done, without) for branch in (statement.body, statement.orelse)]
            done = all(branches)
        elif isinstance(statement, (ast.With, ast.Try)):
            done = done or any(map(mentions_original, getattr(statement, "items", [])))
            done = follow(statement.body, done, without)
        else:
            done = done or mentions_original(statement)
            if isinstance(statement, ast.Return) and not done and ast.unparse(statement) not in ("return", "return None"):
                without.append(ast.unparse(statement))
            if isinstance(statement, (ast.Return, ast.Raise)):
                return True
    return done


def paths_without_original(replace) -> list[str]:
    """Return the paths through a replacement that do not use the original."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(replace))).body[0]
    replacements = [part for part in tree.body if isinstance(part, ast.FunctionDef)] or [tree]
    without: list[str] = []
    for replacement in replacements:
        follow(replacement.body, False, without)
        if not mentions_original(replacement):
            without.append(f"all of {replacement.name}")
    return without


TARGETS = {f"{patch.name}: {target.label}": target for patch in registry().values() for target in patch.targets}


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.body == "runs"])
def test_replacements_declared_to_run_the_original_call_it(name):
    """A replacement that reimplements the original must state the known bodies: ``body=known_bodies(...)``.

    Returning without a value is allowed, because it skips the call.
    """
    target = TARGETS[name]
    if target.attribute.isupper() or target.attribute == "profile_guard_manager":
        return  # a constant, or a measurement for statistics
    assert paths_without_original(target.replace) == []


@pytest.mark.parametrize("patch", ["skip_unit_scaling", "fused_operations", "single_process_reduce"])
def test_replacements_that_do_not_run_the_original_are_detected(patch):
    reimplemented = [name for name, target in TARGETS.items() if name.startswith(patch) and target.body != "runs"]
    assert reimplemented
    for name in reimplemented:
        assert paths_without_original(TARGETS[name].replace) != [], name
