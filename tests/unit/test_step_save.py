"""The statements of a script that save its model, run after the script has failed."""

import importlib.util
from argparse import Namespace
from types import SimpleNamespace

import pytest

from kohya_ext.patching.step_save import step_save

SCRIPT = """
def train(args, accelerator, log):
    save_stable_diffusion_format = False
    use_safetensors = False
    activations = "large"
    global_step = 0

    def optimizer_eval_fn():
        log.append("eval")

    def save(name):
        log.append((name, args.save_every_n_steps, args.save_last_n_steps, args.save_state))
        if not save_stable_diffusion_format_of(name):
            raise OSError("offline")

    for epoch in range(2):
        for step in range(3):
            global_step += 1
            if args.save_every_n_steps is not None and global_step % args.save_every_n_steps == 0:
                accelerator.wait_for_everyone()
                save(f"{args.output_name}-{global_step}-{save_stable_diffusion_format}-{use_safetensors}")
            if global_step == 5:
                del accelerator
                raise ValueError("injected")


def save_stable_diffusion_format_of(name):
    return "True" in name


def other():
    raise ValueError("injected")
"""


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train_cat.py"
    file.write_text(SCRIPT)
    spec = importlib.util.spec_from_file_location("train_cat", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def frame_of(function, *arguments):
    """Return the frame in which a function fails."""
    with pytest.raises(ValueError, match="injected") as caught:
        function(*arguments)
    trace = caught.value.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame


def test_the_model_is_saved_as_that_of_a_step_and_nothing_is_removed(script):
    args, log = Namespace(output_name="cat", save_every_n_steps=None, save_last_n_steps=1, save_state=True), []
    met = []
    accelerator = SimpleNamespace(wait_for_everyone=lambda: met.append("waited for the processes that failed"))
    statements = step_save(frame_of(script.train, args, accelerator, log))
    assert "activations" not in statements.variables

    assert statements.saves_folders
    with pytest.raises(OSError, match="offline"):
        statements.run(4, args, accelerator)
    statements.run(4, args, accelerator, as_file=True)
    assert log == ["eval", ("cat-4-False-False", 1, None, False), "eval", ("cat-4-True-True", 1, None, False)]
    assert args == Namespace(output_name="cat", save_every_n_steps=None, save_last_n_steps=1, save_state=True)
    assert not met
    accelerator.wait_for_everyone()
    assert met


def test_other_functions_save_nothing(script):
    assert step_save(frame_of(script.other)) is None
