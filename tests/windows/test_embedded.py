"""Installing into the embedded Python of a portable package, which reads .pth files only if its own ._pth file says so."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kohya_ext.errors import UserError
from kohya_ext.launch import host


def test_embedded_python_works_once_its_pth_file_imports_site(tmp_path):
    """As in the portable package of lora-scripts-next: the folder of the Python is next to that of the program."""
    embedded, program = tmp_path / "python_embeded", tmp_path / "Next-Trainer"
    program.mkdir()
    (embedded / "Lib" / "site-packages").mkdir(parents=True)
    for file in [Path(sys.executable), *Path(sys.base_prefix).glob("*.dll")]:
        shutil.copy(file, embedded)
    pth = embedded / f"python3{sys.version_info.minor}._pth"
    folders = [".", *(str(Path(sys.base_prefix) / name) for name in ("Lib", "DLLs"))]
    pth.write_text("\n".join([*folders, "#import site"]))
    with pytest.raises(UserError, match=r"_pth, remove the # before `import site`"):
        host.environment(program)
    pth.write_text("\n".join([*folders, "import site"]))
    target = host.environment(program)
    assert target.site_packages.samefile(embedded / "Lib" / "site-packages")
    host.switch_on(target, [])
    environ = {**os.environ, "PYTHONNOUSERSITE": "1"}
    words = [str(target.python), "-s", "-c", "import os; print(os.environ['KOHYA_EXT'])"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    assert done.stdout.strip() == "1", done.stderr
