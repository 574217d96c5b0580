"""With patches off, a real script gives upstream's result, however it is started."""

import pytest

from tests.real import conftest
from tests.real.conftest import Run

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.thorough

STARTS = ("launcher", "accelerate", "environment")
SCRIPTS = ("sdxl_train_network.py", "sdxl_train.py", "train_network.py", "flux_train_network.py", "lumina_train_network.py")


def assert_identical(ours: Run, theirs: Run) -> None:
    assert ours.tensors.keys() == theirs.tensors.keys()
    different = [name for name in theirs.tensors if not torch.equal(ours.tensors[name], theirs.tensors[name])]
    assert different == []


def assert_patches_off(ours: Run, theirs: Run) -> None:
    assert_identical(ours, theirs)
    assert ours.report["script"] == ours.script
    assert {row["status"] for row in ours.report["patches"]} == {"skipped"}
    assert ours.checkpoint_calls == theirs.checkpoint_calls


def test_a_checkout_named_only_by_the_variable_is_still_tested(checkout, monkeypatch, tmp_path):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path))  # empty, as for a user who never ran setup
    monkeypatch.chdir(tmp_path)
    assert checkout in conftest.generations().values()


@pytest.mark.oldest
@pytest.mark.parametrize("start", [pytest.param("launcher", marks=pytest.mark.slow), *STARTS[1:]])
def test_without_patches_files_are_bit_identical_to_upstream(checkout, train, upstream, start):
    script = SCRIPTS[0]
    off = {"before": ("--disable-patch", "*")} if start == "launcher" else {"env": {"KOHYA_EXT_DISABLE_PATCH": "*"}}
    assert_patches_off(train(checkout, script, start=start, bare=True, **off), upstream(checkout, script))


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_without_patches_every_script_and_launcher_is_bit_identical_to_upstream(checkout, train, upstream, script, start):
    ours = train(checkout, script, start=start, bare=True, env={"KOHYA_EXT_DISABLE_PATCH": "*"})
    assert_patches_off(ours, upstream(checkout, script))


@pytest.mark.oldest
def test_the_master_switch_disables_the_extension(checkout, train, upstream):
    ours = train(checkout, SCRIPTS[0], start="environment", bare=True, env={"KOHYA_EXT": "0", "KOHYA_EXT_PRESET": "8gb"})
    assert_identical(ours, upstream(checkout, SCRIPTS[0]))
    assert ours.report == {}
    assert "kohya_ext" not in ours.output
