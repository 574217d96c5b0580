import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from kohya_ext.__main__ import main
from kohya_ext.cache import PARTS
from kohya_ext.errors import UserError
from kohya_ext.sdscripts import checkouts, releases

ROOT = Path(__file__).parents[2]
needs_git = pytest.mark.wine("git is a program of Linux there")
GIT = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "init.defaultBranch=main")


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *GIT, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def make_tree(folder: Path, layout: str = "v0.11", version: str = "0.11.1") -> Path:
    """Write the files that identify a checkout, without any code of sd-scripts."""
    (folder / "library").mkdir(parents=True)
    (folder / "networks").mkdir()
    for file, text in (("library/train_util.py", ""), *releases.BY_NAME[layout].markers):
        (folder / file).write_text(f"{text}(): ...\n" if text else "")
    (folder / "train_network.py").write_text("if __name__ == '__main__': read_config_from_file(1)\n")
    (folder / "networks" / "merge_lora.py").write_text("if __name__ == '__main__': ...\n")
    (folder / "README.md").write_text(f"- **Version {version} (2026-01-01):**\n- **Version 0.1.0:**\n")
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "sd-scripts"


@pytest.fixture
def repository(tmp_path) -> Path:
    folder = make_tree(tmp_path / "repository")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "one")
    git(folder, "tag", "v1")
    return folder


#: A wrapper of a Colab notebook: it imports a script's trainer, in a block that catches every error.
WRAPPER = """try:
    from train_network import setup_parser, NetworkTrainer
    from library.train_util import read_config_from_file
    args = read_config_from_file(setup_parser().parse_args(), setup_parser())
    NetworkTrainer().train(args)
except BaseException as error:
    print(error)
"""


@pytest.mark.parametrize("place", ["tree", "."])
def test_wrapper_runs_the_script_that_it_imports(tmp_path, place):
    checkout = checkouts.describe(make_tree(tmp_path / "tree"), "here")
    wrapper = tmp_path / place / "train_network_wrapper.py"
    wrapper.write_text(WRAPPER)
    assert checkout.trained_by(wrapper) == checkout.path / "train_network.py"
    assert checkout.is_run_by(str(wrapper))


def test_programs_of_a_checkout(tmp_path):
    checkout = checkouts.describe(make_tree(tmp_path / "tree"), "here")
    script, tool, gui = checkout.path / "train_network.py", checkout.path / "networks" / "merge_lora.py", tmp_path / "app.py"
    gui.write_text("import library, train_network\nparser = train_network.setup_parser()\n")
    assert [checkout.trained_by(each) for each in (script, tool, gui)] == [script, None, None]
    assert [checkout.is_run_by(str(each)) for each in (script, tool, gui, "-c", "")] == [True, True, False, True, True]


@pytest.mark.parametrize("layout", releases.BY_NAME)
def test_a_checkout_is_described_from_its_files(tmp_path, layout):
    checkout = checkouts.describe(make_tree(tmp_path / "tree", layout, "0.9.9"), "here")
    assert checkout is not None
    assert (checkout.layout, checkout.version, checkout.commit) == (layout, "0.9.9", None)
    assert checkout.label == "sd-scripts v0.9.9"
    assert checkout.scripts() == ["train_network.py", "networks/merge_lora.py"]


@pytest.mark.parametrize(
    ("layout", "version", "age", "patched"),
    [
        ("v0.11", "0.11.1", "", True),
        ("v0.10", "0.10.4", "", True),
        ("v0.11", "0.12.0", "newer than the tested v0.11.1", True),
        ("unknown", "0.13.0", "newer than the tested v0.11.1", True),
        ("sd3", "0.10.0", "older than the tested v0.10.1", True),
        ("v0.9", "0.9.1", "older than the tested v0.10.1", True),
        ("unknown", "0.8.7", "", False),
    ],
)
def test_a_release_of_a_known_layout_or_a_newer_one_is_patched(tmp_path, layout, version, age, patched):
    checkout = checkouts.describe(make_tree(tmp_path / "tree", layout, version), "here")
    assert (checkout.layout, checkout.age) == (layout, age)
    assert checkout.can_be_patched(allow_unknown_version=False) == patched
    assert checkout.can_be_patched(allow_unknown_version=True)


def test_a_checkout_without_a_version_is_not_newer(tmp_path):
    tree = make_tree(tmp_path / "tree", "unknown")
    (tree / "README.md").unlink()
    checkout = checkouts.describe(tree, "here")
    assert not checkout.is_newer_than_tested
    assert not checkout.can_be_patched(allow_unknown_version=False)


def test_a_folder_without_sd_scripts_is_not_a_checkout(tmp_path):
    assert checkouts.describe(tmp_path, "here") is None


def test_a_script_is_resolved_by_name_and_a_misspelled_name_gets_a_suggestion(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkout = checkouts.describe(make_tree(tmp_path / "tree"), "here")
    assert checkout.script("train_network") == checkout.script("train_network.py") == checkout.path / "train_network.py"
    assert checkout.script("networks/merge_lora.py").name == "merge_lora.py"
    with pytest.raises(UserError, match=r"no script train_netwrok.py .*Did you mean train_network.py\?"):
        checkout.script("train_netwrok.py")
    assert checkouts.is_training_script(checkout.script("train_network"))
    assert not checkouts.is_training_script(checkout.script("networks/merge_lora.py"))


def test_the_order_of_candidates(cache, tmp_path):
    here, gui, own, named = (make_tree(tmp_path / name) for name in ("here", "here/sd-scripts", "own", "named"))
    cached = checkouts.register(make_tree(tmp_path / "registered"))
    assert checkouts.find().path == cached.path
    import os

    os.chdir(here)
    assert checkouts.find().path == here
    (here / "train_network.py").unlink()
    assert checkouts.find().path == gui
    assert checkouts.find(script=str(own / "networks" / "merge_lora.py")).path == own
    assert checkouts.find(named).path == named


def test_the_variable_is_the_only_candidate_unless_the_option_is_set(cache, tmp_path, monkeypatch):
    ours, theirs = make_tree(tmp_path / "ours"), make_tree(tmp_path / "theirs")
    monkeypatch.setenv("KOHYA_SD_SCRIPTS", str(theirs))
    assert checkouts.find().path == checkouts.find_or_fetch(script="sdxl_train.py").path == theirs
    assert checkouts.find(ours).path == ours


@pytest.mark.parametrize("how", ["--sd-scripts", "KOHYA_SD_SCRIPTS"])
def test_a_named_folder_without_sd_scripts_is_an_error(cache, tmp_path, monkeypatch, how):
    monkeypatch.setenv("KOHYA_SD_SCRIPTS", str(tmp_path))
    with pytest.raises(UserError, match=rf"{how}: no sd-scripts in .*setup"):
        checkouts.find(tmp_path if how == "--sd-scripts" else None)


@pytest.mark.parametrize("ref", ["v1", "main", "HEAD", "commit", "short"])
@needs_git
def test_a_local_repository_is_cloned_at_any_ref(cache, repository, ref):
    commit = git(repository, "rev-parse", "HEAD")
    fetched = checkouts.fetch_report(str(repository), {"commit": commit, "short": commit[:9]}.get(ref, ref))
    assert fetched.missing == ()
    assert fetched.checkout.commit == commit
    assert fetched.checkout.path.parent == cache
    assert git(fetched.checkout.path, "status", "--porcelain") == ""
    assert [checkout.path for checkout in checkouts.registered()] == [fetched.checkout.path]


@needs_git
def test_a_checkout_added_later_is_not_the_default_until_it_is_chosen(cache, repository, tmp_path, monkeypatch, capsys):
    mine = make_tree(tmp_path / "mine", "v0.10", "0.10.1")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    def setup(*arguments: str) -> str:
        assert main(["setup", *arguments]) == 0
        return capsys.readouterr().out

    first = setup("--repo", str(repository), "--ref", "v1")
    fetched = checkouts.find().path
    assert f"sd-scripts v0.11.1 in {fetched} is the default" in first
    second = setup("--repo", str(mine))
    assert checkouts.find().path == fetched
    assert (
        f"the default is still sd-scripts v0.11.1 in {fetched}; to change it, run: python -m kohya_ext setup --default {mine}"
        in second
    )
    assert f"sd-scripts v0.10.1 in {mine} is the default" in setup("--default", "v0.10.1")
    assert [checkout.path for checkout in checkouts.registered()] == [mine, fetched]
    assert checkouts.find().source == "registered with `setup --repo`"
    for which in (str(fetched), git(fetched, "rev-parse", "HEAD")[:7], "0.11.1"):
        checkouts.make_default(str(mine))
        setup("--default", which)
        assert [checkout.path for checkout in checkouts.registered()] == [fetched, mine]
    third = make_tree(tmp_path / "third", "v0.10", "0.10.1")
    assert f"{third} is the default" in setup("--repo", str(third), "--default")
    assert main(["setup", "--default", "v0.10.1"]) == 2
    assert "--default v0.10.1 matches several checkouts" in capsys.readouterr().err
    assert main(["setup", "--default", "v9"]) == 2
    assert "--default v9 matches no checkout (registered: " in capsys.readouterr().err


@pytest.mark.parametrize("reason", ["the default", "KOHYA_SD_SCRIPTS", "the working directory"])
def test_the_list_marks_the_checkout_in_use_and_why(cache, tmp_path, monkeypatch, capsys, reason):
    cached = checkouts.register(make_tree(tmp_path / "cached")).path
    other = make_tree(tmp_path / "other", "v0.10", "0.10.1")
    if reason == "the working directory":
        monkeypatch.chdir(other)
    elif reason == "KOHYA_SD_SCRIPTS":
        monkeypatch.setenv("KOHYA_SD_SCRIPTS", str(other))
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["setup", "--list"]) == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines() if "│" in line]
    rows = [row for row in rows if row[0] != "used here"]  # the head, in consoles with fewer characters
    assert rows[0][0] == f"yes: {reason}"
    assert rows[0][4] == str(checkouts.find().path)
    assert [row[4] for row in rows] == [str(cached)] if reason == "the default" else [str(other), str(cached)]
    if reason != "the default":
        assert rows[1][0] == "the default"
        assert main(["setup", "--repo", str(cached)]) == 0
        assert f"but this folder uses sd-scripts v0.10.1 in {other}, because of {reason}" in capsys.readouterr().out


def test_the_list_reports_a_variable_without_a_checkout(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KOHYA_SD_SCRIPTS", str(tmp_path / "nowhere"))
    assert main(["setup", "--list"]) == 0
    assert "KOHYA_SD_SCRIPTS: no sd-scripts in" in capsys.readouterr().out


@needs_git
def test_a_url_is_cloned(cache, repository):
    fetched = checkouts.fetch_report(repository.as_uri(), "v1")
    assert fetched.checkout.commit == git(repository, "rev-parse", "HEAD")


@needs_git
def test_fetching_again_restores_changed_files(cache, repository):
    first = checkouts.fetch(str(repository), "v1")
    (first.path / "train_network.py").write_text("changed")
    second = checkouts.fetch(str(repository), "v1")
    assert second.path == first.path
    assert "read_config" in (second.path / "train_network.py").read_text()
    assert len(checkouts.registered()) == 1


@pytest.fixture
def clone(cache, monkeypatch):
    """Fetch a tree with a read-only file, which git's objects are and Windows does not remove."""

    def write(repo, ref, folder):
        (make_tree(folder) / ".git").mkdir()
        (folder / ".git" / "object").touch()
        (folder / ".git" / "object").chmod(0o444)
        return "0123456789"

    monkeypatch.setattr(checkouts, "_clone", write)
    monkeypatch.setattr(checkouts, "_check_out", lambda folder, commit: ())
    return lambda: checkouts.fetch("https://host/x", "v1")


def test_fetching_again_replaces_read_only_files(cache, clone):
    first = clone()
    (first.path / "train_network.py").unlink()
    assert clone().path == first.path
    assert (first.path / "train_network.py").is_file()
    assert [folder.name for folder in cache.iterdir() if folder.is_dir()] == [first.path.name]


def test_a_checkout_that_cannot_be_replaced_stays_whole(cache, clone, monkeypatch):
    """Windows renames no folder that a run is in."""
    first = clone()
    (first.path / "mine.txt").touch()
    rename = checkouts.rename

    def refuse_new(source, target):
        if source.name.startswith(".fetching"):
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(checkouts, "rename", refuse_new)
    with pytest.raises(UserError, match="cannot be replaced: Permission denied; end the runs that use it"):
        clone()
    assert (first.path / "mine.txt").is_file()
    assert checkouts.describe(first.path, "") is not None
    assert [folder.name for folder in cache.iterdir() if folder.is_dir()] == [first.path.name]


@needs_git
def test_a_partial_repository_is_cloned_and_missing_files_are_reported(cache, repository):
    (repository / "big.dll").write_text("many bytes")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "two")
    blob = git(repository, "rev-parse", "HEAD:big.dll")
    (repository / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    fetched = checkouts.fetch_report(str(repository), "HEAD")
    assert fetched.missing == ("big.dll",)
    assert (fetched.checkout.path / "train_network.py").is_file()
    assert not (fetched.checkout.path / "big.dll").exists()


@pytest.mark.parametrize(
    ("repo", "ref", "message"),
    [
        ("repository", "v9", "no tag, branch or commit v9"),
        ("nowhere", "v1", "could not fetch v1 of nowhere: the folder does not exist"),
        ("nowhere", checkouts.PINNED_REF, "could not fetch v0.11.1 of nowhere: the folder does not exist"),
        ("file:///nowhere", "v1", "could not fetch v1 of file:///nowhere: '/nowhere' does not appear to be a git repository"),
        (".", "v1", r"could not fetch v1 of \.: the folder is neither a git repository nor sd-scripts"),
    ],
)
@needs_git
def test_a_failed_fetch_is_reported_and_leaves_no_files(cache, repository, tmp_path, repo, ref, message):
    source = str(repository) if repo == "repository" else repo
    with pytest.raises(UserError, match=message):
        checkouts.fetch(source, ref)
    assert list(cache.glob("*/")) == []


@needs_git
def test_another_repository_is_rejected(cache, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    git(other, "commit", "-q", "--allow-empty", "-m", "one")
    with pytest.raises(UserError, match="is not sd-scripts"):
        checkouts.fetch(str(other), "HEAD")
    assert checkouts.registered() == []


@needs_git
def test_the_first_run_fetches_the_pinned_commit_once_with_a_message(cache, repository, monkeypatch, capsys):
    monkeypatch.setattr(checkouts, "UPSTREAM", repository.as_uri())
    monkeypatch.setattr(checkouts, "PINNED_REF", git(repository, "rev-parse", "HEAD"))
    checkout = checkouts.find_or_fetch()
    output = capsys.readouterr().err
    assert "no sd-scripts found; fetching v0.11.1 from" in output
    assert output.count("\n") == 1
    assert checkout.path.parent == cache
    assert checkouts.find_or_fetch().path == checkout.path
    assert capsys.readouterr().err == ""


def test_without_network_and_checkout_the_error_lists_candidates_and_solutions(cache, monkeypatch, tmp_path):
    monkeypatch.setattr(checkouts, "UPSTREAM", str(tmp_path / "no-network"))
    with pytest.raises(UserError) as raised:
        checkouts.find_or_fetch()
    message = str(raised.value)
    assert "\n" not in message
    for part in ("the working directory", "./sd-scripts", "--sd-scripts FOLDER", "setup --repo", "KOHYA_SD_SCRIPTS"):
        assert part in message


def test_an_unreadable_registry_is_empty(cache):
    cache.mkdir(parents=True)
    (cache / "registry.json").write_text("{")
    assert checkouts.registered() == []
    (cache / "registry.json").write_text(json.dumps([{"path": str(cache / "gone"), "cloned": True}]))
    assert checkouts.registered() == []


def populate(folder):
    for name in ("sd-scripts/v0.11.1/.git/objects/ab", "estimates", "mine"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_bytes(b"x" * 1000)
    (folder / "sd-scripts/v0.11.1/.git/objects/ab/file").chmod(0o444)


def test_clean_shows_what_it_removes_and_asks(cache, monkeypatch, capsys):
    populate(cache.parent)
    asked = []
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "n")
    assert main(["setup", "--clean"]) == 1
    assert asked == ["remove these folders? [y/N] "]
    shown = capsys.readouterr().out
    assert f"{cache}: fetched checkouts of sd-scripts" in shown
    assert "mine" not in shown
    assert (cache.parent / "estimates" / "file").is_file()

    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert main(["setup", "--clean"]) == 0
    assert [path.name for path in cache.parent.iterdir()] == ["mine"]


def test_clean_without_a_terminal_needs_yes(cache, monkeypatch, capsys):
    populate(cache.parent)
    (cache.parent / "mine" / "file").unlink()
    (cache.parent / "mine").rmdir()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False))
    assert main(["setup", "--clean"]) == 2
    assert "add --yes" in capsys.readouterr().err
    assert cache.is_dir()
    assert main(["setup", "--clean", "--yes"]) == 0
    assert not cache.parent.exists()
    assert main(["setup", "--clean", "--yes"]) == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_every_folder_of_the_cache_is_known_to_clean():
    sources = [file.read_text("utf-8") for folder in ("kohya_ext", "virtual_gpu") for file in (ROOT / folder).rglob("*.py")]
    used = {name for text in sources for name in re.findall(r'(?:cache\.folder\(\)|\broot) / "([\w-]+)"', text)}
    assert used >= {"sd-scripts", "compiled", "estimates"}
    assert used <= set(PARTS)
