"""What is made of a run that is out of memory: the moment, the step to take, the words to paste."""

import re
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import pytest

from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate import memory_config
from kohya_ext.gpu import out_of_memory
from kohya_ext.planning.memory_savings import LADDER, Step
from kohya_ext.sdscripts.checkouts import Checkout

LORA = "sdxl_train_network.py"


def allocate() -> None:
    raise RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
    )


def error_within(*names: str) -> BaseException:
    """An error that came through functions of these names, the outermost first."""
    scope = {"inner": allocate}
    for name in reversed(names):
        exec(f"def {name}(inner=inner):\n    inner()", scope)
        scope["inner"] = scope[name]
    with pytest.raises(RuntimeError) as caught:
        scope["inner"]()
    return caught.value


@pytest.mark.parametrize(
    ("names", "moment"),
    [
        (("train", "load_target_model", "to"), "loading"),
        (("train", "cache_latents", "cache_batch_latents", "forward"), "caching latents"),
        (("train", "process_batch", "call_unet", "forward"), "forward"),
        (("train", "backward", "_engine_run_backward", "recompute_fn", "forward"), "backward"),
        (("train", "backward", "hook", "step"), "backward"),
        (("train", "step", "adamw"), "optimizer step"),
        (("train", "sample_images", "sample_image_inference", "forward"), "sampling"),
        (("train", "save_state", "save"), "saving"),
    ],
)
def test_the_moment_is_told_from_the_functions_it_came_through(names: tuple[str, ...], moment: str) -> None:
    assert out_of_memory.moment(error_within(*names), training=True) == moment


def test_before_the_first_step_it_is_loading() -> None:
    assert out_of_memory.moment(error_within("train", "to"), training=False) == "loading"


def test_only_errors_of_memory_are_taken_for_one() -> None:
    assert out_of_memory.is_out_of_memory(error_within("train"))
    assert not out_of_memory.is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not out_of_memory.is_out_of_memory(ValueError("you tried to allocate"))


def step(phase: str, keep_state: bool, **values: object) -> list[str]:
    command = CommandLine(Path(LORA), (), {})
    known = {"optimizer_type": "AdamW", "mixed_precision": "bf16", "sdpa": True, "cache_latents": True, **values}
    found = out_of_memory.next_step(
        Namespace(**known, optimizer_args=None, gradient_checkpointing=True), command, phase, keep_state
    )  # type: ignore[arg-type]
    return found.words if found is not None else []


def test_a_state_is_kept_where_a_change_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    text = {"network_train_unet_only": True, "cache_text_encoder_outputs": True, "fp8_base": False}
    assert step("optimizer step", keep_state=False, **text) == ["--optimizer_type", "AdamW8bit"]
    assert step("optimizer step", keep_state=True, **text) == ["--fp8_base"]
    assert step("optimizer step", keep_state=True, **{**text, "fp8_base": True}) == ["--optimizer_type", "AdamW8bit"]


def test_what_is_known_of_a_command_line_is_said() -> None:
    checkout = Checkout(Path("there"), "0.11.1", "v0.11", "given")
    script = Path("my kohya", LORA)
    command = CommandLine(script, ("--preset", "8gb"), {"KOHYA_EXT_EMA": "1"})
    args = Namespace(**asdict(memory_config.read(command)[0]))
    line = out_of_memory.predicted(checkout, args, command)
    assert re.match(r"predicted for this command line: \d\.\d\d GB on the card, the peak in backward: weights 5\.", line)
    assert " 0.00" not in line
    args.train_batch_size = 7
    line = out_of_memory.predicted(checkout, args, command)
    assert line == "what needs how much: python -m kohya_ext estimate 'my kohya/sdxl_train_network.py' --ema --preset 8gb"
    assert out_of_memory.predicted(checkout, args, CommandLine(Path("train_controlnet.py"), (), {})) == ""


def test_the_advice_goes_on_from_the_state_or_says_that_it_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [LORA, "--train_batch_size", "4", "--resume", "old"]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr("sys.orig_argv", ["python", *words])
    state = Path("a-state")
    by_name = {rung.name: rung for rung in LADDER}

    what, line = out_of_memory.advice(Step(by_name["checkpointing"], {"gradient_checkpointing": True}), state)
    assert "every block's forward runs twice" in what
    assert "bit for bit" in what
    assert line.startswith("to go on from a-state with it: ")
    assert line.endswith("sdxl_train_network.py --train_batch_size 4 --gradient_checkpointing --resume a-state")

    _, line = out_of_memory.advice(Step(by_name["8-bit optimizer"], {"optimizer_type": "AdamW8bit"}), state)
    assert line.startswith("to begin again with it: ")
    assert line.endswith("sdxl_train_network.py --train_batch_size 4 --optimizer_type AdamW8bit")
