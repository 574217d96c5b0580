"""The lock on an output name: one run at a time, and none for runs that have ended."""

import argparse
import contextlib
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.settings import Settings
from kohya_ext.errors import UserError
from kohya_ext.launch import session
from kohya_ext.run import output_lock, run_record
from kohya_ext.sdscripts.checkouts import Checkout

HOLD = """
import sys
from argparse import Namespace
from kohya_ext.run import output_lock
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.sdscripts.checkouts import Checkout
output_lock.acquire(Namespace(output_dir=sys.argv[1], output_name=sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def args(tmp_path):
    return Namespace(output_dir=str(tmp_path / "out"), output_name="cat")


@pytest.fixture
def lock_owner(args):
    """Another process that holds the lock."""
    command = [sys.executable, "-c", HOLD, args.output_dir, args.output_name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline().strip() == b"held"
    yield process
    process.communicate(timeout=60)


@pytest.fixture(autouse=True)
def _release():
    yield
    output_lock.release_all()


def test_second_run_is_rejected_with_the_owner(args, lock_owner):
    with pytest.raises(UserError, match=rf"--output_name cat .*process {lock_owner.pid} on .*, since 20.*choose another"):
        output_lock.acquire(args)
    assert output_lock.other_owner(args)["pid"] == lock_owner.pid
    output_lock.acquire(Namespace(output_dir=args.output_dir, output_name="dog"))


def test_lock_file_is_removed_when_the_run_ends(args, lock_owner):
    lock_owner.communicate(timeout=60)
    assert output_lock.other_owner(args) is None
    assert not list(output_lock.lock_file(args).parent.iterdir())


def test_lock_and_temporary_files_of_a_killed_run_are_cleaned_up(args, lock_owner, capsys):
    folder = output_lock.lock_file(args).parent
    partial = folder / f"cat-step00000010.safetensors.host-{lock_owner.pid}-0.partial"
    partial.touch()
    (folder / f"cat-rolling00000010-state.host-{lock_owner.pid}-1.partial").mkdir()
    (folder / f"catch.safetensors.host-{lock_owner.pid}-2.partial").touch()
    assert output_lock.other_owner(args) is not None
    lock_owner.kill()
    lock_owner.wait(60)
    assert output_lock.other_owner(args) is None, "the query must not take the lock"
    assert partial.exists()
    output_lock.acquire(args)
    assert f"removed {partial.name}" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == [".cat.lock", f"catch.safetensors.host-{lock_owner.pid}-2.partial"]


@pytest.mark.parametrize("preflight", [True, False])
def test_name_that_cannot_be_locked_is_a_warning_after_preflight(args, monkeypatch, capsys, preflight):
    """Preflight's error names the cause."""
    monkeypatch.setattr(run_record, "begin", lambda record: None)
    argv = ["--output_dir", args.output_dir, "--output_name", "no/cat", *([] if preflight else ["--no-preflight"])]
    monkeypatch.setattr(sys, "argv", ["train_network.py", *argv])
    parser = argparse.ArgumentParser()
    for option in ("--output_dir", "--output_name"):
        parser.add_argument(option)
    patch = session._options_patch(Checkout(Path(), None, "v0.11", ""), CommandLine(Path("train_network.py"), argv, {}))
    patch.targets[0].replace(lambda parser: None, Settings())(parser)
    with pytest.raises(SystemExit) if preflight else contextlib.nullcontext():
        parser.parse_args()
    printed = capsys.readouterr().err
    assert ("--output_name no/cat is a path in a folder that does not exist" in printed) == preflight
    assert ("cannot lock" in printed) == (not preflight)


def test_no_lock_for_a_run_that_writes_nothing(args):
    assert output_lock.lock_file(Namespace(output_dir=None)) is None
    output_lock.acquire(Namespace(**vars(args), debug_dataset=True))
    assert not output_lock._locks
