"""Fake tensors of the CPU under CUDA's rules, as blocks and layers see them in a dry run."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import FakeTensorMode

from kohya_ext.dry_run.autocast import cuda_rules
from kohya_ext.dry_run.cuda_operators import bias_in_place
from kohya_ext.dry_run.tensor_values import Assumptions


@contextmanager
def fake_tensors(mode: FakeTensorMode | None = None) -> Iterator[Assumptions]:
    """Create fake tensors inside the block, in ``mode`` or a new one."""
    fake = mode or FakeTensorMode(allow_non_fake_inputs=True)
    with fake, cuda_rules(), bias_in_place(), Assumptions(fake if mode is None else None) as assumptions:
        yield assumptions
