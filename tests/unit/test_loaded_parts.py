"""What a script would lose of a loaded state is restored at the position."""

from types import SimpleNamespace

import pytest
from kohya_ext.patches.exact_resume import _load_blocks, _load_control_net, _load_optimizer

from kohya_ext.config.settings import Settings
from kohya_ext.run.loaded_parts import GRADIENTS_FILE, OPTIMIZER, LoadedParts, network_norms, save_gradients

torch = pytest.importorskip("torch")


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.down = torch.nn.Linear(3, 2, bias=False)
        self.unet_loras = [self.down]


class ScheduleFree(torch.optim.SGD):
    """Rounds the weights when it switches between their two versions."""

    def __init__(self, weights):
        super().__init__(weights, lr=0.1)
        for group in self.param_groups:
            group["train_mode"] = True

    def _switch(self, training):
        for group in (group for group in self.param_groups if group["train_mode"] != training):
            for weight in group["params"]:
                weight.data.lerp_(torch.full_like(weight, 0.7), 1 - 0.9 if training else 1 - 1 / 0.9)
            group["train_mode"] = training

    def train(self):
        self._switch(True)

    def eval(self):
        self._switch(False)


def accelerator_of(network, *optimizers):
    return SimpleNamespace(
        _models=[network], _optimizers=list(optimizers), unwrap_model=lambda model: model, device=torch.device("cpu")
    )


@pytest.mark.parametrize("switches", [True, False])
@pytest.mark.parametrize("saved_for_training", [True, False])
def test_weights_of_a_schedule_free_optimizer_are_those_after_the_step_of_the_state(saved_for_training, switches, tmp_path):
    torch.manual_seed(0)
    network = Network()
    optimizer = ScheduleFree(network.parameters())
    if not saved_for_training:
        optimizer.eval()
    loaded = network.down.weight.detach().clone()
    parts = LoadedParts.of(accelerator_of(network, optimizer), tmp_path, {}, at_position=True)
    for _ in range(50):
        optimizer.eval()
        optimizer.train()
    assert not torch.equal(network.down.weight, loaded)
    parts.restore(switches)
    restored, training = network.down.weight.detach().clone(), optimizer.param_groups[0]["train_mode"]
    network.down.weight.data.copy_(loaded)
    optimizer.param_groups[0]["train_mode"] = saved_for_training
    if switches:
        optimizer.eval()
    optimizer.train()
    assert training
    assert torch.equal(restored, network.down.weight)


def test_norms_of_ggpo_are_saved_and_restored(tmp_path):
    network = Network()
    network.down.grad_norms, network.down.combined_weight_norms = torch.ones(2, 1), None
    norms = network_norms(accelerator_of(network))
    assert {name: list(each) for name, each in norms.items()} == {"down": ["grad_norms"]}
    resumed = Network()
    LoadedParts.of(accelerator_of(resumed), tmp_path, norms, at_position=True).restore(False)
    assert torch.equal(resumed.down.grad_norms, torch.ones(2, 1))


def test_an_optimizer_that_is_prepared_late_gets_its_state(tmp_path, capsys):
    weight = torch.nn.Parameter(torch.ones(2))
    trained = torch.optim.AdamW([weight])
    weight.grad = torch.ones(2)
    trained.step()
    torch.save(trained.state_dict(), tmp_path / "optimizer_1.bin")
    late = torch.optim.AdamW([weight])
    parts = LoadedParts.of(accelerator_of(Network()), tmp_path, {}, at_position=True)
    parts.load_late(OPTIMIZER, 1, late)
    assert torch.equal(late.state[weight]["exp_avg"], trained.state[weight]["exp_avg"])
    with pytest.raises(SystemExit):
        parts.load_late(OPTIMIZER, 2, late)
    assert "has no optimizer_2.bin; use the --fused_optimizer_groups or" in capsys.readouterr().err


def test_a_state_is_loaded_into_the_parameters_of_a_control_net_that_are_trained():
    class ControlNet(torch.nn.Linear):
        def load_state_dict(self, state_dict, strict=True, assign=True):  # as upstream's, without a result
            super().load_state_dict(state_dict, strict=strict, assign=assign)

    original = ControlNet.load_state_dict
    ControlNet.load_state_dict = _load_control_net(original, Settings())
    model = ControlNet(2, 2)
    trained, state = model.weight, {name: value + 1 for name, value in model.state_dict().items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == ([], [])
    assert model.weight is trained
    assert torch.equal(trained, state["weight"])
    model.load_state_dict(state, True, True)
    assert model.weight is not trained


@pytest.mark.parametrize("kernel", [(), (3, 3)])
def test_blocks_of_ranks_are_loaded_from_the_one_tensor_that_is_saved(monkeypatch, kernel):
    class DyLora(torch.nn.Module):  # as LyCORIS's
        block_size = 2

        def __init__(self):
            super().__init__()
            self.up_list = torch.nn.ParameterList(torch.randn(5, 2) for _ in range(3))
            self.down_list = torch.nn.ParameterList(torch.randn(2, 7 * 9 if kernel else 7) for _ in range(3))
            self.register_buffer("alpha", torch.tensor(4.0))

        def saved(self):
            up, down = torch.cat([*self.up_list], 1), torch.cat([*self.down_list]).reshape(6, -1, *kernel)
            return {"lora_up.weight": up, "lora_down.weight": down, "alpha": self.alpha}

    monkeypatch.setattr(DyLora, "_load_from_state_dict", _load_blocks(DyLora._load_from_state_dict, Settings()))
    saving, loading = DyLora(), torch.nn.ModuleDict({"layer": DyLora()})
    loading.load_state_dict({f"layer.{name}": value for name, value in saving.saved().items()})
    own = dict(saving.named_parameters())
    assert all(torch.equal(value, own[name]) for name, value in loading["layer"].named_parameters())
    loading.load_state_dict(loading.state_dict())  # with the names of the blocks


def test_gradients_that_no_optimizer_clears_are_kept(tmp_path):
    def accelerator():
        network = Network()
        network.up = torch.nn.Linear(2, 3, bias=False)  # with a learning rate of 0
        return network, accelerator_of(network, torch.optim.SGD(network.down.parameters()))

    (saved, saving), (resumed, resuming) = accelerator(), accelerator()
    save_gradients(saving, tmp_path)
    assert not (tmp_path / GRADIENTS_FILE).exists()
    for weight in saved.parameters():
        weight.grad = torch.ones_like(weight)
    save_gradients(saving, tmp_path)
    LoadedParts.of(resuming, tmp_path, {}, at_position=True).restore(switches=False)
    assert torch.equal(resumed.up.weight.grad, saved.up.weight.grad)
    assert resumed.down.weight.grad is None


def test_float32_states_of_bf16_weights_are_loaded_as_they_were_saved():
    def optimizer():
        weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        return torch.optim.SGD([weight], lr=0.1), weight

    (saved, weight), (loaded, other) = optimizer(), optimizer()
    saved.state[weight] = {"average": torch.full((2,), 1 + 2**-20)}
    load = _load_optimizer(lambda accelerated, state: accelerated.optimizer.load_state_dict(state), Settings())
    load(SimpleNamespace(optimizer=loaded), saved.state_dict())
    assert torch.equal(loaded.state[other]["average"], saved.state[weight]["average"])
