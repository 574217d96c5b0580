"""`calibrate` on the virtual GPU: every measurement runs, and is kept under the driver's name. The values are not real."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_rate_is_measured_and_kept(gpu_environment, tmp_path):
    command = [sys.executable, "-m", "kohya_ext", "calibrate", "--json"]
    environ = gpu_environment(KOHYA_EXT_CACHE=str(tmp_path), PYTHONPATH=str(ROOT))
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["products"].keys() == {"16 bits", "int8", "fp8"}  # an RTX 4090 has all of them
    for name in ("bandwidth", "bus", "launch_microseconds", "cache", "memory"):
        assert printed[name] > 0, name
    (file,) = (tmp_path / "gpus").iterdir()
    assert file.stem == "-".join(printed["gpu"].lower().split())
    kept = json.loads(file.read_text())["measured"]
    assert kept == {name: value for name, value in printed.items() if name != "gpu"}
