"""Whether the code that a patch replaces is the code that it knows."""

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
from kohya_ext.sdscripts.fingerprints import fingerprint, known
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
    """code -> a module of it."""
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
    """These were made on Python 3.11; 3.10, 3.12 and 3.13 write other bytecode, and another ``ast.dump``."""
    made = module()
    assert fingerprint(made.Thing.plain) == "19ae380a91f9"
    assert fingerprint(vars(made.Thing)["value"].__wrapped__) == "3d885870f35b"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# explained", "# in other words"),
        ('"""Documented."""', '"""Documented in another way."""'),
        (": int", ""),
        (" -> int", ""),
        ("helper(x) * 2", "(helper(x)\n            * 2)"),
        ("class Thing", "a_line_more = 1\n\n\nclass Thing"),
    ],
)
def test_what_does_not_change_the_work_does_not_change_it(module, before, after):
    known = fingerprint(module().Thing)
    assert known is not None
    assert fingerprint(module(CODE.replace(before, after)).Thing) == known


@pytest.mark.parametrize(
    ("before", "after"), [("* 2", "* 3"), ('"a"', '"b"'), ("helper(x) *", "x *"), ("-7", "-6"), ("@functools.cache", "")]
)
def test_what_changes_the_work_changes_it(module, before, after):
    known = fingerprint(module().Thing)
    assert fingerprint(module(CODE.replace(before, after)).Thing) != known


def test_code_without_a_source_has_none(module):
    compiled = {}
    exec("def function(x):\n    return x\n", compiled)
    for original in (compiled["function"], len, 3, None):
        assert fingerprint(original) is None
    assert known("a").surprise(sys.modules["math"], "sqrt") == "the source code of sqrt in math.py cannot be read"


def tripled(original, settings):
    @wraps(original)
    def plain(self, x):
        return 3 * original(self, x)

    return plain


def armed(*names: str, body, strict: bool = False) -> Patcher:
    target = Target("some_code", "Thing.plain", tripled, body=body)
    patches = {name: Patch(name, "triples", (target,), exactness="exact", held_to="it", idea="here") for name in names}
    patcher = Patcher(patches, Settings(strict=strict), CHECKOUT)
    patcher.arm()
    return patcher


def test_two_patches_of_one_target_both_know_the_body_beneath(module):
    made = module()
    patcher = armed("one", "two", body=known(fingerprint(made.Thing.plain)))
    assert made.Thing().plain(1) == 3 * 3 * 4
    patcher.undo()
    assert made.Thing().plain(1) == 4


def test_somebody_elses_wrapper_is_not_looked_through(module):
    made = module()
    body = known(fingerprint(made.Thing.plain))
    made.Thing.plain = tripled(made.Thing.plain, None)
    armed("one", body=body)
    assert made.Thing().plain(1) == 3 * 4


@pytest.mark.parametrize(("edit", "named"), [(("* 2", "* 3"), "Thing.plain"), (("x + 1", "x + 2"), "helper")])
def test_an_edited_body_is_left_alone_with_a_reason(module, capsys, edit, named):
    made = module()
    body = known(fingerprint(made.Thing.plain), helpers={"helper": (fingerprint(made.helper),)}, releases="theirs v1")
    edited = module(CODE.replace(*edit))
    own = edited.Thing.plain
    outcome = armed("one", body=body).outcomes["one", "some_code:Thing.plain"]
    assert edited.Thing.plain is own
    assert (outcome.status, outcome.surprise) == ("skipped", True)
    assert outcome.reason == f"{named} in some_code.py differs from theirs v1 (edited, a fork or another release)"
    assert outcome.reason in capsys.readouterr().err
    with pytest.raises(SystemExit) as leaving:
        armed("one", body=body, strict=True)
    assert leaving.value.code == 2


# --- what the shipped patches declare --------------------------------------------------------------------------------


def mentions_it(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Name) and part.id == "original" for part in ast.walk(node))


def follow(statements: list[ast.stmt], done: bool, without: list[str]) -> bool:
    """Whether ``original`` has been used behind these statements; ``without`` gets the returns before which it has not."""
    for statement in statements:
        if isinstance(statement, ast.If):
            done = done or mentions_it(statement.test)
            ways = [follow(way, done, without) for way in (statement.body, statement.orelse)]
            done = all(ways)
        elif isinstance(statement, (ast.With, ast.Try)):
            done = done or any(map(mentions_it, getattr(statement, "items", [])))
            done = follow(statement.body, done, without)
        else:
            done = done or mentions_it(statement)
            if isinstance(statement, ast.Return) and not done and ast.unparse(statement) not in ("return", "return None"):
                without.append(ast.unparse(statement))
            if isinstance(statement, (ast.Return, ast.Raise)):
                return True
    return done


def ways_without_the_original(replace) -> list[str]:
    """The ways through a replacement on which it does its work without the original."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(replace))).body[0]
    replacements = [part for part in tree.body if isinstance(part, ast.FunctionDef)] or [tree]
    without: list[str] = []
    for replacement in replacements:
        follow(replacement.body, False, without)
        if not mentions_it(replacement):
            without.append(f"all of {replacement.name}")
    return without


TARGETS = {f"{patch.name}: {target.label}": target for patch in registry().values() for target in patch.targets}


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.body == "runs"])
def test_what_says_that_it_runs_the_original_does(name):
    """A replacement that does the work itself must state the bodies that it knows: ``body=known(...)``.

    Doing nothing is allowed: a step that is skipped is not made by the original either.
    """
    target = TARGETS[name]
    if target.attribute.isupper() or target.attribute == "profile_guard_manager":
        return  # a constant; a measurement for statistics
    assert ways_without_the_original(target.replace) == []


@pytest.mark.parametrize("patch", ["skip_unit_scaling", "fused_operations", "single_process_reduce"])
def test_and_those_that_do_not_would_be_noticed(patch):
    own_work = [name for name, target in TARGETS.items() if name.startswith(patch) and target.body != "runs"]
    assert own_work
    for name in own_work:
        assert ways_without_the_original(TARGETS[name].replace) != [], name
