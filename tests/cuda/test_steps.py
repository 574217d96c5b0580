"""No step with the extension costs more than upstream's: synchronizations, launches and memory, on the virtual GPU."""

import pytest

torch = pytest.importorskip("torch")

ADAFACTOR = ("scale_parameter=False", "relative_step=False", "warmup_init=False")
FUSED = ("--fused_backward_pass", "--optimizer_type", "Adafactor", "--optimizer_args", *ADAFACTOR)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("script", ["sdxl_train_network.py", "flux_train_network.py", "sdxl_train.py"])
def test_x(checkout, train_on_gpu, script, precision):
    more = ("--mixed_precision", precision, *(FUSED if script == "sdxl_train.py" else ()))
    theirs = train_on_gpu(checkout, script, *more, extension=False)
    ours = train_on_gpu(checkout, script, *more)
    for r in (theirs, ours):
        print(r.code, r.output[-3000:] if r.code else "")
        if not r.code:
            print(r.peak, r.reached, r.unknown_calls)
            for s in r.steps: print("   ", s)
    print(ours.applied)
