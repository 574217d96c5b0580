"""mapped_weights: postponed casts give the bits of immediate ones, and weights come back to the host as the file's."""

import pytest
from kohya_ext.patches import mapped_weights

from kohya_ext.config.settings import Settings

torch = pytest.importorskip("torch")

from kohya_ext.weights.postponed import History, PostponedCast  # noqa: E402

HALF, BRAIN, SINGLE, FP8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn


@pytest.fixture
def weight():
    torch.manual_seed(0)
    return torch.randn(6, 4).to(HALF)


def _model(tensor):
    model = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False, device="meta"))
    model.load_state_dict({"0.weight": tensor}, assign=True)
    return model.requires_grad_(False)


def _bits(tensor):
    return tensor.detach().view(torch.uint8).tolist()


@pytest.mark.parametrize("casts", [(), (SINGLE,), (SINGLE, BRAIN), (SINGLE, FP8), (BRAIN, FP8, BRAIN), (SINGLE, BRAIN, SINGLE)])
def test_values_are_those_of_immediate_casts(weight, casts):
    model, expected = _model(PostponedCast(History(weight))), weight
    for dtype in casts:
        model.to(dtype)
        expected = expected.to(dtype)
    parameter = model[0].weight
    assert isinstance(parameter, PostponedCast)
    assert isinstance(parameter, torch.nn.Parameter)
    assert (parameter.dtype, parameter.shape, parameter.device.type) == (expected.dtype, expected.shape, "cpu")
    assert parameter.history.source is weight
    assert _bits(parameter + 0 if expected.dtype != FP8 else parameter.clone()) == _bits(expected)


@pytest.mark.parametrize(
    "change", [lambda tensor: tensor.mul_(2), lambda tensor: tensor[0].fill_(2), lambda tensor: tensor.zero_()]
)
def test_a_change_on_the_host_stays(weight, change):
    model = _model(PostponedCast(History(weight)).to(SINGLE))
    expected = weight.float()
    change(expected)
    change(model[0].weight.data)
    assert torch.equal(model.state_dict()["0.weight"] + 0, expected)
    assert torch.equal(model.to(BRAIN)[0].weight + 0, expected.to(BRAIN))


def test_an_empty_weight_and_a_scalar_are_cast():
    for tensor in (torch.zeros(0, 3, dtype=HALF), torch.tensor(1.5, dtype=HALF)):
        assert torch.equal(PostponedCast(History(tensor)).to(SINGLE).clone(), tensor.float())


@pytest.fixture
def weights(monkeypatch):
    """The callback of a run on a device that is not the host."""
    callback = mapped_weights._Weights(torch.device("meta"), keeps_precision=True)
    monkeypatch.setattr(mapped_weights, "current", lambda kind: callback)
    return callback


def _move(weights, model, *args, **kwargs):
    return mapped_weights._move(torch.nn.Module.to, Settings())(model, *args, **kwargs)


def test_weights_come_back_as_the_files(weights, weight):
    model = _model(weights.postpone({"0.weight": weight}, SINGLE)["0.weight"])
    _move(weights, model, "meta", dtype=BRAIN)
    assert model[0].weight.device.type == "meta"
    assert type(model[0].weight) is torch.nn.Parameter
    _move(weights, model, SINGLE)
    _move(weights, model, "cpu")
    assert weights.returned == 1
    assert model[0].weight.history.source is weight
    assert _bits(model[0].weight + 0) == _bits(weight.float().to(BRAIN).float())


@pytest.mark.parametrize("change", ["in_place", "replaced", "data"])
def test_a_weight_that_was_changed_on_the_gpu_is_not_the_files(weights, weight, change):
    model = _model(weights.postpone({"0.weight": weight}, None)["0.weight"])
    _move(weights, model, "meta")
    parameter = model[0].weight
    if change == "in_place":
        parameter.mul_(2)
    elif change == "replaced":
        model[0].weight = torch.nn.Parameter(torch.empty_like(parameter), requires_grad=False)
    else:
        parameter.data = torch.empty_like(parameter, dtype=BRAIN)
    with pytest.raises(NotImplementedError, match="meta"):
        _move(weights, model, "cpu")
    assert weights.returned == 0


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_a_weight_that_was_changed_on_the_host_is_not_the_files(weights, weight, dtype):
    model = _model(weights.postpone({"0.weight": weight}, None)["0.weight"])
    model[0].weight.mul_(2)
    _move(weights, model, dtype)
    _move(weights, model, "meta")
    with pytest.raises(NotImplementedError, match="meta"):
        _move(weights, model, "cpu")


def test_no_cast_is_left_on_the_device_of_a_run_on_the_cpu(monkeypatch, weight):
    callback = mapped_weights._Weights(torch.device("cpu"), keeps_precision=True)
    monkeypatch.setattr(mapped_weights, "current", lambda kind: callback)
    model = _model(callback.postpone({"0.weight": weight}, SINGLE)["0.weight"])
    _move(callback, model, BRAIN)
    assert isinstance(model[0].weight, PostponedCast)
    _move(callback, model, "cpu")
    assert type(model[0].weight) is torch.nn.Parameter
    assert torch.equal(model[0].weight, weight.float().to(BRAIN))


def test_after_the_first_step_modules_move_as_without_the_patch(weights, weight):
    weights.before_batch(None)
    model = _model(PostponedCast(History(weight)).to(SINGLE))
    _move(weights, model, "meta")
    with pytest.raises(NotImplementedError, match="meta"):
        _move(weights, model, "cpu")


@pytest.mark.parametrize(
    ("device", "disabled", "is_postponed"), [("cpu", False, True), ("cpu", True, False), ("meta", False, False)]
)
def test_only_mapped_files_on_the_host_are_postponed(weights, weight, device, disabled, is_postponed):
    def load_safetensors(path, device, disable_mmap=False, dtype=None, disable_numpy_memmap=False):
        return {"weight": weight if dtype is None else weight.to(dtype)}

    load = mapped_weights._load_file(load_safetensors, Settings())
    (tensor,) = load("model.safetensors", device, disable_mmap=disabled, dtype=BRAIN).values()
    assert isinstance(tensor, PostponedCast) is is_postponed
    assert _bits(tensor.clone()) == _bits(weight.to(BRAIN))
