"""Build the virtual GPU's libraries with g++ and the headers in the wheels of PyTorch's dependencies.

``libcuda.so.1`` defines every function that NVIDIA's libraries export: those in ``src/`` have an implementation, and the others
a stub of three instructions that passes the function's name on. Preloaded, it comes before NVIDIA's libraries, which stay
loaded and are never called.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kohya_ext import cache

SOURCES = Path(__file__).parent / "src"

#: NVIDIA's libraries that PyTorch calls.
_LIBRARIES = ("cudart", "cublas", "cublasLt", "cudnn", "cusparse", "cusparseLt", "cusolver", "cufft")

#: Functions of the CUDA interface: the libraries also export LAPACK's functions and C++ names.
_FUNCTION = re.compile(r"(?:__)?(?:cuda|cublas|cudnn|cusparse|cusolver|cufft|cu)[A-Z]\w*")

#: In cuda.h: ``#define cuMemAlloc cuMemAlloc_v2`` and ``#define cuMemcpyDtoH __CUDA_API_PTDS(cuMemcpyDtoH_v2)``.
_VERSIONED = re.compile(r"^\s*#\s*define\s+(cu[A-Z]\w*)\s+(?:__CUDA_API_PT[SD][ZS]\()?(cu[A-Z]\w*)\)?\s*$", re.MULTILINE)


class BuildError(Exception):
    """The virtual GPU cannot be built here; the message is the reason."""


def missing() -> str | None:
    """Return the reason why the virtual GPU cannot be built for this interpreter, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the virtual GPU needs Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    for tool in ("g++", "nm"):
        if shutil.which(tool) is None:
            return f"the virtual GPU needs {tool}; install g++ and binutils"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if not _headers():
        return "the virtual GPU needs a CUDA build of torch with NVIDIA's wheels; this one has none"
    return None


def library_folder() -> Path:
    """Return the folder of the libraries, which are built unless they are cached. Raises :class:`BuildError`."""
    if (reason := missing()) is not None:
        raise BuildError(reason)
    folder = cache.folder() / "virtual_gpu" / _key()
    if not (folder / "libcuda.so.1").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            built = Path(temporary) / "built"
            built.mkdir()
            _build(built)
            try:
                built.rename(folder)
            except OSError:  # another process has built it in the meantime
                if not folder.is_dir():
                    raise
    return folder


def environment(folder: Path, settings: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process on the virtual GPU: ``base`` with ``settings``, and with the libraries preloaded."""
    preloaded = [str(folder / "libcuda.so.1"), str(folder / "libnvidia-ml.so.1"), base.get("LD_PRELOAD", "")]
    return {
        **base,
        "LD_PRELOAD": ":".join(filter(None, preloaded)),
        "TRITON_LIBCUDA_PATH": str(folder),  # Triton links its launchers with this library
        "CUDA_MODULE_LOADING": "LAZY",
        **settings,
    }


def _packages() -> list[Path]:
    """Return the folders in which NVIDIA's wheels and Triton are installed, next to torch."""
    spec = importlib.util.find_spec("torch")
    return [] if spec is None or spec.origin is None else [Path(spec.origin).parents[1]]


def _headers() -> list[Path]:
    """Return the folders with NVIDIA's headers; Triton's last, because its copies may be of another version."""
    folders = [folder for packages in _packages() for folder in sorted(packages.glob("nvidia/*/include"))]
    folders += [packages / "triton" / "backends" / "nvidia" / "include" for packages in _packages()]
    wanted = ("cuda_runtime_api.h", "cublas_v2.h", "cudnn.h", "cuda.h")
    complete = all(any((folder / header).is_file() for folder in folders) for header in wanted)
    return folders if complete else []


def _key() -> str:
    """Return a hash of the sources and of the versions that the libraries depend on."""
    files = [Path(__file__), *sorted(SOURCES.iterdir())]
    parts = [file.read_bytes() for file in files]
    parts += [f"{name} {_version(name)}".encode() for name in ("torch", "triton")]
    parts += [str(folder.stat().st_mtime_ns).encode() for folder in _headers()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _build(folder: Path) -> None:
    headers = _headers()
    driver = next(header / "cuda.h" for header in headers if (header / "cuda.h").is_file())
    versions = _VERSIONED.findall(driver.read_text(encoding="utf-8"))
    (folder / "versions.inc").write_text(_version_table(versions))
    includes = [f"-I{path}" for path in (SOURCES, folder, *headers)]
    options = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wno-deprecated-declarations", *includes)
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda pair: _run("g++", *options, "-c", pair[0], "-o", pair[1]), zip(sources, objects, strict=True)))

    declared = _run("g++", "-E", "-x", "c++", *includes, driver)
    functions = {name for name in re.findall(r"\b(cu[A-Z]\w*)\(", declared) if _FUNCTION.fullmatch(name)}
    functions |= _exported(_nvidia_libraries())
    stubs = folder / "stubs.S"
    implemented = _exported(objects, "--extern-only")
    # PyTorch 2.6 loads some functions of the driver by the name without a version.
    aliases = {plain: versioned for plain, versioned in versions if versioned in implemented and plain != versioned}
    stubs.write_text(_stubs(sorted(functions - implemented - aliases.keys()), aliases))
    _run("g++", "-c", stubs, "-o", folder / "stubs.o")
    exports = folder / "exports.map"
    names = "cu[A-Z]*; cuda*; cublas*; cudnn*; cusparse*; cusolver*; cufft*; cupti*; __cuda*; nvml*; virtual_gpu_*;"
    exports.write_text(f"{{ global: {names} local: *; }};\n")
    # -Bsymbolic: its own calls reach its own functions, whatever else is loaded.
    link = ("-shared", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic", f"-Wl,--version-script,{exports}")
    static = ("-ldl", "-lpthread", "-static-libstdc++", "-static-libgcc")
    _run("g++", *link, *objects, folder / "stubs.o", *static, "-o", folder / "libcuda.so.1")
    (folder / "libcuda.so").symlink_to("libcuda.so.1")
    # PyTorch and nvidia-ml-py load NVML by its name. An empty library with that name finds the functions in libcuda.so.1.
    nvml = ("-shared", "-Wl,-soname,libnvidia-ml.so.1", "-Wl,--no-as-needed", "-x", "c", os.devnull, "-x", "none")
    _run("g++", *nvml, folder / "libcuda.so.1", "-o", folder / "libnvidia-ml.so.1")
    for file in (*objects, folder / "stubs.o", stubs, exports, folder / "versions.inc"):
        file.unlink()


def _nvidia_libraries() -> list[Path]:
    names = [f"nvidia/*/lib/lib{name}*.so.*" for name in _LIBRARIES]
    return sorted({library for packages in _packages() for name in names for library in packages.glob(name)})


def _exported(files: Iterable[Path], *options: str) -> set[str]:
    """Return the CUDA functions that libraries export or, with ``--extern-only``, that object files define."""
    symbols = _run("nm", *(options or ("--dynamic",)), "--defined-only", *files)
    lines = [line.split() for line in symbols.splitlines()]
    names = {line[2].partition("@")[0] for line in lines if len(line) == 3 and line[1] in "TW"}
    return {name for name in names if _FUNCTION.fullmatch(name)}


def _version_table(versions: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f'  {{"{plain}", "{versioned}"}},\n' for plain, versioned in sorted(set(versions)))
    return f"static const struct {{ const char *plain, *versioned; }} VERSIONS[] = {{\n{rows}}};\n"


def _stubs(names: Iterable[str], aliases: Mapping[str, str]) -> str:
    """Return assembly: a stub calls ``virtual_gpu_unimplemented(its name, its first argument)``, an alias its function."""
    lines = [".text"]
    for name, function in aliases.items():
        lines += [f".globl {name}", f".type {name},@function", f"{name}: jmp {function}"]
    for number, name in enumerate(names):
        lines += [f".globl {name}", f".type {name},@function", f"{name}: movq %rdi,%rsi"]
        lines += [f"leaq .Lname{number}(%rip),%rdi", "jmp virtual_gpu_unimplemented"]
    lines.append(".section .rodata")
    lines += [f'.Lname{number}: .string "{name}"' for number, name in enumerate(names)]
    return "\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""])


def _run(*command: str | Path) -> str:
    environ = {**os.environ, "LC_ALL": "C"}
    environ.pop("LD_PRELOAD", None)
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        raise BuildError(f"{command[0]} failed while building the virtual GPU:\n{done.stderr[-4000:]}")
    return done.stdout
