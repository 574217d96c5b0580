"""The table of families matches upstream's code and the checkpoints of tiny models."""

import inspect
import json
import re

import pytest

from kohya_ext.patching.lora_modules import NETWORKS
from kohya_ext.run.safetensors_header import read_header
from kohya_ext.sdscripts import checkouts, families
from kohya_ext.sdscripts.families import BY_NAME, FAMILIES
from tests.real.conftest import ROOT

pytest.importorskip("torch")


def test_every_training_script_is_in_the_table(checkout):
    scripts = [script for script in checkout.scripts() if "/" not in script]
    training = {script for script in scripts if checkouts.is_training_script(checkout.path / script)}
    assert not {script for script in training if families.of(script, {}) is None}
    for family in FAMILIES:
        assert {family.lora, *family.finetune} <= training


def test_bucket_steps_equal_upstreams(checkout):
    for family in FAMILIES:
        for script in (script for script in family.scripts if (checkout.path / script).is_file()):
            steps = re.findall(r"verify_bucket_reso_steps\((\d+)\)", (checkout.path / script).read_text("utf-8"))
            assert {*map(int, steps)} <= {family.bucket_steps[script != family.lora]}, script


def test_models_and_networks_exist_upstream(checkout_module):
    for family in FAMILIES:
        model = getattr(checkout_module(family.module), family.model)
        assert list(inspect.signature(model.forward).parameters)[1] == family.first_input
        offloads = "cpu_offload" in inspect.signature(model.enable_gradient_checkpointing).parameters
        assert offloads == family.offloads_checkpoints, family.name
        blocks = checkout_module(family.blocks.module)
        assert all(inspect.isfunction(getattr(getattr(blocks, kind), family.blocks.method)) for kind in family.blocks.classes)
        for network in map(checkout_module, family.networks):
            # A network without its own class uses another network's.
            lora = getattr(network, "LoRAModule", None) or network.lora_flux.LoRAModule
            assert lora.__module__ in NETWORKS, f"{family.name} is missing from kohya_ext/patching/lora_modules.py NETWORKS"


@pytest.mark.newest
def test_options_of_a_row_exist_in_its_script(checkout, call):
    scripts = {family.lora for family in FAMILIES}
    process = call(ROOT / "tests" / "real" / "probes" / "parsers.py", checkout.path, *scripts)
    assert process.returncode == 0, process.stderr[-2000:]
    parsers = json.loads(process.stdout.split("JSON", 1)[1])
    for family in FAMILIES:
        options_of_script = parsers[family.lora].keys()
        options = [kind.option[0] for kind in family.checkpoints if kind.option is not None]
        assert {*family.files, *options, *filter(None, [family.fp8])} <= options_of_script
        assert ("attn_mode" in options_of_script) == family.attn_mode
        assert not family.max_blocks_to_swap or "blocks_to_swap" in options_of_script


@pytest.mark.newest
@pytest.mark.parametrize("name", [name if name == "sdxl" else pytest.param(name, marks=pytest.mark.slow) for name in BY_NAME])
def test_a_checkpoint_matches_one_family(checkout, models, name):
    tensors = read_header(models(name).files["pretrained_model_name_or_path"]).shapes
    family = BY_NAME[name]
    assert families.recognize(tensors) == (family, family.checkpoints[0])
    assert not any(part in tensor for tensor in tensors for part in families.LORA_TENSORS)
    kinds = [(row.name, kind) for row in FAMILIES for kind in row.checkpoints]
    fitting = [row for row, kind in kinds if any(part in tensor for tensor in tensors for part in kind.tensors)]
    assert fitting == (["chroma", "flux"] if name == "chroma" else [name])
