"""Wait for sd-scripts to be imported, then begin the session of this process.

``kohya_ext.pth`` calls this at every Python start in which a variable of the extension is set: pip, accelerate's launcher,
data-loader workers and the kohya_ss GUI included. Until one of the modules below is imported, this costs three entries
in a dictionary and one import finder. This module must therefore import nothing else (a test checks this); wrapt alone
would import asyncio, 60 ms. A ``library`` package of another project is ignored.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

_LAUNCHER = "accelerate.commands.launch"

_watching = False
_launched = False
"""Whether the launcher started this process; otherwise the environment decides."""

_waiting: dict[str, Callable[[ModuleType], None]] = {}
"""Names of modules that were not imported yet -> reaction to their import."""


def watch_if_switched_on() -> None:
    """Watch for sd-scripts; the environment is read when it is imported. Safe to repeat."""
    global _watching
    if not _watching:
        _watching = True
        _waiting["library"] = _on_library
        _waiting[_LAUNCHER] = _on_launcher
        _waiting["torch.distributed.elastic.agent.server.local_elastic_agent"] = _on_launcher
        for name in _waiting.keys() & sys.modules.keys():
            _waiting.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, _Finder)


def watch() -> None:
    """Watch for sd-scripts regardless of the environment, for the launcher. Safe to repeat."""
    global _launched
    _launched = True
    watch_if_switched_on()
    if "library" in sys.modules:
        _on_library(sys.modules["library"])


class _Finder:
    """An import finder that finds nothing. At the first import of a watched module it registers a wrapt hook."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Register the reaction to the module's import, then let the other finders find it."""
        if name == _LAUNCHER and name in _waiting and _runs_as_main(name):
            return _imported_main(name)
        react = _waiting.pop(name, None)
        if react is None:
            return None
        try:
            import importlib.util

            import wrapt
        except Exception as error:
            _give_up(error)
            return None
        wrapt.register_post_import_hook(react, name)
        return importlib.util.find_spec(name)  # asks all finders again: wrapt's is now the first


def _runs_as_main(name: str) -> bool:
    """Return whether ``python -m`` is about to run a module, as lora-scripts starts accelerate's launcher."""
    words = sys.orig_argv
    return sys.argv[:1] == ["-m"] and "-m" in words and name in words[words.index("-m") + 1 : words.index("-m") + 2]


def _imported_main(name: str) -> ModuleSpec:
    """Return the spec of a module whose ``python -m`` imports it, so that reactions to its import apply, and calls its main."""
    from importlib.machinery import ModuleSpec

    return ModuleSpec(name, _ImportedMain(), origin=name)  # type: ignore[arg-type]  # runpy calls get_code alone


class _ImportedMain:
    """The loader for runpy, which runs the code of a module without importing it."""

    @staticmethod
    def get_code(name: str) -> CodeType:
        """Return code that imports the module and calls its main function."""
        return compile(f"import importlib\nraise SystemExit(importlib.import_module({name!r}).main())", name, "exec")


def _on_library(module: ModuleType) -> None:
    folder = next(iter(getattr(module, "__path__", [])), None)
    try:
        if folder is None:
            return
        from pathlib import Path

        from kohya_ext.sdscripts.checkouts import describe

        checkout = describe(Path(folder).parent, "imported by this process")
        if checkout is not None and _is_switched_on() and (_launched or any(map(checkout.is_run_by, _programs()))):
            from kohya_ext.launch.session import begin

            begin(checkout)
    except Exception as error:
        _give_up(error)


def _programs() -> tuple[str, str]:
    """Return the file of this process's command line, and of its main module, which a profiler, for example, replaces."""
    return sys.argv[0] if sys.argv else "", getattr(sys.modules.get("__main__"), "__file__", None) or ""


def _on_launcher(module: ModuleType) -> None:
    try:
        if _is_switched_on():
            from kohya_ext.launch import accelerate_signals

            accelerate_signals.arm()
    except Exception as error:
        _give_up(error)


def _is_switched_on() -> bool:
    from kohya_ext.config.settings import switched_on

    return _launched or switched_on(os.environ)


def _give_up(error: Exception) -> None:
    """Print the error; exit under the launcher, and train without the extension in a plain start."""
    if not isinstance(error, ImportError):  # a bug: a report needs the traceback
        import traceback

        traceback.print_exception(error)
    if _launched:
        print(f"kohya_ext: error: cannot start: {error!r}. Reinstall kohya_ext", file=sys.stderr)
        raise SystemExit(2)
    print(f"kohya_ext: not active: {error!r}. Reinstall kohya_ext, or unset its variables", file=sys.stderr)
