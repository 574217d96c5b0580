"""Every training script of each generation: upstream's result, resumes after a kill and a stop, check, estimate and a preset.

    EVERY_SCRIPT=1 python -m pytest -m "slow or not slow" tests/real/test_every_script.py

runs all scripts and keeps the outcomes in tests/data/every_script.json, from which tools/generate.py makes docs/scripts.md.
"""

import json
import os
import signal
from pathlib import Path

import pytest

from kohya_ext.config import preset_files
from kohya_ext.sdscripts import checkouts, families
from kohya_ext.tiny import arguments, environment
from tests.real.conftest import generations
from tests.real.test_losing_nothing import posix, same, send

torch = pytest.importorskip("torch")

RESULTS = Path(__file__).parents[1] / "data" / "every_script.json"

#: In CI. The others are slow.
CHOSEN = ("v0.11", "sdxl_train_textual_inversion.py")

STEPS = ("--max_train_steps", "8", "--learning_rate", "1e-3")

#: With reentrant checkpointing upstream's gradients differ by rounding.
WITHOUT = ("--gradient_checkpointing",)

IDENTICAL, EXACT, PASSES = "identical", "exact", "passes"

#: For a script that ends with an error in upstream itself, and what `check` says of it.
REFUSALS = ("fails at its first step", "cannot be imported")
BROKEN = {
    "upstream": "upstream fails",
    "SIGKILL": "-",
    "SIGTERM": "-",
    "check": "refuses it",
    "estimate": "no",
    "preset": "none",
}


def training_scripts():
    """Return (layout, script) -> checkout, for each training script of each installed generation."""
    return {
        (layout, script): checkout
        for layout, checkout in sorted(generations().items())
        for script in sorted(checkout.scripts())
        if "/" not in script and checkouts.is_training_script(checkout.path / script)
    }


def test_every_script_has_arguments_and_a_row():
    """A new script needs a row in families.py, arguments in tiny/arguments.py and a run of this file."""
    scripts = training_scripts()
    if not scripts:
        pytest.skip("no sd-scripts found (python -m kohya_ext setup)")
    assert {script for _, script in scripts} - arguments.SCRIPTS.keys() == set()
    rows = {(layout, script) for layout, each in json.loads(RESULTS.read_text("utf-8")).items() for script in each}
    assert set(scripts) - rows == set()


def compared(run, expected):
    """Return how a run's model compares with the expected one."""
    if run.code != 0 or not run.file.is_file():
        return f"fails with exit code {run.code}"
    different = 0 if same(run.tensors, expected.tensors) else 1
    return "differs" if different else IDENTICAL


def interrupted(train, checkout, script, whole, folder):
    """Return the outcomes of SIGKILL and SIGTERM: the run is killed, resumed, stopped, and resumed until its end."""
    options = (*STEPS, "--save_state_every_n_minutes", "0", "--resume", "auto")
    killed = train(checkout, script, *options, without=WITHOUT, output=folder, at_step=2, act=send(signal.SIGKILL))
    stopped = train(checkout, script, *options, without=WITHOUT, output=folder, at_step=4, act=send(signal.SIGTERM))
    ended = train(checkout, script, *options, without=WITHOUT, output=folder)
    result = EXACT if compared(ended, whole) == IDENTICAL else compared(ended, whole)
    kill = result if killed.code == -signal.SIGKILL and "resumed after step" in stopped.output else "does not resume"
    stop = result if stopped.code == 128 + signal.SIGTERM and "resumed after step" in ended.output else "does not resume"
    return {"SIGKILL": kill, "SIGTERM": stop}


def preset_of(script):
    """Return the largest tier of a script's presets, or else a preset for every script."""
    family = families.of(script, {})
    folder = family.presets(script) if family is not None else None
    tiers = [name for each, name, _ in preset_files.shipped() if each == folder and name.removesuffix("gb").isdecimal()]
    return max(tiers, key=lambda name: int(name.removesuffix("gb")), default="balanced")


def with_preset(train, checkout, script):
    """Return the preset that a script trains with, or why it does not."""
    preset = preset_of(script)
    run = train(checkout, script, "--preset", preset, "--max_train_steps", "2")
    if run.code == 2 and "preset" in run.output:
        return "none"
    return preset if run.code == 0 and run.file.is_file() else f"fails with exit code {run.code}"


def estimate(call, checkout, script):
    """Return whether a script's memory can be estimated, and whether by a dry run."""
    options = ("--preset", preset_of(script), "--resolution", "512", *arguments.SCRIPT_OPTIONS.get(script, ()))
    done = call("-m", "kohya_ext", "estimate", "--sd-scripts", checkout.path, script, *options)
    yes = "dry run" if "by a dry run" in done.stdout.lower() else "yes"
    return {0: yes, 2: "no"}.get(done.returncode, f"fails with exit code {done.returncode}")


def outcomes(train, call, models, images, checkout, script, folder):
    """Return column -> outcome of one script."""
    tiny = models(arguments.SCRIPTS[script][0])
    plain = train(checkout, script, *STEPS, start="plain", without=WITHOUT)
    words = arguments.training_arguments(script, tiny, images, folder)
    variables = environment.variables(tiny.tokenizers)
    check = call("-m", "kohya_ext", "check", "--sd-scripts", checkout.path, script, *words, **variables)
    if plain.code != 0 and check.returncode == 2 and any(reason in check.stderr for reason in REFUSALS):
        return BROKEN
    ours = train(checkout, script, *STEPS, without=WITHOUT)
    return {
        "upstream": compared(ours, plain) if plain.code == 0 else "upstream fails",
        **interrupted(train, checkout, script, ours, folder),
        "check": PASSES if check.returncode == 0 else f"fails: {check.stderr[-300:]}",
        "estimate": estimate(call, checkout, script),
        "preset": with_preset(train, checkout, script),
    }


def keep(layout, script, row):
    """Write a row to the results."""
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {}
    results.setdefault(layout, {})[script] = row
    ordered = {each: dict(sorted(rows.items())) for each, rows in sorted(results.items())}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


#: v0.10's older scripts, whose dry run fails.
NO_ESTIMATE = ("train_textual_inversion_XTI.py", "sdxl_train_control_net_lllite_old.py")


@posix
@pytest.mark.parametrize(
    "where",
    [
        pytest.param(where, id="-".join(where), marks=pytest.mark.thorough if where == CHOSEN else pytest.mark.slow)
        for where in training_scripts()
    ],
)
def test_script(train, call, models, images, where, tmp_path):
    layout, script = where
    row = outcomes(train, call, models, images, generations()[layout], script, tmp_path)
    if os.environ.get("EVERY_SCRIPT"):
        keep(layout, script, row)
    if row == BROKEN:
        return
    family = families.of(script, {})
    trains = {IDENTICAL: row["upstream"], EXACT: row["SIGKILL"], "stopped": row["SIGTERM"], PASSES: row["check"]}
    assert trains == {IDENTICAL: IDENTICAL, EXACT: EXACT, "stopped": EXACT, PASSES: PASSES}
    assert row["estimate"] == ("yes" if script not in family.others else "no" if script in NO_ESTIMATE else "dry run")
    assert "fails" not in row["preset"]
