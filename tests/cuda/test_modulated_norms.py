"""Compiled blocks have no kernels that sum rows and columns together, which leave gradients of modulations unwritten."""

import pytest

config = pytest.importorskip("torch._inductor.config")

pytestmark = pytest.mark.thorough


@pytest.mark.skipif(not hasattr(config.triton, "mix_order_reduction"), reason="torch 2.10 has brought these kernels")
def test_modulated_norms_have_no_kernels_of_two_directions(printed_on_gpu):
    default, ours = printed_on_gpu("modulated_norms.py")
    assert default > 0
    assert ours == 0
