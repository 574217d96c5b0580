"""Find, describe and fetch a checkout of sd-scripts.

sd-scripts is no package: it is used as a folder of scripts beside its ``library`` and ``networks``. Nothing here imports
any of it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from kohya_ext import cache
from kohya_ext.console import note, progress
from kohya_ext.errors import UserError, did_you_mean

UPSTREAM = "https://github.com/kohya-ss/sd-scripts.git"

#: What ``setup`` fetches when told nothing: the release the extension is tested with first.
PINNED_REF = "6721028c79ee85a78b3a06dfd8954dae310a1cce"
PINNED_VERSION = "0.11.1"

#: Names people type for the commits this product is tested with; not every mirror carries upstream's tags.
KNOWN_REFS = {"v0.11.1": PINNED_REF, "v0.10.1": "48d368fa557731ad0488c07304dfeba8c07910eb"}

#: Names the checkout to use, as ``--sd-scripts`` does, in every command.
VARIABLE = "KOHYA_SD_SCRIPTS"

Layout = Literal["v0.10", "v0.11", "unknown"]
KNOWN_LAYOUTS: frozenset[Layout] = frozenset({"v0.10", "v0.11"})


@dataclass(frozen=True)
class Checkout:
    """A folder that holds sd-scripts."""

    path: Path
    version: str | None
    """As the README's change history names it; None when it does not."""
    layout: Layout
    """``v0.10``: everything in library/train_util.py. ``v0.11``: split modules. Told from the files, not the version."""
    found: str
    """How it was found, in words."""

    @cached_property
    def commit(self) -> str | None:
        """The full hash of the commit checked out; None without git or outside a repository of its own."""
        if not (self.path / ".git").exists():
            return None
        try:
            return _git("rev-parse", "HEAD", folder=self.path)
        except GitError:
            return None

    @property
    def label(self) -> str:
        """For messages: ``sd-scripts v0.11.1``."""
        return f"sd-scripts {'v' + self.version if self.version else 'of unknown version'}"

    def scripts(self) -> list[str]:
        """Every Python file that can be run, relative to the checkout, with forward slashes."""
        folders = (".", "networks", "tools", "finetune")
        found = [file for folder in folders for file in sorted((self.path / folder).glob("*.py"))]
        return [file.relative_to(self.path).as_posix() for file in found if "__main__" in _text(file)]

    def has(self, name: str) -> bool:
        """Return whether the checkout has a script of this name; ``.py`` may be left out."""
        return any((self.path / word).is_file() for word in (name, f"{name}.py"))

    def script(self, name: str) -> Path:
        """Return the path of a script given as the user typed it; ``.py`` may be left out.

        A file of no checkout is taken as it is. Raises UserError when there is no such script, and for a file of another
        checkout: its modules would be imported from there, and the patches chosen for this one.
        """
        elsewhere = None
        for candidate in (Path(name).expanduser(), self.path / name, self.path / f"{name}.py"):
            if not candidate.is_file():
                continue
            file = candidate.resolve()
            if file.suffix != ".py":
                raise UserError(f"{name} is not a Python script")
            if (owner := _owner(file)) is None or owner.path == self.path:
                return file
            elsewhere = owner
        if elsewhere is not None:
            raise UserError(
                f"{name} belongs to {elsewhere.path} ({elsewhere.label}), but {self.found} names {self.path} ({self.label}): "
                "use one checkout for both"
            )
        if Path(name).expanduser().is_dir():
            raise UserError(f"{name} is a folder, not a script: give the name of one, for example sdxl_train_network.py")
        raise UserError(f"no script {name} in {self.path} ({self.label}).{did_you_mean(_with_suffix(name), self.scripts())}")


def _owner(script: Path) -> Checkout | None:
    """Return the checkout that a script is in, at its top or one folder below; None for a file of no checkout."""
    found = (describe(folder, "the script's own folder") for folder in list(script.parents)[:2])
    return next(filter(None, found), None)


def is_training_script(script: Path) -> bool:
    """Return whether a script reads sd-scripts' training arguments and a config file, told from its text."""
    return "read_config_from_file(" in _text(script)


def describe(folder: Path, found: str) -> Checkout | None:
    """Describe the checkout in ``folder``; None when it does not hold sd-scripts."""
    library = folder / "library"
    if not (library / "train_util.py").is_file() or not (folder / "train_network.py").is_file():
        return None
    return Checkout(folder.resolve(), _version(folder), _layout(library), found)


def _version(folder: Path) -> str | None:
    match = re.search(r"\*\*Version (\d+\.\d+\.\d+)", _text(folder / "README.md"))
    return match.group(1) if match else None


def _layout(library: Path) -> Layout:
    if (library / "args.py").is_file() and (library / "accelerator_setup.py").is_file():
        return "v0.11"
    if (library / "anima_models.py").is_file() and "def prepare_accelerator" in _text(library / "train_util.py"):
        return "v0.10"
    return "unknown"


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _with_suffix(name: str) -> str:
    return name if name.endswith(".py") else f"{name}.py"


# --- finding ---------------------------------------------------------------------------------------------------------


def candidates(named: Path | None = None, script: str | None = None) -> Iterator[tuple[str, Path]]:
    """Yield (how, folder) of the places to look in, the first that holds sd-scripts wins.

    ``named`` is ``--sd-scripts``; that, or else the variable, is the only place when given.
    """
    if (chosen := _chosen(named)) is not None:
        yield chosen
        return
    if script is not None and (file := Path(script).expanduser()).is_file():
        for folder in list(file.resolve().parents)[:2]:
            yield "the script's own folder", folder
    yield "the working directory", Path.cwd()
    yield "./sd-scripts, where the kohya_ss GUI keeps it", Path.cwd() / "sd-scripts"
    for entry in Registry.read().entries:
        yield _how(entry), Path(entry.path)


def _chosen(named: Path | None) -> tuple[str, Path] | None:
    """The user's own choice: how it was made, and the folder."""
    if named is not None:
        return "--sd-scripts", named.expanduser()
    variable = os.environ.get(VARIABLE)
    return (VARIABLE, Path(variable).expanduser()) if variable else None


def find(named: Path | None = None, script: str | None = None) -> Checkout | None:
    """Return the checkout to use, or None. Raises UserError when the user's own choice holds no sd-scripts."""
    for how, folder in candidates(named, script):
        if (checkout := describe(folder, how)) is not None:
            return checkout
    if (chosen := _chosen(named)) is not None:
        raise UserError(
            f"{chosen[0]}: no sd-scripts in {chosen[1]} (no library/train_util.py and train_network.py there). "
            "Name the folder that holds sdxl_train.py, or run `python -m kohya_ext setup` to fetch one"
        )
    return None


def find_or_fetch(named: Path | None = None, script: str | None = None) -> Checkout:
    """Return the checkout to use; fetch the pinned one when there is none. Raises UserError that lists what was tried."""
    if (checkout := find(named, script)) is not None:
        return checkout
    tried = "; ".join(dict.fromkeys(f"{how} ({folder})" for how, folder in candidates(script=script)))
    note(f"no sd-scripts found; fetching v{PINNED_VERSION} from {UPSTREAM} once, into {cache_folder()}")
    try:
        return fetch(UPSTREAM, PINNED_REF)
    except UserError as error:
        raise UserError(
            f"no sd-scripts found and none could be fetched. Looked in: {tried}; then {UPSTREAM}: {error}. "
            "Ways out: --sd-scripts FOLDER for one you have; `python -m kohya_ext setup --repo URL-or-folder` for a mirror "
            f"or a copy; or {VARIABLE} in the environment"
        ) from None


# --- the user cache --------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """The folder of fetched checkouts: ``KOHYA_EXT_CACHE``, or the platform's cache folder for this user."""
    return cache.folder() / "sd-scripts"


@dataclass(frozen=True)
class Entry:
    """One checkout that ``setup`` made or was told of."""

    path: str
    cloned: bool


@dataclass(frozen=True)
class Registry:
    """The checkouts that ``setup`` made or registered. The first is the default: it is used when nothing else is found."""

    entries: tuple[Entry, ...]

    @staticmethod
    def file() -> Path:
        """Where it is kept."""
        return cache_folder() / "registry.json"

    @classmethod
    def read(cls) -> Registry:
        """Read it; empty when there is none or it cannot be read. Folders that are gone are left out."""
        try:
            rows = json.loads(cls.file().read_text(encoding="utf-8"))
            entries = [Entry(str(row["path"]), bool(row["cloned"])) for row in rows]
        except (OSError, ValueError, KeyError, TypeError):
            return cls(())
        return cls(tuple(entry for entry in entries if Path(entry.path).is_dir()))

    def with_entry(self, entry: Entry) -> Registry:
        """Return one that has ``entry`` too. It becomes the default only when there is no other."""
        known = any(other.path == entry.path for other in self.entries)
        return self if known else Registry((*self.entries, entry))

    def with_default(self, path: Path) -> Registry:
        """Return one with the entry of a folder first."""
        return Registry(tuple(sorted(self.entries, key=lambda entry: entry.path != str(path))))

    def write(self) -> None:
        """Write it whole: a second process reads the old or the new one, never a part."""
        self.file().parent.mkdir(parents=True, exist_ok=True)
        beside = self.file().with_suffix(f".{os.getpid()}.tmp")
        beside.write_text(json.dumps([asdict(entry) for entry in self.entries], indent=1), encoding="utf-8")
        beside.replace(self.file())


def known() -> list[Checkout]:
    """Every checkout in the user cache or registered there, the default first."""
    described = (describe(Path(entry.path), _how(entry)) for entry in Registry.read().entries)
    return [checkout for checkout in described if checkout is not None]


def _how(entry: Entry) -> str:
    return "the user cache" if entry.cloned else "registered with `setup --repo`"


def make_default(which: str) -> Checkout:
    """Make one of the known checkouts the default: by version (v0.11.1), commit, or folder, which may be a new one.

    Raises UserError when there is none such, or several.
    """
    if (folder := describe(Path(which).expanduser(), "")) is not None:
        found = [register(folder.path)]
    else:
        version = which.removeprefix("v")
        found = [one for one in known() if one.version == version or (len(which) >= 4 and (one.commit or "").startswith(which))]
    if len(found) != 1:
        there = ", ".join(f"v{one.version} ({(one.commit or '?')[:8]}) in {one.path}" for one in found or known())
        wrong = "means several checkouts" if found else "is not there"
        raise UserError(
            f"--default {which} {wrong}: {there or 'no checkout'}. Name one by its commit or folder, or fetch it: --ref"
        )
    Registry.read().with_default(found[0].path).write()
    return found[0]


# --- fetching --------------------------------------------------------------------------------------------------------


class GitError(Exception):
    """git is missing or failed; the message is its first error."""


@dataclass(frozen=True)
class Fetched:
    """What ``setup`` did."""

    checkout: Checkout
    missing: tuple[str, ...]
    """Files of the commit that the source does not hold (a partial clone), left out."""


def register(folder: Path) -> Checkout:
    """Add a folder that already is a checkout to the known ones. Raises UserError when it holds no sd-scripts."""
    checkout = describe(folder, "registered with `setup --repo`")
    if checkout is None:
        raise UserError(f"no sd-scripts in {folder} (no library/train_util.py and train_network.py there)")
    Registry.read().with_entry(Entry(str(checkout.path), cloned=False)).write()
    return checkout


def fetch(repo: str, ref: str) -> Checkout:
    """Clone ``ref`` (tag, branch or commit) of ``repo`` into the user cache. See :func:`fetch_report`."""
    return fetch_report(repo, ref).checkout


def fetch_report(repo: str, ref: str) -> Fetched:
    """Clone ``ref`` of ``repo`` (any git URL, or a local repository, bare or partial) into the user cache and verify it.

    A folder that already holds the commit is verified and used again. Raises UserError when git is missing, the source
    cannot be reached, it has no such ref, or what came is no sd-scripts.
    """
    name = next((tag for tag, commit in KNOWN_REFS.items() if commit == ref), ref)
    if (problem := _no_source(repo)) is not None:
        raise UserError(f"could not fetch {name} of {repo}: {problem}")
    cache_folder().mkdir(parents=True, exist_ok=True)
    beside = cache_folder() / f".fetching-{os.getpid()}"
    shutil.rmtree(beside, ignore_errors=True)
    try:
        try:
            with progress(f"fetching {name} of {repo}"):
                commit = _obtain(repo, ref, beside)
            missing = _check_out(beside, commit)
        except GitError as error:
            raise UserError(f"could not fetch {name} of {repo}: {error}") from None
        fetched = describe(beside, "the user cache")
        if fetched is None:
            raise UserError(f"{ref} of {repo} is no sd-scripts (no library/train_util.py and train_network.py)")
        final = cache_folder() / f"{'v' + fetched.version if fetched.version else 'unversioned'}-{commit[:8]}"
        shutil.rmtree(final, ignore_errors=True)
        beside.replace(final)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    Registry.read().with_entry(Entry(str(final.resolve()), cloned=True)).write()
    checkout = describe(final, "the user cache")
    assert checkout is not None, "it was described a moment ago"
    return Fetched(checkout, missing)


def _no_source(repo: str) -> str | None:
    """Return why a local path cannot be cloned; None when git may try."""
    if "://" in repo or re.match(r"([\w.-]+@)?[\w.-]{2,}:", repo):  # a URL or host:path; one letter would be a Windows drive
        return None
    folder = Path(repo).expanduser()
    if not folder.exists():
        return "there is no such folder"
    if folder.is_dir() and not (folder / ".git").exists() and not (folder / "HEAD").is_file():
        return "it is neither a git repository nor a folder with sd-scripts (library/train_util.py and train_network.py)"
    return None


def _obtain(repo: str, ref: str, folder: Path) -> str:
    """Bring the repository to ``folder`` without a work tree; return the commit's full hash."""
    wanted = KNOWN_REFS.get(ref, ref)
    if Path(repo).expanduser().is_dir():
        # A local clone links the object files as they are, so that a partial repository, which cannot be fetched
        # from, can still be copied.
        _git("clone", "--quiet", "--no-checkout", "--local", str(Path(repo).expanduser()), str(folder))
        return _resolve(folder, wanted)
    _git("init", "--quiet", str(folder))
    _git("remote", "add", "origin", repo, folder=folder)
    try:
        _git("fetch", "--quiet", "--depth", "1", "origin", wanted, folder=folder)
        return _git("rev-parse", "FETCH_HEAD^{commit}", folder=folder)
    except GitError:
        # Servers may refuse to serve a bare hash, and none serves an abbreviated one: take the history and look there.
        _git("fetch", "--quiet", "--tags", "origin", "+refs/heads/*:refs/remotes/origin/*", folder=folder)
        return _resolve(folder, wanted)


def _resolve(folder: Path, ref: str) -> str:
    for name in (ref, f"origin/{ref}"):
        try:
            return _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", folder=folder)
        except GitError:
            continue
    raise GitError(f"it has no tag, branch or commit {ref}; `--ref HEAD` takes what it has checked out")


def _check_out(folder: Path, commit: str) -> tuple[str, ...]:
    """Write the commit's files, leave out those whose content is absent, verify the rest; return what is absent."""
    listing = _git("ls-tree", "-r", "-z", commit, folder=folder).split("\0")
    files = {path: row.split()[2] for row, path in (line.split("\t", 1) for line in listing if line)}
    # Lazy fetching would go to the network for each absent file of a partial clone.
    kinds = _git("cat-file", "--batch-check", folder=folder, stdin="".join(f"{blob}\n" for blob in files.values())).splitlines()
    missing = tuple(path for path, kind in zip(files, kinds, strict=True) if kind.endswith(" missing"))
    _git("update-ref", "--no-deref", "HEAD", commit, folder=folder)
    _git("read-tree", commit, folder=folder)
    present = "\0".join(path for path in files if path not in missing)
    _git("checkout-index", "--index", "--force", "-z", "--stdin", folder=folder, stdin=present)
    changed = _git("diff-files", "--name-only", folder=folder).splitlines()
    if wrong := sorted(set(changed) - set(missing)):
        raise GitError(f"these files did not arrive whole: {', '.join(wrong[:5])}")
    return missing


def _git(*arguments: str, folder: Path | None = None, stdin: str | None = None) -> str:
    command = ["git", *(["-C", str(folder)] if folder else []), *arguments]
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1"}
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, encoding="utf-8", env=environment)
    except FileNotFoundError:
        raise GitError("git is not installed") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        # git explains itself behind its first error; what comes last may be advice cut into lines.
        first = next((line for line in lines if line.startswith(("fatal: ", "error: "))), lines[-1] if lines else "")
        raise GitError(first.partition(": ")[2] or first or f"git {arguments[0]} failed ({done.returncode})")
    return done.stdout.strip()
