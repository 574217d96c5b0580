"""Fuse normalization, rotary embedding, gates and LoRA of eager blocks, for fewer passes over each activation.

Memory bandwidth limits eager mode as much as arithmetic does: each operator reads and writes whole activations
(``python -m benchmarks.eight_bit_steps`` counts the bytes). :mod:`kohya_ext.kernels.fused` contains the replacements:

- a LoRA's products and sum together with its layer, those of queries, keys and values together, and the 16-bit copies of all
  LoRA weights of a block (:mod:`kohya_ext.kernels.casts`);
- RMSNorm of the DiTs, and the rotary embedding of FLUX, Chroma, Lumina, HunyuanImage and Anima;
- LayerNorm and its modulation by the conditioning, in the blocks of DiTs (:mod:`kohya_ext.kernels.modulation`);
- Lumina's SwiGLU;
- GEGLU and the norms in the blocks of SDXL's and SD1.5's U-Nets. Under autocast these norms return fp32, which every consumer
  would copy to 16 bits.

Compiled blocks are not changed, because a compiler fuses more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from operator import itemgetter
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from kohya_ext.config.settings import Option, Settings, boolean
from kohya_ext.patching.lora_modules import FORWARD_WITHOUT_BIAS, NETWORKS, used_attributes
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage
from kohya_ext.sdscripts.families import FAMILIES
from kohya_ext.sdscripts.fingerprints import known_bodies
from kohya_ext.speed import switches

_counts: Counter[str] = Counter()

#: The methods in place of upstream's ``LoRAModule.forward``. That of another network may use weights for more than products.
_forwards: WeakKeyDictionary[Any, Callable[[Any], bool]] = WeakKeyDictionary()
"""With the condition for fused operations of a module."""

#: Attribute of a block: the layers of its LoRA modules.
_LORA_LAYERS = "_kohya_ext_lora_layers"

#: Attribute of a LoRA module while the attention that it belongs to runs.
_SHARED = "_kohya_ext_shared_input"


FUSED_OPERATIONS = Option(
    "fused_operations",
    None,
    boolean,
    "use fused LoRA, GEGLU, norm and rotary embedding operations in eager blocks, fused steps of Adafactor and of "
    "released AdamW, and no needless masks of attention; results differ by rounding only (default: see --speed)",
    activates=True,
)


def _facts() -> Mapping[str, object]:
    return dict(_counts)


def _lora(original: Any, settings: Settings) -> Any:
    import torch

    from kohya_ext.kernels.fused import linear_with_lora
    from kohya_ext.quantization.linear import Linear as QuantizedLinear

    unsupported_options = used_attributes(original, "dropout", "rank_dropout", "module_dropout", "ggpo_sigma")
    has_split_dims = used_attributes(original, "split_dims")
    works = switches.works(switches.FUSED_OPERATIONS, settings)
    linear, plain, quantized = torch.nn.Linear, torch.nn.Linear.forward, QuantizedLinear.forward

    def is_fused(lora: Any) -> bool:
        base, down = lora.org_forward, lora.lora_down
        layer: Any = getattr(base, "__self__", None)
        return (
            not torch.compiler.is_compiling()
            and works()
            and type(base) is MethodType
            and (base.__func__ is plain or base.__func__ is quantized)
            and type(down) is linear
            and not (has_split_dims and lora.split_dims is not None)
            and not (lora.training and any(getattr(lora, name) is not None for name in unsupported_options))
            # DeepSpeed's ZeRO-3 gathers a module's weights when the module is called.
            and not hasattr(layer.weight, "ds_id")
        )

    @wraps(original)
    def forward(self: Any, x: Any) -> Any:
        if not is_fused(self):
            return original(self, x)
        layer, down, up = self.org_forward.__self__, self.lora_down.weight, self.lora_up.weight
        factor = float(self.multiplier * self.scale)
        weight, is_quantized = layer.weight, type(layer) is QuantizedLinear
        if not is_quantized and (
            weight.requires_grad or not (torch.is_autocast_enabled(x.device.type) or x.dtype is weight.dtype is down.dtype)
        ):
            return original(self, x)
        _counts["products"] += 1
        if (shared := self.__dict__.get(_SHARED)) is not None:
            return shared.output(self, x, factor)
        if is_quantized:
            return layer.with_lora(x, down, up, factor)
        return linear_with_lora(x, weight, layer.bias, down, up, factor)

    _forwards[forward] = is_fused
    return forward


class _SharedInput:
    """Computes the LoRA layers of one input together when the first of them is called."""

    def __init__(self, loras: Sequence[Any]) -> None:
        self._loras = loras
        self._input: Any = None
        self._version = 0
        self._outputs: dict[Any, Any] = {}

    def output(self, lora: Any, x: Any, factor: float) -> Any:
        """Return the output of a layer for ``x``; it is kept for one call."""
        if self._input is not x or self._version != x._version or lora not in self._outputs:
            self._outputs = dict(zip(self._loras, _outputs(self._loras, x, factor), strict=True))
            self._input, self._version = x, x._version
        return self._outputs.pop(lora)


def _outputs(loras: Sequence[Any], x: Any, factor: float) -> list[Any]:
    """Return the outputs for ``x`` of LoRA modules that are alike."""
    from kohya_ext.kernels import fused
    from kohya_ext.quantization import linear as quantized

    layers = [lora.org_forward.__self__ for lora in loras]
    downs, ups = [lora.lora_down.weight for lora in loras], [lora.lora_up.weight for lora in loras]
    if type(layers[0]) is quantized.Linear:
        return quantized.linears_with_lora(x, layers, downs, ups, factor)
    return fused.linears_with_lora(x, [layer.weight for layer in layers], downs, ups, factor)


def _attention(queries: str, *others: str) -> Callable[[Any, Settings], Any]:
    """Return a replacement of an attention, whose layers for queries, and for keys and values, have these names.

    Its second argument is the input of keys and values, if that is not the one of queries.
    """

    def replace(original: Any, settings: Settings) -> Any:
        import torch

        works = switches.works(switches.FUSED_OPERATIONS, settings)

        @wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not works() or torch.is_inference_mode_enabled():
                return original(self, *args, **kwargs)
            context = kwargs.get("context", args[1] if len(args) > 1 else None)
            names = others if context is not None else (queries, *others)
            with _shared_input([getattr(self._modules.get(name), "__dict__", {}).get("forward") for name in names]) as count:
                _counts["shared products"] += count
                return original(self, *args, **kwargs)

        return forward

    return replace


@contextmanager
def _shared_input(methods: Sequence[Any]) -> Iterator[int]:
    """Compute the LoRA modules of some layers' replaced forwards together inside the block, if they allow it.

    Yields the number of layers.
    """
    loras = [method.__self__ for method in methods if type(method) is MethodType and method.__func__ in _forwards]
    if len(loras) < len(methods) or not _is_alike(loras):
        yield 0
        return
    shared = _SharedInput(loras)
    for lora in loras:
        lora.__dict__[_SHARED] = shared
    try:
        yield len(loras)
    finally:
        for lora in loras:
            lora.__dict__.pop(_SHARED, None)


def _is_alike(loras: Sequence[Any]) -> bool:
    """Return whether LoRA modules can share products: fused ones of layers without bias, of one kind, shape and factor."""
    forms = set()
    for lora in loras:
        if not _forwards[lora.forward.__func__](lora):
            return False
        layer, down = lora.org_forward.__self__, lora.lora_down.weight
        if layer.bias is not None or layer.weight.requires_grad:
            return False
        of_8_bits = vars(layer).get("kind"), vars(layer).get("products")
        of_weights = layer.weight.shape, layer.weight.dtype, down.shape, down.dtype
        forms.add((type(layer), *of_8_bits, *of_weights, lora.multiplier * lora.scale))
    return len(forms) == 1


def _block(original: Any, settings: Settings) -> Any:
    import torch

    from kohya_ext.kernels import casts

    works = switches.works(switches.FUSED_OPERATIONS, settings)

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not works():
            return original(self, *args, **kwargs)
        with casts.together(_lora_layers(self)) as count:
            _counts["copies"] += count
            return original(self, *args, **kwargs)

    return forward


def _lora_layers(block: Any) -> list[Any]:
    """Return the layers of the LoRA modules that have replaced the ``forward`` of a block's layers."""
    import torch

    if _LORA_LAYERS not in block.__dict__:
        methods = [each for each in (module.__dict__.get("forward") for module in block.modules()) if type(each) is MethodType]
        loras: list[Any] = [method.__self__ for method in methods if method.__func__ in _forwards]
        if not loras:
            return []
        # Names sort the layers of a module, so that the copies of layers that share an input follow each other.
        layers = sorted((pair for lora in loras for pair in lora.named_modules()), key=itemgetter(0))
        block.__dict__[_LORA_LAYERS] = [layer for _, layer in layers if type(layer) in (torch.nn.Linear, torch.nn.Conv2d)]
    return list(block.__dict__[_LORA_LAYERS])


def _instead(
    kind: str, compute: Callable[..., Any], fits: Callable[..., bool], operations: int = 1
) -> Callable[[Any, Settings], Any]:
    """Return a replacement of a function: eager passes call ``compute`` if the arguments fit, and all others the original.

    ``kind`` names the operations in the report.
    """

    def replace(original: Any, settings: Settings) -> Any:
        import torch

        works = switches.works(switches.FUSED_OPERATIONS, settings)

        @wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not works() or not fits(*args, **kwargs):
                return original(*args, **kwargs)
            _counts[kind] += operations
            return compute(*args, **kwargs)

        return function

    return replace


def _is_supported(*args: Any, **kwargs: Any) -> bool:
    """Return whether the first argument is on a device for which torch has all operators, complex ones too."""
    return (*args, *kwargs.values())[0].device.type in ("cuda", "cpu")


def _rms_norm(
    weight: str, eps: Callable[[Any], float], fits: Callable[[Any, Any], bool] = lambda x, weight: True
) -> Callable[[Any, Settings], Any]:
    """Return a replacement for the norms of which ``fits(x, weight)`` is true."""

    def compute(norm: Any, x: Any) -> Any:
        from kohya_ext.kernels.fused import rms_norm

        return rms_norm(x, getattr(norm, weight), eps(norm))

    return _instead("norms", compute, lambda norm, x: fits(x, getattr(norm, weight)))


def _rotate_both(xq: Any, xk: Any, freqs_cis: Any) -> Any:
    """Rotate [b, heads, tokens, d] by matrices [..., 2, 2]."""
    import torch

    from kohya_ext.kernels.fused import rotate

    rotations = torch.complex(freqs_cis[..., 0, 0], freqs_cis[..., 1, 0])
    return rotate(xq, rotations), rotate(xk, rotations)


def _rotate_tokens(x_in: Any, freqs_cis: Any) -> Any:
    """Rotate [b, tokens, heads, d] by complex numbers [b, tokens, d / 2]; upstream's are complex128."""
    import torch

    from kohya_ext.kernels.fused import rotate

    return rotate(x_in, freqs_cis.unsqueeze(2).to(torch.complex64))


def _rotate_by_cosines(xq: Any, xk: Any, freqs_cis: Any, head_first: bool = False) -> Any:
    """Rotate [b, tokens, heads, d] by fp32 cosines and sines [tokens, d], in which each value stands twice."""
    import torch

    from kohya_ext.kernels.fused import rotate

    rotations = torch.complex(*(values.to(xq.device)[None, :, None, ::2].contiguous() for values in freqs_cis))
    return rotate(xq, rotations), rotate(xk, rotations)


def _rotate_by_angles(t: Any, freqs: Any, **_: Any) -> Any:
    """Rotate [b, tokens, heads, d] by fp32 angles [tokens, 1, 1, d], whose halves are equal.

    Upstream rounds cosines and sines to 16 bits, and the products too.
    """
    import torch

    from kohya_ext.kernels.fused import rotate

    angles = freqs[:, 0, :, : t.shape[3] // 2][None]
    return rotate(t, torch.polar(angles.new_ones(()), angles), halves=True)


def _is_anima(t: Any, freqs: Any, *args: Any, tensor_format: str = "sbhd", fused: bool = False, **kwargs: Any) -> bool:
    """Return whether Anima's blocks call its rotation so, which has more options."""
    is_usual = not args and not kwargs and not fused and tensor_format == "bshd" and t.dim() == 4
    return is_usual and _is_supported(t) and freqs.shape == (t.shape[1], 1, 1, t.shape[3])


def _replace_children(original: Any, replacements: Mapping[type, type]) -> Any:
    """Return a block's ``__init__`` that changes the classes of the block's children."""

    @wraps(original)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for child in self.children():
            # Replacing each forward would add a guard per norm to a compiled block.
            child.__class__ = replacements.get(type(child), type(child))

    return initialize


def _norms(original: Any, settings: Settings) -> Any:
    import torch

    from kohya_ext.kernels import fused

    works = switches.works(switches.FUSED_OPERATIONS, settings)

    class LayerNorm(torch.nn.LayerNorm):  # type: ignore[misc]  # torch is not followed
        def forward(self, x: Any) -> Any:
            return fused.layer_norm(x, self) if _is_raised(works, self, x) else super().forward(x)

    class GroupNorm(torch.nn.GroupNorm):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return fused.group_norm(x, self) if _is_raised(works, self, x) else super().forward(x)

    return _replace_children(original, {torch.nn.LayerNorm: LayerNorm, torch.nn.GroupNorm: GroupNorm})


def _modulated_norms(original: Any, settings: Settings) -> Any:
    import torch

    from kohya_ext.kernels.modulation import PendingNorm

    works = switches.works(switches.FUSED_OPERATIONS, settings)

    class LayerNorm(torch.nn.LayerNorm):  # type: ignore[misc]  # torch is not followed
        is_modulated = True

        def forward(self, x: Any) -> Any:
            if torch.compiler.is_compiling() or not works() or self.weight is not None:
                return super().forward(x)
            _counts["norms"] += 1
            return PendingNorm(self, x)

    return _replace_children(original, {torch.nn.LayerNorm: LayerNorm})


def _group_norm(original: Any, settings: Settings) -> Any:
    from kohya_ext.kernels.fused import group_norm

    works = switches.works(switches.FUSED_OPERATIONS, settings)

    @wraps(original)
    def forward(self: Any, x: Any) -> Any:
        if _is_raised(works, self, x):
            return group_norm(x, self)
        return original(self, x)

    return forward


def _is_raised(works: Callable[[], bool], norm: Any, x: Any) -> bool:
    """Return whether autocast would raise the result of an eager norm to fp32, whose input and weights are in 16 bits."""
    import torch

    is_raised = torch.is_autocast_enabled(x.device.type) and norm.weight.dtype is x.dtype
    if torch.compiler.is_compiling() or not works() or not is_raised:
        return False
    _counts["norms"] += 1
    return True


def _geglu(layer: Any, hidden_states: Any) -> Any:
    from kohya_ext.kernels.fused import geglu

    return geglu(layer.proj(hidden_states))


def _silu_gate(layer: Any, x1: Any, x3: Any) -> Any:
    from kohya_ext.kernels.fused import swiglu

    return swiglu(x1, x3)


#: Attentions whose queries, keys and values are layers of their own: module, method, its first two parameters, and their names.
_ATTENTIONS = (
    ("library.sdxl_original_unet", "CrossAttention.forward", ("hidden_states", "context"), ("to_q", "to_k", "to_v")),
    ("library.original_unet", "CrossAttention.forward", ("hidden_states", "context"), ("to_q", "to_k", "to_v")),
    ("library.anima_models", "Attention.compute_qkv", ("x", "context"), ("q_proj", "k_proj", "v_proj")),
)

#: Modules with blocks whose norms are modulated, the first parameter of these, and their classes.
_MODULATED = (
    ("library.flux_models", "hidden_size", ("DoubleStreamBlock", "SingleStreamBlock")),
    ("library.chroma_models", "hidden_size", ("DoubleStreamBlock", "SingleStreamBlock")),
    ("library.sd3_models", "hidden_size", ("SingleDiTBlock",)),
    ("library.anima_models", "x_dim", ("Block",)),
    ("library.hunyuan_image_modules", "hidden_size", ("MMDoubleStreamBlock", "MMSingleStreamBlock")),
)

PATCH = Patch(
    name="fused_operations",
    summary="--fused_operations: use fused LoRA, GEGLU, norm and rotary embedding operations in eager blocks",
    targets=(
        *(
            Target(module, "LoRAModule.forward", _lora, takes("self", "x", exactly=True), body=FORWARD_WITHOUT_BIAS)
            for module in NETWORKS
        ),
        Target(
            "library.flux_models",
            "RMSNorm.forward",
            _rms_norm("scale", lambda norm: 1e-6),
            takes("self", "x", exactly=True),
            body=known_bodies({"14e804fe23cc": "since 2024-12"}),
        ),
        Target(
            "library.lumina_models",
            "RMSNorm.forward",
            _rms_norm("weight", lambda norm: norm.eps),
            takes("self", "x", exactly=True),
            body=known_bodies({"8a897ede5093": "since v0.10.1"}),
        ),
        # Anima's result has the weight's precision if that is higher.
        Target(
            "library.anima_models",
            "RMSNorm.forward",
            _rms_norm("weight", lambda norm: norm.eps, lambda x, weight: x.dtype is weight.dtype),
            takes("self", "x", exactly=True),
            body=known_bodies({"1ecdccb2f867": "since v0.10.1"}, helpers={"RMSNorm._norm": {"020b369189b2": "since v0.10.0"}}),
        ),
        Target(
            "library.hunyuan_image_modules",
            "RMSNorm.forward",
            _rms_norm("weight", lambda norm: norm.eps),
            takes("self", "x", exactly=True),
            body=known_bodies({"751a2ba9daac": "since v0.10.0"}, helpers={"RMSNorm._norm": {"020b369189b2": "since v0.10.0"}}),
        ),
        # Under autocast this one returns fp32, which attention rounds.
        Target(
            "library.sd3_models",
            "RMSNorm.forward",
            _rms_norm("weight", lambda norm: norm.eps, lambda x, weight: weight is not None),
            takes("self", "x", exactly=True),
            body=known_bodies({"ead57d013dd7": "since 2024-12"}, helpers={"rmsnorm": {"f1a122116f65": "since 2024-12"}}),
        ),
        Target(
            "library.flux_models",
            "apply_rope",
            _instead("rotations", _rotate_both, _is_supported, operations=2),
            takes("xq", "xk", "freqs_cis", exactly=True),
            # The replacement reads one column of each matrix, so the matrices must be rotations.
            body=known_bodies(
                {"ae3c2435cd59": "since 2024-12"},
                helpers={"rope": {"345f6c71e4c5": "since 2024-12"}, "EmbedND.forward": {"4e9b4e2d5d7d": "since 2024-12"}},
            ),
        ),
        Target(
            "library.lumina_models",
            "apply_rope",
            _instead("rotations", _rotate_tokens, _is_supported),
            takes("x_in", "freqs_cis", exactly=True),
            body=known_bodies({"85090d8f1954": "since 2025-08"}),
        ),
        # hunyuan_image_modules imports it from there, later.
        Target(
            "library.hunyuan_image_utils",
            "apply_rotary_emb",
            _instead("rotations", _rotate_by_cosines, _is_supported, operations=2),
            takes("xq", "xk", "freqs_cis", "head_first", exactly=True),
            body=known_bodies(
                {"c91dbc3768c8": "since v0.10.0"},
                helpers={
                    "reshape_for_broadcast": {"f44cd68256d4": "since v0.10.0"},
                    "rotate_half": {"1a90995d5740": "since v0.10.0"},
                    "get_1d_rotary_pos_embed": {"e885aa85b7ba": "since v0.10.0"},
                },
            ),
        ),
        Target(
            "library.anima_models",
            "apply_rotary_pos_emb",
            _instead("rotations", _rotate_by_angles, _is_anima),
            takes("t", "freqs", "tensor_format"),
            body=known_bodies(
                {"d05a12100974": "since v0.10.1"},
                helpers={
                    "_apply_rotary_pos_emb_base": {"e294ab831810": "since v0.10.1"},
                    "_rotate_half": {"70f45ffa70ef": "since v0.10.1"},
                    "VideoRopePosition3DEmb.generate_embeddings": {"8c8069783cd8": "since v0.10.1"},
                },
            ),
        ),
        *(
            Target(
                module,
                "GEGLU.forward",
                _instead("gates", _geglu, lambda layer, hidden_states: _is_supported(hidden_states)),
                takes("self", "hidden_states", exactly=True),
                body=known_bodies({"87753a8a2aa0": "since 2024-10"}, helpers={"GEGLU.gelu": {"656ea08553a6": "since 2024-10"}}),
            )
            for module in ("library.sdxl_original_unet", "library.original_unet")
        ),
        Target(
            "library.lumina_models",
            "FeedForward._forward_silu_gating",
            _instead("gates", _silu_gate, lambda layer, x1, x3: _is_supported(x1) and x1.dtype is x3.dtype),
            takes("self", "x1", "x3", exactly=True),
            body=known_bodies({"c3e674d98666": "since 2025-08"}),
        ),
        Target(
            "library.sdxl_original_unet",
            "GroupNorm32.forward",
            _group_norm,
            takes("self", "x", exactly=True),
            body=known_bodies({"82f33f3bc2dd": "since 2024-10"}),
        ),
        *(
            Target(module, f"{block}.__init__", _norms, takes("self", first), body="runs")
            for module in ("library.sdxl_original_unet", "library.original_unet")
            for block, first in (
                ("BasicTransformerBlock", "dim"),
                ("Transformer2DModel", "num_attention_heads"),
                ("ResnetBlock2D", "in_channels"),
            )
        ),
        *(
            Target(family.blocks.module, f"{block}.{family.blocks.method}", _block, takes("self"), body="runs")
            for family in FAMILIES
            for block in family.blocks.classes
        ),
        *(
            Target(module, method, _attention(*layers), takes("self", *parameters), body="runs")
            for module, method, parameters, layers in _ATTENTIONS
        ),
        *(
            Target(module, f"{block}.__init__", _modulated_norms, takes("self", first), body="runs")
            for module, first, blocks in _MODULATED
            for block in blocks
        ),
    ),
    options=(FUSED_OPERATIONS,),
    torch="2.6",
    exactness="close",
    held_to="training without it; float32 weights within 1e-5 after the first steps",
    idea="https://github.com/unslothai/unsloth/blob/main/unsloth/kernels/fast_lora.py",
    wanted=partial(switches.is_wanted, switches.FUSED_OPERATIONS),
    facts=_facts,
    stage=Stage.FUSE,
)
