"""Data loader workers have the patches where they are new processes, as on Windows, and not forks of a patched one."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from tests.unit.test_checkouts import make_tree

DATASET = """
class BaseDataset:
    bucket_manager, batch_size, caching_mode = None, 1, None

    def __getitem__(self, index):
        return {"index": index}
"""

SCRIPT = """
import multiprocessing
import signal
import sys

from library.dataset import BaseDataset


def load(dataset):
    from kohya_ext.launch.session import current

    is_patched = hasattr(BaseDataset.__getitem__, "__wrapped__")
    leaves_keys = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # the parent needs it after Ctrl-C
    return is_patched, current().command.settings["nan_patience"], leaves_keys, sys.stdout.errors


if __name__ == "__main__":  # with a call of read_config_from_file(), as in training scripts
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(*pool.apply(load, (BaseDataset(),)))
"""


@pytest.mark.parametrize("start", ["launcher", "environment"])
def test_a_spawned_worker_has_the_patches(tmp_path, start):
    tree = make_tree(tmp_path / "sd scripts", "v0.11", "0.11.1")
    (tree / "library" / "__init__.py").touch()
    (tree / "library" / "dataset.py").write_text(DATASET)
    script = tree / "train_network.py"
    script.write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KOHYA_EXT")}
    environ |= {"PYTHONIOENCODING": "cp1252:strict", **({"KOHYA_EXT": "1"} if start == "environment" else {})}
    launcher = ["-m", "kohya_ext", "--sd_scripts", str(tree)] if start == "launcher" else []
    words = [*launcher, str(script), "--nan_patience", "7"]
    done = subprocess.run([sys.executable, *words], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "7", "True", "replace"]
    assert done.stderr.count("patches on") == 1
