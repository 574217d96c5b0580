"""The diagnosis of an out-of-memory error: its phase, the next change and the command line."""

import errno
import re
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.config.command_line import CommandLine, quoted_word  # noqa: E402
from kohya_ext.estimate import memory_config  # noqa: E402
from kohya_ext.gpu import out_of_memory  # noqa: E402
from kohya_ext.planning.memory_savings import MEMORY_SAVINGS, Step  # noqa: E402
from kohya_ext.sdscripts.checkouts import Checkout  # noqa: E402

LORA = "sdxl_train_network.py"


def allocate() -> None:
    raise RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
    )


def error_within(*names: str) -> BaseException:
    """Return an error raised through functions of these names, the outermost first."""
    scope = {"inner": allocate}
    for name in reversed(names):
        exec(f"def {name}(inner=inner):\n    inner()", scope)
        scope["inner"] = scope[name]
    with pytest.raises(RuntimeError) as caught:
        scope["inner"]()
    return caught.value


@pytest.mark.parametrize(
    ("names", "phase"),
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
def test_the_phase_comes_from_the_traceback(names: tuple[str, ...], phase: str) -> None:
    assert out_of_memory.phase_of(error_within(*names), training=True) == phase


def test_the_phase_before_the_first_step_is_loading() -> None:
    assert out_of_memory.phase_of(error_within("train", "to"), training=False) == "loading"


def with_cause(cause: Exception) -> Exception:
    error = ValueError("cannot load the model")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        error_within("train"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA driver error: out of memory"),  # expandable segments
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
        RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":1131'),
        RuntimeError("std::bad_alloc"),
        RuntimeError("unable to mmap 10 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
        MemoryError("Unable to allocate 1.00 GiB"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        OSError("The paging file is too small for this operation to complete. (os error 1455)"),
        with_cause(MemoryError()),
    ],
    ids=str,
)
def test_every_form_of_the_error_is_recognized(error: Exception) -> None:
    assert out_of_memory.is_out_of_memory(error)


def test_a_paging_file_that_is_too_small_is_recognized_in_every_language() -> None:
    problem = OSError(0, "Die Auslagerungsdatei ist zu klein", "model", 1455)
    if sys.platform != "win32":  # only Windows keeps the last argument
        problem.winerror = 1455  # type: ignore[attr-defined]
    assert out_of_memory.is_out_of_memory(problem)


def test_other_errors_are_not_out_of_memory() -> None:
    assert not out_of_memory.is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not out_of_memory.is_out_of_memory(ValueError("you tried to allocate"))


def step(phase: str, keep_state: bool, **values: object) -> list[str]:
    command = CommandLine(Path(LORA), (), {})
    known = {"optimizer_type": "AdamW", "mixed_precision": "bf16", "sdpa": True, "cache_latents": True, **values}
    change = out_of_memory.next_step(
        Namespace(**known, optimizer_args=None, gradient_checkpointing=True), command, phase, keep_state
    )  # type: ignore[arg-type]
    return change.words if change is not None else []


def test_a_resumable_change_is_preferred_with_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    text = {"network_train_unet_only": True, "cache_text_encoder_outputs": True, "fp8_base": False}
    assert step("optimizer step", keep_state=False, **text) == ["--optimizer_type", "AdamW8bit"]
    assert step("optimizer step", keep_state=True, **text) == ["--fp8_base"]
    assert step("optimizer step", keep_state=True, **{**text, "fp8_base": True}) == ["--optimizer_type", "AdamW8bit"]


def test_a_known_estimate_is_reported() -> None:
    checkout = Checkout(Path("there"), "0.11.1", "v0.11", "given")
    script = Path("my kohya", LORA)
    command = CommandLine(script, ("--preset", "8gb"), {"KOHYA_EXT_EMA": "1"})
    args = Namespace(**asdict(memory_config.read(command)[0]))
    line = out_of_memory.prediction(checkout, args, command)
    assert re.match(r"predicted for this command line: \d\.\d\d GB, with the peak in backward: weights 5\.", line)
    assert " 0.00" not in line
    args.train_batch_size = 7
    line = out_of_memory.prediction(checkout, args, command)
    words = f"python -m kohya_ext estimate {quoted_word(str(script))} --ema --preset 8gb"
    assert line == f"for an estimate by part, run: {words}"
    assert out_of_memory.prediction(checkout, args, CommandLine(Path("train_controlnet.py"), (), {})) == ""


def test_the_advice_resumes_or_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [LORA, "--train_batch_size", "4", "--resume", "old"]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr("sys.orig_argv", ["python", *words])
    state = Path("a-state")
    by_name = {saving.name: saving for saving in MEMORY_SAVINGS}

    what, line = out_of_memory.advice(Step(by_name["checkpointing"], {"gradient_checkpointing": True}), state)
    assert "every block's forward runs twice" in what
    assert "bit-identical" in what
    assert line.startswith("to resume from a-state with it: ")
    assert line.endswith("sdxl_train_network.py --train_batch_size 4 --gradient_checkpointing --resume a-state")

    _, line = out_of_memory.advice(Step(by_name["8-bit optimizer"], {"optimizer_type": "AdamW8bit"}), state)
    assert line.startswith("to start over with it: ")
    assert line.endswith("sdxl_train_network.py --train_batch_size 4 --optimizer_type AdamW8bit")
