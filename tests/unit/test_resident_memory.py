"""Check the GPU memory in use before a training step: network, swapped blocks and paged optimizer state."""

from types import SimpleNamespace
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.estimate import step  # noqa: E402


def block(width, **more):
    layers = {"norm": torch.nn.LayerNorm(8), "modulation": torch.nn.Linear(8, width), "act": torch.nn.SiLU()}
    return torch.nn.ModuleDict({**layers, **more})


def test_only_weights_of_equal_name_and_shape_are_exchanged():
    entering = block(16, other=torch.nn.Linear(8, 8))
    assert step._exchanged(entering, block(16)) == [entering["norm"].weight, entering["modulation"].weight]
    assert step._exchanged(entering, block(24)) == [entering["norm"].weight]  # the others stay in GPU memory


def test_paged_optimizers_page_the_state_of_large_parameters_only():
    large, small = torch.zeros(step.PAGED_ELEMENTS), torch.zeros(step.PAGED_ELEMENTS - 1)
    state = {weight: {"step": 1, "state1": weight + 1, "absmax1": weight + 2} for weight in (large, small)}
    assert [*step._paged([SimpleNamespace(state=state)])] == [state[large]["state1"]]


def test_a_network_does_not_change_later_ones():
    class Network:
        TARGETS: ClassVar = ["Linear"]

        def __init__(self):
            targets = Network.TARGETS
            targets += ["Conv2d"]  # as networks.lora with conv_dim

    with step._restored_lists(SimpleNamespace(Network=Network)):
        Network()
        assert Network.TARGETS == ["Linear", "Conv2d"]
    assert Network.TARGETS == ["Linear"]
