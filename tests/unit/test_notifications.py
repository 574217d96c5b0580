"""Messages about a run, and the secrets that must not be in any file or message."""

import http.server
import json
import os
import shlex
import sys
import threading
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from kohya_ext.patches import notify

from kohya_ext.config.command_line import CommandLine, restart_line, without_secrets
from kohya_ext.config.settings import Settings
from kohya_ext.errors import UserError
from kohya_ext.run import journal, notifications, run_record
from kohya_ext.run.journal import Journal
from kohya_ext.run.notifications import Notifier, deliver

URL = "https://example.org/hooks/token-1234"
START = {"kind": "start", "time": 0.0, "name": "cat", "script": "sdxl_train_network.py", "host": "here"}


@pytest.fixture
def messages():
    """A notifier that keeps its messages."""
    notifier = Notifier("true")
    notifier.on_line(START)
    notifier.on_line({"kind": "training", "time": 100.0, "steps": 50})

    def all_messages():
        return [notifier._messages.get_nowait() for _ in range(notifier._messages.qsize())]

    return notifier, all_messages


@pytest.fixture
def server():
    """(URL, the bodies of its requests) of an HTTP server whose answer is the status in the path."""
    bodies = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append((self.headers, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(int(self.path.rpartition("/")[2]))
            self.end_headers()

        def log_message(self, *_):
            pass

    running = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}", bodies
    running.shutdown()
    running.server_close()


# --- messages --------------------------------------------------------------------------------------------------------


def test_end_of_a_run(messages):
    notifier, sent = messages
    notifier.on_line({"kind": "step", "time": 130.0, "step": 20, "loss": 0.12345})
    notifier.on_line({"kind": "check", "time": 139.0, "problems": ["the file does not change the model"]})
    notifier.on_line({"kind": "end", "time": 160.0, "status": "failed", "reason": "ValueError: bad", "step": 20})
    (message,) = sent()
    assert message["text"] == message["content"]
    assert message["text"] == (
        "cat: failed (ValueError: bad) at step 20 of 50 after 1 min; loss 0.1235; the file does not change the model"
    )
    assert (message["event"], message["step"], message["steps"], message["host"]) == ("failed", 20, 50, "here")


def test_spill_is_a_message_and_steps_and_saves_are_not(messages):
    notifier, sent = messages
    for kind in ("step", "save", "state", "sample", "resume"):
        notifier.on_line({"kind": kind, "time": 101.0, "step": 1})
    assert sent() == []
    notifier.on_line({"kind": "spill", "time": 102.0, "step": 3, "problem": "steps take 50 s"})
    assert [message["text"] for message in sent()] == ["cat: slow steps: steps take 50 s"]


def test_skipped_steps_are_one_message_in_ten_minutes(messages):
    notifier, sent = messages
    for seconds in (0, 1, 2, 599, 600, 700):
        notifier.on_line({"kind": "skip", "time": 200.0 + seconds, "step": seconds})
    texts = [(message["text"], message["skipped"]) for message in sent()]
    assert texts == [
        ("cat: step 0 skipped, because loss or gradient is not finite", 1),
        ("cat: 4 steps skipped, because loss or gradient is not finite", 4),
    ]


# --- delivery --------------------------------------------------------------------------------------------------------


def test_command_gets_json_and_variables(tmp_path):
    script = tmp_path / "receive.py"
    script.write_text(
        "import json, os, sys; data = json.load(sys.stdin)\n"
        "data['variables'] = {k: v for k, v in os.environ.items() if k.startswith('KOHYA_NOTIFY_')}\n"
        "json.dump(data, open(sys.argv[1], 'w'))\n"
    )
    quote = shlex.quote if os.name == "posix" else str
    command = " ".join(map(quote, [sys.executable, str(script), str(tmp_path / "received.json")]))
    message = {"event": "finished", "name": "cat", "step": 3, "steps": 4, "text": "cat: finished"}
    assert deliver(command, message) == ""
    received = json.loads((tmp_path / "received.json").read_text())
    variables = received.pop("variables")
    assert received == message
    assert variables == {f"KOHYA_NOTIFY_{key.upper()}": str(value) for key, value in message.items()}


def test_failures_are_described_without_the_target(monkeypatch, server):
    message = dict.fromkeys(("event", "name", "step", "steps", "text"), "x")
    assert deliver("exit 3", message) == "the command ended with exit code 3"
    monkeypatch.setattr(notifications, "COMMAND_SECONDS", 0.1)
    assert deliver(f"{shlex.quote(sys.executable)} -c 'import time; time.sleep(60)'", message).endswith("was ended")
    url, _ = server
    assert deliver(f"{url}/token-1234/404", message) == "the server answered with status 404"
    for target in (
        "http://127.0.0.1:1/token-1234",
        "http://example.invalid/token-1234",
        "http://[token-1234",
        "http://x/ token-1234",
    ):
        problem = deliver(target, message)
        assert problem
        assert "token-1234" not in problem


def test_post_is_json(server):
    url, bodies = server
    assert deliver(f"{url}/200", {"text": "cat"}) == ""
    ((headers, body),) = bodies
    assert body == {"text": "cat"}
    assert headers["Content-Type"] == "application/json"
    assert headers["User-Agent"].startswith("kohya_ext/")  # some services reject Python's own


def test_slow_target_delays_neither_steps_nor_the_end(monkeypatch, capsys):
    release, delivered = threading.Event(), []

    def deliver_late(target, message):
        release.wait(60)
        delivered.append(message)
        return ""

    monkeypatch.setattr(notifications, "deliver", deliver_late)
    monkeypatch.setattr(notifications, "LAST_SECONDS", 0.2)
    notifier = Notifier(URL)
    notifier.open()
    for step in range(100):
        notifier.on_line({"kind": "spill", "time": 0.0, "step": step})
    notifier.close()
    assert delivered == []
    release.set()
    text = capsys.readouterr().err
    assert "the last message was not delivered within 0 s" in text
    assert "token" not in text


def test_messages_are_delivered_before_the_process_ends(monkeypatch, tmp_path, server):
    url, bodies = server
    callback = notify._start(Namespace(), SimpleNamespace(is_main_process=True), Settings(notify=f"{url}/200"))
    written = Journal(tmp_path / "cat.journal.jsonl", "cat")
    written.write("start", name="cat")
    written.write("end", status="finished", reason="", step=4)
    callback.on_end()
    assert [body["event"] for _, body in bodies] == ["finished"]
    written.write("end", status="finished", reason="", step=4)
    assert len(bodies) == 1


def test_failure_is_reported_once(capsys, monkeypatch):
    monkeypatch.setattr(notifications, "deliver", lambda target, message: "no network")
    notifier = Notifier(URL)
    notifier.open()
    for _ in range(3):
        notifier.on_line({"kind": "spill", "time": 0.0})
    notifier.close()
    assert capsys.readouterr().err.count("--notify: a message was not delivered: no network") == 1


# --- options and secrets ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", " ", "https://", 3])
def test_invalid_targets(value):
    with pytest.raises(ValueError, match="must be a command"):
        notify.NOTIFY.parse(value)


def test_messages_need_the_journal():
    assert notify.PATCH.wanted(Settings(notify=URL))
    assert not notify.PATCH.wanted(Settings())
    with pytest.raises(UserError, match="needs the journal"):
        notify.PATCH.wanted(Settings(notify=URL, journal=False))
    with pytest.raises(UserError, match="needs the journal"):
        notify.PATCH.wanted(Settings(notify=URL, disable_patch=("journal",)))


@pytest.mark.parametrize("words", [["--notify", URL], [f"--notify={URL}"], ["--noti", URL]])
def test_printed_commands_and_saved_states_have_no_secrets(words, monkeypatch):
    argv = ["--seed", "1", *words, "--noise_offset", "0.1"]
    assert without_secrets(argv) == (["--seed", "1", "--noise_offset", "0.1"], {"notify": URL})
    monkeypatch.setattr(sys, "orig_argv", ["python", "x.py", *argv])
    assert "token" not in " ".join(run_record.describe("x.py", Namespace()).command)
    for environ in ({}, {"KOHYA_EXT_NOTIFY": URL}):
        command = CommandLine(Path("sdxl_train_network.py"), argv if not environ else argv[:2], environ)
        assert command.settings["notify"] == URL or words[0] == "--noti"  # known only with a script's own parser
        assert "token" not in command.shell_line()
        assert "--seed 1" in command.shell_line()


def test_command_to_resume_several_processes_has_no_secrets(monkeypatch, tmp_path):
    monkeypatch.setenv("KOHYA_EXT_NOTIFY", URL)
    monkeypatch.setenv("KOHYA_EXT_PRESET", "16gb")
    monkeypatch.setenv("WORLD_SIZE", "2")
    text = restart_line({"resume": tmp_path})
    assert text.startswith(f"the same command with --resume {tmp_path}, with ")
    assert "KOHYA_EXT_PRESET=16gb" in text
    assert "token" not in text


def test_arguments_for_the_trackers_have_no_secrets():
    args = Namespace(notify=URL, seed=1)
    notify._start(args, SimpleNamespace(is_main_process=False), Settings(notify=URL))
    assert vars(args) == {"seed": 1}


def test_no_listener_is_left_after_the_run():
    before = [*journal._listeners]
    callback = notify._start(Namespace(), SimpleNamespace(is_main_process=True), Settings(notify="true"))
    assert len(journal._listeners) == len(before) + 1
    callback.on_end()
    assert journal._listeners == before
