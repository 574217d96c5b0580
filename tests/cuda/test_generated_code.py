"""The estimate's code of compiled blocks is the code that inductor generates for a GPU."""

import pytest

from kohya_ext.dry_run.inductor import BACKEND, logging_to, traceable
from kohya_ext.dry_run.tracker import Tracker
from tests.cuda import generated_code

pytestmark = pytest.mark.thorough


def test_the_generated_code_is_that_of_a_gpu(printed_on_gpu):
    real = printed_on_gpu("generated_code.py")
    mode = traceable()
    with mode, logging_to(Tracker()):
        estimated = generated_code.generated(BACKEND)
    assert all(len(codes) == 2 for codes in real.values())
    for kind in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"):
        assert kind in str(real)
        assert f"{kind}_backward" in str(real)
    assert estimated == real
