"""Sort the tensors of a file by their names: adapted modules and their parts, model components and blocks.

Known are the names of sd-scripts' networks, LyCORIS, PEFT, Diffusers and ComfyUI, and those of checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

#: Names of a module's tensors after the module's own, and the part that they are.
_PARTS = (
    (r"lora_up\.weight|lora_B(?:\.default)?\.weight|lora(?:_linear_layer)?\.up\.weight", "up"),
    (r"lora_down\.weight|lora_A(?:\.default)?\.weight|lora(?:_linear_layer)?\.down\.weight", "down"),
    (r"lora_mid\.weight", "mid"),
    (r"alpha", "alpha"),
    (r"dora_scale|lora_magnitude_vector(?:\.default)?(?:\.weight)?", "magnitude"),
    (r"(?P<hada>hada_(?:w[12]_[ab]|t[12]))", ""),
    (r"(?P<lokr>lokr_(?:w[12](?:_[ab])?|t2))", ""),
    (r"(?P<oft>oft_(?:blocks|diag)(?:\.\d+)?)", ""),
    (r"(?P<oft_v2>oft_R)\.weight", "oft_R"),
    (r"(?P<boft>boft_[Rs])", ""),
    (r"rescale", "rescale"),
    (r"diff", "diff"),
    (r"diff_b", "diff_b"),
    (r"w_norm", "w_norm"),
    (r"b_norm", "b_norm"),
)
_MODULE = re.compile(
    "(?P<module>.+?)(?:" + "|".join(rf"\.(?P<part{index}>{name})" for index, (name, _) in enumerate(_PARTS)) + ")$"
)
_ATTENTION_PROCESSOR = re.compile(r"(?P<module>.+)_lora\.(?P<part>up|down)\.weight$")
_LLLITE = re.compile(r"(?P<module>lllite_(?!conditioning)[^.]+)\.(?:lllite_)?(?P<part>.+)")
"""A module of a ControlNet-LLLite: for SDXL ``lllite_unet_X.up.0.weight``, for Anima ``lllite_dit_X.up.weight``."""

SHARED = "lllite_conditioning"
"""Start of the names of tensors that all modules of an adapter share: Anima's LLLite encodes the conditioning image once."""

_MAIN = r"lora_unet_|lycoris_|lllite_(?:unet|dit)_|unet\.|transformer\.|(?:model\.)?diffusion_model\.|net\."
_COMPONENTS = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"(?:lora_te|te)(\d?)[_.]", "text encoder"),
        (r"(?:lora_)?prior_te_", "text encoder"),
        (r"text_encoder(?:_(\d))?[_.]", "text encoder"),
        (r"text_encoders\.(\w+)\.", "text encoder"),
        (r"conditioner\.embedders\.([0-9])\.", "text encoder"),
        (r"cond_stage_model\.", "text encoder"),
        (r"first_stage_model\.|vae\.", "VAE"),
        (r"model_ema\.", "EMA"),
    )
)
_BLOCK = re.compile(r"(?P<family>[A-Za-z][A-Za-z_.]*?)[_.](?P<index>[0-9]{1,6})(?:[_.]|$)")
_UNET = ("input_blocks", "middle_block", "output_blocks", "down_blocks", "mid_block", "up_blocks")
_TRANSFORMER = re.compile(r"(?:\w+_)?blocks|layers|\w+_refiner")

_KINDS = {
    "hada": "LoHa",
    "lokr": "LoKr",
    "oft_R": "OFTv2",
    "oft": "OFT",
    "boft": "BOFT",
    "diff": "full difference",
    "w_norm": "norm",
    "b_norm": "norm",
    "lllite": "LLLite",
}
"""Start of a part's name -> kind of adapter."""

MAIN = "model"
"""The component that generates images, if its blocks do not identify it."""


@dataclass(frozen=True)
class Place:
    """Where a module or tensor is in the model."""

    component: str
    """``U-Net``, ``transformer``, ``text encoder 1``, ``VAE``, or ``model``."""
    family: str
    """The repeated blocks that it is in: ``double_blocks``; empty outside of them."""
    index: int | None
    """The number of the block."""
    path: str
    """The name in the component, with underscores instead of dots."""

    @property
    def order(self) -> tuple[object, ...]:
        """The sort key: the model that generates images first, and repeated blocks before other modules."""
        last = self.component.startswith(("text encoder", "VAE", "EMA"))
        return last, self.component, not self.family, self.family, self.index or 0, self.path


@dataclass
class AdaptedModule:
    """A module of the base model, and the tensors in the file that change it."""

    name: str
    tensors: dict[str, str] = field(default_factory=dict)
    """Part -> name of the tensor."""

    @property
    def kind(self) -> str:
        """The kind of adapter, such as ``LoRA`` or ``LoKr``."""
        parts = self.tensors
        if "up" in parts or "down" in parts:
            return "DoRA" if "magnitude" in parts else "LoRA"
        return next((kind for prefix, kind in _KINDS.items() if any(part.startswith(prefix) for part in parts)), "incomplete")


def adapted_modules(names: Iterable[str]) -> tuple[dict[str, AdaptedModule], list[str]]:
    """Return the adapted modules by name, and the names of all other tensors."""
    modules: dict[str, AdaptedModule] = {}
    others: list[str] = []
    for name in names:
        if (split := _module_and_part(name)) is None:
            others.append(name)
        else:
            modules.setdefault(split[0], AdaptedModule(split[0])).tensors[split[1]] = name
    return modules, others


def _module_and_part(name: str) -> tuple[str, str] | None:
    if (match := _LLLITE.match(name)) is not None:
        return match["module"], f"lllite_{match['part']}"
    if (match := _MODULE.match(name)) is not None:
        index, suffix = next((int(key[4:]), text) for key, text in match.groupdict().items() if key[:4] == "part" and text)
        return match["module"].removeprefix("base_model.model."), _PARTS[index][1] or suffix
    match = _ATTENTION_PROCESSOR.match(name)
    return (match["module"], match["part"]) if match is not None else None


def places(names: Iterable[str]) -> Mapping[str, Place]:
    """Return the place of each module or tensor."""
    split = {name: _component(name) for name in names}
    families = {_block(rest)[0] for component, rest in split.values() if component == MAIN}
    main = MAIN
    if any(family.startswith(_UNET) for family in families):
        main = "U-Net"
    elif any(_TRANSFORMER.fullmatch(family) for family in families):
        main = "transformer"
    return {
        name: Place(main if component == MAIN else component, *_block(rest), re.sub(r"\W", "_", rest))
        for name, (component, rest) in split.items()
    }


def _component(name: str) -> tuple[str, str]:
    """Return the component of a name, and the rest of the name."""
    for pattern, component in _COMPONENTS:
        if (match := pattern.match(name)) is not None:
            number = next(iter(match.groups()), None) or ""
            if "embedders" in pattern.pattern:  # counted from 0
                number = str(int(number) + 1)
            return f"{component} {number}".rstrip(), name[match.end() :]
    return MAIN, re.sub(rf"^(?:{_MAIN})", "", name)


def _block(rest: str) -> tuple[str, int | None]:
    match = _BLOCK.match(rest)
    return (match["family"].replace(".", "_"), int(match["index"])) if match is not None else ("", None)
