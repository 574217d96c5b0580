"""Patches replace only known code, so the edits of a user or a fork are never discarded."""

import ast
import dataclasses
import inspect
import shutil
import textwrap

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.patching.patch import NOT_IN_RELEASE, Patch, Patcher, registry  # noqa: E402
from kohya_ext.sdscripts import checkouts  # noqa: E402
from kohya_ext.sdscripts.fingerprints import fingerprint  # noqa: E402

#: Every target with reimplemented code, and each function whose body its patch must know.
KNOWN = [
    (patch.name, target, name)
    for patch in registry().values()
    for target in patch.targets
    if target.body != "runs" and target.needed is None  # else it knows only the torch that needs it
    for name in (target.attribute, *target.body.helpers)
]


def _outcome(name, target, checkout):
    """Apply a target and undo it; return its outcome."""
    patch = Patch(name, "", (target,), exactness="exact", held_to="", idea="")
    patcher = Patcher({name: patch}, Settings(), checkout)
    patcher.arm()
    (outcome,) = map(dataclasses.replace, patcher.outcomes.values())
    patcher.undo()
    return outcome


def _edit(module, original, file):
    """Return the function with one more line, from its own file."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(original)))
    tree.body[0].body.insert(0, ast.parse("edited = 3").body[0])
    tree.body[0].decorator_list.clear()
    file.write_text(ast.unparse(tree))
    names = dict(vars(module))
    exec(compile(file.read_text(), str(file), "exec"), names)
    assert fingerprint(names[original.__name__]) is not None
    return names[original.__name__]


@pytest.mark.parametrize(
    ("patch", "target", "name"), KNOWN, ids=[f"{patch}-{target.module}-{name}" for patch, target, name in KNOWN]
)
def test_the_body_of_each_release_is_replaced_and_an_edited_one_is_not(
    checkout, checkout_module, monkeypatch, tmp_path, patch, target, name
):
    """A new release of sd-scripts, torch or accelerate fails here. Check the patch, then add the new fingerprint."""
    if checkout.lacks(target.module):
        assert _outcome(patch, target, checkout).reason == NOT_IN_RELEASE
        return
    module = owner = checkout_module(target.module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    function = getattr(owner, last)
    if function.__module__ != target.module:  # imported there from another module, which has its own target
        return
    bodies = {target.attribute: target.body.fingerprints, **target.body.helpers}[name]
    assert fingerprint(function) in bodies, f"{name} of {target.module} has an unknown body in {checkout.label}"
    assert _outcome(patch, target, checkout).status == "applied"

    edited = _edit(module, function.__init__ if isinstance(function, type) else function, tmp_path / "edited.py")
    if isinstance(function, type):
        owner, last = function, "__init__"
    is_static = isinstance(inspect.getattr_static(owner, last), staticmethod)
    monkeypatch.setattr(owner, last, staticmethod(edited) if is_static else edited)
    outcome = _outcome(patch, target, checkout)
    assert (outcome.status, outcome.surprise) == ("skipped", True)
    assert f"{name} in " in outcome.reason
    assert (
        f" differs from the code of {target.body.package} {', '.join(dict.fromkeys(bodies.values()))} (edited" in outcome.reason
    )


@pytest.fixture
def edited_checkout(checkout, tmp_path):
    """A copy of the checkout with the LoRA scaled by three."""
    copy = tmp_path / "edited"
    shutil.copytree(checkout.path, copy, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    file = copy / "networks" / "lora.py"
    ours = "return org_forwarded + lx * self.multiplier * scale"
    text = file.read_text(encoding="utf-8")
    assert text.count(ours) == 1
    file.write_text(text.replace(ours, f"{ours} * 3"), encoding="utf-8")
    return checkouts.describe(copy, "edited")


@pytest.mark.slow
def test_an_edited_function_trains_as_without_the_extension(checkout, edited_checkout, train):
    run = ("sdxl_train_network.py", "--network_train_unet_only")
    theirs, ours = (
        train(edited_checkout, *run, start=start, without=("--gradient_checkpointing",)) for start in ("plain", "launcher")
    )
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert [name for name, tensor in theirs.tensors.items() if not torch.equal(ours.tensors[name], tensor)] == []
    unedited = train(checkout, *run, start="plain", without=("--gradient_checkpointing",))
    assert any(not torch.equal(unedited.tensors[name], tensor) for name, tensor in theirs.tensors.items())
    message = (
        "skip_unit_scaling does not recognize networks.lora:LoRAModule.forward: LoRAModule.forward in networks/lora.py differs"
    )
    assert f"{message} from the code of sd-scripts since 2024-10, " in ours.output
    strict = train(edited_checkout, *run, before=("--strict",))
    assert strict.code == 2
    assert message in strict.output
