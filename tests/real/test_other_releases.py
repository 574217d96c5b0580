"""Releases of sd-scripts that the other tests do not run on: older ones, and newer commits of the tested generations.

Each checkout in the user's cache is tried. For one of each layout: python -m kohya_ext setup --ref COMMIT, with a commit from
kohya_ext/sdscripts/releases.py.
"""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.sdscripts import families, releases  # noqa: E402
from kohya_ext.sdscripts.checkouts import Checkout, registered  # noqa: E402
from kohya_ext.sdscripts.introspect import option_names  # noqa: E402
from tests.real.conftest import generations  # noqa: E402
from tests.real.test_losing_nothing import same, send  # noqa: E402

pytestmark = pytest.mark.slow

#: Commit -> the patches that its code leaves alone in these scripts (docs/releases.md).
LEFT_ALONE = {"5a18a03f": {"skip_gradient_norms"}}

SCRIPTS = {"sdxl_train_network.py": "16gb", "flux_train_network.py": "24gb", "train_network.py": "12gb"}


def _others() -> list[Any]:
    """Return the other checkouts, and a skipped parameter for each older layout without one."""
    tested = {checkout.path for checkout in generations().values()}
    others = [checkout for checkout in registered() if checkout.path not in tested]
    missing = {layout.name for layout in releases.LAYOUTS if not layout.tested} - {checkout.layout for checkout in others}
    reason = "no sd-scripts of layout {} in the user's cache (python -m kohya_ext setup --ref COMMIT)"
    return [
        *(pytest.param(checkout, id=f"{checkout.layout}-{(checkout.commit or '?')[:8]}") for checkout in others),
        *(pytest.param(None, id=name, marks=pytest.mark.skip(reason=reason.format(name))) for name in sorted(missing)),
    ]


def _runs() -> list[object]:
    """Return :func:`_others`, each with the scripts that it has."""
    return [
        pytest.param(other.values[0], script, id=f"{other.id}-{script}", marks=other.marks)
        for other in _others()
        for script in SCRIPTS
        if other.values[0] is None or other.values[0].has(script)
    ]


def _needed(checkout: Checkout, script: str, folder: Path) -> list[str]:
    """Return arguments without which the release's own script fails: 2025-08 lacks the options that it reads when it saves."""
    saves = (checkout.path / "library" / "train_util.py").read_text(encoding="utf-8")
    missing = set(re.findall(r"args\.(metadata_\w+)", saves)) - option_names(checkout.script(script))
    if not missing:
        return []
    file = folder / "metadata.toml"
    file.write_text("".join(f'{name} = "a"\n' for name in sorted(missing)))
    return ["--config_file", str(file)]


@pytest.mark.parametrize(("other", "script"), _runs())
def test_without_patches_the_file_is_its_own_and_with_a_preset_a_stopped_run_resumes(train, other, script, tmp_path):
    needed = _needed(other, script, tmp_path)
    own = train(other, script, *needed, start="plain")
    off = train(other, script, *needed, "--disable_patch", "*")
    assert same(off.tensors, own.tensors)

    options = (*needed, "--preset", SCRIPTS[script], "--max_train_steps", "12", "--save_every_n_epochs", "1", "--save_state")
    whole = train(other, script, *options)
    assert whole.code == 0, whole.output[-4000:]
    rows = whole.report["patches"]
    assert not [row for row in rows if row["status"] == "failed" or (row["surprise"] and "differs from" not in row["reason"])]
    assert {row["patch"] for row in rows if row["surprise"]} <= LEFT_ALONE.get((other.commit or "")[:8], set())
    assert ("than the tested" in whole.output) == bool(other.age)
    assert other.age in whole.output

    stopped = train(other, script, *options, at_step=9, act=send(signal.SIGTERM))
    assert stopped.code == 128 + signal.SIGTERM, stopped.output[-3000:]
    assert not stopped.file.exists()
    resumed = train(other, script, *options, "--resume", "auto", output=stopped.folder)
    assert same(resumed.tensors, whole.tensors)


@pytest.mark.parametrize("other", _others())
def test_doctor_finds_no_failure_and_lists_what_the_release_lacks(call, other):
    """Missing code is not reported. Code that differs is, and the patch is skipped."""
    done = call("-m", "kohya_ext", "doctor", "--sd-scripts", other.path, "--json")
    rows = json.loads(done.stdout)["patches"]
    assert {row["status"] for row in rows} <= {"applied", "skipped"}, done.stdout[-4000:]
    lacking = [row for row in rows if row["target"].partition(":")[0] in _missing_modules(other)]
    assert all(row["status"] == "skipped" and not row["surprise"] for row in lacking)
    assert {row["reason"] for row in rows if row["surprise"]} <= {
        row["reason"] for row in rows if "differs from" in row["reason"]
    }


def _missing_modules(checkout: Checkout) -> set[str]:
    modules = {family.module for family in families.FAMILIES} | {
        f"networks.{name}" for name in ("loha", "lora_anima", "lora_flux")
    }
    return {module for module in modules if checkout.lacks(module)}
