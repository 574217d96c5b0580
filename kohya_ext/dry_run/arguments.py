"""The command line of a dry run: the user's own, with stand-ins for missing files, for images and for the output folder."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import toml

from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.user_files import read_dataset_config
from kohya_ext.dry_run import stand_ins
from kohya_ext.errors import UserError
from kohya_ext.estimate import memory_config
from kohya_ext.estimate.whole_runs import IRRELEVANT
from kohya_ext.patching.patch import registry
from kohya_ext.sdscripts import families
from kohya_ext.sdscripts.introspect import option_names

#: Switches that are turned off: models compiled as a whole are left out, and workers would need the GPU in other processes.
_OFF = (
    "preflight", "journal", "persistent_data_loader_workers", "auto_data_loader", "torch_compile", "compile", "xformers",
)  # fmt: skip

_SAMPLING = "sample_"
"""The beginning of the options for sample images."""

#: Options of a run with compiled blocks.
COMPILED = {"compile_mode": "default"}

#: Micro-steps of a step that is estimated: the first, those that add to its gradients, and the last.
MICRO_STEPS = 3


@dataclass(frozen=True)
class Workload:
    """The largest batch of a command line; without images, for scripts that train on prompts alone, ``size`` is None."""

    size: tuple[int, int] | None
    batch: int
    micro_steps: int

    @classmethod
    def of(cls, command: CommandLine) -> Workload:
        """Read it from the options or the dataset's file. Raises UserError without a resolution."""
        micro_steps = min(int(command.values.get("gradient_accumulation_steps", 1)), MICRO_STEPS)
        if _trains_on_prompts(command):
            return cls(None, 1, micro_steps)
        width, height, batch = memory_config.largest_batch(memory_config.any_script(command))
        return cls((width, height), batch, micro_steps)


@dataclass
class Arguments:
    """The words of a dry run, whose files are in ``folder``."""

    command: CommandLine
    workload: Workload
    folder: Path
    changes: dict[str, object] = field(default_factory=dict)
    missing: str = ""
    """The kind of checkpoint of which stand-ins are used."""

    def words(self) -> list[str]:
        """Write the stand-ins, and return the script's arguments."""
        self._drop()
        self._run_a_few_steps()
        self._name_models()
        self._sample()
        self._disable_patches()
        if self.workload.size is None:
            self._write_prompts()
        elif self.command.values.get("dataset_config"):
            self._write_dataset_config(Path(str(self.command.values["dataset_config"])))
        else:
            self._write_images()
        return self.command.with_(self.changes).words

    @property
    def kind(self) -> str:
        """The kind of checkpoint that the script loads; empty for an unknown script."""
        kind = families.checkpoint_of(self.command.name, self.command.values)
        return kind.title if kind is not None else ""

    @property
    def is_compiled(self) -> bool:
        """Whether blocks are compiled."""
        return bool(self.command.settings["selective_torch_compile"])

    @property
    def is_recorded(self) -> bool:
        """Whether passes are recorded."""
        return bool(self.command.settings["cuda_graphs"])

    @property
    def is_divided(self) -> bool:
        """Whether DeepSpeed divides the state of training."""
        return bool(self.command.values.get("deepspeed"))

    @property
    def processes(self) -> int:
        """The number of processes, which have one GPU each."""
        return self.command.settings.num_processes or 1

    @property
    def left_out(self) -> list[str]:
        """What the user's run does and a dry run does not: ``--torch_compile``."""
        names = ("validation_split", "torch_compile", "compile")
        return [f"--{name}" for name in names if self.command.values.get(name)]

    def _drop(self) -> None:
        given, config = self.command.values, self.command.config
        self.changes |= {name: None for name in given if name.startswith(IRRELEVANT)}
        self.changes |= {name: False for name in _OFF if given.get(name)}
        self.changes |= {"vram_budget": None, "preflight": False, "journal": False, "speed": "off"}
        self.changes |= {"one_way_block_swap": memory_config.swaps_one_way(self.command.settings)}
        self.changes |= COMPILED if self.is_compiled else {}
        self.changes |= {"cuda_graphs_always": True} if self.is_recorded else {}  # within the first steps
        if given.get("xformers"):
            has_switch = "sdpa" in option_names(self.command.script or Path())
            self.changes |= {"sdpa": True} if has_switch else {"attn_mode": "torch"}
        if config is not None:
            kept = {name: value for name, value in config.values.items() if self.changes.get(name, value) is not None}
            self.changes["config_file"] = self._write("config.toml", toml.dumps(kept))

    def _disable_patches(self) -> None:
        off = (name for name, patch in registry().items() if not patch.in_dry_runs)
        names = (*self.command.settings.disable_patch, *off)
        self.changes["disable_patch"] = "*" if "*" in names else ",".join(names)

    def _run_a_few_steps(self) -> None:
        self.changes |= {
            "output_dir": str(self.folder / "output"),
            "output_name": "dry_run",
            "max_train_steps": 100,  # the run ends itself after three
            "gradient_accumulation_steps": self.workload.micro_steps,
            "max_data_loader_n_workers": 0,
        }

    @property
    def sample(self) -> str | None:
        """Width and height of the largest image that the script samples, "1024,1024"; None without sampling."""
        if families.of(self.command.name, self.command.values) is None:
            return None
        return memory_config.largest_sample(memory_config.any_script(self.command))

    def _sample(self) -> None:
        """Sample the largest image after each step. The first two steps of denoising are as large as all."""
        self.changes |= {name: None for name in self.command.values if name.startswith(_SAMPLING)}
        if self.sample is not None:
            width, height = self.sample.split(",")
            prompt = self._write("prompts.txt", f"{stand_ins.CAPTION} --w {width} --h {height} --s 2 --d 1")
            self.changes |= {"sample_prompts": prompt, "sample_every_n_steps": 1}

    def _name_models(self) -> None:
        """Keep the user's files, and name stand-ins for those that are missing."""
        tokenizers = self.folder / "tokenizers"
        stand_ins.write_tokenizers(tokenizers)
        self.changes["tokenizer_cache_dir"] = str(tokenizers)
        for option in stand_ins.options(self.kind):
            if not self._exists(option):
                file = self.folder / "models" / f"{option}.safetensors"
                stand_ins.write_checkpoint(self.kind, option, file, fp8="fp8" in self._name_of(option))
                self.changes[option], self.missing = str(file), self.kind
        if "vae" not in self.changes and self.command.values.get("vae") and not self._exists("vae"):
            self.changes["vae"] = None  # a repository: the checkpoint has a VAE of the same sizes

    def _name_of(self, option: str) -> str:
        """Return the name of a missing file, which the user or the preset's author knows; empty without one."""
        name = self.command.values.get(option) or self.command.presets.assumed.get(option) or ""
        return Path(str(name)).name

    def _exists(self, option: str) -> bool:
        value = self.command.values.get(option)
        return bool(value) and Path(str(value)).exists()

    def _write_images(self) -> None:
        folder, values = self.folder / "images", self.command.values
        by_metadata = bool(values.get("in_json")) or self.command.name == "fine_tune.py"
        has_classes = not by_metadata and not self._has_conditions()
        images = folder / f"{self._repeats}_sks" if has_classes else folder
        self._draw(images)
        self.changes |= {"train_data_dir": str(folder), "caption_extension": stand_ins.CAPTION_EXTENSION}
        if by_metadata:
            self.changes |= {"in_json": self._write_metadata(images), "dataset_repeats": self._repeats}
        elif not has_classes:
            self.changes["conditioning_data_dir"] = str(images)

    def _write_dataset_config(self, file: Path) -> None:
        """Write the user's file with the dataset of the largest batch alone, and one subset of other images."""
        document = read_dataset_config(file)
        general, datasets = document.get("general", {}), document.get("datasets", []) or [{}]
        dataset = max(datasets, key=lambda each: self._pixels({**general, **each}))
        subset: dict[str, Any] = dict(next(iter(dataset.get("subsets", [])), {}))
        images = self.folder / "images"
        self._draw(images)
        subset |= {"image_dir": str(images), "num_repeats": self._repeats, "is_reg": False}
        if "metadata_file" in subset:
            subset["metadata_file"] = self._write_metadata(images)
        else:
            subset["caption_extension"] = stand_ins.CAPTION_EXTENSION
        if "conditioning_data_dir" in subset or self._has_conditions():
            subset["conditioning_data_dir"] = str(images)
        kept = {name: value for name, value in dataset.items() if not name.startswith("validation")}
        written = {"general": general, "datasets": [{**kept, "subsets": [subset]}]}
        self.changes |= {"dataset_config": self._write("dataset.toml", toml.dumps(written))}

    def _pixels(self, dataset: Mapping[str, Any]) -> int:
        """Return the pixels of a dataset's batch."""
        resolution = dataset.get("resolution", self.command.values.get("resolution", 512))
        sides = resolution if isinstance(resolution, list) else str(resolution).split(",")
        batch = dataset.get("batch_size", self.command.values.get("train_batch_size", 1))
        return int(sides[0]) * int(sides[-1]) * int(batch)

    def _has_conditions(self) -> bool:
        return families.trains_control_net(self.command.name) or bool(self.command.values.get("conditioning_data_dir"))

    @property
    def _images(self) -> int:
        """As many as fill each batch of training and caching."""
        names = ("vae_batch_size", "text_encoder_batch_size")
        caching = [max(int(self.command.values.get(name) or 1), 1) for name in names]
        return math.lcm(self.workload.batch, *caching)

    @property
    def _repeats(self) -> int:
        needed = 5 * self.workload.batch * self.workload.micro_steps  # more than three steps
        return -(-needed // self._images)

    def _draw(self, folder: Path) -> None:
        assert self.workload.size is not None, "a run with images"
        stand_ins.write_images(folder, self.workload.size, self._images)

    def _write_metadata(self, images: Path) -> str:
        entries = {str(file): {"caption": stand_ins.CAPTION, "tags": ""} for file in images.glob("*.png")}
        return self._write("metadata.json", json.dumps(entries))

    def _write_prompts(self) -> None:
        """Copy the user's prompts, or write one."""
        given = self.command.values.get("prompts_file")
        if given and not Path(str(given)).is_file():
            raise UserError(f"--prompts_file: no file {given}")
        if given:
            shutil.copy(str(given), self.folder)
            self.changes["prompts_file"] = str(self.folder / Path(str(given)).name)
        else:
            family = families.of(self.command.name, self.command.values)
            side = family.side if family is not None else 1024
            text = f'[[prompts]]\ntarget = "a red circle"\nresolution = {side}\n'
            self.changes["prompts_file"] = self._write("prompts.toml", text)

    def _write(self, name: str, text: str) -> str:
        file = self.folder / name
        file.write_text(text, encoding="utf-8")
        return str(file)


def _trains_on_prompts(command: CommandLine) -> bool:
    return command.name.endswith("_leco.py") or bool(command.values.get("prompts_file"))


def caption_tokens(script: str, values: Mapping[str, Any], size: tuple[int, int] | None) -> int:
    """Return the length that a script reads from the GPU: of captions, or of HunyuanImage's whole sequence."""
    family = families.of(script, values)
    if family is None:
        return 0
    if family.name == "hunyuan-image" and size is not None:
        return (size[0] // 32) * (size[1] // 32) + memory_config.HUNYUAN_CAPTION_TOKENS + 128
    names = {"lumina": ("gemma2_max_token_length", 256), "anima": ("qwen3_max_token_length", 512)}
    option, default = names.get(family.name, ("t5xxl_max_token_length", family.t5_tokens))
    return int(values.get(option) or default)
