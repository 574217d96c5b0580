"""Buckets of gradients, and the runs that --ddp_average_once and --ddp_gradient_compression reject."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from kohya_ext.patches import gradient_averaging

from kohya_ext.config.settings import Settings

MIB = 2**20


def test_a_bucket_has_gradients_of_one_type_and_some_25_mib() -> None:
    full = [torch.zeros(10 * MIB // 4) for _ in range(7)]
    half = [torch.zeros(10 * MIB // 2, dtype=torch.bfloat16) for _ in range(2)]
    mixed = [full[0], half[0], *full[1:], half[1]]
    buckets = list(gradient_averaging._buckets(mixed))
    assert [len(bucket) for bucket in buckets] == [3, 3, 1, 2]
    assert all(len({each.dtype for each in bucket}) == 1 for bucket in buckets)
    assert {id(each) for bucket in buckets for each in bucket} == {id(each) for each in mixed}


@pytest.mark.parametrize(
    ("kind", "processes", "cause"),
    [("MULTI_GPU", 1, "needs several processes"), ("DEEPSPEED", 2, "is for DistributedDataParallel"), ("FSDP", 2, "is for")],
)
def test_runs_without_distributed_data_parallel_are_rejected(
    kind: str, processes: int, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator = SimpleNamespace(num_processes=processes, distributed_type=f"DistributedType.{kind}")
    with pytest.raises(SystemExit):
        gradient_averaging.PATCH.on_start(Namespace(), accelerator, Settings(ddp_average_once=True))
    assert cause in capsys.readouterr().err
