"""Find, describe and fetch checkouts of sd-scripts.

sd-scripts is not a package but a folder of scripts, with its ``library`` and ``networks`` next to them. Nothing here imports
any of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from kohya_ext import cache
from kohya_ext.console import note, progress
from kohya_ext.errors import UserError, did_you_mean
from kohya_ext.renames import rename, replace_text
from kohya_ext.sdscripts import releases

UPSTREAM = "https://github.com/kohya-ss/sd-scripts.git"

#: The release that ``setup`` fetches by default, and the newest one whose training scripts are tested.
PINNED_VERSION = "0.11.1"
PINNED_REF = releases.TAGS[f"v{PINNED_VERSION}"]

#: Environment variable for the checkout to use, like ``--sd-scripts``.
VARIABLE = "KOHYA_SD_SCRIPTS"

#: The packages of sd-scripts that patches know.
PACKAGES = ("library", "networks")


@dataclass(frozen=True)
class Checkout:
    """A folder with sd-scripts."""

    path: Path
    version: str | None
    """Version in the README's change history; None if it has none."""
    layout: str
    """The name of its generation in :data:`releases.LAYOUTS`. Read from the files, not from the version."""
    source: str
    """Where the checkout comes from, for messages: ``--sd-scripts``, ``the user cache``."""

    @cached_property
    def commit(self) -> str | None:
        """The full hash of the checked-out commit; None without git or if the folder is not a repository."""
        if not (self.path / ".git").exists():
            return None
        try:
            return _git("rev-parse", "HEAD", folder=self.path)
        except GitError:
            return None

    @property
    def label(self) -> str:
        """Name and version, for messages: ``sd-scripts v0.11.1``."""
        return f"sd-scripts {'v' + self.version if self.version else releases.BY_NAME[self.layout].title}"

    @property
    def is_newer_than_tested(self) -> bool:
        """Whether its version is newer than the newest tested release."""
        from packaging.version import Version

        return self.version is not None and Version(self.version) > Version(PINNED_VERSION)

    @property
    def is_older_than_tested(self) -> bool:
        """Whether its generation is older than the oldest tested one."""
        return self.layout != releases.UNKNOWN.name and not releases.BY_NAME[self.layout].tested

    @property
    def age(self) -> str:
        """``newer than the tested v0.11.1``, ``older than the tested v0.10.1``, or empty."""
        if self.is_newer_than_tested:
            return f"newer than the tested v{PINNED_VERSION}"
        return f"older than the tested {releases.BY_NAME[releases.TESTED[0]].tested}" if self.is_older_than_tested else ""

    def can_be_patched(self, allow_unknown_version: bool) -> bool:
        """Return whether patches are tried. Each patch checks its own targets.

        An unknown layout of a newer release has most of the code that patches know. That of a fork may not, so the user must
        allow it.
        """
        return self.layout != releases.UNKNOWN.name or self.is_newer_than_tested or allow_unknown_version

    def lacks(self, module: str) -> bool:
        """Return whether a module of sd-scripts, by its dotted name, does not exist here."""
        is_theirs = module.partition(".")[0] in PACKAGES and module not in sys.modules
        return is_theirs and not (self.path / f"{module.replace('.', '/')}.py").is_file()

    def scripts(self) -> list[str]:
        """Return all runnable Python files, relative to the checkout, with forward slashes."""
        folders = (".", "networks", "tools", "finetune")
        files = [file for folder in folders for file in sorted((self.path / folder).glob("*.py"))]
        return [file.relative_to(self.path).as_posix() for file in files if "__main__" in _text(file)]

    def has(self, name: str) -> bool:
        """Return whether the checkout has a script of this name, with or without ``.py``."""
        return any((self.path / file).is_file() for file in (name, f"{name}.py"))

    def script(self, name: str) -> Path:
        """Return the path of a script that the user has named, with or without ``.py``.

        The script may be a file outside all checkouts. Raises UserError if it does not exist or belongs to another checkout:
        its modules would be imported from there, but the patches would be chosen for this one.
        """
        elsewhere = None
        for candidate in (Path(name).expanduser(), self.path / name, self.path / f"{name}.py"):
            if not candidate.is_file():
                continue
            file = candidate.resolve()
            if file.suffix != ".py":
                raise UserError(f"{name} is not a Python script")
            if (owner := _checkout_of(file)) is None or owner.path == self.path:
                return file
            elsewhere = owner
        if elsewhere is not None:
            raise UserError(
                f"{name} belongs to {elsewhere.path} ({elsewhere.label}), but {self.source} is {self.path} ({self.label}); "
                "use one checkout for both"
            )
        if Path(name).expanduser().is_dir():
            raise UserError(f"{name} is a folder; name a script, for example sdxl_train_network.py")
        raise UserError(f"no script {name} in {self.path} ({self.label}).{did_you_mean(_with_suffix(name), self.scripts())}")

    def trained_by(self, program: Path) -> Path | None:
        """Return the training script that a program runs; None if it runs none.

        It is the program itself, or the script whose trainer a wrapper imports. Colab notebooks train through wrappers.
        """
        text = _text(program)
        if not is_training_script(program):
            return None
        if "def setup_parser" not in text:
            for name in re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE):
                if is_training_script(file := self.path / f"{name}.py"):
                    return file
        return program if self.path in program.parents else None

    def is_run_by(self, program: str) -> bool:
        """Return whether a program may be a run of this checkout: one of its files, one that trains, or no file at all.

        A GUI that imports its modules is none, for example fluxgym, which builds its form from a script's parser.
        """
        file = Path(program).resolve()
        return not file.is_file() or self.path in file.parents or is_training_script(file)


def _checkout_of(script: Path) -> Checkout | None:
    """Return the checkout with the script in its root or a folder below; None if there is none."""
    described = (describe(folder, "the script's own folder") for folder in list(script.parents)[:2])
    return next(filter(None, described), None)


def is_training_script(script: Path) -> bool:
    """Return whether a script's source code reads sd-scripts' config file, as training scripts do."""
    return "read_config_from_file(" in _text(script)


def describe(folder: Path, source: str) -> Checkout | None:
    """Return the checkout in ``folder``; None if it does not contain sd-scripts."""
    if not (folder / "library" / "train_util.py").is_file() or not (folder / "train_network.py").is_file():
        return None
    return Checkout(folder.resolve(), _version(folder), releases.layout_of(folder).name, source)


def _version(folder: Path) -> str | None:
    match = re.search(r"\*\*Version (\d+\.\d+\.\d+)", _text(folder / "README.md"))
    return match.group(1) if match else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _with_suffix(name: str) -> str:
    return name if name.endswith(".py") else f"{name}.py"


# --- finding ---------------------------------------------------------------------------------------------------------


def candidates(named: Path | None = None, script: str | None = None) -> Iterator[tuple[str, Path]]:
    """Yield (source, folder) of all candidate folders. The first one with sd-scripts is used.

    ``named`` is the value of ``--sd-scripts``. If it or else the variable is set, it is the only candidate.
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
        yield _source(entry), Path(entry.path)


def _chosen(named: Path | None) -> tuple[str, Path] | None:
    """Return (source, folder) of the user's explicit choice; None if there is none."""
    if named is not None:
        return "--sd-scripts", named.expanduser()
    variable = os.environ.get(VARIABLE)
    return (VARIABLE, Path(variable).expanduser()) if variable else None


def find(named: Path | None = None, script: str | None = None) -> Checkout | None:
    """Return the checkout to use, or None. Raises UserError if the user's explicit choice has no sd-scripts."""
    for source, folder in candidates(named, script):
        if (checkout := describe(folder, source)) is not None:
            return checkout
    if (chosen := _chosen(named)) is not None:
        raise UserError(
            f"{chosen[0]}: no sd-scripts in {chosen[1]} (library/train_util.py or train_network.py is missing). "
            "Name the folder with sdxl_train.py, or run `python -m kohya_ext setup` to fetch sd-scripts"
        )
    return None


def find_or_fetch(named: Path | None = None, script: str | None = None) -> Checkout:
    """Return the checkout to use; fetch the pinned release if there is none. Raises UserError with all candidates."""
    if (checkout := find(named, script)) is not None:
        return checkout
    tried = "; ".join(dict.fromkeys(f"{source} ({folder})" for source, folder in candidates(script=script)))
    note(f"no sd-scripts found; fetching v{PINNED_VERSION} from {UPSTREAM} into {cache_folder()}")
    try:
        return fetch(UPSTREAM, PINNED_REF)
    except UserError as error:
        raise UserError(
            f"sd-scripts was not found and could not be fetched. Tried: {tried}; {UPSTREAM}: {error}. "
            f"Name your copy with --sd-scripts FOLDER or {VARIABLE}, or fetch from a mirror or a copy: "
            "`python -m kohya_ext setup --repo URL-or-folder`"
        ) from None


# --- the user cache --------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder of fetched checkouts, in ``KOHYA_EXT_CACHE`` or the user's cache folder."""
    return cache.folder() / "sd-scripts"


@dataclass(frozen=True)
class Entry:
    """A checkout that ``setup`` has cloned or registered."""

    path: str
    cloned: bool


@dataclass(frozen=True)
class Registry:
    """The checkouts that ``setup`` has cloned or registered. The first one is the default, the last candidate to use."""

    entries: tuple[Entry, ...]

    @staticmethod
    def file() -> Path:
        """Return the path of the registry."""
        return cache_folder() / "registry.json"

    @classmethod
    def read(cls) -> Registry:
        """Return the stored registry without deleted folders; empty if it is missing or unreadable."""
        try:
            rows = json.loads(cls.file().read_text(encoding="utf-8"))
            entries = [Entry(str(row["path"]), bool(row["cloned"])) for row in rows]
        except (OSError, ValueError, KeyError, TypeError):
            return cls(())
        return cls(tuple(entry for entry in entries if Path(entry.path).is_dir()))

    def with_entry(self, entry: Entry) -> Registry:
        """Return a registry that also has ``entry``, which becomes the default if it is the only entry."""
        is_registered = any(other.path == entry.path for other in self.entries)
        return self if is_registered else Registry((*self.entries, entry))

    def with_default(self, path: Path) -> Registry:
        """Return a registry in which the entry of a folder is the default."""
        return Registry(tuple(sorted(self.entries, key=lambda entry: entry.path != str(path))))

    def write(self) -> None:
        """Write the registry atomically: another process never reads a partial file."""
        replace_text(self.file(), json.dumps([asdict(entry) for entry in self.entries], indent=1))


def registered() -> list[Checkout]:
    """Return all cloned and registered checkouts, the default first."""
    described = (describe(Path(entry.path), _source(entry)) for entry in Registry.read().entries)
    return [checkout for checkout in described if checkout is not None]


def _source(entry: Entry) -> str:
    return "the user cache" if entry.cloned else "registered with `setup --repo`"


def make_default(which: str) -> Checkout:
    """Make a checkout the default: a registered one by version (v0.11.1) or commit, or any checkout by its folder.

    Raises UserError if no checkout matches, or several do.
    """
    if (folder := describe(Path(which).expanduser(), "")) is not None:
        matches = [register(folder.path)]
    else:
        version, is_hash = which.removeprefix("v"), len(which) >= 4
        matches = [
            each for each in registered() if each.version == version or (is_hash and (each.commit or "").startswith(which))
        ]
    if len(matches) != 1:
        listed = ", ".join(f"v{each.version} ({(each.commit or '?')[:8]}) in {each.path}" for each in matches or registered())
        problem = "matches several checkouts" if matches else "matches no checkout"
        raise UserError(
            f"--default {which} {problem} (registered: {listed or 'none'}); name a commit or a folder, or fetch it with --ref"
        )
    Registry.read().with_default(matches[0].path).write()
    return matches[0]


# --- fetching --------------------------------------------------------------------------------------------------------


class GitError(Exception):
    """git is missing or failed. The message is git's first error."""


@dataclass(frozen=True)
class Fetched:
    """A fetched checkout."""

    checkout: Checkout
    missing: tuple[str, ...]
    """Files of the commit that the source, a partial clone, does not contain."""


def register(folder: Path) -> Checkout:
    """Add an existing checkout to the registry. Raises UserError if the folder has no sd-scripts."""
    checkout = describe(folder, "registered with `setup --repo`")
    if checkout is None:
        raise UserError(f"no sd-scripts in {folder} (library/train_util.py or train_network.py is missing)")
    Registry.read().with_entry(Entry(str(checkout.path), cloned=False)).write()
    return checkout


def fetch(repo: str, ref: str) -> Checkout:
    """Clone ``ref`` (tag, branch or commit) of ``repo`` into the user cache. See :func:`fetch_report`."""
    return fetch_report(repo, ref).checkout


def fetch_report(repo: str, ref: str) -> Fetched:
    """Clone ``ref`` of ``repo`` (a git URL, or a local repository, bare or partial) into the user cache and verify it.

    Replaces an earlier clone of the same commit. Raises UserError if git is missing, the source cannot be reached, it has no
    such ref, or the commit is not sd-scripts.
    """
    name = next((tag for tag, commit in releases.TAGS.items() if commit == ref), ref)
    if (problem := _source_problem(repo)) is not None:
        raise UserError(f"could not fetch {name} of {repo}: {problem}")
    cache_folder().mkdir(parents=True, exist_ok=True)
    partial = cache_folder() / f".fetching-{os.getpid()}"
    _remove(partial)
    try:
        try:
            with progress(f"fetching {name} of {repo}"):
                commit = _clone(repo, ref, partial)
            missing = _check_out(partial, commit)
        except GitError as error:
            raise UserError(f"could not fetch {name} of {repo}: {error}") from None
        fetched = describe(partial, "the user cache")
        if fetched is None:
            raise UserError(f"{ref} of {repo} is not sd-scripts (library/train_util.py or train_network.py is missing)")
        final = cache_folder() / f"{'v' + fetched.version if fetched.version else 'unversioned'}-{commit[:8]}"
        _replace(partial, final)
    finally:
        _remove(partial)
    Registry.read().with_entry(Entry(str(final.resolve()), cloned=True)).write()
    checkout = describe(final, "the user cache")
    assert checkout is not None, "described above"
    return Fetched(checkout, missing)


def _replace(new: Path, old: Path) -> None:
    """Put a checkout in place of an earlier one, which stays whole if that fails. Raises UserError while a run is in it."""
    aside = old.with_name(f".replaced-{os.getpid()}")
    _remove(aside)
    try:
        if old.exists():
            rename(old, aside)
        rename(new, old)
    except OSError as error:
        if aside.exists() and not old.exists():
            rename(aside, old)
        raise UserError(f"{old} cannot be replaced: {error.strerror or error}; end the runs that use it") from None
    _remove(aside)


def _remove(folder: Path) -> None:
    """Remove a temporary folder, or leave it to `setup --clean`."""
    with contextlib.suppress(OSError):
        cache.remove_tree(folder)


def _source_problem(repo: str) -> str | None:
    """Return why a local path cannot be cloned; None if git can try."""
    if "://" in repo or re.match(r"([\w.-]+@)?[\w.-]{2,}:", repo):  # a URL or host:path; a single letter is a Windows drive
        return None
    folder = Path(repo).expanduser()
    if not folder.exists():
        return "the folder does not exist"
    if folder.is_dir() and not (folder / ".git").exists() and not (folder / "HEAD").is_file():
        return "the folder is neither a git repository nor sd-scripts (library/train_util.py and train_network.py)"
    return None


def _clone(repo: str, ref: str, folder: Path) -> str:
    """Clone the repository to ``folder`` without a work tree; return the commit's full hash."""
    commit = releases.TAGS.get(ref, ref)
    if Path(repo).expanduser().is_dir():
        # A local clone links the object files, so it also works for a partial repository, which cannot be fetched from.
        _git("clone", "--quiet", "--no-checkout", "--local", str(Path(repo).expanduser()), str(folder))
        return _resolve(folder, commit)
    _git("init", "--quiet", str(folder))
    _git("remote", "add", "origin", repo, folder=folder)
    try:
        _git("fetch", "--quiet", "--depth", "1", "origin", commit, folder=folder)
        return _git("rev-parse", "FETCH_HEAD^{commit}", folder=folder)
    except GitError:
        # Some servers refuse a full hash, and all refuse an abbreviated one, so fetch the history and search it.
        _git("fetch", "--quiet", "--tags", "origin", "+refs/heads/*:refs/remotes/origin/*", folder=folder)
        return _resolve(folder, commit)


def _resolve(folder: Path, ref: str) -> str:
    for name in (ref, f"origin/{ref}"):
        try:
            return _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", folder=folder)
        except GitError:
            continue
    raise GitError(f"no tag, branch or commit {ref}; use --ref HEAD for its checked-out commit")


def _check_out(folder: Path, commit: str) -> tuple[str, ...]:
    """Write and verify the commit's files; return those whose content is missing."""
    listing = _git("ls-tree", "-r", "-z", commit, folder=folder).split("\0")
    files = {path: row.split()[2] for row, path in (line.split("\t", 1) for line in listing if line)}
    # Checking out a missing file of a partial clone would fetch it over the network.
    kinds = _git("cat-file", "--batch-check", folder=folder, stdin="".join(f"{blob}\n" for blob in files.values())).splitlines()
    missing = tuple(path for path, kind in zip(files, kinds, strict=True) if kind.endswith(" missing"))
    _git("update-ref", "--no-deref", "HEAD", commit, folder=folder)
    _git("read-tree", commit, folder=folder)
    present = "\0".join(path for path in files if path not in missing)
    _git("checkout-index", "--index", "--force", "-z", "--stdin", folder=folder, stdin=present)
    changed = _git("diff-files", "--name-only", folder=folder).splitlines()
    if damaged := sorted(set(changed) - set(missing)):
        raise GitError(f"these files are damaged: {', '.join(damaged[:5])}")
    return missing


def _git(*arguments: str, folder: Path | None = None, stdin: str | None = None) -> str:
    command = ["git", *(["-C", str(folder)] if folder else []), *arguments]
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1"}
    try:
        process = subprocess.run(command, input=stdin, capture_output=True, text=True, encoding="utf-8", env=environment)
    except FileNotFoundError:
        raise GitError("git is not installed") from None
    if process.returncode:
        lines = process.stderr.strip().splitlines()
        # The first error explains the failure. The last lines may be general advice.
        first = next((line for line in lines if line.startswith(("fatal: ", "error: "))), lines[-1] if lines else "")
        raise GitError(first.partition(": ")[2] or first or f"git {arguments[0]} failed ({process.returncode})")
    return process.stdout.strip()
