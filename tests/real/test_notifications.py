"""Messages and trackers of real runs: what they get, and that no file has the URL."""

import http.server
import json
import re
import signal
import threading
from pathlib import Path

import pytest

from kohya_ext.config.settings import is_secret
from kohya_ext.sdscripts.checkouts import is_training_script
from kohya_ext.sdscripts.introspect import option_names
from tests.real.test_losing_nothing import FULL, LORA, send

pytest.importorskip("torch")

pytestmark = pytest.mark.thorough

TOKEN = "token-1234"
SECRETS = ("--wandb_api_key", TOKEN, f"--huggingface_token={TOKEN}")

#: Options with such a word in their names that are not secret.
NOT_SECRET = {
    *("max_token_length", "t5xxl_max_token_length", "t5_max_token_length", "gemma2_max_token_length", "qwen3_max_token_length"),
    *("keep_tokens", "keep_tokens_separator", "num_vectors_per_token", "no_token_padding", "token_string"),
    *("token_warmup_min", "token_warmup_step", "tokenizer_cache_dir", "t5_tokenizer_path", "t5xxl_token_length"),
}


@pytest.fixture
def server():
    """(URL, the messages that it has received) of an HTTP server."""
    messages = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    running = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}/{TOKEN}", messages
    running.shutdown()
    running.server_close()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return {name: [(step, value)]} of TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values = {}
    for file in folder.rglob("events.out.*"):
        events = EventAccumulator(str(file)).Reload()
        for name in events.Tags()["scalars"]:
            values[name] = [(event.step, event.value) for event in events.Scalars(name)]
    return values


def test_every_secret_option_of_every_script_is_known(checkout):
    scripts = [file for file in checkout.path.glob("*.py") if is_training_script(file)]
    names = {name for script in scripts for name in option_names(script)}
    assert {"wandb_api_key", "huggingface_token"} <= names
    words = re.compile("token|key|secret|password|credential")
    assert {name for name in names if words.search(name) and not is_secret(name)} <= NOT_SECRET


@pytest.mark.newest
@pytest.mark.parametrize("script", [LORA, pytest.param(FULL, marks=pytest.mark.slow)])
def test_trackers_have_upstreams_values_and_times(checkout, train, server, tmp_path, script):
    pytest.importorskip("tensorboard")
    url, messages = server
    options = ("--log_with", "tensorboard", "--log_config", "--gradient_accumulation_steps", "2")
    plain = train(checkout, script, *options, "--logging_dir", str(tmp_path / "plain"), "--disable_patch", "tracker_values")
    run = train(checkout, script, *options, "--logging_dir", str(tmp_path / "run"), "--notify", url, "--save_state", *SECRETS)
    assert (plain.code, run.code) == (0, 0), run.output[-3000:]
    theirs, ours = scalars(tmp_path / "plain"), scalars(tmp_path / "run")
    assert theirs
    assert {name: ours[name] for name in theirs} == theirs
    added = {"seconds/step", "seconds/waiting_for_data", "seconds/between_steps"}
    assert ours.keys() - theirs.keys() == added
    assert all([step for step, _ in ours[name]] == [1, 2, 3, 4] for name in added)

    (message,) = messages
    assert (message["event"], message["step"], message["steps"]) == ("finished", 4, 4)
    assert message["text"].startswith("tiny: finished at step 4 of 4 after ")
    for folder in (run.folder, tmp_path / "run"):
        written = [file for file in folder.rglob("*") if file.is_file()]
        assert written
        assert [file for file in written if TOKEN.encode() in file.read_bytes()] == []
    assert TOKEN not in run.output


@pytest.mark.newest
def test_run_that_is_stopped_runs_the_command(checkout, train, tmp_path):
    file = tmp_path / "message.txt"
    environment = {"KOHYA_EXT_NOTIFY": f'echo "$KOHYA_NOTIFY_EVENT {TOKEN} $KOHYA_NOTIFY_TEXT" >> {file}'}
    run = train(checkout, LORA, "--max_train_steps", "50", *SECRETS, env=environment, at_step=2, act=send(signal.SIGTERM))
    assert run.code == 143
    (line,) = file.read_text().splitlines()
    assert line.startswith(f"stopped {TOKEN} tiny: stopped (SIGTERM) at step ")
    assert "to resume: " in run.output
    assert TOKEN not in run.output
    assert [each for each in run.folder.rglob("*") if each.is_file() and TOKEN.encode() in each.read_bytes()] == []


@pytest.mark.newest
def test_failure_is_a_message(checkout, train, server):
    url, messages = server
    run = train(
        checkout, LORA, "--max_train_steps", "8", env={"SPY_OUT_OF_MEMORY_AT": "3", "KOHYA_EXT_NOTIFY": url},
        without=("--gradient_checkpointing",),
    )  # fmt: skip
    assert run.code == 1, run.output[-3000:]
    assert [message["event"] for message in messages] == ["out of memory"]
    assert TOKEN not in run.output
