"""Install the extension into the Python environment of a GUI, switch it on there, and undo both.

A file in the environment's site-packages sets ``KOHYA_EXT`` at every start of its Python. So the GUI is started as usual, and
none of its files changes. A variable that is set comes first: ``KOHYA_EXT=0`` turns the extension off for one start.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from kohya_ext import __version__
from kohya_ext.config.command_line import quoted, quoted_word
from kohya_ext.errors import UserError
from kohya_ext.renames import replace_text, unlink
from kohya_ext.sdscripts import checkouts
from kohya_ext.sdscripts.checkouts import Checkout

#: Python reads files of this kind by name, and this one before kohya_ext.pth, which needs the variable.
SWITCH = "kohya_ext-on.pth"

_NAME = "kohya-ext"
_LINE = 'import os; os.environ.setdefault("KOHYA_EXT", "1")'
_ADDED = "# packages added by setup --for: "

#: Where programs keep their environment, relative to their folder. LoRA_Easy_Training_Scripts has another one for its window,
#: in venv. Portable packages have theirs outside the folder that updates replace.
_ENVIRONMENTS = (
    *("backend/sd_scripts/venv", "sd_scripts/venv", "sd-scripts/venv", "venv", ".venv", "env", ""),
    *("python", "python_embeded", "python_embedded", "../python_embeded", "../python_embedded"),
)

#: Where they keep their copy of sd-scripts.
_COPIES = (
    *("sd-scripts", "sd_scripts", "backend/sd_scripts", "vendor/sd-scripts", "scripts/sd-scripts", "scripts/stable"),
    *("scripts/dev", "", "Next-Trainer/vendor/sd-scripts", "Next-Trainer/scripts/stable"),
)

#: Where StabilityMatrix keeps its packages, each with an environment of its own.
_PACKAGES = ("Packages", "Data/Packages")

_PYTHONS = ("bin/python", "Scripts/python.exe", "python.exe")

#: On Windows pip leaves folders such as ~orch-2.0.dist-info, of which it was interrupted or refused to remove the files.
_DESCRIBE = """
import importlib.metadata as m, json, sys, sysconfig
found = [d for d in m.distributions() if not getattr(getattr(d, "_path", None), "name", "").startswith("~")]
packages = {d.metadata["Name"]: d.version for d in found if d.metadata["Name"]}
print(json.dumps([list(sys.version_info[:2]), sysconfig.get_path("purelib"), packages, "site" in sys.modules]))
"""


@dataclass(frozen=True)
class Environment:
    """A Python environment."""

    python: Path
    site_packages: Path
    packages: Mapping[str, str]
    """Name -> version."""

    @property
    def switch(self) -> Path:
        """The file that switches the extension on in it."""
        return self.site_packages / SWITCH

    @property
    def added(self) -> list[str]:
        """The packages that were added with the extension."""
        lines = self.switch.read_text(encoding="utf-8").splitlines() if self.switch.is_file() else []
        return [name for line in lines if line.startswith(_ADDED) for name in line.removeprefix(_ADDED).split()]


def environment(folder: Path) -> Environment:
    """Return the environment of a program in a folder, of an environment's folder, or of a Python. Raises UserError."""
    python = folder if folder.is_file() else next(_pythons(folder), None)
    if python is None:
        raise UserError(f"no Python environment in {folder}{_where_to_look(folder)}")
    (major, minor), site_packages, packages, reads_pth = _describe(python)
    if (major, minor) < (3, 10):
        raise UserError(f"{python} is Python {major}.{minor}; kohya_ext needs 3.10 or newer")
    if not reads_pth:
        file = next(python.parent.glob("python*._pth"), python.parent / "python*._pth")
        raise UserError(f"{python} does not read .pth files; in {file}, remove the # before `import site`, and run this again")
    return Environment(python, Path(site_packages), packages)


def _where_to_look(folder: Path) -> str:
    """Return the rest of the message about a folder without an environment."""
    packages = [package for name in _PACKAGES for package in (folder / name).glob("*") if checkout(package) is not None]
    if packages:
        return f"; name one of its packages: --for {' or '.join(quoted_word(str(each)) for each in sorted(packages))}"
    tried = ", ".join(name or "the folder itself" for name in _ENVIRONMENTS)
    return f" (tried {tried}); name its Python: --for PATH_TO/python"


def _pythons(folder: Path) -> Iterator[Path]:
    return (file for name in _ENVIRONMENTS for each in _PYTHONS if (file := folder / name / each).is_file())


def _describe(python: Path) -> tuple[Sequence[int], str, dict[str, str], bool]:
    try:
        done = subprocess.run([str(python), "-c", _DESCRIBE], capture_output=True, text=True, timeout=120, check=True)
        # The environment's own startup files may print lines before it.
        version, site_packages, packages, reads_pth = json.loads(next(reversed(done.stdout.splitlines()), ""))
    except subprocess.CalledProcessError as error:  # its message would be the program
        reason = next(reversed(error.stderr.splitlines()), f"exit code {error.returncode}")
        raise UserError(f"{python} does not work as a Python: {reason}") from None
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(f"{python} does not work as a Python: {error}") from None
    return version, site_packages, packages, reads_pth


def checkout(folder: Path) -> Checkout | None:
    """Return the copy of sd-scripts of a program in a folder; None without one."""
    return next((copy for name in _COPIES if (copy := checkouts.describe(folder / name, "")) is not None), None)


def install(target: Environment) -> list[str]:
    """Install this extension without changing another package; return the names of the packages that it has added.

    Raises UserError if that is not possible.
    """
    others = {name: version for name, version in target.packages.items() if _plain(name) != _NAME}
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "constraints.txt"
        kept.write_text("".join(f"{name}=={version}\n" for name, version in sorted(others.items())), encoding="utf-8")
        _pip(target, "install", "--constraint", str(kept), _source())
    before = {_plain(name) for name in target.packages}
    return sorted({*target.added, *({_plain(name) for name in _describe(target.python)[2]} - before)})


def _pip(target: Environment, action: str, *words: str) -> None:
    """Run pip or uv for an environment. Raises UserError if it fails."""
    command = _installer(target, action, words)
    # Without the variable, pip installs into the user's own folder where the environment is read-only. GUIs leave that out.
    if subprocess.run(command, env={**os.environ, "PYTHONNOUSERSITE": "1"}).returncode != 0:
        raise UserError(f"{command[0]} could not {action} the packages, for the reason above; nothing else was changed")


def _installer(target: Environment, action: str, words: Sequence[str]) -> list[str]:
    """Return a command for the environment's own pip, or for uv or this Python's pip if it has none. Raises UserError."""
    python = str(target.python)
    agree = ["--yes"] if action == "uninstall" else []
    pip = ["-m", "pip", "--disable-pip-version-check"]
    if any(_plain(name) == "pip" for name in target.packages):
        return [python, *pip, action, *agree, *words]
    if (uv := shutil.which("uv")) is not None:
        # uv would otherwise keep what it has built from this folder's earlier code.
        again = ["--reinstall-package", _NAME] if action == "install" else []
        return [uv, "pip", action, "--python", python, *again, *words]
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, *pip, "--python", python, action, *agree, *words]
    raise UserError(
        f"{python} has no pip, and neither uv nor pip is installed here; run: {quoted([python, '-m', 'ensurepip'])}"
    )


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _source() -> str:
    """Return where this installation came from, for pip."""
    folder = Path(__file__).parents[2]
    if (folder / "hatch_build.py").is_file():
        return str(folder)
    try:
        origin = json.loads(importlib.metadata.distribution(_NAME).read_text("direct_url.json") or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        origin = {}
    url = str(origin.get("url", ""))
    if "vcs_info" in origin:
        return f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    return url2pathname(urlsplit(url).path) if url.startswith("file:") else url or f"{_NAME}=={__version__}"


def switch_on(target: Environment, added: Sequence[str]) -> None:
    """Switch the extension on in an environment. Raises UserError if its folder cannot be written."""
    try:
        replace_text(target.switch, f"{_ADDED}{' '.join(added)}\n{_LINE}\n")
    except OSError as error:
        raise UserError(f"{target.switch} cannot be written: {error.strerror or error}") from None


def undo(target: Environment) -> list[str]:
    """Remove the packages that were added, and switch the extension off; return their names. Raises UserError."""
    added = target.added
    if added:
        _pip(target, "uninstall", *added)
    try:
        unlink(target.switch)
    except OSError as error:
        raise UserError(f"{target.switch} cannot be removed: {error.strerror or error}") from None
    return added


def first_lines(target: Environment, sd_scripts: Checkout) -> list[str]:
    """Return the extension's lines of a plain start of a script in an environment; none if it is not on there."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("KOHYA_EXT", "SDSCRIPTS_"))}
    command = [str(target.python), str(sd_scripts.script("train_network.py")), "--help"]
    done = subprocess.run(command, env=environ, cwd=sd_scripts.path, capture_output=True, text=True, errors="replace")
    return [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("kohya_ext: ")]
