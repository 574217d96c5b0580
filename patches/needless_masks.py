"""Leave out the masks of attention that are true for all tokens, which PyTorch's flash attention does not support.

- Lumina 2: texts of the same length in a batch, as with one image, need no mask. Its noise refiner has image tokens only.
- FLUX with ``--apply_t5_attn_mask``: no image token sees the padding of a text, and the output consists of image tokens. So
  texts are cut to the longest of the batch. Those of the same length then need no mask. The mask is read from the GPU once
  per forward pass. Recorded passes need texts of one length, so the patch does not cut them with ``--cuda_graphs``.

The mask of texts of different lengths remains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching import text_lengths
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage
from kohya_ext.sdscripts.fingerprints import known_bodies
from kohya_ext.speed import switches

_counts: Counter[str] = Counter()


def _facts() -> Mapping[str, object]:
    return dict(_counts)


# --- Lumina 2 --------------------------------------------------------------------------------------------------------


def _attend(works: Callable[[], bool], attend: Any, q: Any, k: Any, v: Any, attn_mask: Any = None, **rest: Any) -> Any:
    """Call ``attend`` without a mask that has a single value for all keys: :func:`_all_true` returns such masks."""
    if attn_mask is not None and attn_mask.stride(-1) == 0 and works():
        attn_mask = None
    return attend(q, k, v, attn_mask=attn_mask, **rest)


def _attend_without_mask(
    works: Callable[[], bool], attend: Any, q: Any, k: Any, v: Any, attn_mask: Any = None, **rest: Any
) -> Any:
    return attend(q, k, v, attn_mask=None if works() else attn_mask, **rest)


@cache
def _processor(attend: Any, works: Callable[[], bool], processor: Any) -> Any:
    """Return one object for all blocks: a compiled graph is only for blocks with the same one."""
    return partial(attend, works, processor)


def _all_true(mask: Any) -> Any:
    """Return a mask of all true values as a view of its first one, which upstream's other kinds of attention can read."""
    return mask[:1, :1].expand_as(mask)


def _lumina(original: Any, settings: Settings) -> Any:
    works = switches.works(switches.FUSED_OPERATIONS, settings)

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        for blocks, attend in ((self.layers, _attend), (self.noise_refiner, _attend_without_mask)):
            for block in blocks:
                if not block.attention.use_sage_attn:
                    block.attention.attention_processor = _processor(attend, works, block.attention.attention_processor)

    return __init__


def _lumina_mask(original: Any, settings: Settings) -> Any:
    import torch

    works = switches.works(switches.FUSED_OPERATIONS, settings)

    @wraps(original)
    def patchify_and_embed(self: Any, *args: Any, **kwargs: Any) -> Any:
        x, mask, freqs_cis, text, lengths = original(self, *args, **kwargs)
        if works() and not torch.compiler.is_compiling() and text_lengths.are_equal(lengths):
            _counts["masks left out"] += 1
            mask = _all_true(mask)
        return x, mask, freqs_cis, text, lengths

    return patchify_and_embed


# --- FLUX ------------------------------------------------------------------------------------------------------------


def _flux(original: Any, settings: Settings) -> Any:
    import torch

    works, graphs = switches.works(switches.FUSED_OPERATIONS, settings), switches.CUDA_GRAPHS

    def is_recorded(text: Any) -> bool:
        return graphs.on or (text.is_cuda and torch.cuda.is_current_stream_capturing())

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        has_mask = "txt" in kwargs and kwargs.get("txt_attention_mask") is not None
        if has_mask and works() and not torch.compiler.is_compiling() and not is_recorded(kwargs["txt"]):
            kwargs |= _without_padding(kwargs["txt"], kwargs["txt_ids"], kwargs["txt_attention_mask"])
        return original(self, *args, **kwargs)

    return forward


def _without_padding(txt: Any, txt_ids: Any, mask: Any) -> dict[str, Any]:
    """Return texts, their positions and the mask, cut to the longest text; no mask for texts of the same length.

    Their shapes are (batch, tokens, width), (batch, tokens, 3) and (batch, tokens). Nothing changes unless every text has a
    token and all padding is at its end.
    """
    rows = [[bool(value) for value in row] for row in mask.tolist()]
    lengths = [sum(row) for row in rows]
    if not all(length and all(row[:length]) for row, length in zip(rows, lengths, strict=True)):
        return {}
    longest = max(lengths)
    if longest < mask.shape[1]:
        _counts["texts cut"] += 1
        txt, txt_ids, mask = txt[:, :longest], txt_ids[:, :longest], mask[:, :longest]
    if text_lengths.are_equal(lengths):
        _counts["masks left out"] += 1
        mask = None
    return {"txt": txt, "txt_ids": txt_ids, "txt_attention_mask": mask}


_FLUX_FORWARD = {
    "Flux": {"8c099fb7508e": "2024-12 to 2025-07", "bea54a17f214": "since 2025-08"},
    "ControlNetFlux": {"d6db0c8f7d36": "since 2024-12"},
}
_FLUX_BLOCKS = {
    "DoubleStreamBlock._forward": {"380896691fd7": "since 2024-12"},
    "SingleStreamBlock._forward": {"107b0ece8846": "since 2024-12"},
}
_LUMINA_FORWARD = {"NextDiT.forward": {"307672ba3dcc": "since 2025-08"}}
_LUMINA_TOKENS = {"NextDiT.patchify_and_embed": {"f867eb39dc9c": "2025-08 to v0.10.0", "01ea319bbffc": "since v0.10.1"}}

PATCH = Patch(
    name="needless_masks",
    summary="--fused_operations: no mask for texts of one length (Lumina 2, FLUX), and no padding (FLUX)",
    targets=(
        # The originals run. Their code shows which tokens the mask covers, and that no output depends on padding.
        Target(
            "library.lumina_models",
            "NextDiT.__init__",
            _lumina,
            takes("self", "patch_size"),
            body=known_bodies({"22603675e177": "since 2025-08"}, helpers=_LUMINA_TOKENS),
        ),
        Target(
            "library.lumina_models",
            "NextDiT.patchify_and_embed",
            _lumina_mask,
            takes("self", "x", "cap_feats", "cap_mask", "t", exactly=True),
            body=known_bodies(_LUMINA_TOKENS["NextDiT.patchify_and_embed"], helpers=_LUMINA_FORWARD),
        ),
        *(
            Target(
                "library.flux_models",
                f"{model}.forward",
                _flux,
                takes("self", "img", "img_ids"),
                body=known_bodies(bodies, helpers=_FLUX_BLOCKS),
                wanted=lambda settings: not settings["cuda_graphs"],
            )
            for model, bodies in _FLUX_FORWARD.items()
        ),
    ),
    torch="2.6",
    exactness="close",
    held_to="training without it; float32 weights within 1e-5 after the first steps",
    idea="https://pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
    wanted=partial(switches.is_wanted, switches.FUSED_OPERATIONS),
    facts=_facts,
    stage=Stage.FUSE,
)
