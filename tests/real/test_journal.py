"""The journal of real runs: the trainer's own losses, and how each run ended."""

import json
import os
import signal
import statistics
from pathlib import Path

import pytest

from kohya_ext.run.journal import SUFFIX
from kohya_ext.run.journal_reader import JournalReader
from kohya_ext.tiny.arguments import OUTPUT_NAME
from tests.real.test_losing_nothing import FULL, LORA, send, write_images_with_nan

torch = pytest.importorskip("torch")


def lines_of(run):
    text = (run.folder / f"{OUTPUT_NAME}{SUFFIX}").read_text()
    return [json.loads(line) for line in text.splitlines() if line]


def steps_of(run):
    return [line for line in lines_of(run) if line["kind"] == "step"]


def log_of(run):
    reader = JournalReader(run.folder / f"{OUTPUT_NAME}{SUFFIX}")
    reader.update()
    return reader.latest


@pytest.mark.newest
@pytest.mark.parametrize("script", [LORA, pytest.param(FULL, marks=pytest.mark.slow)])
def test_journal_has_the_trainers_losses_and_files(checkout, train, script):
    options = ("--max_train_steps", "6", "--gradient_accumulation_steps", "2", "--save_every_n_steps", "4", "--save_state")
    options += ("--huggingface_token", "hf_value")
    run = train(checkout, script, *options, env={"SPY_LOSSES": "1"})
    assert run.code == 0, run.output[-3000:]
    kinds = [line["kind"] for line in lines_of(run)]
    assert kinds[:-4] == ["start", "training", *["step"] * 3, "save", "state", *["step"] * 3]
    assert (sorted(kinds[-4:-2]), kinds[-2:]) == (["save", "state"], ["check", "end"])
    steps = steps_of(run)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [loss for line in steps for loss in line["losses"]] == run.losses
    assert [line["loss"] for line in steps] == [statistics.fmean(line["losses"]) for line in steps]
    assert [line["epoch"] for line in steps] == [1, 1, 1, 1, 2, 2]
    assert all(0 <= line["data"] < line["seconds"] for line in steps)
    after_third, _at_the_end = [line["seconds"] for line in lines_of(run) if line["kind"] == "state"]
    assert steps[3]["outside"] > after_third

    start, training = lines_of(run)[:2]
    assert start["settings"]["max_train_steps"] == [6, "command line"]
    assert {"host", "pid", "torch", "sd_scripts", "kohya_ext", "resume_command"} <= start.keys()
    assert script in start["command"]
    assert "hf_value" not in json.dumps(lines_of(run))
    assert start["settings"]["huggingface_token"] == ["***", "command line"]
    assert (training["steps"], training["images"], training["epochs"]) == (6, 4, 2)
    assert sum(training["buckets"].values()) == training["images_with_repeats"]
    (folder,) = training["folders"]
    assert (folder["images"], folder["repeats"], folder["captioned"]) == (4, 2, 4)
    captions = [file.read_text().strip() for file in sorted(Path(folder["folder"]).glob("*.txt"))]
    assert folder["caption"] == captions[0]
    assert sum(training["tags"].values()) >= 4
    assert training["patches"]["journal"] == ["applied", ""]
    assert training["patches"]["ema"] == ["skipped", "not enabled"]

    summary = log_of(run).summary()
    assert (summary["status"], summary["step"], summary["steps"]) == ("DONE", 6, 6)
    (first,) = [line for line in run.output.splitlines() if "finished at step 6 after" in line]
    assert first.startswith("kohya_ext: ")
    check = lines_of(run)[-2]
    assert (check["file"], check["problems"], check["step"]) == (str(run.file), [], 6)
    assert f"kohya_ext: checked {run.file.name}: {check['summary']}" in run.output
    assert check["summary"].startswith("LoRA: " if script == LORA else "checkpoint: ")
    assert f"loss: first {steps[0]['loss']:.4g}, last {steps[-1]['loss']:.4g}" in run.output


@pytest.mark.newest
def test_run_that_changes_nothing_has_an_error(checkout, train):
    warmup = ("--lr_scheduler", "constant_with_warmup", "--lr_warmup_steps", "5")  # whose first step has a learning rate of 0
    run = train(checkout, LORA, "--max_train_steps", "1", *warmup)
    assert run.code == 0, run.output[-3000:]
    (check,) = [line for line in lines_of(run) if line["kind"] == "check"]
    assert check["problems"][0].startswith("the file does not change the model")
    assert f"checked {run.file.name}: error: the file does not change the model" in run.output


@pytest.mark.newest
def test_run_without_a_journal_writes_none(checkout, train, upstream):
    run = train(checkout, LORA, "--no-journal")
    assert run.code == 0
    assert not list(run.folder.glob(f"*{SUFFIX}"))
    assert "finished at step" not in run.output


@pytest.mark.newest
def test_script_that_records_no_losses_has_steps_without_losses(checkout, train):
    run = train(checkout, "sdxl_train_textual_inversion.py")
    assert run.code == 0, run.output[-3000:]
    assert [(line["step"], line["loss"]) for line in steps_of(run)] == [(step, None) for step in (1, 2, 3, 4)]
    assert log_of(run).summary()["status"] == "DONE"


@pytest.mark.newest
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_stopped_and_resumed_run_is_one_run_of_two_parts(checkout, train):
    options = ("--max_train_steps", "8")
    stopped = train(checkout, LORA, *options, at_step=3, act=send(signal.SIGTERM))
    summary = log_of(stopped).summary()
    assert (summary["status"], summary["exit_code"], summary["reason"]) == ("STOPPED", 143, "SIGTERM")
    assert "--resume auto" in summary["next_command"]
    assert {"stop", "save", "state", "check"} <= {event["kind"] for event in summary["events"]}
    assert "stopped (SIGTERM) at step" in stopped.output

    resumed = train(checkout, LORA, *options, "--resume", "auto", output=stopped.folder)
    log = log_of(resumed)
    assert (log.parts, log.status(0.0), list(log.steps)) == (2, "DONE", list(range(1, 9)))
    (event,) = [event for event in log.events if event["kind"] == "resume"]
    assert event["step"] == summary["step"]
    uninterrupted = train(checkout, LORA, *options)
    assert [line["loss"] for line in steps_of(resumed)] == [line["loss"] for line in steps_of(uninterrupted)]

    train(checkout, LORA, "--max_train_steps", "2", output=stopped.folder)
    assert list(log_of(stopped).steps) == [1, 2]  # a new run of the same name


@pytest.mark.newest
def test_killed_run_is_dead(checkout, train):
    run = train(checkout, LORA, "--max_train_steps", "500", at_step=2, act=send(signal.SIGKILL))
    assert run.code == -signal.SIGKILL
    log = log_of(run)
    assert log.step >= 1  # the progress bar is ahead of the loss
    assert log.summary()["status"] == "DEAD"


@pytest.mark.newest
def test_skipped_step_has_its_images(checkout, train, tmp_path):
    write_images_with_nan(folder := tmp_path / "images")
    cached = ("--cache_latents_to_disk", "--caching_workers", "0")
    run = train(checkout, LORA, "--max_train_steps", "8", "--train_data_dir", str(folder), *cached)
    skipped = [line["step"] for line in steps_of(run) if line.get("skipped")]
    events = [line for line in lines_of(run) if line["kind"] == "skip"]
    assert 1 <= len(skipped) <= 2
    assert [event["step"] for event in events] == skipped
    assert all(event["images"] for event in events)
    assert all((line["loss"] is None) == bool(line.get("skipped")) for line in steps_of(run))


@pytest.mark.newest
def test_failed_run_has_its_reason(checkout, train):
    run = train(
        checkout, LORA, "--max_train_steps", "8", env={"SPY_OUT_OF_MEMORY_AT": "3"}, without=("--gradient_checkpointing",)
    )
    assert run.code == 1, run.output[-3000:]
    summary = log_of(run).summary()
    assert (summary["status"], summary["exit_code"], summary["step"]) == ("FAILED", 1, 2)
    assert summary["reason"].startswith("OutOfMemoryError: CUDA out of memory")
    assert {"out_of_memory", "state"} <= {event["kind"] for event in summary["events"]}
    assert "out of memory (OutOfMemoryError" in run.output


@pytest.mark.newest
@pytest.mark.parametrize("file", ["/dev/full", "folder"])
def test_journal_that_cannot_be_written_does_not_end_the_run(checkout, train, tmp_path, file):
    run = train(checkout, LORA, "--journal_file", file if file.startswith("/") else str(tmp_path))
    assert run.code == 0, run.output[-3000:]
    assert run.output.count("is incomplete: ") == 1
    assert "finished at step 4" in run.output


@pytest.mark.slow
def test_samples_and_a_validation_between_steps_are_not_part_of_them(checkout, train, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle --w 64 --h 64 --s 2 --d 1\n")
    options = ("--sample_prompts", str(prompts), "--sample_every_n_steps", "2", "--validation_split", "0.25")
    options += ("--validation_seed", "1", "--validate_every_n_steps", "3", "--network_train_unet_only")
    run = train(checkout, LORA, *options, env={"SPY_LOSSES": "1"})
    steps = steps_of(run)
    assert [line["loss"] for line in steps] == run.losses[:4]
    samples = [line for line in lines_of(run) if line["kind"] == "sample"]
    assert [line["step"] for line in samples] == [2, 4]
    (training,) = [line for line in lines_of(run) if line["kind"] == "training"]
    assert training["sample_prompts"] == ["a red circle --w 64 --h 64 --s 2 --d 1"]
    assert steps[1]["outside"] > steps[0]["seconds"] / 100
    assert steps[3]["outside"] > 0
