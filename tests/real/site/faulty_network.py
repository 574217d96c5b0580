"""networks.lora with one fault, selected with --network_args: fault=dtype, device, detached or base_model."""

import functools

import torch


def create_network(multiplier, dim, alpha, vae, text_encoder, unet, fault, **kwargs):
    from networks import lora

    network = lora.create_network(multiplier, dim, alpha, vae, text_encoder, unet, **kwargs)
    FAULTS[fault](network, unet)
    return network


def dtype(network, unet):
    for adapter in adapters(network):
        adapter.lora_down.to(torch.float8_e4m3fn)
        adapter.lora_up.to(torch.float8_e4m3fn)


def adapters(network):
    return network.unet_loras + network.text_encoder_loras


def device(network, unet):
    """Move one weight to another device after everything has been prepared."""

    @functools.wraps(network.prepare_grad_etc)
    def prepare_grad_etc(*args):
        layer = network.unet_loras[0].lora_down
        layer.weight = torch.nn.Parameter(layer.weight.to("meta"))

    network.prepare_grad_etc = prepare_grad_etc


def detached(network, unet):
    """Create adapters that the model does not call."""
    for adapter in adapters(network):
        adapter.apply_to = functools.partial(apply_to_nothing, adapter.apply_to, adapter.org_module)


def apply_to_nothing(apply_to, module):
    forward = module.forward
    apply_to()
    module.forward = forward


def base_model(network, unet):
    original = network.prepare_optimizer_params

    @functools.wraps(original)
    def prepare_optimizer_params(*args):
        groups, names = original(*args)
        return [*groups, {"params": list(unet.parameters())[:3]}], names

    network.prepare_optimizer_params = prepare_optimizer_params


FAULTS = {fault.__name__: fault for fault in (dtype, device, detached, base_model)}
