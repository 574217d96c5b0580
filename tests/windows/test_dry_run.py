"""A dry run of a real script on Windows has the memory of one on Linux."""

import json
import subprocess
import sys

import pytest

from kohya_ext.planning import tiers
from kohya_ext.sdscripts import checkouts

pytest.importorskip("torch")


def test_a_dry_run_has_the_memory_of_the_packages_table():
    """It waits for the end of its standard input meanwhile, for which libraries that are loaded must not wait, too."""
    checkout = next((each for each in checkouts.registered() if each.layout == "v0.11"), None)
    if checkout is None:
        pytest.skip("sd-scripts v0.11 is not in the user cache")
    words = ["-m", "kohya_ext", "estimate", "--sd-scripts", str(checkout.path), "--fresh", "--json", "train_network.py"]
    done = subprocess.run([sys.executable, *words, "--preset", "8gb"], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    known = next(tier.estimate for tier in tiers.tiers("sd15-lora") if tier.name == "sd15-lora/8gb")
    assert json.loads(done.stdout)["reserved"] == pytest.approx(known.reserved, rel=0.005)
