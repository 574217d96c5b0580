"""Write the files in this folder with the kohya_ss GUI's own code: ``python make.py KOHYA_SS_FOLDER``.

Needs the GUI's requirements gradio, easygui, toml, psutil and rich, no torch. Each form is built with its default values, some
fields are set as a user would, and "Print training command" writes the config file.
"""

import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import gradio

HERE = Path(__file__).parent

DIT = {"cache_latents": True, "gradient_checkpointing": True}

#: File name -> (the form's module, the function that builds it, fields that are not at their default).
FILES = {
    "lora-sd15": ("lora_gui", "lora_tab", {}),
    "lora-sdxl": ("lora_gui", "lora_tab", {"sdxl": True}),
    "lora-sdxl-boxes": (
        *("lora_gui", "lora_tab"),
        {
            "sdxl": True,
            "LoRA_type": "LyCORIS/LoCon",
            "sdxl_no_half_vae": True,
            "persistent_data_loader_workers": True,
            "max_data_loader_n_workers": 2,
            "shuffle_caption": True,
            "gradient_checkpointing": True,
            "full_bf16": True,
            "lr_scheduler": "constant",
            "lr_warmup": 0,
            "optimizer_args": "weight_decay=0.01 betas=.9,.999",
            "xformers": "sdpa",
            "noise_offset": 0.05,
            "min_snr_gamma": 5,
            "sample_prompts": "a cat --w 512",
            "sample_every_n_steps": 100,
            "seed": 7,
            "network_dropout": 0.1,
            "mixed_precision": "bf16",
            "max_token_length": "225",
            "noise_offset_type": "Multires",
        },
    ),
    "lora-sdxl-unet": (
        *("lora_gui", "lora_tab"),
        {
            "sdxl": True,
            "text_encoder_lr": 0.0,
            "sdxl_cache_text_encoder_outputs": True,
            "gradient_checkpointing": True,
            "lr_warmup": 0,
            "xformers": "sdpa",
            "mixed_precision": "bf16",
        },
    ),
    "lora-flux": ("lora_gui", "lora_tab", {"flux1_checkbox": True, "LoRA_type": "Flux1", **DIT}),
    "lora-chroma": ("lora_gui", "lora_tab", {"flux1_checkbox": True, "LoRA_type": "Flux1", "model_type": "chroma", **DIT}),
    "lora-sd3": ("lora_gui", "lora_tab", {"sd3_checkbox": True, **DIT}),
    "lora-hunyuan-image": (
        *("lora_gui", "lora_tab"),
        {"hunyuan_image_checkbox": True, "LoRA_type": "HunyuanImage-2.1", **DIT},
    ),
    "lora-anima": ("lora_gui", "lora_tab", {"anima_checkbox": True, "LoRA_type": "Anima", **DIT}),
    "lora-lumina": ("lora_gui", "lora_tab", {"lumina_checkbox": True, "LoRA_type": "Lumina", **DIT}),
    "dreambooth-sd15": ("dreambooth_gui", "dreambooth_tab", {}),
    "dreambooth-sdxl": ("dreambooth_gui", "dreambooth_tab", {"sdxl": True}),
    "dreambooth-flux": ("dreambooth_gui", "dreambooth_tab", {"flux1_checkbox": True, **DIT}),
    "dreambooth-sd3": ("dreambooth_gui", "dreambooth_tab", {"sd3_checkbox": True, **DIT}),
    "finetune-sd15": ("finetune_gui", "finetune_tab", {}),
    "finetune-sdxl": ("finetune_gui", "finetune_tab", {"sdxl_checkbox": True}),
    "finetune-flux": ("finetune_gui", "finetune_tab", {"flux1_checkbox": True, **DIT}),
    "finetune-anima": ("finetune_gui", "finetune_tab", {"anima_checkbox": True, **DIT}),
    "finetune-lumina": ("finetune_gui", "finetune_tab", {"lumina_checkbox": True, **DIT}),
    "textual-inversion-sd15": ("textual_inversion_gui", "ti_tab", {}),
    "textual-inversion-sdxl": ("textual_inversion_gui", "ti_tab", {"sdxl": True}),
    "lllite-anima": ("anima_lllite_gui", "anima_lllite_tab", {"anima_qwen3": "model", "anima_vae": "model"}),
}


def values(module, tab):
    """Return the default value of each field of a form."""
    with gradio.Blocks():
        getattr(module, tab)(headless=True, config=importlib.import_module("kohya_gui.class_gui_config").KohyaSSGUIConfig())
    # The browser sends an empty text for a field that was never edited.
    return {
        name: "" if component.value is None and not isinstance(component, gradio.Number) else component.value
        for name, component in module.last_built_field_registry
    }


def write(name, folder):
    """Write one file, its paths relative."""
    module_name, tab, chosen = FILES[name]
    module = importlib.import_module(f"kohya_gui.{module_name}")
    os.chdir(folder)
    for part in ("train/10_cat", "output", "logs", "model"):
        Path(part).mkdir(parents=True, exist_ok=True)
    Path("train/10_cat/a.png").touch()
    Path("train/meta.json").write_text("{}")
    form = values(module, tab)
    common = {"pretrained_model_name_or_path": "model", "output_dir": "output", "output_name": "cat", "train_data_dir": "train"}
    common |= {"image_folder": "train/10_cat", "logging_dir": "logs", "conditioning_data_dir": "train", "token_string": "cat"}
    common |= {
        "train_dir": "train",
        "init_word": "cat",
        "latent_metadata_filename": "meta.json",
        "caption_metadata_filename": "meta.json",
    }
    unknown = chosen.keys() - form.keys()
    assert not unknown, unknown
    form |= {key: value for key, value in common.items() if key in form} | chosen
    module.train_model(headless=True, print_only=True, **form)
    (file,) = Path("output").glob("config_*.toml")
    (HERE / f"{name}.toml").write_bytes(file.read_bytes())


def main(gui):
    """Write every file."""
    folder = Path(tempfile.mkdtemp())
    sys.path.insert(0, gui)
    (folder / "bin").mkdir()
    accelerate = folder / "bin" / "accelerate"
    accelerate.write_text("#!/bin/sh\n")
    accelerate.chmod(0o755)
    os.environ["PATH"] = f"{accelerate.parent}:{os.environ['PATH']}"
    for name in FILES:
        (folder / name).mkdir()
        write(name, folder / name)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
