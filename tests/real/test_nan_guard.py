"""A skipped step frees as much memory as any other step."""

import numpy
import pytest

from kohya_ext.tiny import dataset
from tests.real.test_losing_nothing import FULL, write_images_with_nan

torch = pytest.importorskip("torch")

ADAFACTOR = ("scale_parameter=False", "relative_step=False", "warmup_init=False")
FUSED = ("--fused_backward_pass", "--optimizer_type", "Adafactor", "--optimizer_args", *ADAFACTOR)
GROUPS = ("--fused_optimizer_groups", "3")
RELEASE = ("--gradient_release", "--max_grad_norm", "0")


# By default the virtual GPU shows the same: tests/cuda/test_steps.py.
@pytest.mark.slow
@pytest.mark.parametrize("fused", [FUSED, GROUPS, RELEASE], ids=["backward-pass", "groups", "release"])
def test_skipped_step_frees_its_memory(checkout, train, tmp_path, fused):
    def run(name, latents):
        write_images_with_nan(folder := tmp_path / name)
        (file,) = (folder / dataset.CLASS).glob("*.npz")
        numpy.savez(file, **{name: latents(value) for name, value in numpy.load(file).items()})
        options = ("--max_train_steps", "8", "--train_data_dir", str(folder), "--cache_latents_to_disk")
        options += ("--caching_workers", "0", *fused)  # the extension would replace a cache with NaN
        return train(checkout, FULL, *options, env={"SPY_MEMORY": "1"})

    skipping, finite = run("nan", lambda value: value), run("zero", numpy.nan_to_num)
    skipped = [line for line in skipping.output.splitlines() if "skipped: loss or gradient is not finite (loss nan" in line]
    assert len(skipped) == 2, skipping.output[-4000:]
    assert "not finite" not in finite.output
    assert all(tensor.isfinite().all() for tensor in skipping.tensors.values())
    # A skipped step may leave less, because the optimizer did not step.
    assert len(finite.bytes_left_by_steps) == 7
    assert all(ours <= theirs for ours, theirs in zip(skipping.bytes_left_by_steps, finite.bytes_left_by_steps, strict=True))
